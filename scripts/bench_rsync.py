"""`rsync` over tcp: 1 GB in 290 tensors from a publication into a serving rank, with checksums, over loopback.

Beside it, in the same run and by turns: a bare socket that moves as many bytes, torch's gloo in its best way, and the
pipeline of FastDeploy's rsync (bench_movers.py has all three). Ours is timed from asking for the update, when the
publication is there, to its end: fetched, checked, installed, served. Publisher, server, client and measuring process
are one process here."""

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_memory import STEPS, Resident, peak_of
from bench_row import Row, at_least, at_most, seconds_of
from bench_updates import WARM_UP, numpy_engine, random_tensors

from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.weight_server import WeightServer
from fastdeploy_rl.update.client import BoardClient

PIPELINE_RUNS = 2
"""It takes long, and little of that is left to chance."""
MOVE_S = 120.0
RANKS = 2
HALF, WHOLE = 0.505, 1.01
"""Of the weights; norms go to every rank."""


class Mover:
    """A process of bench_movers.py that moves weights when asked; `ways` are the names of what it can."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid = child.pid
        self.ways: list[str] = self._answer()

    def move(self, way: str) -> float:
        """Seconds that it took."""
        self._child.stdin.write(way.encode() + b"\n")
        self._child.stdin.flush()
        return float(self._answer())

    def _answer(self) -> object:
        if not select.select([self._child.stdout], [], [], MOVE_S)[0]:
            self._child.kill()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("a peer ended, or did not answer in time")
        return json.loads(line)


@contextmanager
def mover(*what: str, python: str = sys.executable) -> Iterator[Mover]:
    command = [python, str(Path(__file__).with_name("bench_movers.py")), *what]
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}  # what Paddle says at import about itself
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=quiet) as child, child.stdin:
        yield Mover(child)


def rsync_rows(runs: int, torch_python: str) -> list[Row]:
    """`torch_python`: an interpreter that has torch; without it gloo is not measured."""
    tensors = random_tensors()
    size = sum(tensor.nbytes for tensor in tensors.values())
    pipeline_s, pipeline_extra = _pipeline()
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench", dir="/dev/shm") as folder:
        update_s, bare_s, gloo_s = _by_turns(Path(folder) / "speed", tensors, torch_python, runs)
        extra = _extra_memory(Path(folder) / "memory", tensors) - size
        moved, sent = _moved_and_sent(Path(folder) / "halves", tensors)
    gloo = (
        f"torch gloo, {min(gloo_s, key=gloo_s.__getitem__)}" if gloo_s else "gloo not measured: torch is not installed"
    )
    return [
        _faster(size, update_s, "bare socket", bare_s, 0.55),
        _faster(size, update_s, gloo, min(gloo_s.values(), default=0.0), 1.3),
        _faster(size, update_s, "FastDeploy's rsync", pipeline_s, 12),
        _of_weights("rsync: extra memory of a rank at the peak", extra, size, 1.1, "<= 1.1"),
        _of_weights("FastDeploy's rsync: extra memory of a rank", pipeline_extra, size, math.inf, "none: to know"),
        _of_weights(f"rsync: moved by each of {RANKS} ranks", max(moved), size, HALF, f"<= {HALF:g}"),
        _of_weights(f"rsync: sent to {RANKS} ranks in all", sent, size, WHOLE, f"<= {WHOLE:g}"),
    ]


def _faster(size: int, seconds: float, peer: str, peer_seconds: float, wanted: float) -> Row:
    """Bytes per second, beside a peer's; a peer that was not measured (0 s) is not beaten."""
    rate, peer_rate = size / seconds / 1e9, size / peer_seconds / 1e9 if peer_seconds else 0.0
    name, allowed = "rsync: published to serving", wanted * peer_rate if peer_rate else math.inf
    return at_least(name, rate, "GB/s", peer, peer_rate, allowed, f">= {wanted:g}")


def _of_weights(name: str, value: int, size: int, allowed: float, target: str) -> Row:
    return at_most(name, value / 1e6, "MB", "the weights", size / 1e6, allowed * size / 1e6, target)


def _pipeline() -> tuple[float, int]:
    """(median seconds, bytes at the highest point beyond what the rank had before it began)."""
    with mover("fastdeploy") as peer:
        rest = Resident.of(peer.pid).total
        with peak_of(peer.pid) as peak:
            seconds = [peer.move(peer.ways[0]) for _ in range(PIPELINE_RUNS)]
        return statistics.median(seconds), peak[0].total - rest


def _by_turns(
    channel: Path, tensors: dict[str, np.ndarray], torch_python: str, runs: int
) -> tuple[float, float, dict[str, float]]:
    """Median seconds of an update, of the bare socket, and of each way of gloo (none without torch)."""
    updates, bare = [], []
    with ExitStack() as stack:
        publisher, _, client = stack.enter_context(_scene(channel))
        socket = stack.enter_context(mover("socket"))
        gloo = stack.enter_context(mover("gloo", python=torch_python)) if _has_torch(torch_python) else None
        broadcasts: dict[str, list[float]] = {way: [] for way in gloo.ways} if gloo else {}
        for step in range(WARM_UP + runs):
            publisher.publish(tensors, step=step)
            updates.append(seconds_of(lambda: client.update(deadline_s=60)))
            bare.append(socket.move(socket.ways[0]))
            for way, seconds in broadcasts.items():
                seconds.append(gloo.move(way))
    return _median(updates), _median(bare), {way: _median(seconds) for way, seconds in broadcasts.items()}


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[WARM_UP:])


def _has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", "import torch.distributed"], capture_output=True, timeout=60).returncode == 0


class Scene(NamedTuple):
    """An engine that fetches over loopback what is published, and keeps a way back."""

    publisher: WeightPublisher
    server: WeightServer
    client: BoardClient


@contextmanager
def _scene(channel: Path, num_ranks: int = 1) -> Iterator[Scene]:
    with (
        WeightPublisher(channel) as publisher,
        WeightServer(channel) as server,
        numpy_engine(channel, "auto", num_ranks, load_strategy="rsync") as port,
        BoardClient(port) as client,
    ):
        yield Scene(publisher, server, client)


def _extra_memory(channel: Path, tensors: dict[str, np.ndarray]) -> int:
    """Bytes of a rank at the highest point of several updates, over the same rank without weights."""
    with _scene(channel) as (publisher, _, client):
        pid = client.status().ranks[0].pid
        base = Resident.of(pid)
        with peak_of(pid) as peak:
            for step in range(STEPS):
                publisher.publish(tensors, step=step)
                client.update(deadline_s=60)
        return peak[0].total - base.total


def _moved_and_sent(channel: Path, tensors: dict[str, np.ndarray]) -> tuple[list[int], int]:
    """(bytes that each rank brought to itself, as it reports; bytes that the server counted)."""
    with _scene(channel, RANKS) as (publisher, server, client):
        publisher.publish(tensors, step=0, layout=f"tp:{RANKS}")
        report = client.update(deadline_s=60)
        moved = [step.num_bytes for rank in report.ranks for step in rank.steps if step.step == "stage"]
        return moved, server.num_payload_bytes
