"""Requests in flight when weights change: for every load strategy, apply mode, KV policy and way to treat them, each
token is the one that the weights it is stamped with make of what was there before it, and new requests meet nothing
old; memory that an engine gave back is NaN meanwhile.

What must be said comes from switching_reference.py, which knows nothing of the engine's, and, to the bit, from a runner
in this process that never held other weights. Of the product of strategies, apply modes, KV policies and modes of a
pause nothing is left out; an update that treats requests itself, without a pause, is played on one engine of each apply
mode.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import pytest
from lively_model import SETTINGS, lively_weights, write_lively_model
from served_engine import Model, ServedEngine, Weights, greedy
from switching_reference import Answer, Version, disagreements
from tiny_llama import GREEDY, next_step

from fastdeploy_rl.config import ABORT, ALIAS, COPY, IN_FLIGHT, KEEP, KV_POLICIES, REBUILD, SLEEP_LEVELS, WAIT
from fastdeploy_rl.control.generation import GenerationRequest
from fastdeploy_rl.engines.embedded.page_allocator import PAGE_TOKENS
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.errors import CoverageError
from tests.process.trainer import Trainer

PROMPTS = ([(7 * place + 3) % 250 for place in range(3 * PAGE_TOKENS + 5)], [9, 8, 7])
NUM_LONG, NUM_LONGER, NUM_SHORT = 190, 400, 24


class Setup(NamedTuple):
    load_strategy: str
    apply_mode: str
    num_ranks: int


SETUPS = (
    Setup("ipc", ALIAS, 2),
    Setup("ipc", COPY, 1),
    Setup("ipc_snapshot", ALIAS, 1),
    Setup("ipc_snapshot", COPY, 1),
    Setup("rsync", ALIAS, 1),
    Setup("rsync", COPY, 1),
)


def setup_name(setup: Setup) -> str:
    return f"{setup.load_strategy} {setup.apply_mode} {setup.num_ranks}"


class Rig:
    """One engine for all its tests; each publication has weights that the engine never saw, unless they are given."""

    def __init__(self, setup: Setup, model: Model, engine: ServedEngine) -> None:
        self.setup, self.model, self.engine = setup, model, engine
        self.versions = {"0.0": Version(model.weights)}
        self._step = 0

    def trainer(self) -> Trainer:
        return Trainer(self.setup.load_strategy, self.engine.channel)

    def publish(self, trainer: Trainer, kv: str, weights: Weights | None = None) -> str:
        """`kv`: how they are going to be taken over."""
        self._step += 1
        weights = weights or lively_weights(self.model.directory, self._step)
        version = str(trainer.publish(weights, step=self._step, layout=f"tp:{self.setup.num_ranks}").version)
        self.versions[version] = Version(weights, kv == KEEP)
        return version

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        return self.engine.complete(prompt, NUM_SHORT, logprobs=0)

    @contextmanager
    def in_flight(self, num_tokens: int = NUM_LONG) -> Iterator[list[Answer]]:
        """Two streamed requests that have begun, next to each other. Their answers when the block ends, which waits for
        them."""
        answers: list[Answer] = []
        with (
            self.engine.stream(PROMPTS[0], num_tokens, logprobs=0) as first,
            self.engine.stream(PROMPTS[1], num_tokens, logprobs=0) as second,
        ):
            begun = [next(first)], [next(second)]
            yield answers
            answers += [Answer.of_events([*begun[0], *first]), Answer.of_events([*begun[1], *second])]


class ColdRunner:
    """What weights say that are the first ones in a process."""

    def __init__(self, model: Model) -> None:
        self._directory = model.directory

    def ask(self, weights: Weights, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities."""
        runner = EmbeddedRunner(self._directory, 0, 1, None)
        views = runner.load()
        for name, view in views.items():
            np.copyto(view.numpy(), weights[name])
        runner.bind(views)
        runner.rebuild_kv_cache("0" * 64)
        runner.recapture_graphs()
        request = GenerationRequest(list(prompt), NUM_SHORT, GREEDY, ignore_eos=True, num_logprobs=0)
        runner.scheduler.submit("0", request)
        while (step := next_step(runner)) is not None:
            runner.accept(step, runner.execute(step))
        made = [output.token for output in runner.scheduler.take_outputs()]
        return [token.token_id for token in made], [token.logprob for token in made]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_lively_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="module")
def cold(model: Model) -> ColdRunner:
    return ColdRunner(model)


@pytest.fixture(scope="module", params=SETUPS, ids=setup_name)
def rig(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    setup: Setup = request.param
    place, options = tmp_path_factory.mktemp("engine"), ("--load-strategy", setup.load_strategy)
    with ServedEngine(model, place, num_ranks=setup.num_ranks, apply_mode=setup.apply_mode, options=options) as engine:
        engine.await_ready()
        yield Rig(setup, model, engine)


def only(*setups: Setup) -> pytest.MarkDecorator:
    """Runs a test on these engines alone."""
    return pytest.mark.parametrize("rig", setups, ids=setup_name, indirect=True)


def cached_tokens(body: dict[str, Any]) -> int:
    count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def check_in_flight(rig: Rig, answers: list[Answer], in_flight: str, old: str, new: str) -> None:
    """That they fared as `in_flight` says, and say what the reference says."""
    versions, reason = {ABORT: ([old], "abort"), WAIT: ([old], "length"), KEEP: ([old, new], "length")}[in_flight]
    for answer in answers:
        assert disagreements(SETTINGS, rig.versions, answer) == []
        assert ([span.version for span in answer.spans], answer.finish_reason) == (versions, reason)
        assert (len(answer.tokens) == NUM_LONG) == (reason == "length")


def check_new_requests(rig: Rig, cold: ColdRunner, version: str, prompt: Sequence[int] = PROMPTS[0]) -> None:
    """The first one finds nothing in the cache that others left, and says to the bit what a cold engine says; the
    second one finds what the first one left. Alone, so that nothing is added up in another order."""
    first = rig.ask(prompt)
    answer = check_new_request(rig, version, first, num_cached=0)
    if rig.setup.num_ranks == 1:  # the ranks' sums have an order of their own
        assert (answer.tokens, answer.logprobs) == cold.ask(rig.versions[version].weights, prompt)
    check_new_request(rig, version, rig.ask(prompt), num_cached=3 * PAGE_TOKENS)


def check_new_request(rig: Rig, version: str, body: dict[str, Any], *, num_cached: int) -> Answer:
    answer = Answer.of(body)
    assert cached_tokens(body) == num_cached
    assert [span.version for span in answer.spans] == [version]
    assert disagreements(SETTINGS, rig.versions, answer) == []
    return answer


def check_after(rig: Rig, cold: ColdRunner, version: str, kv: str, in_flight: str) -> None:
    """A request that was kept across a rebuild has filled pages anew, with the new weights alone: those may be used."""
    if (kv, in_flight) == (REBUILD, KEEP):
        check_new_request(rig, version, rig.ask(PROMPTS[0]), num_cached=3 * PAGE_TOKENS)
        check_new_requests(rig, cold, version, PROMPTS[0][::-1])
    else:
        check_new_requests(rig, cold, version)


def check_refused_while_paused(rig: Rig) -> None:
    refused = rig.engine.http.post("/v1/completions", json=greedy(PROMPTS[1], 1))
    assert (refused.status_code, "paused" in refused.text) == (503, True)
    assert rig.engine.control.is_paused()


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("kv", KV_POLICIES)
def test_a_pause_an_update_and_what_comes_after(rig: Rig, cold: ColdRunner, kv: str, in_flight: str) -> None:
    control, old = rig.engine.control, rig.engine.control.status().version
    with rig.trainer() as trainer:
        new = rig.publish(trainer, kv)
        with rig.in_flight() as answers:
            assert control.pause(in_flight).outcome == "done"
            check_refused_while_paused(rig)
            report = control.update(kv=kv)
            assert (report.outcome, report.version) == ("done", new)
            check_refused_while_paused(rig)
            control.resume()
    check_in_flight(rig, answers, in_flight, old, new)
    check_after(rig, cold, new, kv, in_flight)


@only(SETUPS[0], SETUPS[-1])
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("kv", KV_POLICIES)
def test_an_update_that_says_what_becomes_of_requests(rig: Rig, cold: ColdRunner, kv: str, in_flight: str) -> None:
    old = rig.engine.control.status().version
    with rig.trainer() as trainer:
        new = rig.publish(trainer, kv)
        with rig.in_flight() as answers:
            report = rig.engine.control.update(kv=kv, in_flight=in_flight)
    assert (report.outcome, report.version) == ("done", new)
    check_in_flight(rig, answers, in_flight, old, new)
    check_after(rig, cold, new, kv, in_flight)


@only(SETUPS[0], SETUPS[-1])
def test_four_updates_in_one_answer_leave_keys_and_values_of_three_kinds(rig: Rig, cold: ColdRunner) -> None:
    old = rig.engine.control.status().version
    with rig.trainer() as trainer, rig.in_flight(NUM_LONGER) as answers:
        versions = [old]
        for kv in (KEEP, REBUILD, KEEP, KEEP):
            versions.append(rig.publish(trainer, kv))
            rig.engine.control.update(kv=kv)
    for answer in answers:
        assert disagreements(SETTINGS, rig.versions, answer) == []
        assert ([span.version for span in answer.spans], answer.finish_reason) == (versions, "length")
    check_new_requests(rig, cold, versions[-1])


@only(SETUPS[0], SETUPS[-1])
def test_what_the_same_weights_left_may_be_used_when_they_come_back(rig: Rig, cold: ColdRunner) -> None:
    """By their content, whatever their version. Of an answer that went on under others, what was before the switch is
    theirs; what came after it is nobody's, though its tokens are asked for."""
    with rig.trainer() as trainer:
        first = rig.publish(trainer, KEEP)
        rig.engine.control.update(kv=KEEP)
        check_new_requests(rig, cold, first)
        with rig.in_flight() as answers:
            other = rig.publish(trainer, KEEP)
            rig.engine.control.update(kv=KEEP)
        check_in_flight(rig, answers, KEEP, first, other)
        check_new_requests(rig, cold, other)
        mixed = [*PROMPTS[0], *answers[0].tokens]
        check_new_request(rig, other, rig.ask(mixed), num_cached=3 * PAGE_TOKENS)
        again = rig.publish(trainer, KEEP, dict(rig.versions[first].weights))
        rig.engine.control.update(kv=KEEP)
        fresh = check_new_request(rig, again, rig.ask(PROMPTS[0]), num_cached=3 * PAGE_TOKENS)
        # The last token's keys and values come with the one after it. What the request before this one says anew may
        # go further than what was left, where other weights happen to say the same.
        num_pure = len(PROMPTS[0]) + answers[0].spans[0].end - 1
        anew = zip(mixed, [*PROMPTS[0], *fresh.tokens[:-1]], strict=False)
        num_anew = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], anew))
        num_cached = max(num_pure, num_anew) // PAGE_TOKENS * PAGE_TOKENS
        check_new_request(rig, again, rig.ask(mixed), num_cached=num_cached)


def test_weights_that_were_dropped_come_back_as_the_newest_version(rig: Rig, cold: ColdRunner) -> None:
    """Keys and values were awake all the time: requests in flight go on with them."""
    control, old = rig.engine.control, rig.engine.control.status().version
    with rig.trainer() as trainer:
        with rig.in_flight() as answers:
            control.sleep("weight", level=2, mode=KEEP)
            new = rig.publish(trainer, KEEP)
            assert control.wake(kv=KEEP).version == new
        check_in_flight(rig, answers, KEEP, old, new)
        check_new_requests(rig, cold, new)


@only(SETUPS[0], SETUPS[-1])
@pytest.mark.parametrize("level", SLEEP_LEVELS)
def test_an_engine_that_slept_goes_on_where_it_was(rig: Rig, level: int) -> None:
    """Nothing is published meanwhile: neither requests in flight nor new ones notice."""
    control = rig.engine.control
    with rig.trainer() as trainer:
        version = rig.publish(trainer, REBUILD)
        control.update()
        with rig.in_flight() as answers:
            control.sleep(level=level, mode=KEEP)
            refused = rig.engine.http.post("/v1/completions", json=greedy(PROMPTS[1], 1))
            assert (refused.status_code, "asleep" in refused.text) == (503, True)
            for tag in ("graph", "weight", "kv_cache"):
                assert control.status().is_serving is False
                control.wake([tag])
    for answer in answers:
        assert disagreements(SETTINGS, rig.versions, answer) == []
        assert ([span.version for span in answer.spans], answer.finish_reason) == ([version], "length")


@only(SETUPS[0], SETUPS[-1])
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_an_update_that_is_refused_takes_no_token_from_anybody(rig: Rig, in_flight: str) -> None:
    with rig.trainer() as trainer:
        version = rig.publish(trainer, REBUILD)
        rig.engine.control.update()
        broken = lively_weights(rig.model.directory, 0)
        del broken["model.norm.weight"]
        rig.publish(trainer, KEEP, broken)
        with rig.in_flight() as answers, pytest.raises(CoverageError, match=r"model\.norm\.weight"):
            rig.engine.control.update(kv=KEEP, in_flight=in_flight)
    for answer in answers:
        assert disagreements(SETTINGS, rig.versions, answer) == []
        assert ([span.version for span in answer.spans], answer.finish_reason) == ([version], "length")
    assert rig.engine.control.status().version == version
