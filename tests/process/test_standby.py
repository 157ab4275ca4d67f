"""Pause, resume, sleep and wake of a numpy engine of real processes: all ranks or none."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    LifecycleError,
    NotServingError,
    StepFailedError,
)
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_missed_and_fenced import wait_until
from tests.process.test_update_numpy import MODEL, publish

ALL = ["weight", "kv_cache", "graph"]
STEPS = itertools.count(1)
RESIDENT = dict.fromkeys(ALL, "resident")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NumpyEngine, WeightPublisher, BoardClient]]:
    channel = tmp_path_factory.mktemp("standby") / "channel"
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine,
        WeightPublisher(channel) as publisher,
        BoardClient(engine.port) as client,
    ):
        for _ in range(3):  # whatever arenas the publisher comes to need are there before the first test
            publish(publisher, random_weights(MODEL, 1), next(STEPS))
            client.update()
        yield engine, publisher, client


@pytest.fixture(autouse=True)
def awake(scene) -> None:
    """Each test begins with version 1.1, or a later one, live."""
    _, publisher, client = scene
    publish(publisher, random_weights(MODEL, 1), next(STEPS))
    client.update()
    if not client.status().is_serving:
        client.wake()
    assert client.status().is_serving


def test_a_paused_engine_refuses_with_the_reason_until_it_is_resumed(scene):
    _engine, _, client = scene
    report = client.pause()
    assert (report.kind, report.outcome, len(report.ranks)) == ("pause", "done", 2)
    status = client.status()
    assert (status.is_serving, status.is_paused, status.reason) == (False, True, "the engine is paused; resume it")
    assert status.residency == RESIDENT
    assert status.legacy_status == "NORMAL"
    assert status.version
    client.pause(mode="keep")
    client.resume()
    client.resume()
    assert client.status().is_serving
    assert not client.status().is_paused


def test_an_update_leaves_a_paused_engine_paused(scene):
    engine, publisher, client = scene
    client.pause(mode="keep")
    publish(publisher, random_weights(MODEL, 2), next(STEPS))
    report = client.update(kv="keep")
    assert [rank.kv for rank in report.ranks] == ["kept", "kept"]
    assert client.status().is_paused
    assert not client.status().is_serving
    client.resume()
    assert engine.holds(random_weights(MODEL, 2))
    assert client.status().is_serving


@pytest.mark.parametrize("level", [1, 2])
def test_weights_come_back_from_sleep(scene, level: int):
    engine, _publisher, client = scene
    before = client.status()
    client.sleep(["weight"], level=level)
    asleep = client.status()
    assert asleep.residency == {
        "weight": "offloaded" if level == 1 else "dropped", "kv_cache": "resident", "graph": "dropped"
    }  # fmt: skip
    assert asleep.asleep == ["weight"]
    assert not asleep.is_serving
    assert engine.tokens() == [None, None]
    with pytest.raises(LifecycleError, match="weight, graph cannot be resumed: wake it first"):
        client.resume()
    client.wake(["weight"])
    assert client.status().residency == RESIDENT
    assert client.status().is_serving
    assert client.status().version == before.version
    assert engine.holds(random_weights(MODEL, 1))
    assert client.receipt(recompute=True).version == before.version


def test_a_wake_from_level_2_brings_what_was_published_meanwhile(scene):
    engine, publisher, client = scene
    client.sleep(level=2)
    assert client.status().legacy_status == "CLEARED"
    published = publish(publisher, random_weights(MODEL, 3), next(STEPS))
    report = client.wake()
    assert report.version == str(published.version)
    assert report.receipt is not None
    assert client.status().is_serving
    assert engine.holds(random_weights(MODEL, 3))


def test_tags_sleep_and_wake_one_at_a_time_in_any_order_and_twice(scene):
    engine, _, client = scene
    for order in (ALL, ALL[::-1], ["kv_cache", "weight", "graph"]):
        for tag in order:
            client.sleep(tag)
            client.sleep(tag)
        assert client.status().asleep == ALL
        for count, tag in enumerate(order, 1):
            client.wake(tag)
            client.wake(tag)
            assert client.status().is_serving == (count == 3)
        assert client.status().residency == RESIDENT
    assert engine.holds(random_weights(MODEL, 1))


def test_an_update_brings_the_weights_and_leaves_the_rest_asleep(scene):
    engine, publisher, client = scene
    client.sleep()
    publish(publisher, random_weights(MODEL, 4), next(STEPS))
    client.update()
    status = client.status()
    assert status.residency == {"weight": "resident", "kv_cache": "dropped", "graph": "dropped"}
    assert not status.is_serving
    assert status.asleep == ["kv_cache", "graph"]
    client.wake()
    assert client.status().is_serving
    assert engine.holds(random_weights(MODEL, 4))


def test_an_update_of_weights_that_slept_in_a_pause_leaves_it_paused_and_a_wake_ends_it(scene):
    _engine, publisher, client = scene
    client.pause(mode="keep")
    client.sleep("weight")
    publish(publisher, random_weights(MODEL, 4), next(STEPS))
    client.update()
    assert client.status().residency == RESIDENT
    assert client.status().is_paused
    assert client.status().asleep == []
    client.sleep("kv_cache")
    client.wake("kv_cache")
    assert client.status().is_serving
    assert not client.status().is_paused


def test_a_clear_wakes_nothing_and_the_next_update_brings_everything(scene):
    engine, publisher, client = scene
    client.sleep("kv_cache")
    client.clear()
    assert client.status().legacy_status == "CLEARED"
    assert client.status().asleep == []
    publish(publisher, random_weights(MODEL, 5), next(STEPS))
    client.update()
    assert client.status().is_serving
    assert engine.holds(random_weights(MODEL, 5))


@pytest.mark.parametrize("tags", [["kv_cache"], ["weight"], ["graph"]])
def test_the_legacy_word_clears_an_engine_of_which_a_part_sleeps(scene, tags: list[str]):
    engine, publisher, client = scene
    client.sleep(tags)
    with LegacySignal(engine.port) as signal:
        signal.request_clear(20.0)
        assert set(client.status().residency.values()) == {"dropped"}
        assert client.status().asleep == []
        publish(publisher, random_weights(MODEL, 6), next(STEPS))
        signal.request_update(20.0)
    assert client.status().is_serving


def test_what_was_cleared_is_for_an_update_to_bring_and_not_for_a_wake(scene):
    _, publisher, client = scene
    client.clear()
    client.sleep("kv_cache")
    client.wake("kv_cache")
    assert client.status().legacy_status == "CLEARED"
    assert client.status().asleep == []
    publish(publisher, random_weights(MODEL, 6), next(STEPS))
    client.update()
    assert client.status().is_serving


@pytest.mark.parametrize("tag", ["graph", "kv_cache"])
def test_a_refused_update_that_wakes_all_leaves_all_asleep_that_was(scene, tag: str):
    """Also in the memory of the ranks."""
    engine, publisher, client = scene
    client.sleep(tag)
    before = client.status()
    publish(publisher, random_weights(MODEL, 6), next(STEPS))
    assert engine.ask(1, "refuse one recapture") == "refusing"
    with LegacySignal(engine.port) as signal:
        signal.request_update(20.0)
    after = client.status()
    assert (after.residency, after.asleep, after.version) == (before.residency, before.asleep, before.version)
    assert [engine.ask(rank, "graphs") for rank in range(2)] == [False, False]
    client.wake()
    assert client.status().is_serving


@pytest.mark.parametrize("command", ["pause", "sleep", "update"])
def test_requests_that_do_not_end_in_time_refuse_a_command_before_any_rank_begins_with_it(scene, command: str):
    """Rank 0 alone knows of them."""
    engine, publisher, client = scene
    publish(publisher, random_weights(MODEL, 6), next(STEPS))
    before, calls = client.status(), engine.ask(1, "calls")
    assert engine.ask(0, "running 2") == "running"
    try:
        with pytest.raises(DeadlineExceededError, match="2 requests in flight did not come to their end in time"):
            waiting(client, command, "refuse")
        after = client.status()
        assert (after.is_serving, after.is_paused, after.version) == (True, False, before.version)
        assert (after.residency, after.asleep) == (RESIDENT, [])
        assert engine.ask(1, "calls") == calls
        client.pause("keep")
        with pytest.raises(LifecycleError, match="cannot come to their end while the engine is paused; resume it"):
            waiting(client, command, "refuse")
        client.resume()
    finally:
        engine.ask(0, "running 0")


def waiting(client: BoardClient, command: str, on_timeout: str) -> None:
    if command == "update":
        client.update(in_flight="wait", deadline_s=0.3)
    elif command == "pause":
        client.pause("wait", on_timeout=on_timeout, deadline_s=0.3)
    else:
        client.sleep(mode="wait", on_timeout=on_timeout, deadline_s=0.3)


def test_a_pause_of_an_engine_that_is_paused_ends_requests_that_were_kept(scene):
    engine, _, client = scene
    client.pause("keep")
    report = client.pause("abort")
    assert len(report.ranks) == 2
    assert engine.ask(0, "calls")[-1] == "abort the engine was paused"
    client.resume()


def test_the_legacy_word_wakes_everything(scene):
    engine, publisher, client = scene
    client.sleep(level=2)
    publish(publisher, random_weights(MODEL, 6), next(STEPS))
    with LegacySignal(engine.port) as signal:
        signal.request_update(20.0)
    assert client.status().is_serving
    assert client.status().asleep == []
    assert engine.holds(random_weights(MODEL, 6))


def test_a_wake_that_one_rank_cannot_do_leaves_all_asleep(scene):
    engine, _, client = scene
    client.sleep(["weight", "kv_cache"])
    before = client.status()
    assert engine.ask(1, "refuse bind") == "refusing"
    with pytest.raises(StepFailedError, match="told to refuse"):
        client.wake()
    assert engine.ask(1, "mend bind") == "mended"
    assert engine.dump(0) == engine.dump(1) == {}
    after = client.status()
    assert (after.residency, after.asleep, after.is_serving) == (before.residency, before.asleep, False)
    assert engine.tokens() == [None, None]
    client.wake()
    assert client.status().is_serving
    assert engine.holds(random_weights(MODEL, 1))


@pytest.mark.parametrize("kv", ["rebuild", "keep"])
def test_a_refused_update_of_sleeping_weights_leaves_the_cache_that_is_awake(scene, kv: str):
    engine, publisher, client = scene
    client.sleep("weight")
    before = client.status()
    publish(publisher, random_weights(MODEL, 2), next(STEPS))
    assert engine.ask(1, "refuse bind") == "refusing"
    with pytest.raises(StepFailedError, match="told to refuse"):
        client.update(kv=kv)
    assert engine.ask(1, "mend bind") == "mended"
    assert client.status().residency == before.residency
    client.wake("weight")
    assert client.status().version == before.version
    assert engine.holds(random_weights(MODEL, 1))
    assert None not in engine.tokens()


def test_a_sleep_that_one_rank_cannot_do_leaves_all_awake(tmp_path: Path):
    """Its live memory is not what was committed, so that a copy of it would not be either."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2, apply_mode="copy") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        assert engine.ask(1, "spoil norm") == "spoilt"
        with pytest.raises(ChecksumMismatchError, match=r"rank 1.*first norm"):
            client.sleep(["weight"])
        assert client.status().is_serving
        assert client.status().residency == RESIDENT
        assert client.status().asleep == []
        assert None not in engine.tokens()


def restarting_engine(tmp_path: Path, **wishes: str) -> NumpyEngine:
    return NumpyEngine(
        MODEL,
        channel=tmp_path / "channel",
        num_ranks=2,
        is_restarted_on_death=True,
        deadlines=Deadlines(update_s=5.0, attach_s=20.0, rejoin_s=20.0, finish_s=0.3, step_s=60.0),
        **wishes,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_while_weights_sleep_in_host_memory_leaves_nothing_and_a_wake_brings_the_newest(
    tmp_path: Path, rank: int
):
    """What one rank kept is gone, so that all drop theirs; never is a part of a version served."""
    with (
        restarting_engine(tmp_path) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        client.sleep(["weight"])
        engine.workers[rank].kill()
        wait_until(lambda: engine.deaths == [rank] and client.status().legacy_status == "CLEARED")
        status = client.status()
        assert set(status.residency.values()) == {"dropped"}
        assert status.asleep == ["weight"]
        assert not status.is_serving
        assert "while the engine slept; what it held is dropped: wake or update it" in status.reason
        with pytest.raises(NotServingError):
            client.receipt()
        publish(publisher, random_weights(MODEL, 2), 2)
        client.wake()
        assert client.status().is_serving
        assert client.status().residency == RESIDENT
        assert engine.holds(random_weights(MODEL, 2))


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_dies_after_the_commit_word_of_a_waking_update_leaves_the_engine_awake(tmp_path: Path, level: int):
    with (
        restarting_engine(tmp_path, module="fastdeploy_rl.testing.faulty_worker") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        client.pause("keep")
        client.sleep(level=level)
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(1, 'fault {"act": "kill", "step": "commit", "when": "begin"}') == "armed"
        client.wake() if level == 2 else client.update()
        wait_until(lambda: engine.deaths == [1] and engine.holds(random_weights(MODEL, 2)))
        wait_until(lambda: client.status().residency["weight"] == "resident")
        assert client.status().version == "1.2"
        assert client.status().asleep == ([] if level == 2 else ["kv_cache", "graph"])
        assert client.status().is_serving == (level == 2)
