"""`ipc_snapshot`: 1 GB in 290 tensors from files that are in the page cache into a serving rank.

With checksums, as by default: copied into the engine's arena in the pass that checks. Then as an alias of the mapped
files, unchecked. Each version is published and written out anew before both are asked for it; limit and peer
(`paddle.load` and `set_value`) take turns with them. Files lie where temporary files do, on a real file system: pages
of /dev/shm take longer to map."""

import statistics
import tempfile
from pathlib import Path

from bench_row import Row, at_least, at_most, seconds_of
from bench_rsync import mover
from bench_updates import WARM_UP, Limits, numpy_engine, random_tensors

from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter
from fastdeploy_rl.update.client import BoardClient

KEEP = 2
ALIAS_S = 0.006
STRATEGY = "ipc_snapshot"


def snapshot_rows(runs: int, directory: Path | None) -> list[Row]:
    """`directory`: where snapshots are written, and removed again; None: where temporary files lie."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench", dir=directory) as folder:
        return _rows(Path(folder), runs)


def _rows(folder: Path, runs: int) -> list[Row]:
    tensors, channel = random_tensors(), folder / "channel"
    size = sum(tensor.nbytes for tensor in tensors.values())
    limits = Limits(size)
    copied, mapped, loaded = [], [], []
    with (
        WeightPublisher(channel) as publisher,
        SnapshotWriter(channel, keep=KEEP) as snapshots,
        numpy_engine(channel, "auto", load_strategy=STRATEGY) as copying,
        numpy_engine(channel, "alias", load_strategy=STRATEGY, has_checksums=False) as mapping,
        BoardClient(copying) as client,
        LegacySignal(mapping) as signal,
        mover("pdparams", str(folder)) as paddle,
    ):
        for step in range(WARM_UP + runs):
            snapshots.write(publisher.publish(tensors, step=step))
            snapshots.wait()
            copied.append(seconds_of(lambda: client.update(deadline_s=60)))
            mapped.append(seconds_of(lambda: signal.request_update(60)))
            loaded.append(paddle.move(paddle.ways[0]))
            if step >= WARM_UP:
                limits.take()
    copy, alias, load = (statistics.median(seconds[WARM_UP:]) for seconds in (copied, mapped, loaded))
    one_pass, rate, peer_rate = limits.median("copy"), size / copy / 1e9, size / load / 1e9
    name, peer = "ipc_snapshot: files to serving", "paddle.load and set_value"
    return [
        at_most(name, copy, "s", "memory pass", one_pass, 1.5 * one_pass, "<= 1.5"),
        at_least(name, rate, "GB/s", peer, peer_rate, 3 * peer_rate, ">= 3"),
        at_most("ipc_snapshot, alias, unchecked: signal to serving", alias, "s", "6 ms", ALIAS_S, ALIAS_S, "<= 6 ms"),
    ]
