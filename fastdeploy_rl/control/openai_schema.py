"""OpenAI's completion requests: what a body may say.

Owns names, bounds and defaults of the JSON; refuses to know HTTP and engines. Invariant: what is not supported is
refused by name, never ignored; a field at the value that changes nothing is accepted.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from fastdeploy_rl.control.generation import MAX_STOP_STRINGS, SamplingOptions
from fastdeploy_rl.errors import RequestError

MAX_BODY_BYTES = 4 << 20
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat completion may fill the context by default."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Stop = str | list[str] | None


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = ""
    max_tokens: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: _Stop = None
    stream: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str = ""
    # Accepted at the value that changes nothing; see `_refuse_unsupported`.
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stream_options: dict[str, bool] | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def sampling(self) -> SamplingOptions:
        return SamplingOptions(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)


class CompletionBody(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `logprobs` 0 or 1 reports the chosen tokens'."""

    prompt: str | list[int]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    echo: bool = False
    best_of: int = 1
    suffix: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. `logprobs` reports the chosen tokens'."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1024)]
    max_completion_tokens: _Positive | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


Body = CompletionBody | ChatBody
_BodyT = TypeVar("_BodyT", CompletionBody, ChatBody)

_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "echo": False,
    "best_of": 1,
    "top_logprobs": 0,
}
_ABSENT = ("logit_bias", "suffix")


def parse_completion(data: bytes) -> CompletionBody:
    """RequestError naming the field that is wrong or not supported."""
    body = _decode(data, CompletionBody)
    _refuse_unsupported(body)
    return body


def parse_chat(data: bytes) -> ChatBody:
    """RequestError naming the field that is wrong or not supported."""
    body = _decode(data, ChatBody)
    _refuse_unsupported(body)
    return body


def _decode(data: bytes, kind: type[_BodyT]) -> _BodyT:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the request body is not what this route takes: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error


def _refuse_unsupported(body: Body) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name, neutral) != neutral:
            raise RequestError(
                f"`{name}` = {getattr(body, name)!r} is not supported by this engine; leave it at {neutral!r}"
            )
    for name in _ABSENT:
        if getattr(body, name, None):
            raise RequestError(f"`{name}` is not supported by this engine; leave it out")
    stops = body.stop_strings
    if len(stops) > MAX_STOP_STRINGS or not all(0 < len(stop) <= 256 for stop in stops):
        raise RequestError(f"`stop` takes up to {MAX_STOP_STRINGS} strings of 1 to 256 characters, got {len(stops)}")
