"""What the HTTP side and an engine say to each other about generating text.

Owns the records of one request and its tokens, and the Protocols behind which engine and tokenizer stand. Knows neither
HTTP nor processes. Invariant: the tokens of a request come in order, and the last one, and only that, has a finish
reason.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

MAX_STOP_STRINGS = 4
MAX_VERSION_WAIT_S = 3600.0
"""That a request may wait for a version of the weights."""


class FinishReason(str, Enum):
    """Why a request ended: OpenAI's words, and ABORT of this engine's own, for what was ended from outside."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next token is chosen. `temperature` 0 is greedy; `seed` None draws one; other defaults change nothing.

    Presence and frequency penalty and `logit_bias` (token id -> what is added to its logit) are OpenAI's;
    `repetition_penalty` is Hugging Face's, over prompt and completion; `min_p` keeps tokens at least that much as
    likely as the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What a request gets where it is silent. `max_tokens` None leaves it to the route; `max_staleness` None lets it
    begin however far the live version is behind the newest one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    max_staleness: int | None = None


class GenerationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt as token ids. Ends after `max_tokens`, or at an end token of the model unless `ignore_eos`.

    `num_logprobs` None: no log-probabilities, which saves the work; n: that of each chosen token and of the n most
    likely ones. It begins on no version below `min_version` (text; empty: any), and on none more than `max_staleness`
    steps behind the newest published one (None: however far); where the live one is, it waits `version_wait_s` for
    another, and is refused then."""

    token_ids: list[int]
    max_tokens: int
    sampling: SamplingOptions
    ignore_eos: bool = False
    num_logprobs: int | None = None
    min_version: str = ""
    max_staleness: int | None = None
    version_wait_s: float = 0.0


class GeneratedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One token, the version of the weights that made it and, where asked for, the natural logarithm of its probability
    and (token id, logarithm) of the most likely ones, falling.

    `finish_reason` is "" until the last, then the value of a FinishReason; an aborted request ends in a record with
    `token_id` -1. Its cause is in `error` where the engine failed it, which is then all that its client gets; in
    `abort_reason` where somebody ended it in order, and what it has so far is its answer. An end token is reported like
    any other. `num_cached`: with the first token, how many of the prompt's were taken from the prefix cache."""

    token_id: int
    version: str
    logprob: float | None = None
    finish_reason: str = ""
    error: str = ""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    abort_reason: str = ""
    num_cached: int = 0


def aborted(reason: str, *, is_fault: bool = True) -> GeneratedToken:
    """The last record of a request that ends without a last token: failed, or ended in order."""
    end = GeneratedToken(-1, "", None, FinishReason.ABORT.value)
    changed = {"error": reason} if is_fault else {"abort_reason": reason}
    return msgspec.structs.replace(end, **changed)


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is: requests that run and that wait, pages of the KV cache that are free (those that only the
    prefix cache holds are), of how many. Then counts since the engine's start: pages that the prefix cache had, had
    not, and had only under other weights, when requests began; graphs that were captured, and replays of them."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    num_prefix_hits: int = 0
    num_prefix_misses: int = 0
    num_prefix_refusals: int = 0
    num_graphs_captured: int = 0
    num_graph_replays: int = 0


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


class NextToken(NamedTuple):
    """A token of request number `request`, from 0, of those that were started together."""

    request: int
    token: GeneratedToken


class Generation(Protocol):
    """Requests that were started together, as one stream of their tokens. Ends when all of them have ended."""

    def __aiter__(self) -> "Generation": ...
    async def __anext__(self) -> NextToken: ...

    def cancel(self, request: int) -> None:
        """Nobody reads this request any more; no token of it comes after this. One that has ended is left alone."""
        ...

    def close(self) -> None:
        """Cancels what has not ended, and ends the stream, also for a reader that is waiting. May be called again."""
        ...


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

    def check_admitting(self) -> None:
        """NotServingError with the reason while no request is taken."""
        ...

    @property
    def max_requests(self) -> int:
        """That it takes at once, running and waiting together."""
        ...

    @property
    def load(self) -> EngineLoad:
        """As the engine last told it."""
        ...

    def start(self, requests: Sequence[GenerationRequest]) -> Generation:
        """All of them or none: OverloadedError where there is no room for all, NotServingError where the engine is
        going away. Close what is returned."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back, from any thread."""

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
