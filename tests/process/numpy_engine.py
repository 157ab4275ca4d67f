"""A numpy engine of real worker processes, for tests: started, asked, stopped."""

import json
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import numpy as np

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.memory.shared_segment import SharedSegment

READY_S = 30.0


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
    `errors`: where the workers' standard error goes, if not to ours."""

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
        errors: IO[bytes] | None = None,
        update_s: float = 5.0,
    ) -> None:
        self.port = free_port()
        self.model = model
        self.num_ranks = num_ranks
        self.workers: list[subprocess.Popen[str]] = []
        self._errors = errors
        self._config = {
            "port": self.port,
            "num_ranks": num_ranks,
            "channel": str(channel),
            "collectives": f"fastdeploy_rl_test.{self.port}",
            "specs": msgspec.to_builtins(model.specs),
            "seed": seed,
            "apply_mode": apply_mode,
            "rollback": rollback,
            "load_strategy": load_strategy,
            "update_s": update_s,
        }

    def __enter__(self) -> "NumpyEngine":
        with ExitStack() as stack:
            self.board = Board.create(self.port, num_ranks=self.num_ranks)
            stack.callback(self.board.close)
            num_bytes = CollectiveGroup.required_bytes(self.num_ranks, 1 << 16)
            group = stack.enter_context(SharedSegment.create(self._config["collectives"], num_bytes))
            stack.callback(group.unlink)
            stack.callback(self._stop_workers)
            for _ in range(self.num_ranks):
                self.workers.append(self._spawn())
            for rank, worker in enumerate(self.workers):
                worker.stdin.write(json.dumps(self._config | {"rank": rank}) + "\n")
                worker.stdin.flush()
            for rank in range(self.num_ranks):
                if self.read(rank) != "ready":
                    raise RuntimeError(f"rank {rank} did not start")
            self._stack = stack.pop_all()
        return self

    def _spawn(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "fastdeploy_rl.engines.numpy.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

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

    def holds(self, weights: dict[str, np.ndarray]) -> bool:
        """Every live byte of every rank is that of `weights`."""
        return all(self.dump(rank) == self.expected(weights, rank) for rank in range(self.num_ranks))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stop_workers(self) -> None:
        for worker in self.workers:
            worker.stdin.close()
        for worker in self.workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(10)
            worker.stdout.close()
