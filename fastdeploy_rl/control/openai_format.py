"""OpenAI's completion responses: whole ones and the chunks of a stream.

Owns the names of the JSON; refuses to know HTTP, engines and tokenizers. Beyond OpenAI's fields every choice carries
`weight_versions`: spans over its tokens, each made by one version of the weights, and token ids where they were asked
for. In a stream each chunk carries the span of its token (none in one that brings no token) and its `weight_version`,
and the last of a choice, which has its `finish_reason`, all spans of that choice. A response of one choice also has its
`weight_versions` at the top. A choice that somebody ended in order has finish reason "abort", what it has so far, and
an `abort_reason`.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy_rl.control.generation import FinishReason, GeneratedToken, VersionSpan, version_spans
from fastdeploy_rl.errors import AuthenticationError, FastDeployRLError, RequestError
from fastdeploy_rl.report import EngineStatus

Json = dict[str, Any]


class LoggedToken(NamedTuple):
    """A token in words, where log-probabilities were asked for. `offset`: characters of the completion before it."""

    text: str
    logprob: float
    top: list[tuple[str, float]]
    offset: int


@dataclass
class Choice:
    """What has been generated of one choice so far. `pieces[i]` is the text that became final with token i; the last
    one also holds the rest, unless the choice was aborted: then `rest` does."""

    index: int
    prompt_token_ids: list[int]
    tokens: list[GeneratedToken] = field(default_factory=list)
    logged: list[LoggedToken] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""
    abort_reason: str = ""
    rest: str = ""

    def abort(self, reason: str, rest: str) -> None:
        """It has no further token; `rest` is the text that was held back so far."""
        self.finish_reason, self.abort_reason, self.rest = FinishReason.ABORT.value, reason, rest

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.rest

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return self.tokens[0].num_cached if self.tokens else 0

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def weight_versions(self) -> list[Json]:
        return [span._asdict() for span in version_spans([token.version for token in self.tokens])]


class Usage(NamedTuple):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class ResponseFormat:
    """How one route words its answers: /v1/completions or /v1/chat/completions."""

    id: str
    created: int
    model: str
    is_chat: bool
    num_choices: int
    num_logprobs: int | None
    wants_token_ids: bool
    wants_stream_usage: bool

    @classmethod
    def begin(
        cls,
        *,
        model: str,
        is_chat: bool,
        num_choices: int,
        num_logprobs: int | None,
        wants_token_ids: bool,
        wants_stream_usage: bool,
    ) -> "ResponseFormat":
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        created = int(time.time())
        return cls(name, created, model, is_chat, num_choices, num_logprobs, wants_token_ids, wants_stream_usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        """The answer of a request that was not streamed."""
        body = self._envelope([self._whole_choice(choice) for choice in choices], is_chunk=False)
        return body | self._top_versions(choices[0]) | {"usage": usage.as_json()}

    def opening(self, choice: Choice) -> Json | None:
        """The chunk before any text; only a chat has one."""
        if not self.is_chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": choice.index, "delta": delta, "finish_reason": None, "weight_versions": []})

    def chunk(self, choice: Choice) -> Json:
        """The newest token and the text that became final with it."""
        token, text = choice.tokens[-1], choice.pieces[-1]
        span = VersionSpan(token.version, len(choice.tokens) - 1, len(choice.tokens))
        content: Json = {"delta": {"content": text}} if self.is_chat else {"text": text}
        body = content | {
            "index": choice.index,
            "finish_reason": None,
            "logprobs": self._logprobs(choice.logged[-1:]),
            "weight_version": token.version,
            "weight_versions": [span._asdict()],
        }
        if self.wants_token_ids:
            body["completion_token_ids"] = [token.token_id]
        return self._chunk(body)

    def closing(self, choice: Choice) -> Json:
        """The last chunk of a choice: why it ended, and which versions made it."""
        delta = {"content": choice.rest} if choice.rest else {}
        content: Json = {"delta": delta} if self.is_chat else {"text": choice.rest}
        body = content | _ending(choice) | {"logprobs": None}
        if self.wants_token_ids:
            body["prompt_token_ids"] = choice.prompt_token_ids
        return self._chunk(body) | self._top_versions(choice)

    def usage_chunk(self, usage: Usage) -> Json | None:
        """What follows the last choice where it was asked for."""
        if not self.wants_stream_usage:
            return None
        return self._envelope([], is_chunk=True) | {"usage": usage.as_json()}

    def _whole_choice(self, choice: Choice) -> Json:
        text = choice.text
        content: Json = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        )
        body = content | _ending(choice) | {"logprobs": self._logprobs(choice.logged)}
        if self.wants_token_ids:
            body |= {"prompt_token_ids": choice.prompt_token_ids, "completion_token_ids": choice.token_ids}
        return body

    def _top_versions(self, choice: Choice) -> Json:
        return {"weight_versions": choice.weight_versions()} if self.num_choices == 1 else {}

    def _logprobs(self, logged: Sequence[LoggedToken]) -> Json | None:
        if self.num_logprobs is None:
            return None
        return _chat_logprobs(logged) if self.is_chat else _text_logprobs(logged, self.num_logprobs)

    def _chunk(self, choice: Json) -> Json:
        # With usage asked for, OpenAI sends a null in every chunk but the last.
        return self._envelope([choice], is_chunk=True) | ({"usage": None} if self.wants_stream_usage else {})

    def _envelope(self, choices: list[Json], *, is_chunk: bool) -> Json:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _ending(choice: Choice) -> Json:
    """What a whole choice says and the last chunk of one."""
    ending: Json = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "weight_versions": choice.weight_versions(),
    }
    return ending | ({"abort_reason": choice.abort_reason} if choice.abort_reason else {})


def model_card(name: str, created: int, status: EngineStatus, max_model_len: int) -> Json:
    """An entry of /v1/models, with what is live: version and proof, since when, and how it came."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "fastdeploy_rl"}
    live = {"weight_version": status.version, "content_digest": status.content_digest}
    told = ("receipt_digest", "live_since", "source", "apply_mode", "newest_version")
    state = ("residency", "asleep", "is_paused")
    more = {field: getattr(status, field) for field in (*told, *state)}
    return card | live | more | {"max_model_len": max_model_len}


def error_body(error: Exception) -> Json:
    """OpenAI's error form; `type` is the name of the error's class, `code` OpenAI's word where there is one."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    code = "invalid_api_key" if isinstance(error, AuthenticationError) else code
    kind = type(error).__name__ if isinstance(error, FastDeployRLError) else "InternalServerError"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _text_logprobs(logged: Sequence[LoggedToken], num_logprobs: int) -> Json:
    """The form of /v1/completions; the chosen token is among `top_logprobs` even where it is none of the likeliest."""
    top = [_by_text([*token.top, (token.text, token.logprob)]) for token in logged] if num_logprobs else None
    return {
        "tokens": [token.text for token in logged],
        "token_logprobs": [token.logprob for token in logged],
        "top_logprobs": top,
        "text_offset": [token.offset for token in logged],
    }


def _by_text(entries: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of several tokens with one text (parts of a character) the likeliest stands."""
    found: dict[str, float] = {}
    for text, logprob in entries:
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _chat_logprobs(logged: Sequence[LoggedToken]) -> Json:
    content = [
        _chat_entry(token.text, token.logprob) | {"top_logprobs": [_chat_entry(*entry) for entry in token.top]}
        for token in logged
    ]
    return {"content": content, "refusal": None}


def _chat_entry(text: str, logprob: float) -> Json:
    # A token that is part of a character has no text of its own, and then nobody here knows its bytes.
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
