"""A fenced engine drops what it holds on every rank, also where something keeps a rank from it at first."""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import FencedError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.testing.step_faults import Act, StepFault
from fastdeploy_rl.update.client import BoardClient
from tests.faults.numpy_scene import MODEL, as_published, turned
from tests.process.numpy_engine import NumpyEngine

_DEADLINES = Deadlines(update_s=5.0, clear_s=0.3, finish_s=0.2, rejoin_s=10.0, attach_s=30.0, step_s=30.0)
_SOON_S = 20.0
_LASTING = StepFault(Act.RAISE, "commit", "end", is_lasting=True)


def _engine(place: Path) -> NumpyEngine:
    return NumpyEngine(
        MODEL,
        channel=place / "channel",
        apply_mode="copy",
        deadlines=_DEADLINES,
        is_restarted_on_death=True,
        module="fastdeploy_rl.testing.faulty_worker",
    )


def _publish(publisher: WeightPublisher, seed: int) -> None:
    publisher.publish(turned(random_weights(MODEL, seed)), step=seed, layout="tp:3", convention=as_published)


def _soon(condition: Callable[[], bool]) -> bool:
    last = time.monotonic() + _SOON_S
    while not condition() and time.monotonic() < last:
        time.sleep(0.01)  # the period of looking
    return condition()


def test_a_rank_that_comes_to_no_decode_boundary_in_time_drops_what_it_holds_later(tmp_path: Path) -> None:
    """The word does not read CLEARED before."""
    with (
        _engine(tmp_path) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        _publish(publisher, 1)
        assert engine.ask(1, f"fault {msgspec.json.encode(_LASTING).decode()}") == "armed"
        assert engine.ask(2, "linger 1.5") == "will linger"
        with pytest.raises(FencedError, match="rank 1 could not commit"):
            client.update()
        assert client.status().legacy_status == "UPDATING"
        assert _soon(lambda: client.status().legacy_status == "CLEARED")
        assert not client.status().is_serving
        assert [engine.dump(rank) for rank in range(3)] == [{}, {}, {}]
        engine.ask(1, "disarm")
        _publish(publisher, 2)
        assert client.update().outcome == "done"
        assert engine.holds(random_weights(MODEL, 2))
