"""Continuous batching: who advances, who waits, who gives pages back; no page is lost and no token comes twice."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator
from fastdeploy_rl.engines.embedded.sampler import SampledToken
from fastdeploy_rl.engines.embedded.scheduler import RunningRequest, Scheduler, SchedulerLimits, SequenceSlice, Step
from fastdeploy_rl.errors import RequestError

EOS = 2
VOCAB = 1000
FIRST, SECOND = "a" * 64, "b" * 64
"""Content digests."""


def limits(**changes: int) -> SchedulerLimits:
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "max_step_tokens": 32} | changes
    return SchedulerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,), **sizes)


def make(num_pages: int = 16, **changes: int) -> tuple[Scheduler, PageAllocator]:
    """Without a prefix cache: every request computes all of its tokens."""
    allocator = PageAllocator(num_pages)
    scheduler = Scheduler(limits(**changes), allocator, has_prefix_cache=False)
    scheduler.use_weights(FIRST, keeps_kv=False)
    return scheduler, allocator


def make_caching(num_pages: int = 16, **changes: int) -> tuple[Scheduler, PageAllocator]:
    allocator = PageAllocator(num_pages)
    scheduler = Scheduler(limits(**changes), allocator)
    scheduler.use_weights(FIRST, keeps_kv=False)
    return scheduler, allocator


def request(num_prompt: int, max_tokens: int = 8, **options: object) -> GenerationRequest:
    return GenerationRequest(list(range(10, 10 + num_prompt)), max_tokens, SamplingOptions(seed=5), **options)


def token_of(item: RunningRequest, row: int) -> SampledToken:
    """The token tells its position, so that a test sees one that is lost or made twice."""
    return SampledToken(100 + len(item.token_ids), -0.5)


def advance(scheduler: Scheduler, version: str = "1.1") -> Step | None:
    step = scheduler.schedule()
    if step is not None:
        scheduler.accept(step, token_of, version)
    return step


def finish(scheduler: Scheduler) -> dict[str, list[GeneratedToken]]:
    while advance(scheduler) is not None:
        pass
    tokens: dict[str, list[GeneratedToken]] = {}
    for request_id, token in scheduler.take_outputs():
        tokens.setdefault(request_id, []).append(token)
    return tokens


def shape(step: Step) -> list[tuple[str, int, int, bool]]:
    return [(part.request_id, part.start, len(part.token_ids), part.wants_logits) for part in step.slices]


def test_prefill_then_one_token_a_step() -> None:
    scheduler, _ = make()
    scheduler.submit("a", request(5))
    assert shape(advance(scheduler)) == [("a", 0, 5, True)]
    assert shape(advance(scheduler)) == [("a", 5, 1, True)]


def test_decoding_goes_on_while_a_long_prompt_is_read_in_pieces() -> None:
    scheduler, _ = make(max_step_tokens=16)
    scheduler.submit("a", request(4))
    advance(scheduler)
    scheduler.submit("b", request(40))
    assert shape(advance(scheduler)) == [("a", 4, 1, True), ("b", 0, 15, False)]
    assert shape(advance(scheduler)) == [("a", 5, 1, True), ("b", 15, 15, False)]
    assert shape(advance(scheduler)) == [("a", 6, 1, True), ("b", 30, 10, True)]


def test_single_tokens_come_first_in_a_step() -> None:
    scheduler, _ = make()
    scheduler.submit("long", request(9))
    scheduler.submit("short", request(1))
    assert [part.request_id for part in advance(scheduler).slices] == ["short", "long"]


def test_every_page_of_a_step_has_one_holder_and_new_ones_are_named() -> None:
    scheduler, _ = make()
    scheduler.submit("a", request(PAGE_TOKENS))
    scheduler.submit("b", request(3))
    first, second = advance(scheduler), advance(scheduler)
    pages = {part.request_id: part.pages for part in second.slices}
    assert sorted(first.new_pages) == sorted(pages["a"][:1] + pages["b"])
    assert second.new_pages == pages["a"][1:]
    assert len({page for own in pages.values() for page in own}) == 3


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler, _ = make(max_num_seqs=2)
    for name in "abc":
        scheduler.submit(name, request(3, max_tokens=2))
    advance(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert {name: len(tokens) for name, tokens in finish(scheduler).items()} == {"a": 2, "b": 2, "c": 2}


def test_stop_and_length_end_a_request_and_free_its_pages() -> None:
    scheduler, allocator = make()
    scheduler.submit("length", request(3, max_tokens=2))
    scheduler.submit("stop", request(3))
    step = scheduler.schedule()
    scheduler.accept(step, lambda item, row: SampledToken(EOS if item.request_id == "stop" else 50, -1.0), "1.1")
    assert finish(scheduler) == {
        "length": [GeneratedToken(50, "1.1", -1.0), GeneratedToken(104, "1.1", -0.5, "length")],
        "stop": [GeneratedToken(EOS, "1.1", -1.0, "stop")],
    }
    assert allocator.num_free == 16


def test_ignore_eos_goes_on_and_the_model_length_ends_it() -> None:
    scheduler, _ = make(max_model_len=6)
    scheduler.submit("a", request(3, max_tokens=100, ignore_eos=True))
    while (step := scheduler.schedule()) is not None:
        scheduler.accept(step, lambda item, row: SampledToken(EOS, -1.0), "1.1")
    assert [token.token.finish_reason for token in scheduler.take_outputs()] == ["", "", "length"]


def test_out_of_pages_the_youngest_gives_way_and_loses_no_token() -> None:
    scheduler, allocator = make(num_pages=4)
    scheduler.submit("old", request(PAGE_TOKENS, max_tokens=40))
    scheduler.submit("young", request(2 * PAGE_TOKENS - 4, max_tokens=30))
    advance(scheduler)
    while scheduler.num_running == 2:
        advance(scheduler)
    assert scheduler.find("young").pages == []
    tokens = finish(scheduler)
    assert [token.token_id for token in tokens["old"]] == list(range(116, 156))
    assert [token.token_id for token in tokens["young"]] == list(range(128, 158))
    assert allocator.num_free == 4


def test_a_request_that_gave_way_keeps_its_turn() -> None:
    scheduler, _ = make(num_pages=4)
    scheduler.submit("old", request(PAGE_TOKENS, max_tokens=40))
    scheduler.submit("young", request(2 * PAGE_TOKENS - 4, max_tokens=30))
    scheduler.submit("later", request(2))
    begun = []
    while (step := advance(scheduler)) is not None:
        begun += [part.request_id for part in step.slices if part.start == 0]
    assert begun == ["old", "young", "young", "later"]


def test_a_request_begins_only_where_its_first_token_finds_a_page_too() -> None:
    scheduler, allocator = make(num_pages=3)
    scheduler.submit("old", request(PAGE_TOKENS + 1, max_tokens=2))
    scheduler.submit("young", request(PAGE_TOKENS))
    advance(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting, allocator.num_free) == (1, 1, 1)
    assert len(finish(scheduler)["young"]) == 8


def test_preempt_all_keeps_the_order() -> None:
    scheduler, _ = make(max_num_seqs=3, max_step_tokens=8)
    for name in "abcd":
        scheduler.submit(name, request(4))
    advance(scheduler), advance(scheduler)
    scheduler.preempt_all()
    assert [part.request_id for part in scheduler.schedule().slices] == ["a", "b"]


def test_load_counts_requests_and_pages() -> None:
    scheduler, _ = make(max_num_seqs=1)
    assert scheduler.load == EngineLoad(0, 0, 16, 16)
    scheduler.submit("running", request(PAGE_TOKENS + 1))
    scheduler.submit("waiting", request(3))
    advance(scheduler)
    assert scheduler.load == EngineLoad(1, 1, 14, 16)
    scheduler.abort("running", "left")
    scheduler.abort("waiting", "left")
    assert scheduler.load == EngineLoad(0, 0, 16, 16)
    assert scheduler.find("running") is None


def test_preempt_all_keeps_tokens_and_computes_them_again_under_the_new_version() -> None:
    scheduler, allocator = make()
    scheduler.submit("a", request(3, max_tokens=4))
    scheduler.submit("b", request(4, max_tokens=4))
    advance(scheduler), advance(scheduler)
    scheduler.preempt_all()
    assert allocator.num_free == 16
    step = advance(scheduler, "1.2")
    assert shape(step) == [("a", 0, 5, True), ("b", 0, 6, True)]
    assert step.slices[0].token_ids == [10, 11, 12, 103, 104]
    versions = {name: [token.version for token in tokens] for name, tokens in finish(scheduler).items()}
    assert versions["a"][:3] == ["1.1", "1.1", "1.2"]


def test_step_of_a_preempted_request_is_not_accepted() -> None:
    scheduler, _ = make()
    scheduler.submit("a", request(3))
    step = scheduler.schedule()
    scheduler.preempt_all()
    scheduler.accept(step, token_of, "1.1")
    assert scheduler.take_outputs() == []
    assert shape(scheduler.schedule()) == [("a", 0, 3, True)]


def test_abort_ends_with_the_reason_and_frees_pages_running_or_waiting() -> None:
    scheduler, allocator = make(max_num_seqs=1)
    scheduler.submit("running", request(3))
    scheduler.submit("waiting", request(3))
    advance(scheduler)
    scheduler.take_outputs()
    scheduler.abort("unknown", "never seen")
    scheduler.abort_all("weights were cleared")
    ended = GeneratedToken(-1, "", None, "abort", "weights were cleared")
    assert scheduler.take_outputs() == [("running", ended), ("waiting", ended)]
    assert (scheduler.schedule(), allocator.num_free) == (None, 16)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (request(64), "prompt too long: 64 tokens, and the engine takes 64"),
        (request(0), "at least one prompt token"),
        (request(3, max_tokens=0), "max_tokens of at least 1"),
        (GenerationRequest([VOCAB], 1, SamplingOptions()), "token id 1000 is outside the vocabulary of 1000"),
        (GenerationRequest([1], 1, SamplingOptions(logit_bias={VOCAB: 1.0})), "token id 1000 is outside"),
    ],
)
def test_request_that_can_never_run_is_refused(odd: GenerationRequest, message: str) -> None:
    scheduler, _ = make()
    with pytest.raises(RequestError, match=message):
        scheduler.submit("a", odd)
    assert (scheduler.num_waiting, scheduler.schedule()) == (0, None)


def test_second_request_of_the_same_name_is_refused() -> None:
    scheduler, _ = make()
    scheduler.submit("a", request(3))
    with pytest.raises(RequestError, match="already there"):
        scheduler.submit("a", request(3))
    assert scheduler.num_waiting == 1


def test_step_survives_the_wire() -> None:
    scheduler, _ = make()
    scheduler.submit("a", request(20))
    step = scheduler.schedule()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step


# --- requests that begin alike ------------------------------------------------------------------------------------


def prefix_counts(scheduler: Scheduler) -> tuple[int, int, int]:
    load = scheduler.load
    return (load.num_prefix_hits, load.num_prefix_misses, load.num_prefix_refusals)


def begin(scheduler: Scheduler, name: str, num_prompt: int, max_tokens: int = 8) -> Step:
    scheduler.submit(name, request(num_prompt, max_tokens))
    step = advance(scheduler)
    assert step is not None
    return step


def pages_of(step: Step, name: str) -> list[int]:
    return next(part.pages for part in step.slices if part.request_id == name)


def test_a_prompt_that_begins_like_another_computes_the_rest_only() -> None:
    scheduler, allocator = make_caching()
    first = begin(scheduler, "a", 32)
    second = begin(scheduler, "b", 40)
    assert shape(second) == [("a", 32, 1, True), ("b", 32, 8, True)]
    assert pages_of(second, "b")[:2] == pages_of(first, "a")
    assert set(second.new_pages).isdisjoint(first.new_pages)
    assert allocator.num_free == 16 - 2 - 1 - 1
    assert prefix_counts(scheduler) == (2, 1, 0)
    tokens = finish(scheduler)
    assert [token.num_cached for token in tokens["a"]] == [0] * 8
    assert [token.num_cached for token in tokens["b"]] == [32] + [0] * 7
    assert scheduler.load == EngineLoad(0, 0, 16, 16, 2, 1, 0)


def test_the_same_prompt_again_computes_its_last_token_at_least() -> None:
    scheduler, _ = make_caching()
    begin(scheduler, "a", 32)
    finish(scheduler)
    assert shape(begin(scheduler, "b", 32)) == [("b", 16, 16, True)]
    assert shape(begin(scheduler, "c", 33)) == [("b", 32, 1, True), ("c", 32, 1, True)]
    assert prefix_counts(scheduler) == (1 + 2, 1, 0)


def test_a_conversation_goes_on_from_the_tokens_that_were_made() -> None:
    scheduler, _ = make_caching()
    begin(scheduler, "a", 20, max_tokens=14)
    made = [token.token_id for token in finish(scheduler)["a"]]
    scheduler.submit("b", GenerationRequest([*range(10, 30), *made, 5], 1, SamplingOptions()))
    assert shape(advance(scheduler)) == [("b", 32, 3, True)]


def test_other_weights_find_nothing_and_it_is_counted() -> None:
    scheduler, _ = make_caching()
    begin(scheduler, "a", 40)
    finish(scheduler)
    scheduler.use_weights(SECOND, keeps_kv=True)
    assert shape(begin(scheduler, "b", 40)) == [("b", 0, 32, False)]
    assert prefix_counts(scheduler) == (0, 2, 2)
    tokens = finish(scheduler)
    assert {token.num_cached for token in tokens["b"]} == {0}
    assert shape(begin(scheduler, "c", 40)) == [("c", 32, 8, True)]


def test_nobody_is_given_a_block_of_a_request_that_went_on_under_other_weights() -> None:
    """Its chain is mixed: neither these weights filled it nor those."""
    scheduler, _ = make_caching()
    begin(scheduler, "kept", 8, max_tokens=40)
    scheduler.use_weights(SECOND, keeps_kv=True)
    kept = finish(scheduler)["kept"]
    assert [token.token_id for token in kept] == list(range(108, 148))
    whole = [*range(10, 18), *(token.token_id for token in kept)]
    for digest in (SECOND, FIRST):
        scheduler.use_weights(digest, keeps_kv=True)
        scheduler.submit(digest, GenerationRequest(whole, 1, SamplingOptions()))
        assert advance(scheduler).slices[0].start == 0
        scheduler.abort(digest, "seen")


def test_what_was_full_before_the_weights_changed_is_found_when_they_come_back() -> None:
    scheduler, _ = make_caching()
    begin(scheduler, "kept", 16, max_tokens=30)
    scheduler.use_weights(SECOND, keeps_kv=True)
    assert shape(begin(scheduler, "b", 20))[1] == ("b", 0, 20, True)
    scheduler.use_weights(FIRST, keeps_kv=True)
    assert shape(begin(scheduler, "c", 20))[-1] == ("c", 16, 4, True)


def test_weights_that_nothing_was_computed_with_leave_no_trace() -> None:
    """An update that was undone after it had the cache."""
    scheduler, _ = make_caching()
    begin(scheduler, "a", 8, max_tokens=30)
    scheduler.use_weights(SECOND, keeps_kv=True)
    scheduler.use_weights(FIRST, keeps_kv=True)
    made = [token.token_id for token in finish(scheduler)["a"]]
    scheduler.submit("b", GenerationRequest([*range(10, 18), *made], 1, SamplingOptions()))
    assert shape(advance(scheduler)) == [("b", 32, 6, True)]


def test_a_kept_request_that_is_computed_anew_is_of_the_present_weights_and_found_again() -> None:
    scheduler, _ = make_caching(num_pages=4)
    scheduler.submit("old", request(3, max_tokens=60))
    scheduler.submit("young", GenerationRequest(list(range(500, 528)), 30, SamplingOptions()))
    advance(scheduler)
    scheduler.use_weights(SECOND, keeps_kv=True)
    while scheduler.find("young").num_cached:
        advance(scheduler)
    while (step := advance(scheduler)) is not None and step.slices[0].request_id != "young":
        pass
    assert step.slices[0].start == 0, "what it had is mixed"
    young = finish(scheduler)["young"]
    scheduler.submit("b", GenerationRequest([*range(500, 528), *(t.token_id for t in young)], 1, SamplingOptions()))
    assert advance(scheduler).slices[0].start == 48


def test_a_request_that_gave_way_finds_its_own_blocks_that_nobody_took() -> None:
    scheduler, _ = make_caching(num_pages=5, max_model_len=80)
    scheduler.submit("old", request(16, max_tokens=20))
    scheduler.submit("young", GenerationRequest(list(range(500, 540)), 30, SamplingOptions()))
    advance(scheduler)
    while scheduler.num_running < 2:
        advance(scheduler)
    while scheduler.num_running == 2:
        advance(scheduler)
    assert scheduler.find("young").pages == []
    while (step := advance(scheduler)) is not None and step.slices[0].request_id != "young":
        pass
    assert step.slices[0].start == 32
    assert step.slices[0].pages[:2] != step.new_pages
    tokens = finish(scheduler)
    assert [token.token_id for token in tokens["young"]] == list(range(140, 170))
    assert [token.num_cached for token in tokens["young"]] == [0] * 30


def test_a_request_that_gave_way_under_other_weights_finds_none_of_its_own_blocks() -> None:
    scheduler, _ = make_caching(num_pages=5, max_model_len=80)
    scheduler.submit("old", request(16, max_tokens=20))
    scheduler.submit("young", GenerationRequest(list(range(500, 540)), 30, SamplingOptions()))
    advance(scheduler)
    while scheduler.num_running < 2:
        advance(scheduler)
    while scheduler.num_running == 2:
        advance(scheduler)
    scheduler.use_weights(SECOND, keeps_kv=True)
    while (step := advance(scheduler)) is not None and step.slices[0].request_id != "young":
        pass
    assert step.slices[0].start == 0
    assert len(finish(scheduler)["young"]) == 30


@pytest.mark.parametrize(
    "keeps_nothing", [lambda it: it.preempt_all(), lambda it: it.use_weights(FIRST, keeps_kv=False)]
)
def test_a_cache_that_is_rebuilt_or_lost_is_forgotten(keeps_nothing: Callable[[Scheduler], None]) -> None:
    scheduler, allocator = make_caching()
    begin(scheduler, "done", 40)
    finish(scheduler)
    begin(scheduler, "running", 33)
    keeps_nothing(scheduler)
    assert allocator.num_free == 16
    step = advance(scheduler)
    assert (step.slices[0].start, sorted(step.new_pages)) == (0, sorted(step.slices[0].pages))
    assert prefix_counts(scheduler)[2] == 0


def test_pages_of_others_are_given_away_only_where_none_is_blank() -> None:
    scheduler, allocator = make_caching(num_pages=5)
    begin(scheduler, "a", 32)
    finish(scheduler)
    scheduler.submit("b", GenerationRequest(list(range(500, 540)), 1, SamplingOptions()))
    advance(scheduler)
    assert shape(begin(scheduler, "c", 20))[-1] == ("c", 16, 4, True)
    finish(scheduler)
    assert allocator.num_free == 5


def test_a_request_does_not_begin_where_its_own_cached_pages_are_the_only_free_ones() -> None:
    scheduler, allocator = make_caching(num_pages=5)
    begin(scheduler, "a", 33, max_tokens=1)
    finish(scheduler)
    scheduler.submit("long", GenerationRequest(list(range(500, 547)), 9, SamplingOptions()))
    advance(scheduler), advance(scheduler)
    assert allocator.num_free == 2
    scheduler.submit("b", request(33))
    advance(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert len(finish(scheduler)["b"]) == 8


def test_without_a_prefix_cache_nothing_is_shared_or_counted() -> None:
    scheduler, _ = make()
    begin(scheduler, "a", 20)
    assert shape(begin(scheduler, "b", 20))[-1] == ("b", 0, 20, True)
    assert {token.num_cached for token in finish(scheduler)["b"]} == {0}
    assert prefix_counts(scheduler) == (0, 0, 0)


def test_before_anybody_said_which_weights_these_are_nothing_is_shared() -> None:
    scheduler = Scheduler(limits(), PageAllocator(16))
    begin(scheduler, "a", 20)
    assert shape(begin(scheduler, "b", 20))[-1] == ("b", 0, 20, True)


# --- an engine that pauses ----------------------------------------------------------------------------------------


def test_requests_that_have_not_begun_stay_where_they_are_when_no_new_one_is_to_begin() -> None:
    scheduler, _ = make()
    begin(scheduler, "begun", 4, max_tokens=3)
    scheduler.submit("new", request(4, max_tokens=2))
    while (step := scheduler.schedule(begins_new=False)) is not None:
        assert [part.request_id for part in step.slices] == ["begun"]
        scheduler.accept(step, token_of, "1.1")
    assert (scheduler.num_requests(begun=True), scheduler.num_requests()) == (0, 1)
    assert len(finish(scheduler)["new"]) == 2


def test_a_request_with_tokens_that_gave_its_pages_back_goes_on_where_no_new_one_is_to_begin() -> None:
    scheduler, _ = make()
    begin(scheduler, "begun", 4, max_tokens=3)
    scheduler.submit("new", request(2))
    scheduler.use_weights(SECOND, keeps_kv=False)
    assert shape(scheduler.schedule(begins_new=False)) == [("begun", 0, 5, True)]


def test_requests_that_are_kept_over_a_pause_go_on_where_they_were_and_may_be_cancelled_meanwhile() -> None:
    scheduler, allocator = make_caching()
    begin(scheduler, "kept", 4)
    begin(scheduler, "left", 20)
    before = pages_of(advance(scheduler), "kept")
    scheduler.take_outputs()
    scheduler.use_weights(SECOND, keeps_kv=True)
    scheduler.abort("left", "nobody reads it")
    assert [token.finish_reason for _, token in scheduler.take_outputs()] == ["abort"]
    assert allocator.num_free == 15
    step = advance(scheduler, "1.2")
    assert shape(step) == [("kept", 6, 1, True)]
    assert pages_of(step, "kept") == before
    assert len(finish(scheduler)["kept"]) == 5


# --- any order ----------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a request had computed or was given since it began: its page table, and for each position the weights."""

    pages: list[int]
    digests: list[str]


class AnyOrder(RuleBasedStateMachine):
    """Requests come, steps run, weights change, clients leave: pages and tokens always add up. Each page remembers what
    was written into it, so that each request reads what it computed itself or, of others, what is of the same tokens
    and of the weights that it began with."""

    has_prefix_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(6)
        sizes = limits(max_model_len=80, max_step_tokens=24, max_num_seqs=3)
        self.scheduler = Scheduler(sizes, self.allocator, has_prefix_cache=self.has_prefix_cache)
        self.digest = FIRST
        self.prompts: dict[str, int] = {}
        self.tokens: dict[str, list[GeneratedToken]] = {}
        self.written: dict[tuple[int, int], tuple[list[int], str]] = {}
        """(Page, place in it) -> (all tokens up to there, content digest)."""
        self.seen: dict[str, Seen] = {}
        self.update(FIRST, keeps_kv=False)

    @rule(num_prompt=st.sampled_from([3, 17, 40, 60]), max_tokens=st.integers(1, 40), is_odd=st.booleans())
    def submit(self, num_prompt: int, max_tokens: int, is_odd: bool) -> None:
        """Prompts begin alike; odd ones differ from the second page on."""
        name = str(len(self.prompts))
        self.prompts[name] = num_prompt
        self.tokens[name] = []
        ids = [900 + i if is_odd and i >= 20 else 10 + i for i in range(num_prompt)]
        self.scheduler.submit(name, GenerationRequest(ids, max_tokens, SamplingOptions(seed=5)))

    @rule(count=st.sampled_from([1, 2, 30]), begins_new=st.booleans())
    def run(self, count: int, begins_new: bool) -> None:
        for _ in range(count):
            step = self.scheduler.schedule(begins_new=begins_new)
            if step is not None:
                self.compute(step)
                self.scheduler.accept(step, token_of, "1.1")
        for name, token in self.scheduler.take_outputs():
            self.tokens[name].append(token)

    def compute(self, step: Step) -> None:
        assert len(set(step.new_pages)) == len(step.new_pages)
        self.written = {place: what for place, what in self.written.items() if place[0] not in step.new_pages}
        holders = Counter(page for item in self.items() for page in item.pages)
        for part in step.slices:
            self.read(part)
            self.write(part, holders)

    def items(self) -> list[RunningRequest]:
        return [item for name in self.prompts if (item := self.scheduler.find(name))]

    def read(self, part: SequenceSlice) -> None:
        item = self.scheduler.find(part.request_id)
        if part.request_id not in self.seen or self.seen[part.request_id].pages is not item.pages:
            assert self.has_prefix_cache or part.start == 0
            self.seen[part.request_id] = Seen(item.pages, [self.digest] * part.start)
        for position, digest in enumerate(self.seen[part.request_id].digests):
            assert self.written[place(part, position)] == (item.token_ids[: position + 1], digest)

    def write(self, part: SequenceSlice, holders: Counter[int]) -> None:
        item, digests = self.scheduler.find(part.request_id), self.seen[part.request_id].digests
        assert part.start == len(digests)
        for position in range(part.start, part.start + len(part.token_ids)):
            here = place(part, position)
            assert holders[here[0]] == 1, "a page that others hold is not written"
            assert here not in self.written, "nor is anything overwritten"
            self.written[here] = (item.token_ids[: position + 1], self.digest)
            digests.append(self.digest)

    @rule(digest=st.sampled_from([FIRST, SECOND]), keeps_kv=st.sampled_from([True] * 7 + [False]))
    def update(self, digest: str, keeps_kv: bool) -> None:
        self.scheduler.use_weights(digest, keeps_kv=keeps_kv)
        self.digest = digest
        if not keeps_kv:
            self.written.clear()
            assert self.allocator.num_free == 6

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.prompts:
            self.scheduler.abort(data.draw(st.sampled_from(sorted(self.prompts))), "left")

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        held = {page for item in self.items() for page in item.pages}
        assert all(len(set(item.pages)) == len(item.pages) for item in self.items())
        assert len(held) + self.allocator.num_free == 6

    @invariant()
    def tokens_come_once_and_in_order(self) -> None:
        for name, tokens in self.tokens.items():
            ids = [token.token_id for token in tokens if token.token_id >= 0]
            first = 100 + self.prompts[name]
            assert ids == list(range(first, first + len(ids)))

    def teardown(self) -> None:
        while advance(self.scheduler) is not None:
            pass
        assert (self.scheduler.num_waiting, self.allocator.num_free) == (0, 6)


class AnyOrderWithoutCache(AnyOrder):
    has_prefix_cache = False


def place(part: SequenceSlice, position: int) -> tuple[int, int]:
    return part.pages[position // PAGE_TOKENS], position % PAGE_TOKENS


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
TestAnyOrderWithoutCache = AnyOrderWithoutCache.TestCase
TestAnyOrderWithoutCache.settings = settings(max_examples=20, stateful_step_count=30, deadline=None, derandomize=True)


@pytest.mark.parametrize(("num_prompt", "num_steps"), [(17, 1), (20, 1), (33, 2)])
def test_a_prompt_cut_short_by_a_step_begins_again_under_other_weights(num_prompt: int, num_steps: int) -> None:
    """Also where a single token of it is left: its span would not name what filled the rest."""
    scheduler, _ = make(max_step_tokens=16)
    scheduler.submit("a", request(num_prompt))
    for _ in range(num_steps):
        advance(scheduler)
    scheduler.use_weights(SECOND, keeps_kv=True)
    assert shape(advance(scheduler, "1.2")) == [("a", 0, 16, False)]


def test_an_answer_goes_on_under_other_weights_with_what_it_has() -> None:
    scheduler, _ = make(max_step_tokens=16)
    scheduler.submit("a", request(3))
    advance(scheduler)
    scheduler.use_weights(SECOND, keeps_kv=True)
    assert shape(advance(scheduler, "1.2")) == [("a", 3, 1, True)]


def test_a_request_that_lost_its_pages_before_its_first_token_reused_nothing() -> None:
    scheduler, _ = make_caching(max_step_tokens=32)
    scheduler.submit("a", request(40))
    advance(scheduler)
    scheduler._preempt_youngest()
    assert [token.num_cached for token in finish(scheduler)["a"]] == [0] * 8


def test_only_who_has_yet_to_begin_can_be_called_back() -> None:
    scheduler, _ = make(max_num_seqs=1)
    for name in "ab":
        scheduler.submit(name, request(3))
    advance(scheduler)
    assert [scheduler.has_yet_to_begin(name) for name in "abc"] == [False, True, False]
    scheduler.recall("b")
    assert set(finish(scheduler)) == {"a"}
