"""OpenAI's completion requests: what a body may say.

Owns names, bounds and defaults of the JSON; refuses to know HTTP and engines. Invariant: what is not supported is
refused by name, never ignored; a field at the value that changes nothing, or null, is accepted. Beyond OpenAI's fields
there are vLLM's `top_k`, `min_p`, `repetition_penalty`, `ignore_eos` and `return_token_ids`, and this engine's own
`min_weight_version`, `max_staleness` and `weight_version_wait_s`.
"""

import re
from typing import Annotated, Literal, TypeVar

import msgspec

from fastdeploy_rl.control.generation import MAX_STOP_STRINGS, MAX_VERSION_WAIT_S, GenerationDefaults, SamplingOptions
from fastdeploy_rl.errors import RequestError, VersionFormatError
from fastdeploy_rl.version import WeightVersion

MAX_BODY_BYTES = 4 << 20
MAX_CHOICES = 128
"""`n` of one prompt, as with OpenAI."""
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat completion may fill the context by default."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    max_tokens: _Positive | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, _Bias], msgspec.Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    # On which weights it may begin, and how long it waits for such.
    min_weight_version: str | None = None
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    weight_version_wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_VERSION_WAIT_S)] | None = None
    # Who asks and what for: nothing here depends on it.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_stream_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: GenerationDefaults, choice: int) -> SamplingOptions:
        """For choice number `choice` of a prompt: with a seed each has its own, the first the one that was given."""
        return SamplingOptions(
            temperature=_given(self.temperature, defaults.temperature),
            top_p=_given(self.top_p, defaults.top_p),
            top_k=max(0, _given(self.top_k, defaults.top_k)),
            min_p=_given(self.min_p, defaults.min_p),
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_given(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias={int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()},
        )


class CompletionBody(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt`: one text, one list of token ids, or a list of either. `logprobs` n reports the
    chosen tokens' and those of the n most likely."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more. RequestError where texts and token ids are mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(part) for part in self.prompt}
        if kinds <= {int}:
            return [[part for part in self.prompt if isinstance(part, int)]]
        if len(kinds) > 1:
            raise RequestError("`prompt` mixes texts, token ids and lists of them; give one kind", param="prompt")
        return [part for part in self.prompt if not isinstance(part, int)]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. An answer of this engine may be sent back as it came, with what is null in it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: None = None

    def as_template_message(self) -> dict[str, str]:
        """`developer` is OpenAI's newer word for `system`; chat templates know the older one."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. `logprobs` reports the chosen
    tokens', `top_logprobs` n those of the n most likely as well."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1024)]
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    store: Literal[False] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Body = CompletionBody | ChatBody
_BodyT = TypeVar("_BodyT", CompletionBody, ChatBody)
_ValueT = TypeVar("_ValueT", int, float)


def parse_completion(data: bytes) -> CompletionBody:
    """RequestError naming the field that is wrong or not supported."""
    body = _decode(data, CompletionBody)
    if body.best_of not in (None, body.num_choices):
        raise RequestError(
            f"`best_of` = {body.best_of} is not supported by this engine; leave it out, or at `n`", param="best_of"
        )
    return body


def parse_chat(data: bytes) -> ChatBody:
    """RequestError naming the field that is wrong or not supported."""
    body = _decode(data, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return body


def _decode(data: bytes, kind: type[_BodyT]) -> _BodyT:
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _not_valid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` is for `stream` = true", param="stream_options")
    _check_stop(body.stop_strings)
    _check_bias(body.logit_bias or {})
    _check_version(body.min_weight_version)
    return body


def _not_valid(reason: str) -> RequestError:
    """msgspec says `... - at `$.messages[0].role``, or `Object contains unknown field `tools``."""
    unknown = re.search(r"unknown field `([^`]*)`(?! - at)", reason)
    if unknown is not None:
        name = unknown.group(1)
        return RequestError(f"`{name}` is not supported by this engine", param=name, code="unsupported_parameter")
    place = re.search(r" - at `(?:key in )?\$\.([^`]+)`", reason) or re.search(r"required field `([^`]*)`", reason)
    return RequestError(
        f"the request body is not what this route takes: {reason}", param=place.group(1) if place else None
    )


def _check_stop(stops: list[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= 256 for stop in stops):
        raise RequestError(
            f"`stop` takes up to {MAX_STOP_STRINGS} strings of 1 to 256 characters, got {len(stops)}", param="stop"
        )


def _check_bias(bias: dict[str, float]) -> None:
    odd = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if odd:
        raise RequestError(f"`logit_bias` is for token ids, got {odd[0]!r:.40}", param="logit_bias")


def _check_version(text: str | None) -> None:
    try:
        if text:
            WeightVersion.parse(text, current_epoch=0)  # a plain step is one of the epoch that is live
    except VersionFormatError as error:
        raise RequestError(f"`min_weight_version`: {error}", param="min_weight_version") from error


def _given(asked: _ValueT | None, default: _ValueT) -> _ValueT:
    return default if asked is None else asked
