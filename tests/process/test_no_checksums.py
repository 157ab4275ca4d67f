"""Without checksums: what still holds (all ranks or none, the way back, a rank that returns), and what is said of the
rest: nothing is proved, and there is no receipt."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy_rl.config import COPY, Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ConfigurationError, CoverageError, NotServingError, StepFailedError
from fastdeploy_rl.manager import ManagerConfig
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_rank_death import await_recovery, kill
from tests.process.test_update_numpy import MODEL, publish


@contextmanager
def rig(place: Path, **settings: object) -> Iterator[tuple[NumpyEngine, WeightPublisher, BoardClient]]:
    with (
        NumpyEngine(MODEL, channel=place / "channel", has_checksums=False, **settings) as engine,
        WeightPublisher(place / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        yield engine, publisher, client


@pytest.mark.parametrize("layout", ["full", "tp:3"])
def test_every_rank_takes_it_over_and_nothing_is_proved(tmp_path: Path, layout: str):
    """Full: column slices are copied all the same, without sums."""
    with rig(tmp_path) as (engine, publisher, client):
        assert client.receipt(recompute=True).version == "0.0"  # what came with the model was summed up
        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step, layout)
            report = client.update()
            assert (report.outcome, report.version, report.receipt) == ("done", f"1.{step}", None)
            assert engine.holds(random_weights(MODEL, step))
            assert client.status().version == f"1.{step}"
        with pytest.raises(NotServingError, match="checksums are off"):
            client.receipt()
        with pytest.raises(NotServingError, match="checksums are off"):
            client.receipt(recompute=True)
        assert None not in engine.tokens()


def test_what_cannot_be_taken_over_is_refused_and_nothing_changed(tmp_path: Path):
    with rig(tmp_path) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        addresses = [engine.ask(rank, "address embed") for rank in range(3)]
        broken = random_weights(MODEL, 2)
        del broken["norm"]
        publish(publisher, broken, 2)
        with pytest.raises(CoverageError, match="norm"):
            client.update()
        assert engine.holds(random_weights(MODEL, 1))
        assert [engine.ask(rank, "address embed") for rank in range(3)] == addresses
        assert client.status().version == "1.1"


def test_one_rank_that_refuses_brings_all_back(tmp_path: Path):
    with rig(tmp_path) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        assert engine.ask(1, "refuse one bind") == "refusing"
        publish(publisher, random_weights(MODEL, 2), 2)
        with pytest.raises(StepFailedError, match="told to refuse"):
            client.update()
        assert engine.holds(random_weights(MODEL, 1))
        assert client.status().version == "1.1"
        assert None not in engine.tokens()
        client.update()
        assert engine.holds(random_weights(MODEL, 2))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_comes_back_to_what_the_others_hold(tmp_path: Path, rank: int):
    deadlines = Deadlines(update_s=5.0, attach_s=20.0, rejoin_s=20.0, finish_s=0.3)
    with rig(tmp_path, is_restarted_on_death=True, deadlines=deadlines) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        kill(engine, rank)
        await_recovery(engine, client, 1)
        assert engine.holds(random_weights(MODEL, 1))
        assert client.status().version == "1.1"
        publish(publisher, random_weights(MODEL, 2), 2)
        assert client.update().receipt is None
        assert engine.holds(random_weights(MODEL, 2))


def test_copying_over_live_weights_takes_checksums() -> None:
    with pytest.raises(ConfigurationError, match="takes checksums to undo"):
        ManagerConfig(load_strategy="ipc", apply_mode=COPY, has_checksums=False)
