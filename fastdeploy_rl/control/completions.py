"""POST /v1/completions and /v1/chat/completions: from a body to text, whole or streamed.

Owns the way of one request: bounds, tokens, text, stop strings, choices, response. Refuses to know how an engine
generates. Invariant: every choice ends in exactly one line of the metrics, and one that nobody reads any more is
cancelled in the engine.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from fastdeploy_rl.control.generation import (
    FinishReason,
    GeneratedToken,
    Generation,
    GenerationClient,
    GenerationDefaults,
    GenerationRequest,
    NextToken,
    Tokenizer,
)
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.control.openai_format import Choice, Json, LoggedToken, ResponseFormat, Usage, error_body
from fastdeploy_rl.control.openai_schema import DEFAULT_COMPLETION_TOKENS, Body, ChatBody
from fastdeploy_rl.control.text_stream import TextStream, TokenText
from fastdeploy_rl.errors import FastDeployRLError, NotServingError, RequestError, UnknownModelError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CompletionService:
    """Everything a completion needs; one per application."""

    engine: GenerationClient
    tokenizer: Tokenizer
    metrics: EngineMetrics
    model_name: str
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    def check_model(self, name: str) -> None:
        """UnknownModelError for a name that is not the served model's."""
        if name != self.model_name:
            raise UnknownModelError(
                f"no model {name!r} here; this engine serves {self.model_name!r}", param="model", code="model_not_found"
            )

    def prepare(self, body: Body) -> "RunningCompletion":
        """RequestError for a model, prompt or length that cannot be. Starts nothing; may run in any thread."""
        if body.model:
            self.check_model(body.model)
        # Before any of them is made: a small body can ask for a hundred million choices.
        self._check_num_choices(1 if isinstance(body, ChatBody) else len(body.prompts), body.num_choices)
        prompts = list(self._prompts(body))
        requests = [self._request(body, prompt, number) for prompt in prompts for number in range(body.num_choices)]
        response = ResponseFormat.begin(
            model=self.model_name,
            is_chat=isinstance(body, ChatBody),
            num_choices=len(requests),
            num_logprobs=body.num_logprobs,
            wants_token_ids=body.return_token_ids,
            wants_stream_usage=body.wants_stream_usage,
        )
        return RunningCompletion(self, requests, response, body.stop_strings, body.num_choices)

    def _check_num_choices(self, num_prompts: int, num_choices: int) -> None:
        wanted = num_prompts * num_choices
        if wanted > self.engine.max_requests:
            raise RequestError(
                f"{num_prompts} prompts with `n` = {num_choices} are {wanted} choices, and the engine takes "
                f"{self.engine.max_requests} at once; send fewer",
                param="prompt" if num_prompts > 1 else "n",
            )

    def _prompts(self, body: Body) -> Iterator[list[int]]:
        if isinstance(body, ChatBody):
            yield self.tokenizer.apply_chat_template([message.as_template_message() for message in body.messages])
            return
        for prompt in body.prompts:
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self._check_token_ids(token_ids, "prompt")
            yield token_ids

    def _check_token_ids(self, token_ids: list[int], param: str) -> None:
        vocab_size = self.engine.vocab_size
        if not token_ids:
            raise RequestError(f"`{param}` is empty; give at least one token", param=param)
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise RequestError(f"`{param}` has token ids outside the vocabulary of {vocab_size}", param=param)

    def _request(self, body: Body, token_ids: list[int], number: int) -> GenerationRequest:
        sampling = body.sampling(self.defaults, number)
        if sampling.logit_bias:
            self._check_token_ids(list(sampling.logit_bias), "logit_bias")
        return GenerationRequest(
            token_ids=token_ids,
            max_tokens=self._max_tokens(body, len(token_ids)),
            sampling=sampling,
            ignore_eos=body.ignore_eos,
            num_logprobs=body.num_logprobs,
            min_version=body.min_weight_version or "",
            max_staleness=self.defaults.max_staleness if body.max_staleness is None else body.max_staleness,
            version_wait_s=body.weight_version_wait_s or 0.0,
        )

    def _max_tokens(self, body: Body, prompt_length: int) -> int:
        room = self.engine.max_model_len - prompt_length
        asked = (body.max_completion_tokens if isinstance(body, ChatBody) else None) or body.max_tokens
        asked = asked or min(self._silent_max_tokens(body), max(room, 1))
        if asked > room:
            raise RequestError(
                f"the prompt has {prompt_length} tokens and {asked} more are asked for, but together they may "
                f"have {self.engine.max_model_len}; shorten the prompt or lower `max_tokens`",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return asked

    def _silent_max_tokens(self, body: Body) -> int:
        route = self.engine.max_model_len if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        return self.defaults.max_tokens or route


class RunningChoice:
    """One choice while its tokens come."""

    def __init__(self, tokenizer: Tokenizer, stop: list[str], done: Choice) -> None:
        self.done = done
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, stop)
        self._token_text = TokenText(tokenizer)
        self._num_characters = 0

    def take(self, token: GeneratedToken) -> None:
        """Adds a token, the text that became final with it, and how it ended if it did."""
        if token.finish_reason == FinishReason.ABORT.value:
            self.done.abort(token.abort_reason, self._text.finish())
        else:
            self._take_token(token)

    def _take_token(self, token: GeneratedToken) -> None:
        done = self.done
        is_end = token.finish_reason == FinishReason.STOP.value and token.token_id in self._tokenizer.eos_token_ids
        text = "" if is_end else self._text.push(token.token_id)
        if self._text.is_stopped:
            done.finish_reason = FinishReason.STOP.value
        elif token.finish_reason:
            text += self._text.finish()
            done.finish_reason = FinishReason.STOP.value if self._text.is_stopped else token.finish_reason
        done.tokens.append(token)
        done.pieces.append(text)
        if token.logprob is not None:
            self._take_logprob(token, token.logprob)

    def _take_logprob(self, token: GeneratedToken, logprob: float) -> None:
        text = self._token_text.of(token.token_id)
        top = [(self._token_text.of(token_id), other) for token_id, other in token.top_logprobs]
        self.done.logged.append(LoggedToken(text, logprob, top, self._num_characters))
        self._num_characters += len(text)


class RunningCompletion:
    """One HTTP request from its first token to its last. `start`, then `whole` or `stream`; `cancel` at any time."""

    def __init__(
        self,
        service: CompletionService,
        requests: list[GenerationRequest],
        response: ResponseFormat,
        stop: list[str],
        choices_per_prompt: int,
    ) -> None:
        self._service = service
        self._requests = requests
        self._response = response
        self._choices_per_prompt = choices_per_prompt
        self._generation: Generation | None = None
        self._choices = [
            RunningChoice(service.tokenizer, stop, Choice(index, request.token_ids))
            for index, request in enumerate(requests)
        ]

    def start(self) -> None:
        """Queues every choice in the engine, or none. OverloadedError, NotServingError."""
        try:
            self._generation = self._service.engine.start(self._requests)
        except FastDeployRLError:
            self._observe("refused")
            raise

    def cancel(self) -> None:
        """Nobody reads it any more: the engine gives back what it holds, and `whole` or `stream` ends early."""
        if self._generation is not None:
            self._generation.close()

    async def whole(self) -> Json:
        """The response body. NotServingError when the engine ended it."""
        async with aclosing(self._progress()) as progress:
            async for _ in progress:
                pass
        return self._response.whole([choice.done for choice in self._choices], self._usage())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, from the first token on. An error before the first token is raised here, a later one is
        an event."""
        progress = self._progress()
        try:
            first = await anext(progress, None)
        except BaseException:
            await progress.aclose()
            raise
        return self._events(first, progress)

    async def _events(
        self, first: Choice | None, progress: AsyncGenerator[Choice, None]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(progress):
            for running in self._choices:
                if opening := self._response.opening(running.done):
                    yield _event(opening)
            try:
                if first is not None:
                    yield self._chunks(first)
                async for choice in progress:
                    yield self._chunks(choice)
            except FastDeployRLError as error:
                yield _event(error_body(error))
            else:
                if usage := self._response.usage_chunk(self._usage()):
                    yield _event(usage)
            yield DONE

    def _chunks(self, choice: Choice) -> bytes:
        if choice.finish_reason == FinishReason.ABORT.value:
            return _event(self._response.closing(choice))  # it ended between two tokens
        chunks = _event(self._response.chunk(choice))
        return chunks + _event(self._response.closing(choice)) if choice.finish_reason else chunks

    async def _progress(self) -> AsyncGenerator[Choice, None]:
        """Each choice as often as it has got a token; counts them all when it ends."""
        generation = self._generation
        if generation is None:
            return
        fault = ""
        try:
            async for item in generation:
                yield self._take(generation, item)
        except NotServingError:
            fault = "abort" if any(choice.done.tokens for choice in self._choices) else "refused"
            raise
        finally:
            generation.close()
            self._observe(fault or "cancel")

    def _take(self, generation: Generation, item: NextToken) -> Choice:
        if item.token.error:
            raise NotServingError(item.token.error)
        choice = self._choices[item.request]
        choice.take(item.token)
        if choice.done.finish_reason and not item.token.finish_reason:
            generation.cancel(item.request)  # a stop string: the engine would go on
        return choice.done

    def _usage(self) -> Usage:
        """A prompt's first choice tells what was cached of it: the others find what that one left."""
        done = [choice.done for choice in self._choices]
        firsts = done[:: self._choices_per_prompt]
        return Usage(
            prompt_tokens=sum(len(choice.prompt_token_ids) for choice in firsts),
            completion_tokens=sum(len(choice.tokens) for choice in done),
            cached_tokens=sum(choice.num_cached for choice in firsts),
        )

    def _observe(self, unfinished: str) -> None:
        """`unfinished`: what became of the choices that have not ended by themselves."""
        for choice in self._choices:
            self._service.metrics.observe_request(
                choice.done.finish_reason or unfinished,
                prompt_tokens=len(choice.done.prompt_token_ids),
                completion_tokens=len(choice.done.tokens),
            )


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
