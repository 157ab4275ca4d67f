"""A model's chat template, run.

A template is a program that came with the model, and what it works on came with a request: it runs in jinja2's sandbox,
without access to Python objects. Owns what it may use (the names and filters transformers gives it) and how much.
Knows nothing of tokens. Invariant: whatever a request says, a rendering ends with a text or a RequestError; its loops,
its products and its text are bounded. (A template that sets out to exhaust memory, doubling a text again and again,
could: it is part of the model that the operator chose.)
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdeploy_rl.errors import RequestError

MAX_CHARACTERS = 16 << 20
"""Of a rendered conversation: far beyond what any model takes."""
MAX_STEPS = 1_000_000
"""Of all `range` loops of one rendering together."""
MAX_PRODUCT = 1 << 20
"""Of `*` with a text or list, in elements, and of `**` in bits: as far as a template may blow something up."""
MAX_WIDTH = 1000
"""Of padding and indentation."""
UNSUPPORTED_ROLES = ("tool", "function")


class ChatTemplate:
    """Compiled once, at the first use: a broken template must not keep an engine from serving completions."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: Template | None = None

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as text, ready for the assistant's next turn. RequestError where the template is broken,
        refuses the messages or does not end."""
        _refuse_tools(messages)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source)
            names = {"messages": list(messages), "range": _Steps().range, "tools": None, "documents": None}
            return _join(self._compiled.generate(add_generation_prompt=True, **names, **self._special_tokens))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's own bounds `range` alone; here what multiplies texts is bounded too."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _product_size(operator, left, right)
        if size > MAX_PRODUCT:
            raise TemplateError(f"{operator} makes something of {size} elements, {MAX_PRODUCT} are allowed")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """`str` methods that make a text as wide as a number says."""
        is_padding = isinstance(obj, str) and attr in ("center", "ljust", "rjust", "zfill", "expandtabs")
        return not is_padding and super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Steps:
    """The `range` of one rendering: all loops together have a bound."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def range(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._left -= len(steps)
        if self._left < 0:
            raise TemplateError(f"more than {MAX_STEPS} steps of range")
        return steps


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers makes it (utils/chat_template_utils.py)."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent"):
        environment.filters[name] = _narrow(environment.filters[name])
    return environment


def _product_size(operator: str, left: Any, right: Any) -> int:
    if operator == "**":
        return left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            return len(many) * times
    return 0


def _join(pieces: Iterator[str]) -> str:
    """Stops a template that goes on and on."""
    taken, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TemplateError(f"it makes more than {MAX_CHARACTERS} characters")
        taken.append(piece)
    return "".join(taken)


def _refuse_tools(messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        role = message.get("role")
        if role in UNSUPPORTED_ROLES or message.get("tool_calls"):
            raise RequestError(f"messages: role {role!r:.40}: this engine has no tool calls; leave them out")


def _refuse(message: str) -> None:
    """What templates call to reject a conversation."""
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """The day, as some templates put it into the system's message."""
    return datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own escapes what HTML would mind."""
    _check_width(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _narrow(pad: Callable[..., str]) -> Callable[..., str]:
    """The same filter, refusing every number that is too wide, wherever it stands."""

    def narrow(value: str, *options: Any, **named: Any) -> str:
        for option in (*options, *named.values()):
            _check_width(option)
        return pad(value, *options, **named)

    return narrow


def _check_width(width: object) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TemplateError(f"a width of {width}, {MAX_WIDTH} are allowed")
