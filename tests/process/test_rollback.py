"""The policy of the way back on real ranks: what is in force is told, and what it costs."""

from pathlib import Path

import pytest

from fastdeploy_rl.config import ROLLBACKS
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.manager import ManagerConfig
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, publish


@pytest.mark.parametrize("rollback", ROLLBACKS)
def test_every_rank_reports_the_way_back_it_had_from_a_copy(tmp_path: Path, rollback: str):
    """A cold engine cannot fetch its checkpoint from the channel: it keeps the old bytes, and says why."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2, apply_mode="copy", rollback=rollback) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step)
            report = client.update()
            assert engine.holds(random_weights(MODEL, step))
            in_force = "keep" if rollback == "refetch" and step == 1 else rollback
            assert [rank.rollback for rank in report.ranks] == [in_force] * 2
            assert [rank.rollback_bytes > 0 for rank in report.ranks] == [in_force == "keep"] * 2
            assert [bool(rank.rollback_reason) for rank in report.ranks] == [in_force != rollback] * 2
            assert client.history(1)[0].rollback.split()[0] == in_force


@pytest.mark.parametrize("rollback", ["", "Keep", "both"])
def test_an_unknown_rollback_is_refused_with_the_known_ones(rollback: str):
    with pytest.raises(ConfigurationError, match="rollback must be one of keep, refetch, off, got"):
        ManagerConfig("ipc", rollback=rollback)
