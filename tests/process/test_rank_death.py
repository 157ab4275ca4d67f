"""A rank dies and is started again: the engine comes back to what was committed, proved, or is fenced and says why."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.board.layout import Ballot
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import FencedError, PeerLostError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_missed_and_fenced import wait_until
from tests.process.test_update_numpy import MODEL, as_the_engine, publish

RANKS = (0, 1, 2)


@contextlib.contextmanager
def scene(
    tmp_path: Path,
    apply_mode: str = "auto",
    is_restarted_on_death: bool = True,
    finish_s: float = 0.3,
    step_s: float = 60.0,
) -> Iterator[tuple[NumpyEngine, WeightPublisher, BoardClient]]:
    with (
        NumpyEngine(
            MODEL,
            channel=tmp_path / "channel",
            apply_mode=apply_mode,
            is_restarted_on_death=is_restarted_on_death,
            deadlines=Deadlines(
                update_s=5.0, clear_s=2.0, attach_s=20.0, rejoin_s=20.0, finish_s=finish_s, step_s=step_s
            ),
        ) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        yield engine, publisher, client


def kill(engine: NumpyEngine, rank: int) -> None:
    os.kill(engine.workers[rank].pid, signal.SIGKILL)


def await_recovery(engine: NumpyEngine, client: BoardClient, num_deaths: int) -> None:
    wait_until(lambda: len(engine.deaths) == num_deaths and client.status().is_serving)


def check_whole(engine: NumpyEngine, client: BoardClient, weights: dict[str, np.ndarray], version: str) -> None:
    """Every byte of every rank, and the engine's own word for it."""
    assert engine.holds(weights)
    assert client.status().version == version
    assert client.receipt(recompute=True).version == version
    assert None not in engine.tokens()


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_dies_idle_comes_back_to_what_it_started_with(tmp_path: Path, rank: int):
    """No trainer ever published: the weights that came with the model."""
    with scene(tmp_path) as (engine, _, client):
        before = client.receipt()
        kill(engine, rank)
        await_recovery(engine, client, 1)
        check_whole(engine, client, random_weights(MODEL, 0), "0.0")
        assert client.receipt() == before
        assert [entry.kind for entry in client.history()] == ["restore", "recompute"]


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_that_dies_after_an_update_comes_back_to_it_from_the_channel(tmp_path: Path, rank: int, apply_mode: str):
    """Also where a newer version stands in the channel meanwhile: what was committed is what comes back."""
    with scene(tmp_path, apply_mode) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        kill(engine, rank)
        await_recovery(engine, client, 1)
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


@pytest.mark.parametrize("rank", RANKS)
def test_an_update_in_flight_ends_at_once_when_a_rank_dies(tmp_path: Path, rank: int):
    """Its deadline is far away, and one rank is inside a long forward pass: nobody waits for either."""
    busy = (rank + 1) % 3
    with scene(tmp_path) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(busy, "busy 3") == "begun"
        with _asked(engine.port) as outcome:
            wait_until(lambda: all(engine.board.read_rank(r).ballot == Ballot.STAGED for r in RANKS))
            kill(engine, rank)
            error = outcome()
        assert isinstance(error, PeerLostError)
        assert engine.read(busy) == "done"
        await_recovery(engine, client, 1)
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


def test_ranks_that_die_together_come_back_together(tmp_path: Path):
    with scene(tmp_path) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        for rank in (0, 2):
            kill(engine, rank)
        await_recovery(engine, client, 2)
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_cannot_be_had_any_more_fences_until_the_next_good_update(tmp_path: Path, rank: int):
    """The trainer left and took its publication along: one rank cannot come back to it."""
    with scene(tmp_path) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publisher.close()
        kill(engine, rank)
        wait_until(lambda: client.status().legacy_status == "CLEARED")
        status = client.status()
        assert (status.admission, status.version) == ("fenced", "")
        assert "nothing is published" in status.reason
        assert engine.tokens() == [None] * 3
        with WeightPublisher(tmp_path / "channel") as fresh:
            publish(fresh, random_weights(MODEL, 2), 2)
            client.update()
            check_whole(engine, client, random_weights(MODEL, 2), "2.2")


def test_a_dead_rank_that_nobody_starts_again_fences(tmp_path: Path):
    with scene(tmp_path, is_restarted_on_death=False, step_s=4.0) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        kill(engine, 2)
        wait_until(lambda: "ranks [2] died, and nobody starts them again" in client.status().reason)
        assert client.status().admission == "fenced"
        publish(publisher, random_weights(MODEL, 2), 2)
        with pytest.raises((PeerLostError, FencedError), match=r"\[2\]"):
            client.update(deadline_s=1.0)


def test_a_cleared_engine_stays_cleared_when_a_rank_comes_back(tmp_path: Path):
    with scene(tmp_path) as (engine, publisher, client):
        client.clear()
        kill(engine, 1)
        wait_until(lambda: len(engine.deaths) == 1)
        publish(publisher, random_weights(MODEL, 1), 1)
        assert client.status().legacy_status == "CLEARED"
        client.update()
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")


@contextlib.contextmanager
def _asked(port: int) -> Iterator[Callable[[], object]]:
    """An update with a far deadline, asked for by another thread; called, it gives what came of it."""

    def ask() -> object:
        with BoardClient(port) as client:
            try:
                return client.update(deadline_s=60)
            except Exception as error:
                return error

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask)
        yield lambda: future.result(30)


def test_borrowed_memory_whose_trainer_is_gone_fences(tmp_path: Path):
    """Nobody vouches for it any more. What a publisher copied stays: the lease vouches for that."""
    with scene(tmp_path, "alias") as (engine, publisher, client):
        weights, dtypes = random_weights(MODEL, 1), {spec.name: spec.dtype for spec in MODEL.specs}
        lent = publisher.allocate({name: (dtypes[name], array.shape) for name, array in weights.items()})
        for name, array in weights.items():
            lent[name][...] = array
        publisher.publish(dict(lent), step=1, borrow=True, convention=as_the_engine)
        client.update()
        publisher.close()
        wait_until(lambda: client.status().legacy_status == "CLEARED")
        assert "the trainer that lent the memory of version 1.1 is gone" in client.status().reason
        assert engine.tokens() == [None] * 3
