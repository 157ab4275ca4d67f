"""Continuous batching: who advances, who waits, who gives pages back; no page is lost and no token comes twice."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS, PageAllocator
from fastdeploy_rl.engines.embedded.sampler import SampledToken
from fastdeploy_rl.engines.embedded.scheduler import RunningRequest, Scheduler, SchedulerLimits, Step
from fastdeploy_rl.errors import RequestError

EOS = 2
VOCAB = 1000


def limits(**changes: int) -> SchedulerLimits:
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "max_step_tokens": 32} | changes
    return SchedulerLimits(vocab_size=VOCAB, eos_token_ids=(EOS,), **sizes)


def make(num_pages: int = 16, **changes: int) -> tuple[Scheduler, PageAllocator]:
    allocator = PageAllocator(num_pages)
    return Scheduler(limits(**changes), allocator), allocator


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


class AnyOrder(RuleBasedStateMachine):
    """Requests come, steps run, weights change, clients leave: pages and tokens always add up."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.allocator = make(num_pages=6, max_model_len=80, max_step_tokens=24, max_num_seqs=3)
        self.prompts: dict[str, int] = {}
        self.tokens: dict[str, list[GeneratedToken]] = {}

    @rule(num_prompt=st.integers(1, 60), max_tokens=st.integers(1, 40))
    def submit(self, num_prompt: int, max_tokens: int) -> None:
        name = str(len(self.prompts))
        self.prompts[name] = num_prompt
        self.tokens[name] = []
        self.scheduler.submit(name, request(num_prompt, max_tokens))

    @rule(count=st.integers(1, 30))
    def run(self, count: int) -> None:
        for _ in range(count):
            advance(self.scheduler)
        for name, token in self.scheduler.take_outputs():
            self.tokens[name].append(token)

    @rule()
    def preempt_all(self) -> None:
        self.scheduler.preempt_all()
        assert self.allocator.num_free == 6

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.prompts:
            self.scheduler.abort(data.draw(st.sampled_from(sorted(self.prompts))), "left")

    @invariant()
    def every_page_is_free_or_held_once(self) -> None:
        held = [page for name in self.prompts if (item := self.scheduler.find(name)) for page in item.pages]
        assert len(set(held)) == len(held)
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


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
