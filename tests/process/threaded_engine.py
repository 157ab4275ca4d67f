"""A numpy engine whose ranks are threads of the test: for sources that break when the test says so."""

import select
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.manager import DynamicWeightManager, InitialWeights, ManagerConfig
from fastdeploy_rl.sources.base import WeightSource
from fastdeploy_rl.version import WeightVersion
from tests.process.numpy_engine import free_port


class ThreadedEngine:
    """One rank for each source; the manager closes it. Starts on `random_weights(model, 0)`."""

    def __init__(self, model: NumpyModel, sources: Sequence[WeightSource], apply_mode: str = "auto") -> None:
        self.port = free_port()
        self.model = model
        self._sources = sources
        self._config = ManagerConfig("ipc", apply_mode, Deadlines(update_s=10.0, attach_s=20.0))
        self._is_over = threading.Event()

    def __enter__(self) -> "ThreadedEngine":
        num_ranks = len(self._sources)
        with ExitStack() as stack:
            self.board = Board.create(self.port, num_ranks=num_ranks)
            stack.callback(self.board.close)
            self.runners = [NumpyRunner(self.model, rank, num_ranks) for rank in range(num_ranks)]
            self.managers = [self._manager(rank, stack) for rank in range(num_ranks)]
            for manager, runner in reversed(list(zip(self.managers, self.runners, strict=True))):
                manager.start(InitialWeights(WeightVersion(0, 0), runner.load(0)))
            self._pool = stack.enter_context(ThreadPoolExecutor(num_ranks + 1))
            looping = self._pool.submit(self._loop)
            stack.callback(looping.result, 20)
            stack.callback(self._is_over.set)
            self._stack = stack.pop_all()
        return self

    def _manager(self, rank: int, stack: ExitStack) -> DynamicWeightManager:
        board = Board.attach(self.port)
        stack.callback(board.close)
        manager = DynamicWeightManager(
            runner=self.runners[rank], board=board, rank=rank, source=self._sources[rank], config=self._config
        )
        stack.callback(manager.close)
        return manager

    def _loop(self) -> None:
        while not self._is_over.is_set():
            select.select([self.managers[0].wake_fd], [], [], 0.05)
            number = self.managers[0].poll()
            if number:
                running = [self._pool.submit(manager.run, number) for manager in self.managers]
                for rank in running:
                    rank.result()

    def holds(self, weights: dict[str, np.ndarray]) -> bool:
        """Every live byte of every rank is that of `weights`."""
        return all(self._holds(runner, weights) for runner in self.runners)

    def _holds(self, runner: NumpyRunner, weights: dict[str, np.ndarray]) -> bool:
        bound = runner.bound()
        for spec in self.model.specs:
            if spec.coverage is not Coverage.UPDATED:
                continue
            whole = weights[spec.name]
            part = whole if spec.shard_axis is None else np.split(whole, runner.num_ranks, spec.shard_axis)[runner.rank]
            if bound[spec.name].numpy().tobytes() != part.tobytes():
                return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
