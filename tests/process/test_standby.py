"""Pause, resume, sleep and wake of a numpy engine of real processes: all ranks or none."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ChecksumMismatchError, LifecycleError, StepFailedError
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
    assert (status.is_serving, status.is_paused, status.reason) == (False, True, "the engine is paused")
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_while_weights_sleep_in_host_memory_leaves_nothing_and_a_wake_brings_the_newest(
    tmp_path: Path, rank: int
):
    """What one rank kept is gone, so that all drop theirs; never is a part of a version served."""
    with (
        NumpyEngine(
            MODEL,
            channel=tmp_path / "channel",
            num_ranks=2,
            is_restarted_on_death=True,
            deadlines=Deadlines(update_s=5.0, attach_s=20.0, rejoin_s=20.0, finish_s=0.3, step_s=60.0),
        ) as engine,
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
        assert "while weights slept; nothing is kept of them: wake or update the engine" in status.reason
        publish(publisher, random_weights(MODEL, 2), 2)
        client.wake()
        assert client.status().is_serving
        assert client.status().residency == RESIDENT
        assert engine.holds(random_weights(MODEL, 2))
