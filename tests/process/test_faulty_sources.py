"""Sources that fail at one rank, at each call: all ranks stay where they were, nothing is held, and the next update
works. The fault is at one rank only, so each case is one of disagreement."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy_rl import AsyncEngineController
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    NoSpaceError,
    StepFailedError,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.testing import Corrupt, Delay, Fail, FaultySource, Sequencer, Vanish
from fastdeploy_rl.testing.faulty_source import Fault
from fastdeploy_rl.update.client import BoardClient
from tests.process.test_update_numpy import MODEL, publish
from tests.process.threaded_engine import ThreadedEngine


@contextmanager
def rig(
    place: Path, apply_mode: str = "auto"
) -> Iterator[tuple[ThreadedEngine, list[FaultySource], WeightPublisher, BoardClient]]:
    """Two ranks on published version 1. Three arenas: a lease that is not given back stops the trainer soon."""
    sources = [FaultySource(IpcSource(SourceConfig(place / "channel"))) for _ in range(2)]
    with (
        ThreadedEngine(MODEL, sources, apply_mode) as engine,
        WeightPublisher(place / "channel", max_arenas=3) as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        yield engine, sources, publisher, client


def flip_in_the_half_of_rank_1(manifest: Manifest) -> Corrupt:
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == "embed")
    return Corrupt(tensor.parts[0].segment, tensor.parts[0].offset + tensor.num_bytes // 2 + 1)


def flip_in_what_both_ranks_read(manifest: Manifest) -> Corrupt:
    """Whole, each for itself; rank 0's read is the one that is counted."""
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == "norm")
    return Corrupt(tensor.parts[0].segment, tensor.parts[0].offset)


FAULTS: dict[str, tuple[str, Callable[[Manifest], Fault], type[FastDeployRLError], str]] = {
    "resolve fails": ("resolve", lambda _: Fail(NoSpaceError("disk on fire")), NoSpaceError, "rank 1.*on fire"),
    "stage fails": ("stage", lambda _: Fail(NoSpaceError("disk on fire")), NoSpaceError, "rank 1.*on fire"),
    "stage breaks": ("stage", lambda _: Fail(RuntimeError("a bug")), StepFailedError, "stage: RuntimeError: a bug"),
    "bytes differ": (
        "stage",
        flip_in_the_half_of_rank_1,
        ChecksumMismatchError,
        "from what was published: embed",
    ),
    "bytes of a replica differ": (
        "stage",
        flip_in_what_both_ranks_read,
        ChecksumMismatchError,
        "what each of them holds whole: norm on rank 1",
    ),
    "source vanishes": ("stage", lambda _: Vanish(), NoPublicationError, "rank 1.*vanished"),
    "stage is late": ("stage", lambda _: Delay(threading.Event()), DeadlineExceededError, "STAGED|stood still"),
}


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_at_one_rank_leaves_every_rank_on_its_version(tmp_path: Path, case: str, apply_mode: str):
    method, fault, error, reason = FAULTS[case]
    with rig(tmp_path, apply_mode) as (engine, sources, publisher, client):
        before = client.receipt()
        published = publish(publisher, random_weights(MODEL, 2), 2)
        sources[1].then(method, fault(published.manifest))
        with pytest.raises(error, match=reason):
            client.update(deadline_s=0.5 if "late" in case else 10)
        assert engine.holds(random_weights(MODEL, 1))
        assert client.receipt(recompute=True) == before
        assert (client.status().version, client.status().legacy_status) == ("1.1", "NORMAL")
        sources[1].restore()
        publish(publisher, random_weights(MODEL, 4), 3)
        published = publish(publisher, random_weights(MODEL, 3), 4)
        assert client.update(published.version).outcome == "done"
        assert engine.holds(random_weights(MODEL, 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_reason_that_is_no_unicode_is_told_and_the_engine_goes_on(tmp_path: Path, rank: int):
    """As that of a channel whose path has bytes that are no UTF-8."""
    with rig(tmp_path) as (engine, sources, publisher, client):
        sources[rank].then("resolve", Fail(NoSpaceError("no room in /\udcff")))
        publish(publisher, random_weights(MODEL, 2), 2)
        with pytest.raises(NoSpaceError, match=r"no room in /\?"):
            client.update(deadline_s=10)
        assert engine.holds(random_weights(MODEL, 1))
        assert "no room in /?" in client.last_report().reason == client.history(1)[0].reason
        assert client.update().outcome == "done"
        assert engine.holds(random_weights(MODEL, 2))


def test_memory_that_cannot_be_released_is_reported_and_the_new_version_is_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """`retire` fails on one rank: the commit stands, and says what leaked."""
    with rig(tmp_path) as (engine, sources, publisher, client):
        sources[0].then("release", Fail(NoSpaceError("will not let go")))
        publish(publisher, random_weights(MODEL, 2), 2)
        assert client.update().outcome == "done"
        assert engine.holds(random_weights(MODEL, 2))
        client.receipt(recompute=True)
        assert "event=leak" in caplog.text
        assert "will not let go" in caplog.text


def test_the_engine_serves_on_while_a_source_stands_still(tmp_path: Path):
    """Stepwise: rank 1 stands in `stage`; status and the old weights are there; released, the update commits."""
    points = ["rank 1 stands", "the old version answers", "rank 1 goes on"]
    with rig(tmp_path) as (engine, sources, publisher, client), Sequencer.create(points) as order:
        delay = Delay(threading.Event())
        sources[1].then("stage", delay)
        publish(publisher, random_weights(MODEL, 2), 2)
        releasing = threading.Thread(target=release_in_order, args=(order, delay))
        releasing.start()
        updating = threading.Thread(target=client.update)
        updating.start()
        with order.at("the old version answers"), BoardClient(engine.port) as onlooker:
            assert onlooker.status().version == "1.1"
            assert onlooker.status().is_serving
            assert engine.holds(random_weights(MODEL, 1))
        updating.join(20)
        releasing.join(20)
        assert engine.holds(random_weights(MODEL, 2))


def release_in_order(order: Sequencer, delay: Delay) -> None:
    with order.at("rank 1 stands"):
        if not delay.begun.wait(20):
            raise RuntimeError("rank 1 never came to stage")
    with order.at("rank 1 goes on"):
        delay.gate.set()


def test_a_cancelled_update_that_had_begun_still_ends_for_all_ranks(tmp_path: Path):
    """The caller gives up while rank 1 stands in `stage`; both ranks commit all the same, and history says so."""
    with rig(tmp_path) as (engine, sources, publisher, client):
        delay = Delay(threading.Event())
        sources[1].then("stage", delay)
        publish(publisher, random_weights(MODEL, 2), 2)

        async def give_up() -> None:
            async with AsyncEngineController(engine.port) as controller:
                updating = asyncio.create_task(controller.update(deadline_s=20))
                await asyncio.to_thread(delay.begun.wait, 20)
                updating.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await updating

        asyncio.run(give_up())
        delay.gate.set()
        client.receipt(recompute=True)  # waits its turn behind the update
        assert engine.holds(random_weights(MODEL, 2))
        assert [(entry.kind, entry.outcome) for entry in client.history(2)] == [
            ("update", "done"),
            ("recompute", "done"),
        ]


@pytest.mark.parametrize("asked", ["", "1.2"])
def test_a_version_replaced_while_ranks_take_it_gives_way_to_the_newest_if_that_was_asked_for(
    tmp_path: Path, asked: str
):
    """Rank 0 resolved 1.2 and holds nothing of it yet when the arena that it lies in is written again."""
    with rig(tmp_path) as (engine, sources, publisher, client), ThreadPoolExecutor(1) as pool:
        delays = [Delay(threading.Event()) for _ in sources]
        sources[0].then("stage", delays[0])
        sources[1].then("resolve", delays[1])
        publish(publisher, random_weights(MODEL, 2), 2)
        update = pool.submit(client.update, asked or None)
        assert all(delay.begun.wait(20) for delay in delays)
        for step in (3, 4):
            publish(publisher, random_weights(MODEL, step), step)
        for delay in delays:
            delay.gate.set()
        if asked:
            with pytest.raises(NoPublicationError, match=r"superseded|not to be had"):
                update.result(20)
            assert engine.holds(random_weights(MODEL, 1))
        else:
            assert update.result(20).version == "1.4"
            assert engine.holds(random_weights(MODEL, 4))


def test_a_version_that_is_followed_by_another_while_ranks_take_it_is_taken_whole(tmp_path: Path):
    """Rank 0 resolved 1.2, rank 1 comes to it after 1.3 was published: its memory is intact."""
    with rig(tmp_path) as (engine, sources, publisher, client), ThreadPoolExecutor(1) as pool:
        delay = Delay(threading.Event())
        sources[1].then("resolve", delay)
        publish(publisher, random_weights(MODEL, 2), 2)
        update = pool.submit(client.update)
        assert delay.begun.wait(20)
        publish(publisher, random_weights(MODEL, 3), 3)
        delay.gate.set()
        assert update.result(20).version == "1.2"
        assert engine.holds(random_weights(MODEL, 2))
        assert client.update().version == "1.3"
        assert engine.holds(random_weights(MODEL, 3))
