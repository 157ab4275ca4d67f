"""An engine whose ranks are actors: threads of the test, each rank with a board, source and files of its own.

Owns ranks, their loops (which play the collectives) and the supervisor that starts dead ranks again. Everything else is
the product's: board, rendezvous, conductor, coordinator, manager, runner."""

import contextlib
import logging
import queue
import select
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import KV_CACHE_WORD, PREFIX_TREE_WORD, WEIGHTS_WORD, StatusWord
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.manager import DynamicWeightManager, InitialWeights, ManagerConfig
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.update.coordinator import Coordinator
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.version import WeightVersion
from tests.model.actors import (
    Actor,
    ActorDiedError,
    ActorFiles,
    ActorLock,
    ActorSource,
    CrashingBoard,
    CrashingWord,
    join,
)
from tests.model.actors import wait_until as wait_until
from tests.process.numpy_engine import free_port, held_bytes

_log = logging.getLogger(__name__)

NUM_RANKS = 3
MODEL = NumpyModel(
    (
        ParameterSpec("embed", "F32", (6, 5), 0),
        ParameterSpec("norm", "F32", (5,), None),
        ParameterSpec("up", "F32", (5, 9), 1),
    )
)
DEADLINES = Deadlines(update_s=3.0, clear_s=3.0, recompute_s=3.0, attach_s=20.0, finish_s=0.6, rejoin_s=15.0)
_LOOK_S = 0.02


class RememberingRunner(NumpyRunner):
    """Knows what was ever live on it: the judge's own account."""

    def __init__(self, model: NumpyModel, rank: int, num_ranks: int, seen: list[str]) -> None:
        super().__init__(model, rank, num_ranks)
        self._seen = seen

    def set_version(self, version: str) -> None:
        super().set_version(version)
        self._seen.append(version)


class ActorManager(DynamicWeightManager):
    """Hands the actor's own files and words to what it makes."""

    def __init__(self, actor: Actor, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self._actor = actor
        self._files = self._participant._files = ActorFiles(self._board.run_dir, actor)
        self._lock = ActorLock(self._lock.path, actor)

    def _new_coordinator(self) -> Coordinator:
        coordinator = super()._new_coordinator()
        files = ActorFiles(self._board.run_dir, self._actor)
        for part in (coordinator, *vars(coordinator).values()):
            if isinstance(getattr(part, "_files", None), RankFiles):
                part._files = files
        coordinator.state.close()
        coordinator.state._weights_word = CrashingWord(WEIGHTS_WORD, self._board.port, self._actor)
        coordinator.state._other_words = [
            CrashingWord(word, self._board.port, self._actor) for word in (KV_CACHE_WORD, PREFIX_TREE_WORD)
        ]
        return coordinator


class Rank:
    """One process of the engine."""

    def __init__(self, engine: "ModelEngine", rank: int) -> None:
        self.rank = rank
        self.actor = Actor(f"rank {rank}", self._locks)
        self.is_started = threading.Event()
        # Python 3.11's SimpleQueue may wait for good where its time-out is nearly over.
        self.boundaries: queue.Queue[int] = queue.Queue()
        self.complaint = ""
        self._engine = engine
        self._is_over = threading.Event()
        self.board = CrashingBoard.attach_for(engine.port, self.actor)
        self.runner = RememberingRunner(MODEL, rank, NUM_RANKS, engine.seen[rank])
        self.source = ActorSource(SourceConfig(engine.channel), self.actor)
        self.manager = ActorManager(
            self.actor,
            runner=self.runner,
            board=self.board,
            rank=rank,
            source=self.source,
            config=ManagerConfig("ipc", engine.apply_mode, engine.deadlines, is_restarted_on_death=True),
        )
        self.thread = threading.Thread(target=self._live, name=f"model-{rank}", daemon=True)

    def _locks(self) -> list:
        return [self.manager._lock, *self.source.held_locks()]

    def _live(self) -> None:
        try:
            initial = None
            if self.manager.needs_cold_start():
                initial = InitialWeights(WeightVersion(0, 0), self.runner.load(0))
            self.manager.start(initial)
            self.is_started.set()
            while not self._is_over.is_set():
                self._step()
        except ActorDiedError:
            raise
        except FastDeployRLError as error:
            self._die_of(error)
        except BaseException as error:
            self._die_of(error)
            raise

    def _die_of(self, error: BaseException) -> None:
        self.complaint = f"rank {self.rank}: {type(error).__name__}: {error}"
        self._engine.complaints.append(self.complaint)
        self.actor.kill(self.complaint)

    def _step(self) -> None:
        if self.rank == 0:
            select.select([self.manager.wake_fd], [], [], _LOOK_S)
            self.actor.act("step")
            number = self.manager.poll()
            if number:
                self._engine.tell(number)
        with contextlib.suppress(queue.Empty):
            number = self.boundaries.get(self.rank != 0, _LOOK_S)
            self.actor.act("step")
            self.manager.run(number)

    # --- its end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """In order, as a process that was told to."""
        self._is_over.set()
        join(self.thread)
        self.manager.close()
        self.board.close()

    def bury(self) -> None:
        """After its death, when it was judged: what a process lets go of by ending."""
        manager, coordinator = self.manager, self.manager._coordinator
        self._is_over.set()
        manager._is_stopping.set()
        if coordinator is not None:
            coordinator._is_stopping.set()
        self.actor.bury()
        self.board.forsake()
        for thread in [self.thread, manager._stager, *(coordinator._threads if coordinator is not None else [])]:
            join(thread)
        if coordinator is not None:
            if coordinator._watcher is not None:
                coordinator._watcher.stop()
            coordinator.state.close()
        self.runner.unbind()
        manager._state.live = None
        manager._close_wake_fd()
        self.source.forsake()
        self.board.close()


class ModelEngine:
    """Three ranks and their supervisor. `seen`: for each rank, the versions that were ever live on it."""

    def __init__(self, channel: Path, apply_mode: str, deadlines: Deadlines = DEADLINES) -> None:
        self.port = free_port()
        self.channel = channel
        self.apply_mode = apply_mode
        self.deadlines = deadlines
        self.seen: list[list[str]] = [[] for _ in range(NUM_RANKS)]
        self.complaints: list[str] = []
        self.ranks: list[Rank] = []
        self.dead: list[Rank] = []
        self.is_restarting = threading.Event()
        self._is_over = threading.Event()

    def __enter__(self) -> "ModelEngine":
        with ExitStack() as stack:
            self.board = Board.create(self.port, num_ranks=NUM_RANKS)
            stack.callback(self.board.close)
            self.word = StatusWord(WEIGHTS_WORD, self.port)
            stack.callback(self.word.close)
            self.ranks = [Rank(self, rank) for rank in range(NUM_RANKS)]
            stack.callback(self._stop)
            for rank in self.ranks:
                rank.thread.start()
            self._await_started()
            self.is_restarting.set()
            self._supervisor = threading.Thread(target=self._supervise, name="model-supervisor", daemon=True)
            self._supervisor.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        join(self._supervisor)
        self._stack.close()

    def _await_started(self) -> None:
        for rank in self.ranks:
            wait_until(lambda rank=rank: rank.is_started.is_set(), lambda: f"not started: {self.complaints}")

    def _stop(self) -> None:
        with ExitStack() as stack:
            for rank in self.dead:
                stack.callback(rank.bury)
            for rank in self.ranks:
                rank.actor.spare()
                rank.actor.resume()
                stack.callback(rank.bury if rank.actor.is_dead else rank.stop)

    # --- the loop's collectives --------------------------------------------------------------------

    def tell(self, number: int) -> None:
        """Rank 0's loop tells all of a boundary; where one is dead the meeting breaks, and is tried again."""
        ranks = list(self.ranks)
        if not any(rank.actor.is_dead for rank in ranks):
            for rank in ranks:
                rank.boundaries.put(number)

    # --- the supervisor ----------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not self._is_over.wait(0.005):
            for rank in self.board.condemned_ranks():
                self.ranks[rank].actor.kill("condemned")
            dead = [rank.rank for rank in self.ranks if rank.actor.is_dead]
            for rank in dead:
                self.board.mark_lost(rank)
            if self.is_restarting.is_set():
                for rank in dead:
                    self._restart(rank)

    def _restart(self, rank: int) -> None:
        self.dead.append(self.ranks[rank])
        self.board.advance_generation()
        fresh = Rank(self, rank)
        self.ranks[rank] = fresh
        fresh.thread.start()
        # As a supervisor that waits for a worker's first line; one that dies before it is found by the next look.
        wait_until(lambda: fresh.is_started.is_set() or fresh.actor.is_dead, lambda: f"rank {rank} does not start")

    # --- what the judge reads ----------------------------------------------------------------------

    def is_healthy(self) -> bool:
        return all(rank.is_started.is_set() and not rank.actor.is_dead for rank in list(self.ranks)) and not (
            self.board.lost_ranks() or self.board.condemned_ranks()
        )

    def dump(self, rank: int) -> dict[str, bytes]:
        return {name: view.numpy().tobytes() for name, view in self.ranks[rank].runner.bound().items()}

    def is_bare(self) -> bool:
        return not any(rank.runner.bound() for rank in self.ranks)

    def holds(self, weights: dict[str, np.ndarray]) -> bool:
        return all(self.dump(rank) == expected(weights, rank) for rank in range(NUM_RANKS))


def expected(weights: dict[str, np.ndarray], rank: int) -> dict[str, bytes]:
    return {
        spec.name: held_bytes(spec, weights, rank, NUM_RANKS)
        for spec in MODEL.specs
        if spec.coverage is Coverage.UPDATED
    }
