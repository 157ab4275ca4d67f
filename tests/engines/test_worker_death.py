"""A worker of a served engine is killed, whatever it is at: the engine comes back to what was committed, or is fenced
and says why.

Bytes are judged from outside, out of the workers' memory, and tokens by an engine that nothing happened to.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served_engine import DEADLINE_S, Model, ServedEngine, greedy

from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.errors import FastDeployRLError, PeerLostError
from fastdeploy_rl.publish.publisher import Published, WeightPublisher

NUM_RANKS = 2
PROMPT, NUM_TOKENS, NUM_LONG = [1, 2, 3], 24, 250
FAR_S = 60.0


class Scene:
    """One engine for all tests of a module, the trainer of one test, and what tokens the two models make."""

    def __init__(self, engine: ServedEngine, a: Model, b: Model, tokens: dict[str, list[int]]) -> None:
        self.engine = engine
        self.a, self.b = a, b
        self.tokens = tokens

    def check(self, name: str, version: str) -> None:
        """It serves that version of model a or b: every byte of every rank, the tokens, the proof."""
        engine = self.engine
        engine.await_serving()
        assert engine.control.status().version == version
        assert engine.differing(self.a if name == "a" else self.b) == []
        body = engine.complete(PROMPT, NUM_TOKENS)
        assert body["choices"][0]["completion_token_ids"] == self.tokens[name]
        assert body["weight_versions"] == [{"version": version, "start": 0, "end": NUM_TOKENS}]
        assert engine.control.receipt(recompute=True).version == version

    def lose(self, rank: int) -> None:
        """Kills it, and waits until its successor is there."""
        self.engine.kill(rank)
        assert self.engine.await_event("rank_lost")["rank"] == rank
        assert self.engine.await_event("rank_back")["rank"] == rank
        self.engine.await_serving()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("death")
    a, b = (Model.write(place / name, seed=seed, is_tied=True) for name, seed in (("a", 1), ("b", 2)))
    with ServedEngine(b, place / "cold", num_ranks=NUM_RANKS) as cold:
        cold.await_ready()
        tokens_of_b = cold.tokens(PROMPT, NUM_TOKENS)
    with ServedEngine(a, place / "warm", num_ranks=NUM_RANKS, options=["--max-num-seqs", "2"]) as engine:
        engine.await_ready()
        yield Scene(engine, a, b, {"a": engine.tokens(PROMPT, NUM_TOKENS), "b": tokens_of_b})


@pytest.fixture
def publish(scene: Scene) -> Iterator[Callable[[Mapping[str, Any]], Published]]:
    steps = iter(range(1, 100))
    with WeightPublisher(scene.engine.channel) as publisher:
        yield lambda weights: publisher.publish(weights, step=next(steps), layout=f"tp:{NUM_RANKS}")


Publish = Callable[[Mapping[str, Any]], Published]


@pytest.mark.parametrize("rank", [1, 0])
def test_an_engine_that_was_never_updated_comes_back_from_its_checkpoint(scene: Scene, rank: int) -> None:
    scene.lose(rank)
    scene.check("a", "0.0")


@pytest.mark.parametrize("rank", [1, 0])
def test_an_idle_engine_comes_back_to_its_version_from_the_channel(scene: Scene, publish: Publish, rank: int) -> None:
    """Also where a newer one is published meanwhile, which the next update takes."""
    engine = scene.engine
    version = str(publish(scene.b.weights).version)
    engine.control.update(version)
    newer = str(publish(scene.a.weights).version)
    scene.lose(rank)
    scene.check("b", version)
    assert engine.control.update().version == newer
    scene.check("a", newer)


def test_requests_wait_for_a_rank_that_died_and_go_on(scene: Scene, publish: Publish) -> None:
    """Rank 1 dies in the middle of streams: not a token of theirs is lost or changed."""
    engine = scene.engine
    version = str(publish(scene.b.weights).version)
    engine.control.update()
    undisturbed = engine.tokens(PROMPT, NUM_LONG)
    with engine.stream(PROMPT, NUM_LONG) as first, engine.stream([7] * 40, NUM_LONG) as second:
        begun = [next(first)], [next(second)]
        engine.kill(1)
        told = [*begun[0], *first], [*begun[1], *second]
    assert tokens_of(told[0]) == undisturbed
    assert len(tokens_of(told[1])) == NUM_LONG
    assert told[0][-1]["weight_versions"] == [{"version": version, "start": 0, "end": NUM_LONG}]
    engine.await_event("rank_back")
    scene.check("b", version)


def test_requests_that_rank_0_had_begun_end_with_it_and_others_wait_for_the_next_one(
    scene: Scene, publish: Publish
) -> None:
    """Meanwhile new ones are told 503 and why."""
    engine = scene.engine
    version = str(publish(scene.b.weights).version)
    engine.control.update()
    with (
        ThreadPoolExecutor(1) as pool,
        engine.stream(PROMPT, NUM_LONG) as first,
        engine.stream(PROMPT, NUM_LONG) as second,
    ):
        next(first), next(second)
        queued = pool.submit(engine.tokens, PROMPT, NUM_TOKENS)
        wait_until(lambda: 'requests_now{state="waiting"} 1.0' in engine.http.get("/metrics").text)
        engine.kill(0)
        ends = [list(first)[-1], list(second)[-1]]
        refused = engine.http.post("/v1/completions", json=greedy(PROMPT, 1))
        health = engine.http.get("/health")
        assert queued.result(DEADLINE_S) == scene.tokens["b"]
    for end in ends:
        assert "rank 0" in end["error"]["message"]
        assert "was killed by SIGKILL" in end["error"]["message"]
    for answer in (refused, health):
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert "died" in answer.json()["error"]["message"]
    engine.await_event("rank_back")
    scene.check("b", version)


@pytest.mark.parametrize("rank", [1, 0])
def test_an_update_in_flight_ends_at_once_when_a_rank_dies(scene: Scene, publish: Publish, rank: int) -> None:
    """Its deadline is far away, and the other rank is inside it; nothing of it is live anywhere, and the next one
    works."""
    engine = scene.engine
    before = str(publish(scene.a.weights).version)
    engine.control.update()
    version = str(publish(scene.b.weights).version)
    stopped = engine.pid(1)
    with ThreadPoolExecutor(1) as pool:
        os.kill(stopped, signal.SIGSTOP)  # it stages nothing, so that the update stands where it is
        update = pool.submit(update_error, engine, version)
        wait_until(lambda: engine.control.status().ranks[0].phase == "staged")
        engine.kill(rank)
        if rank == 0:
            os.kill(stopped, signal.SIGCONT)
        assert isinstance(update.result(FAR_S / 2), PeerLostError)
    engine.await_event("rank_back")
    scene.check("a", before)
    assert engine.control.update().version == version
    scene.check("b", version)


def update_error(engine: ServedEngine, version: str) -> FastDeployRLError | None:
    with EngineController(engine.board_port) as control:
        try:
            control.update(version, deadline_s=FAR_S)
        except FastDeployRLError as error:
            return error
    return None


def test_ranks_that_die_together_come_back_together(scene: Scene, publish: Publish) -> None:
    engine = scene.engine
    version = str(publish(scene.a.weights).version)
    engine.control.update()
    pids = [engine.pid(rank) for rank in range(NUM_RANKS)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for _ in pids:
        engine.await_event("rank_back")
    scene.check("a", version)


@pytest.mark.parametrize("rank", [1, 0])
def test_what_the_channel_has_no_more_fences_until_the_next_good_update(scene: Scene, rank: int) -> None:
    engine = scene.engine
    with WeightPublisher(engine.channel) as publisher:
        engine.control.update(publisher.publish(scene.b.weights, step=1).version)
    engine.kill(rank)  # the trainer took its publication along
    engine.await_event("rank_back")
    wait_until(lambda: engine.control.status().legacy_status == "CLEARED")
    status = engine.control.status()
    assert (status.admission, status.version) == ("fenced", "")
    refused = engine.http.post("/v1/completions", json=greedy(PROMPT, 1))
    assert refused.status_code == 503
    assert "nothing is published" in refused.json()["error"]["message"]
    assert [engine.places(rank) for rank in range(NUM_RANKS)] == [{}, {}]
    with WeightPublisher(engine.channel) as publisher:
        version = str(publisher.publish(scene.a.weights, step=1).version)
        engine.control.update()
        scene.check("a", version)


def tokens_of(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in event["choices"][0].get("completion_token_ids", ())]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # bounded by the deadline above
