"""OpenAI's completion responses: whole ones and the chunks of a stream.

Owns the names of the JSON; refuses to know HTTP, engines and tokenizers. Beyond OpenAI's fields a response carries
`weight_versions`: spans over the completion tokens, each made by one version of the weights, and token ids where they
were asked for.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_rl.control.generation import GeneratedToken, version_spans

Json = dict[str, Any]


@dataclass
class Completion:
    """What has been generated so far. `pieces[i]` is the text that
    became final with token i; the last one also holds the rest."""

    prompt_token_ids: list[int]
    tokens: list[GeneratedToken] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def weight_versions(self) -> list[Json]:
        return [span._asdict() for span in version_spans([token.version for token in self.tokens])]

    def usage(self) -> Json:
        prompt, completion = len(self.prompt_token_ids), len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclass(frozen=True)
class ResponseFormat:
    """How one route words its answers: /v1/completions or /v1/chat/completions."""

    id: str
    created: int
    model: str
    is_chat: bool
    wants_logprobs: bool
    wants_token_ids: bool

    @classmethod
    def begin(cls, *, model: str, is_chat: bool, wants_logprobs: bool, wants_token_ids: bool) -> "ResponseFormat":
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return cls(name, int(time.time()), model, is_chat, wants_logprobs, wants_token_ids)

    def whole(self, done: Completion) -> Json:
        """The answer of a request that was not streamed."""
        content: Json = (
            {"message": {"role": "assistant", "content": done.text}} if self.is_chat else {"text": done.text}
        )
        choice = content | self._choice(done, slice(None), done.finish_reason)
        if self.wants_token_ids:
            choice |= {"prompt_token_ids": done.prompt_token_ids, "completion_token_ids": done.token_ids}
        return self._envelope(choice, streamed=False) | {
            "usage": done.usage(),
            "weight_versions": done.weight_versions(),
        }

    def opening(self) -> Json | None:
        """The chunk before any text; only a chat has one."""
        if not self.is_chat:
            return None
        return self._envelope(
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}, streamed=True
        )

    def chunk(self, done: Completion, new: slice, text: str) -> Json:
        """The tokens `new` and the text that became final with them."""
        content: Json = {"delta": {"content": text}} if self.is_chat else {"text": text}
        choice = content | self._choice(done, new, None)
        if self.wants_token_ids:
            choice["completion_token_ids"] = done.token_ids[new]
        return self._envelope(choice, streamed=True)

    def closing(self, done: Completion, *, with_usage: bool) -> Json:
        """The last chunk: why it ended, and which versions made it."""
        content: Json = {"delta": {}} if self.is_chat else {"text": ""}
        choice = content | {"index": 0, "finish_reason": done.finish_reason, "logprobs": None}
        if self.wants_token_ids:
            choice["prompt_token_ids"] = done.prompt_token_ids
        last = self._envelope(choice, streamed=True) | {"weight_versions": done.weight_versions()}
        return last | ({"usage": done.usage()} if with_usage else {})

    def _choice(self, done: Completion, new: slice, finish_reason: str | None) -> Json:
        return {"index": 0, "finish_reason": finish_reason, "logprobs": self._logprobs(done, new)}

    def _logprobs(self, done: Completion, new: slice) -> Json | None:
        if not self.wants_logprobs:
            return None
        form: Callable[[Sequence[str], Sequence[float], int], Json] = _chat_logprobs if self.is_chat else _text_logprobs
        offset = len("".join(done.token_texts[: new.start or 0]))
        return form(done.token_texts[new], [token.logprob for token in done.tokens[new]], offset)

    def _envelope(self, choice: Json, *, streamed: bool) -> Json:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": [choice]}


def error_body(kind: str, message: str) -> Json:
    """OpenAI's error form; `type` is the name of the error's class."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _text_logprobs(texts: Sequence[str], logprobs: Sequence[float], offset: int) -> Json:
    offsets = [offset + len("".join(texts[:i])) for i in range(len(texts))]
    return {"tokens": list(texts), "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def _chat_logprobs(texts: Sequence[str], logprobs: Sequence[float], offset: int) -> Json:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, logprobs, strict=True)
        ]
    }
