"""Which requests advance in the next step: continuous batching over a paged KV cache.

Owns the requests, their tokens and the pages they hold. Knows nothing of Paddle, of weights beyond the name of their
version and the digest of their content, or of other ranks: it writes down a `Step`, which every rank executes.
Invariant: a page that is written is held by exactly one running request; full ones, which nobody writes again, may be
shared with others and with the prefix cache. A request that gave its pages back keeps its tokens and computes their
keys and values again, in whatever weights are live then. Requests begin in the order in which they came, and one that
gave its pages back keeps its turn: it goes on before any that came after it.
"""

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from fastdeploy_rl.control.generation import EngineLoad, FinishReason, GeneratedToken, GenerationRequest, aborted
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator
from fastdeploy_rl.engines.embedded.prefix_cache import BlockChain, BlockKey, PrefixCache, num_lookup_blocks
from fastdeploy_rl.engines.embedded.sampler import SampledToken
from fastdeploy_rl.errors import RequestError


class SequenceSlice(msgspec.Struct, frozen=True, array_like=True):
    """The consecutive tokens of one request that go through the model in one step.

    `start`: position of the first; everything before lies in the cache, also where a request begins. `pages`: the page
    table, in order, with room for all of them; full ones before `start` may be in other requests' tables too.
    `wants_logits`: the last token's logits are needed.
    """

    request_id: str
    token_ids: list[int]
    start: int
    pages: list[int]
    wants_logits: bool


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass, the same on every rank. Slices of a single token come first. `new_pages` hold nothing of use
    yet, and whatever a request before left there."""

    number: int
    slices: list[SequenceSlice]
    new_pages: list[int]


class TokenOutput(NamedTuple):
    """One token of one request, or how the request ended without one."""

    request_id: str
    token: GeneratedToken


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_num_seqs` requests run at once; `max_model_len` tokens a request, prompt included; `max_step_tokens` tokens
    a step, so that a long prompt does not hold up the others for long."""

    max_num_seqs: int
    max_model_len: int
    max_step_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(eq=False)
class RunningRequest:
    """What the scheduler remembers of a request, running or waiting. `num_cached` of its tokens have keys and values in
    `pages`; `num_reused` were there when it first began (None: it has not). `has_answered`: it made a token with those
    that it has now. The first `num_entered` pages are known to the prefix cache; `chain` None: later ones never will
    be, since other weights filled some of them."""

    request_id: str
    request: GenerationRequest
    seed: int
    token_ids: list[int]
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_reused: int | None = None
    has_answered: bool = False
    num_entered: int = 0
    chain: BlockChain | None = None

    @property
    def num_missing(self) -> int:
        """Tokens that have not been through the model."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.token_ids)

    @property
    def has_begun(self) -> bool:
        return bool(self.pages or self.num_generated)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[len(self.request.token_ids) :]


Choose = Callable[[RunningRequest, int], SampledToken]
"""(request, row of the step's logits) -> its next token."""


class Scheduler:
    """Not thread-safe; all calls come from the engine's loop."""

    def __init__(self, limits: SchedulerLimits, allocator: PageAllocator, *, has_prefix_cache: bool = True) -> None:
        """Nothing is reused before `use_weights` said what fills the pages; `has_prefix_cache` False: nor then."""
        self._limits = limits
        self._allocator = allocator
        self._has_prefix_cache = has_prefix_cache
        self._cache = PrefixCache(allocator)
        self._num_pages = allocator.num_free
        self._requests: dict[str, RunningRequest] = {}
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []  # oldest first
        self._outputs: list[TokenOutput] = []
        self._num_steps = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def load(self) -> EngineLoad:
        counts = self._cache.counts
        return EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_pages=self._allocator.num_free,
            num_pages=self._num_pages,
            num_prefix_hits=counts.num_hits,
            num_prefix_misses=counts.num_misses,
            num_prefix_refusals=counts.num_refusals,
        )

    def find(self, request_id: str) -> RunningRequest | None:
        """The request while it has not ended."""
        return self._requests.get(request_id)

    def submit(self, request_id: str, request: GenerationRequest) -> None:
        """Queues a request. RequestError for one that can never run; nothing changed then."""
        self._check(request_id, request)
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        item = RunningRequest(request_id, request, seed % (1 << 64), list(request.token_ids))
        self._requests[request_id] = item
        self._waiting.append(item)

    def use_weights(self, content_digest: str, *, keeps_kv: bool) -> None:
        """Weights with that digest fill pages from now on. `keeps_kv` False: no page holds anything any more, as after
        `preempt_all`. True: running requests go on with what they have, unless they were in the middle of computing it:
        keys and values of a version that made no token could be told by no span, so these begin again. What others
        reuse was filled by weights of this digest alone."""
        if keeps_kv:
            self._preempt_unfinished()
        else:
            self.preempt_all()
        self._cache.use_weights(content_digest if self._has_prefix_cache else "")

    def schedule(self, *, begins_new: bool = True) -> Step | None:
        """What to compute next; None when there is nothing. Follow it with `accept` or `preempt_all`. `begins_new`
        False: requests that have not begun stay where they are."""
        budget = self._limits.max_step_tokens
        slices: list[SequenceSlice] = []
        new_pages: list[int] = []
        for item in sorted(self._running, key=lambda item: item.num_missing > 1):  # who waits for one token comes first
            budget -= self._advance(item, budget, slices, new_pages)
        while budget > 0 and (begun := self._begin_next(begins_new)) is not None:
            budget -= self._advance(begun, budget, slices, new_pages)
        if not slices:
            return None
        self._num_steps += 1
        slices.sort(key=lambda part: len(part.token_ids) > 1)
        return Step(self._num_steps, slices, new_pages)

    def accept(self, step: Step, choose: Choose, version: str) -> None:
        """Takes over what a step made; `choose` is asked once for each slice that wanted logits and is still there."""
        row = 0
        for part in step.slices:
            item = self.find(part.request_id)
            if item is not None and item.pages and item.num_cached == part.start:  # else ended or preempted since
                item.num_cached += len(part.token_ids)
                self._enter_blocks(item)
                if part.wants_logits:
                    self._append(item, choose(item, row), version)
            row += part.wants_logits

    def take_outputs(self) -> list[TokenOutput]:
        """Everything since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def preempt_all(self) -> None:
        """Every running request gives its pages back and waits to be computed again; no page holds anything
        afterwards."""
        while self._running:
            self._preempt_youngest()
        self._cache.forget_all()

    def abort(self, request_id: str, reason: str) -> None:
        """Ends one request; an unknown one has ended before."""
        item = self.find(request_id)
        if item is not None:
            self._finish(item, aborted(reason))

    def has_yet_to_begin(self, request_id: str) -> bool:
        """It is here, and has neither tokens nor pages of its own."""
        item = self.find(request_id)
        return item is not None and not item.has_begun

    def recall(self, request_id: str) -> None:
        """Of a request that has yet to begin nothing stays here, and nobody is told."""
        item = self._requests.pop(request_id)
        self._waiting.remove(item)

    def abort_all(self, reason: str, *, is_fault: bool = True, begun: bool = False) -> None:
        """`begun`: those alone that `num_requests(begun=True)` counts."""
        for item in (*self._running, *self._waiting):
            if item.has_begun or not begun:
                self._finish(item, aborted(reason, is_fault=is_fault))

    def num_requests(self, *, begun: bool = False) -> int:
        """Requests that have not ended; `begun`: that run, or have tokens of their own."""
        return sum(item.has_begun or not begun for item in (*self._running, *self._waiting))

    def _check(self, request_id: str, request: GenerationRequest) -> None:
        limits = self._limits
        if self.find(request_id) is not None:
            raise RequestError(f"request {request_id} is already there")
        if not request.token_ids or request.max_tokens < 1:
            raise RequestError("a request needs at least one prompt token and max_tokens of at least 1")
        if len(request.token_ids) >= limits.max_model_len:
            raise RequestError(
                f"prompt too long: {len(request.token_ids)} tokens, "
                f"and the engine takes {limits.max_model_len} with the completion"
            )
        named = (*request.token_ids, *request.sampling.logit_bias)
        odd = [token for token in named if not 0 <= token < limits.vocab_size]
        if odd:
            raise RequestError(f"token id {odd[0]} is outside the vocabulary of {limits.vocab_size}")

    def _begin_next(self, begins_new: bool) -> RunningRequest | None:
        """The next in turn, which runs from now on; None where there is none, or no room for it."""
        item = next((item for item in self._waiting if begins_new or item.has_begun), None)
        if item is None or len(self._running) >= self._limits.max_num_seqs or not self._take_cached(item):
            return None
        self._waiting.remove(item)
        self._running.append(item)
        return item

    def _take_cached(self, item: RunningRequest) -> bool:
        """The pages that the prefix cache has of it. False, and nothing happened, where there is no room for all of it
        (and the token it will make), lest it be preempted at once."""
        keys = self._lookup_keys(item)
        found = self._cache.find(keys)
        num_missing = self._allocator.pages_for(len(item.token_ids) + 1) - len(found)
        if not self._allocator.can_allocate(num_missing, beside=found):
            return False
        self._allocator.share(found)
        self._cache.count(keys, len(found))
        item.pages, item.num_entered = found, len(found)
        item.num_cached = len(found) * PAGE_TOKENS
        if item.num_reused is None:
            item.num_reused = item.num_cached
        return True

    def _lookup_keys(self, item: RunningRequest) -> list[BlockKey]:
        if item.chain is None or item.chain.content_digest != self._cache.content_digest:
            item.chain = self._cache.new_chain()
        num_blocks = num_lookup_blocks(len(item.token_ids))
        return [] if item.chain is None else item.chain.keys(item.token_ids, num_blocks)

    def _enter_blocks(self, item: RunningRequest) -> None:
        """Pages that have become full are known to the prefix cache from now on."""
        if item.chain is not None and item.chain.content_digest != self._cache.content_digest:
            item.chain = None
        num_full = item.num_cached // PAGE_TOKENS
        if item.chain is None or num_full == item.num_entered:
            return
        keys = item.chain.keys(item.token_ids, num_full)
        for key, page in zip(keys[item.num_entered :], item.pages[item.num_entered :], strict=False):
            self._cache.enter(key, page)
        item.num_entered = num_full

    def _advance(self, item: RunningRequest, budget: int, slices: list[SequenceSlice], new_pages: list[int]) -> int:
        """Adds the next slice of a request that runs (still); returns its number of tokens."""
        count = min(item.num_missing, budget)
        if count < 1 or item not in self._running or not self._grow(item, new_pages):
            return 0
        end = item.num_cached + count
        tokens = item.token_ids[item.num_cached : end]
        slices.append(
            SequenceSlice(item.request_id, tokens, item.num_cached, list(item.pages), end == len(item.token_ids))
        )
        return count

    def _grow(self, item: RunningRequest, new_pages: list[int]) -> bool:
        """Pages for all tokens, taken from the youngest where none are free; False when `item` itself had to give
        way."""
        missing = self._allocator.pages_for(len(item.token_ids)) - len(item.pages)
        while not self._allocator.can_allocate(missing):
            if self._preempt_youngest() is item:
                return False
        pages = self._allocator.allocate(missing)
        self._cache.overwrite(pages)
        item.pages += pages
        new_pages += pages
        return True

    def _preempt_youngest(self) -> RunningRequest:
        victim = self._running[-1]
        self._preempt(victim)
        return victim

    def _preempt_unfinished(self) -> None:
        """Those that have keys and values, and made no token with them yet."""
        for item in reversed([item for item in self._running if not item.has_answered]):
            self._preempt(item)

    def _preempt(self, item: RunningRequest) -> None:
        self._running.remove(item)
        self._release(item)
        self._waiting.appendleft(item)

    def _append(self, item: RunningRequest, token: SampledToken, version: str) -> None:
        item.token_ids.append(token.token_id)
        item.has_answered = True
        reason = self._finish_reason(item, token.token_id)
        made = GeneratedToken(
            token.token_id,
            version,
            token.logprob,
            reason.value if reason else "",
            top_logprobs=token.top_logprobs,
            num_cached=(item.num_reused or 0) if item.num_generated == 1 else 0,
        )
        if reason:
            self._finish(item, made)
        else:
            self._outputs.append(TokenOutput(item.request_id, made))

    def _finish_reason(self, item: RunningRequest, token_id: int) -> FinishReason | None:
        if token_id in self._limits.eos_token_ids and not item.request.ignore_eos:
            return FinishReason.STOP
        if item.num_generated >= item.request.max_tokens or len(item.token_ids) >= self._limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(self, item: RunningRequest, last: GeneratedToken) -> None:
        self._release(item)
        queue = self._running if item in self._running else self._waiting
        queue.remove(item)
        del self._requests[item.request_id]
        self._outputs.append(TokenOutput(item.request_id, last))

    def _release(self, item: RunningRequest) -> None:
        self._allocator.free(item.pages)
        item.pages = []
        item.num_cached = item.num_entered = 0
        item.has_answered = False
