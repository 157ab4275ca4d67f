"""Text to token ids and back, and conversations to text, by the files of a Hugging Face directory.

Owns reading tokenizer.json, special tokens and where the chat template lies. Knows nothing of requests or of streaming;
how a template runs is chat_template.py's. Imports neither torch nor transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from fastdeploy_rl.engines.embedded.chat_template import ChatTemplate
from fastdeploy_rl.engines.embedded.model_config import read_bounded, read_config, read_json
from fastdeploy_rl.errors import CheckpointError, RequestError

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
DEFAULT_TEMPLATE = "default"
"""The one of several named templates that conversations without tools take."""


class Tokenizer:
    """Satisfies `fastdeploy_rl.control.generation.Tokenizer`. Made by `open`."""

    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None, eos_token_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self._template = template
        self._eos_token_ids = eos_token_ids

    @classmethod
    def open(cls, directory: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and, where they are there, special_tokens_map.json and
        chat_template.jinja. CheckpointError names the file; a directory that has only the files of a slow tokenizer is
        refused with what would mend it."""
        fast = _read_fast(directory)
        settings = read_json(directory / "tokenizer_config.json")
        source = _template_source(directory, settings)
        template = None if source is None else ChatTemplate(source, _special_tokens(directory, settings))
        return cls(fast, template, read_config(directory).eos_token_ids)

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
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions")
        return self._template.render(messages)


def _read_fast(directory: Path) -> FastTokenizer:
    path = directory / "tokenizer.json"
    slow = [name for name in SLOW_FILES if (directory / name).exists()]
    if slow and not path.exists():
        raise CheckpointError(
            f"{path}: No such file: {slow[0]} alone is a slow tokenizer, which this engine does not read; write the "
            f"file once with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        return FastTokenizer.from_buffer(read_bounded(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Newer directories have a file of its own, which wins; older ones
    keep it in the settings, as text or as a list of named texts."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8 text: {error}") from error
    given = settings.get("chat_template")
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    if isinstance(given, list):
        named = [item for item in given if isinstance(item, dict) and item.get("name") == DEFAULT_TEMPLATE]
        given = named[0].get("template") if named else None
    if given is None or isinstance(given, str):
        return given
    raise CheckpointError(f"{where}: expected text or a list of named texts, got {type(given).__name__}")


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """What templates know by name: from the settings, else from the map that older directories have beside them."""
    path = directory / "special_tokens_map.json"
    mapped = read_json(path) if path.exists() else {}
    found = {key: _token_text(settings.get(key)) or _token_text(mapped.get(key)) for key in SPECIAL_TOKENS}
    return {key: text or "" for key, text in found.items()}


def _token_text(value: object) -> str | None:
    """A special token is written as text or as an object that has it."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
