"""POST /v1/completions and /v1/chat/completions: from a body to text, whole or streamed.

Owns the way of one request: bounds, tokens, text, stop strings, response. Refuses
to know how an engine generates. Invariant: every request ends in exactly one line
of the metrics, and one that nobody reads any more is cancelled in the engine.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from fastdeploy_rl.control.generation import GeneratedToken, GenerationClient, GenerationRequest, Tokenizer
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.control.openai_format import Completion, Json, ResponseFormat, error_body
from fastdeploy_rl.control.openai_schema import DEFAULT_COMPLETION_TOKENS, Body, ChatBody
from fastdeploy_rl.control.text_stream import TextStream
from fastdeploy_rl.errors import FastDeployRLError, NotServingError, RequestError


@dataclass(frozen=True)
class CompletionService:
    """Everything a completion needs; one per application."""

    engine: GenerationClient
    tokenizer: Tokenizer
    metrics: EngineMetrics
    model_name: str

    def prepare(self, body: Body) -> "RunningCompletion":
        """RequestError for a model, prompt or length that cannot be."""
        if body.model not in ("", self.model_name):
            raise RequestError(f"no model {body.model!r} here; this engine serves {self.model_name!r}")
        token_ids = self._prompt(body)
        request = GenerationRequest(
            token_ids=token_ids,
            max_tokens=self._max_tokens(body, len(token_ids)),
            sampling=body.sampling,
            ignore_eos=body.ignore_eos,
        )
        response = ResponseFormat.begin(
            model=self.model_name,
            is_chat=isinstance(body, ChatBody),
            wants_logprobs=body.wants_logprobs,
            wants_token_ids=body.return_token_ids,
        )
        return RunningCompletion(self, body, request, response)

    def _prompt(self, body: Body) -> list[int]:
        if isinstance(body, ChatBody):
            messages = [{"role": message.role, "content": message.content} for message in body.messages]
            return self.tokenizer.apply_chat_template(messages)
        token_ids = self.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if not token_ids:
            raise RequestError("`prompt` is empty; give at least one token")
        vocab_size = self.engine.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise RequestError(f"`prompt` has token ids outside the vocabulary of {vocab_size}")
        return token_ids

    def _max_tokens(self, body: Body, prompt_length: int) -> int:
        room = self.engine.max_model_len - prompt_length
        asked = body.max_tokens
        if isinstance(body, ChatBody):
            asked = body.max_completion_tokens or asked or max(room, 1)
        asked = asked or min(DEFAULT_COMPLETION_TOKENS, max(room, 1))
        if asked > room:
            raise RequestError(
                f"the prompt has {prompt_length} tokens and {asked} more are asked for, but together they may "
                f"have {self.engine.max_model_len}; shorten the prompt or lower `max_tokens`"
            )
        return asked


class RunningCompletion:
    """One request from its first token to its last."""

    def __init__(
        self, service: CompletionService, body: Body, request: GenerationRequest, response: ResponseFormat
    ) -> None:
        self._service = service
        self._body = body
        self._request = request
        self._response = response
        self._done = Completion(request.token_ids)
        self._text = TextStream(service.tokenizer, body.stop_strings)

    async def whole(self, is_disconnected: Callable[[], Awaitable[bool]]) -> Json:
        """The response body. NotServingError when the engine ended it; cancels when the client goes away."""
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                if await is_disconnected():
                    break
        return self._response.whole(self._done)

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events, from the first token on. An error before
        the first token is raised here, a later one is an event."""
        pieces = self._pieces()
        try:
            first = await anext(pieces)
        except BaseException:
            await pieces.aclose()
            raise
        return self._events(first, pieces)

    async def _events(
        self, first: tuple[slice, str], pieces: AsyncGenerator[tuple[slice, str], None]
    ) -> AsyncIterator[bytes]:
        async with aclosing(pieces):
            if opening := self._response.opening():
                yield _event(opening)
            yield _event(self._response.chunk(self._done, *first))
            try:
                async for new, text in pieces:
                    yield _event(self._response.chunk(self._done, new, text))
            except FastDeployRLError as error:
                yield _event(error_body(type(error).__name__, str(error)))
            else:
                yield _event(self._response.closing(self._done, with_usage=self._wants_usage()))
            yield b"data: [DONE]\n\n"

    def _wants_usage(self) -> bool:
        return bool((self._body.stream_options or {}).get("include_usage", False))

    async def _pieces(self) -> AsyncGenerator[tuple[slice, str], None]:
        """(tokens, text) as text becomes final; keeps the record in `_done` and counts the request when it ends."""
        try:
            async with aclosing(self._service.engine.generate(self._request)) as tokens:
                async for token in tokens:
                    text = self._take(token)
                    start = len(self._done.tokens) - 1
                    yield slice(start, start + 1), text
                    if self._done.finish_reason:
                        break
        except NotServingError:
            self._done.finish_reason = "abort" if self._done.tokens else "refused"
            raise
        finally:
            self._service.metrics.observe_request(
                self._done.finish_reason or "cancel",
                prompt_tokens=len(self._request.token_ids),
                completion_tokens=len(self._done.tokens),
            )

    def _take(self, token: GeneratedToken) -> str:
        if token.error:
            raise NotServingError(token.error)
        is_end = token.finish_reason == "stop" and token.token_id in self._service.tokenizer.eos_token_ids
        text = "" if is_end else self._text.push(token.token_id)
        if self._text.is_stopped:
            self._done.finish_reason = "stop"
        elif token.finish_reason:
            text += self._text.finish()
            self._done.finish_reason = "stop" if self._text.is_stopped else token.finish_reason
        self._done.tokens.append(token)
        self._done.token_texts.append(self._service.tokenizer.decode([token.token_id]))
        self._done.pieces.append(text)
        return text


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
