"""Which version rank 0 says is live: the one that its next token is made with."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.manager import DynamicWeightManager, ManagerConfig
from fastdeploy_rl.version import WeightVersion
from tests.process.numpy_engine import free_port


def test_the_version_that_was_just_committed_is_live_before_its_outcome_is_told() -> None:
    """A forced update back to 1.3: no request that wants 1.5 is to begin between the two."""
    source: Any = None
    with closing(Board.create(free_port(), num_ranks=1)) as board:
        runner = NumpyRunner(NumpyModel(()), 0, 1)
        manager = DynamicWeightManager(
            runner=runner, board=board, rank=0, source=source, config=ManagerConfig(load_strategy="ipc")
        )
        told: Any = SimpleNamespace(state=SimpleNamespace(live_version="1.5"))
        held: Any = SimpleNamespace(version=WeightVersion(1, 3))
        manager._coordinator, manager._state.live = told, held
        assert manager.live_version == "1.3"
        told.state.live_version = ""
        assert manager.live_version == ""
