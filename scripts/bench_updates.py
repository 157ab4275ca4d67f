"""Publishing and taking over 1 GB in 290 tensors (the shapes of Qwen2.5-0.5B, bf16), one rank, defaults.

The engine is the numpy one, a process of its own: nothing but the update is in its time. Limits are native copies and
reads of as many bytes between warm buffers of the kind that the step works on, with as many threads."""

import json
import os
import secrets
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from bench_row import Row, at_most, seconds_of
from bench_shapes import shapes

from fastdeploy_rl import config
from fastdeploy_rl._native import CollectiveGroup, Mapping, Place, Region, transfer
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.plan.llama import shard_axis
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient

START_S = 30.0
WARM_UP = 4
"""Runs that do not count: they make and warm the arenas, which later ones use again."""


def random_tensors() -> dict[str, np.ndarray]:
    """BF16 bits, each tensor in memory of its own, as a trainer has them."""
    generator = np.random.default_rng(0)
    return {name: generator.integers(0, 2**16, shape, np.uint16) for name, shape in shapes().items()}


@contextmanager
def numpy_engine(channel: Path, apply_mode: str, num_ranks: int = 1, **settings: object) -> Iterator[int]:
    """Ranks without weights at first; gives their port. `settings`: more of WorkerConfig's fields."""
    port, name = 20000 + secrets.randbelow(40000), f"fastdeploy_rl_bench.{os.getpid()}.{secrets.token_hex(4)}"
    specs = [
        ParameterSpec(name, "BF16", shape, shard_axis(name) if num_ranks > 1 else None)
        for name, shape in shapes().items()
    ]
    settings |= {
        "port": port,
        "num_ranks": num_ranks,
        "channel": str(channel),
        "collectives": name,
        "specs": msgspec.to_builtins(specs),
        "seed": -1,
        "apply_mode": apply_mode,
        "deadlines": {"update_s": 30.0},
        "num_copy_threads": config.num_copy_threads(),
    }
    with ExitStack() as stack:
        board = Board.create(port, num_ranks=num_ranks)
        stack.callback(board.close)
        group = stack.enter_context(SharedSegment.create(name, CollectiveGroup.required_bytes(num_ranks, 1 << 16)))
        stack.callback(group.unlink)
        workers = [stack.enter_context(_started(settings | {"rank": rank})) for rank in range(num_ranks)]
        for worker in workers:
            stack.callback(worker.stdin.close)  # all of them before one is waited for: they end together
        for worker in workers:
            _await_ready(worker)
        yield port


def _started(settings: dict[str, object]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fastdeploy_rl.engines.numpy.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker.stdin.write(json.dumps(settings).encode() + b"\n")
    worker.stdin.flush()
    return worker


def _await_ready(worker: subprocess.Popen[bytes]) -> None:
    if not select.select([worker.stdout], [], [], START_S)[0]:
        worker.kill()
    if worker.stdout.readline() != b'"ready"\n':
        raise RuntimeError("the engine did not start")


class Limits:
    """Seconds of one pass over the same bytes between warm buffers: `publish`, private to shared memory; `copy`, shared
    to private memory; `read`, shared memory alone. Taken beside every run that is measured, since machines drift."""

    def __init__(self, num_bytes: int) -> None:
        self._threads = config.num_copy_threads()
        self._private = Mapping.private(num_bytes)
        self._shared = SharedSegment.create(f"fastdeploy_rl_bench.{os.getpid()}.limit", num_bytes)
        self._shared.unlink()
        self._seconds: dict[str, list[float]] = {"publish": [], "copy": [], "read": []}
        self.take()
        self.forget()

    def take(self) -> None:
        private, shared = self._private, self._shared.mapping
        self._seconds["publish"].append(seconds_of(lambda: _copy(private, shared, self._threads)))
        self._seconds["copy"].append(seconds_of(lambda: _copy(shared, private, self._threads)))
        self._seconds["read"].append(seconds_of(lambda: _read(shared, self._threads)))

    def forget(self) -> None:
        self._seconds = {name: [] for name in self._seconds}

    def median(self, name: str) -> float:
        return statistics.median(self._seconds[name])


def _copy(source: Mapping, target: Mapping, threads: int) -> None:
    size = source.num_bytes
    region = Region(
        source=source, source_offset=0, source_stride=size, rows=1, row_bytes=size, target=target, target_stride=size
    )
    transfer([region], threads)


def _read(source: Mapping, threads: int) -> None:
    size = source.num_bytes
    place = Place(0, size, size)
    transfer(
        [Region(source=source, source_offset=0, source_stride=size, rows=1, row_bytes=size, read_place=place)], threads
    )


def update_rows(runs: int) -> list[Row]:
    tensors = random_tensors()
    limits = Limits(sum(tensor.nbytes for tensor in tensors.values()))
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench", dir="/dev/shm") as folder:
        rows = _alias_rows(Path(folder) / "alias", tensors, limits, runs)
        limits.forget()
        return rows + _copy_rows(Path(folder) / "copy", tensors, limits, runs)


def _alias_rows(channel: Path, tensors: dict[str, np.ndarray], limits: Limits, runs: int) -> list[Row]:
    published, stalls, serving = [], [], []
    with (
        WeightPublisher(channel) as publisher,
        numpy_engine(channel, "alias") as port,
        LegacySignal(port) as signal,
        BoardClient(port) as client,
    ):
        for step in range(WARM_UP + runs):
            published.append(publisher.publish(tensors, step=step).seconds)
            serving.append(seconds_of(lambda: signal.request_update(60)))
            stalls.append(client.last_report().stall_seconds)
            if step >= WARM_UP:
                limits.take()
    write, read = limits.median("publish"), limits.median("read")
    publish, stall, served = (statistics.median(seconds[WARM_UP:]) for seconds in (published, stalls, serving))
    within = "<= 20 ms + 1.2 read passes"
    return [
        at_most("publish 1 GB / 290 tensors", publish, "s", "memory pass", write, 1.5 * write, "<= 1.5"),
        at_most("alias: stall, drain to commit", stall, "s", "5 ms", 0.005, 0.005, "<= 5 ms"),
        at_most("alias: signal to serving", served, "s", "read pass", read, 0.020 + 1.2 * read, within),
    ]


def _copy_rows(channel: Path, tensors: dict[str, np.ndarray], limits: Limits, runs: int) -> list[Row]:
    stalls = []
    with (
        WeightPublisher(channel) as publisher,
        numpy_engine(channel, "copy") as port,
        BoardClient(port) as client,
    ):
        for step in range(WARM_UP + runs):
            publisher.publish(tensors, step=step)
            stalls.append(client.update(deadline_s=60).stall_seconds)
            if step >= WARM_UP:
                limits.take()
    stall, limit = statistics.median(stalls[WARM_UP:]), limits.median("copy")
    within = "<= 2.2 passes + 10 ms"
    return [at_most("copy: stall, drain to commit", stall, "s", "memory pass", limit, 0.010 + 2.2 * limit, within)]
