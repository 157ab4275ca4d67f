"""A numpy engine of real worker processes, for tests: started, asked, stopped."""

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import numpy as np

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import numpy_dtype
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.engines.numpy.worker import SLOT_BYTES
from fastdeploy_rl.memory.shared_segment import SharedSegment


def _release(worker: "subprocess.Popen[str]") -> None:
    """The pipes of one that has ended."""
    with suppress(BrokenPipeError):
        worker.stdin.close()
    worker.stdout.close()
    worker.wait(10)


def free_port() -> int:
    """A queue port number that no other engine of this test run
    uses (nothing listens there: it only names segments)."""
    return 20000 + secrets.randbelow(40000)


def held_bytes(spec: ParameterSpec, weights: dict[str, np.ndarray], rank: int, num_ranks: int) -> bytes:
    """A rank's share of a parameter: split, then fused; turned and padded as its spec says. Written down a second time
    here, so that the engine's own arithmetic is not what it is judged by."""
    pieces = []
    for name in [part.name for part in spec.fused] or [spec.name]:
        value = weights[name]
        if spec.vocab_rows is not None:
            rows = spec.shape[-1 if spec.is_transposed else 0]
            value = np.pad(value, [(0, rows - len(value))] + [(0, 0)] * (value.ndim - 1))
        if spec.is_transposed:
            value = np.swapaxes(value, -2, -1)
        if spec.shard_axis is not None:
            share = value.shape[spec.shard_axis] // num_ranks
            value = value.take(range(rank * share, (rank + 1) * share), spec.shard_axis)
        pieces.append(value)
    return (np.concatenate(pieces, spec.fused_axis) if spec.fused else pieces[0]).tobytes()


class NumpyEngine:
    """`num_ranks` workers around one board. The test process is the supervisor and owns board and collectives.
    `errors`: where the workers' standard error goes, if not to ours. `is_restarted_on_death`: a worker that dies, or is
    condemned, is killed and started again. `module`: what a worker runs. `draft`: a second model."""

    def __init__(
        self,
        model: NumpyModel,
        *,
        channel: Path,
        num_ranks: int = 3,
        seed: int = 0,
        apply_mode: str = "auto",
        rollback: str = "keep",
        load_strategy: str = "ipc",
        rsync_config: dict[str, Any] | None = None,
        model_dir: Path | None = None,
        metas_dir: Path | None = None,
        has_checksums: bool = True,
        errors: IO[bytes] | None = None,
        update_s: float = 5.0,
        deadlines: Deadlines | None = None,
        is_restarted_on_death: bool = False,
        module: str = "fastdeploy_rl.engines.numpy.worker",
        draft: NumpyModel | None = None,
        is_draft_frozen: bool = False,
    ) -> None:
        self.port = free_port()
        self.model = model
        self.num_ranks = num_ranks
        self.workers: list[subprocess.Popen[str]] = []
        self.deaths: list[int] = []
        """Ranks that died and were started again, in order."""
        self._errors = errors
        self._module = module
        self._is_watching = threading.Event()
        self._config = {
            "port": self.port,
            "num_ranks": num_ranks,
            "channel": str(channel),
            "collectives": f"fastdeploy_rl_test.{self.port}",
            "specs": msgspec.to_builtins(model.specs),
            "draft_specs": msgspec.to_builtins(draft.specs if draft is not None else ()),
            "is_draft_frozen": is_draft_frozen,
            "seed": seed,
            "apply_mode": apply_mode,
            "rollback": rollback,
            "load_strategy": load_strategy,
            "rsync_config": json.dumps(rsync_config) if rsync_config is not None else "",
            "model_dir": str(model_dir or ""),
            "metas_dir": str(metas_dir or ""),
            "has_checksums": has_checksums,
            "deadlines": msgspec.to_builtins(deadlines or Deadlines(update_s=update_s, attach_s=20.0)),
            "is_restarted_on_death": is_restarted_on_death,
        }

    def __enter__(self) -> "NumpyEngine":
        with ExitStack() as stack:
            self.board = Board.create(self.port, num_ranks=self.num_ranks)
            stack.callback(self.board.close)
            num_bytes = CollectiveGroup.required_bytes(self.num_ranks, SLOT_BYTES)
            group = stack.enter_context(SharedSegment.create(self._config["collectives"], num_bytes))
            stack.callback(group.unlink)
            stack.callback(self._stop_workers)
            for rank in range(self.num_ranks):
                self.workers.append(self._spawn(rank))
            for rank in range(self.num_ranks):
                if self.read(rank) != "ready":
                    raise RuntimeError(f"rank {rank} did not start")
            if self._config["is_restarted_on_death"]:
                stack.enter_context(self._watching())
            self._stack = stack.pop_all()
        return self

    def _spawn(self, rank: int) -> "subprocess.Popen[str]":
        worker = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        worker.stdin.write(json.dumps(self._config | {"rank": rank}) + "\n")
        worker.stdin.flush()
        return worker

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """As a supervisor does: what died is started again."""
        self._is_watching.set()
        with ThreadPoolExecutor(1) as pool:
            watch = pool.submit(self._watch)
            try:
                yield
            finally:
                self._is_watching.clear()
                watch.result(30)

    def _watch(self) -> None:
        while self._is_watching.is_set():
            for rank in self.board.condemned_ranks():
                self.workers[rank].kill()
                self.workers[rank].wait(10)
            dead = [rank for rank, worker in enumerate(self.workers) if worker.poll() is not None]
            for rank in dead:
                self.board.mark_lost(rank)
            for rank in dead:
                self._restart(rank)
            time.sleep(0.01)  # the period of looking, not a wait for something

    def _restart(self, rank: int) -> None:
        old = self.workers[rank]
        generation = self.board.advance_generation()
        ShmCollectives.advance(self._config["collectives"], self.num_ranks, SLOT_BYTES, generation)
        fresh = self._spawn(rank)
        line = fresh.stdout.readline()  # a worker that dies at once is found by the next look
        self.workers[rank] = fresh
        _release(old)
        if line:
            self.deaths.append(rank)

    def read(self, rank: int) -> Any:
        line = self.workers[rank].stdout.readline()
        return json.loads(line) if line else None

    def ask(self, rank: int, question: str) -> Any:
        worker = self.workers[rank]
        worker.stdin.write(question + "\n")
        worker.stdin.flush()
        return self.read(rank)

    def tokens(self) -> list[int | None]:
        return [self.ask(rank, "token") for rank in range(self.num_ranks)]

    def dump(self, rank: int) -> dict[str, bytes]:
        """The raw bytes of every live parameter of a rank."""
        return {name: bytes.fromhex(text) for name, text in self.ask(rank, "dump").items()}

    def expected(self, weights: dict[str, np.ndarray], rank: int) -> dict[str, bytes]:
        """What `dump` must give when the full logical tensors `weights` are live."""
        return {
            spec.name: held_bytes(spec, weights, rank, self.num_ranks)
            for spec in self.model.specs
            if spec.coverage is Coverage.UPDATED
        }

    def slices(self, weights: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """As `expected`, in the dtypes and shapes that the rank has."""
        specs = {spec.name: spec for spec in self.model.specs}
        return {
            name: np.frombuffer(data, numpy_dtype(specs[name].dtype)).reshape(specs[name].local_shape(self.num_ranks))
            for name, data in self.expected(weights, rank).items()
        }

    def holds(self, weights: dict[str, np.ndarray]) -> bool:
        """Every live byte of every rank is that of `weights`."""
        return all(self.dump(rank) == self.expected(weights, rank) for rank in range(self.num_ranks))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            with suppress(BrokenPipeError):
                worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(10)
            worker.stdout.close()
