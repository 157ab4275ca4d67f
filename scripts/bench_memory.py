"""What a rank holds beyond its weights, at rest and at the peak of an update: `copy` a save area, `alias` nothing.

Resident pages of a numpy engine's worker as the kernel counts them. RssAnon is the rank's own memory; RssShmem is what
it has mapped of the publisher's, which is there once however many ranks look at it. Both are taken over those of the
same worker without weights, and in units of its weights."""

import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_row import Row, at_most
from bench_updates import numpy_engine, random_tensors

from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient

STEPS = 4
_PERIOD_S = 0.002
_FIELD = re.compile(r"^(RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)


class Resident(NamedTuple):
    """Bytes of a process that are in memory."""

    own: int
    shared: int

    @classmethod
    def of(cls, pid: int) -> "Resident":
        found = {name: int(size) * 1024 for name, size in _FIELD.findall(Path(f"/proc/{pid}/status").read_text())}
        return cls(found["RssAnon"], found["RssShmem"])

    @property
    def total(self) -> int:
        return self.own + self.shared


def memory_rows() -> list[Row]:
    tensors = random_tensors()
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench", dir="/dev/shm") as folder:
        return [
            *_copy_rows(Path(folder) / "copy", tensors),
            *_alias_rows(Path(folder) / "alias", tensors),
        ]


def _copy_rows(channel: Path, tensors: dict[str, np.ndarray]) -> list[Row]:
    size = sum(tensor.nbytes for tensor in tensors.values())
    rest, peak = _measure(channel, "copy", tensors)
    return [
        _extra("copy: extra memory, own and mapped, at rest", rest.total - size, size, 1.1),
        _extra("copy: extra memory of its own at the peak", peak.own - size, size, 1.1),
        _extra("copy: mapped of the publisher's at the peak", peak.shared, size, 1.1),
    ]


def _alias_rows(channel: Path, tensors: dict[str, np.ndarray]) -> list[Row]:
    """The weights are the publisher's memory; that of the version before stays mapped, unleased, to be used again."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    rest, peak = _measure(channel, "alias", tensors)
    return [
        _extra("alias: extra memory of its own at the peak", peak.own, size, 0.05),
        _extra("alias: mapped of the publisher's beyond the weights", rest.shared - size, size, 1.1),
    ]


def _extra(name: str, value: int, size: int, allowed: float) -> Row:
    return at_most(name, value / 1e6, "MB", "its weights", size / 1e6, allowed * size / 1e6, f"<= {allowed:g}")


def _measure(channel: Path, apply_mode: str, tensors: dict[str, np.ndarray]) -> tuple[Resident, Resident]:
    """(at rest after the updates, highest during them), over the worker without weights."""
    with (
        WeightPublisher(channel) as publisher,
        numpy_engine(channel, apply_mode) as port,
        BoardClient(port) as client,
    ):
        pid = client.status().ranks[0].pid
        base = Resident.of(pid)
        with peak_of(pid) as peak:
            for step in range(STEPS):
                publisher.publish(tensors, step=step)
                client.update(deadline_s=60)
        client.receipt(recompute=True)  # waits until the last update's memory is given back
        return _over(Resident.of(pid), base), _over(peak[0], base)


def _over(found: Resident, base: Resident) -> Resident:
    return Resident(found.own - base.own, found.shared - base.shared)


@contextmanager
def peak_of(pid: int) -> Iterator[list[Resident]]:
    """One entry: the highest of both counts while the block runs, sampled every 2 ms."""
    peak = [Resident.of(pid)]
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(_PERIOD_S):
            now = Resident.of(pid)
            peak[0] = Resident(max(peak[0].own, now.own), max(peak[0].shared, now.shared))

    sampling = threading.Thread(target=sample)
    sampling.start()
    try:
        yield peak
    finally:
        is_over.set()
        sampling.join()
