"""Text to token ids and back, and conversations to text, by the files of a Hugging Face directory.

Owns reading tokenizer.json and the chat template. Knows nothing of requests or of streaming. Invariant: a chat
template, which is a program that came with the model, runs in jinja2's sandbox, without access to Python objects.
Imports neither torch nor transformers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from fastdeploy_rl.engines.embedded.model_config import read_bounded, read_config, read_json
from fastdeploy_rl.errors import CheckpointError, RequestError


class Tokenizer:
    """Satisfies `fastdeploy_rl.control.generation.Tokenizer`. Made by `open`."""

    def __init__(self, fast: FastTokenizer, settings: dict[str, Any], eos_token_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self._template = settings.get("chat_template")
        self._special_tokens = {
            key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._eos_token_ids = eos_token_ids

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja. CheckpointError
        names the file."""
        path = directory / "tokenizer.json"
        try:
            fast = FastTokenizer.from_buffer(read_bounded(path))
        except ValueError as error:
            raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
        settings = read_json(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        if template.exists():
            settings["chat_template"] = read_bounded(template).decode()
        return cls(fast, settings, read_config(directory).eos_token_ids)

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Special tokens that stand in the text become themselves."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens; bytes that are no complete character become U+FFFD."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the conversation, ready for the assistant's
        next turn. RequestError where the template refuses it."""
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as text. RequestError where there is no template or it refuses the messages."""
        if not isinstance(self._template, str):
            raise RequestError("this model has no chat template; use /v1/completions")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            template = environment.from_string(self._template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    """What templates call to reject a conversation."""
    raise TemplateError(message)


def _token_text(value: object) -> str:
    """A special token is written as text or as an object that has it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
