"""What the HTTP side and an engine say to each other about generating text.

Owns the records of one request and its tokens, and the Protocols behind which
engine and tokenizer stand. Knows neither HTTP nor processes. Invariant: the tokens
of a request come in order, and the last one, and only that, has a finish reason.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

import msgspec

MAX_STOP_STRINGS = 4


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen. `temperature` 0 is greedy;
    `top_k` 0 and `top_p` 1 do not narrow; `seed` None draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt as token ids. Ends after `max_tokens`, or at an end token of the model unless `ignore_eos`."""

    token_ids: list[int]
    max_tokens: int
    sampling: SamplingOptions
    ignore_eos: bool = False


class GeneratedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token, the version of the weights that made it, and the natural logarithm of its probability.

    `finish_reason` is "" until the last: "stop", "length" or "abort"; an aborted request ends in a record with
    `token_id` -1 and the cause in `error`. An end token is reported like any other."""

    token_id: int
    version: str
    logprob: float
    finish_reason: str = ""
    error: str = ""


class VersionSpan(NamedTuple):
    """Completion tokens [start, end) were made by `version`."""

    version: str
    start: int
    end: int


def version_spans(versions: Sequence[str]) -> list[VersionSpan]:
    """Runs of equal versions over the tokens of one completion, in order, without gaps."""
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    ends = [*starts[1:], len(versions)]
    return [VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True)] if starts else []


class GenerationClient(Protocol):
    """The engine as the HTTP side sees it; all calls on the event loop's thread."""

    @property
    def max_model_len(self) -> int:
        """Prompt and completion together, in tokens."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Streams the tokens; closing the iterator early cancels the
        request. NotServingError where the engine cannot take it."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the conversation, ready for the assistant's
        next turn. RequestError for a role it does not know."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens; bytes that are no complete character become U+FFFD."""
        ...
