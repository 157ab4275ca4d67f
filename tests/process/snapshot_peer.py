"""A process that writes snapshots of what another one publishes, and is killed where the test says.

python snapshot_peer.py CHANNEL POINT      writes the version that is published, keeps one; says "done"
python snapshot_peer.py CHANNEL hold       takes the directory, says "held" and stays
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.publish import snapshot_directory, snapshot_writer
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.snapshot_directory import SnapshotDirectory
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter

DEADLINE_S = 60.0

POINTS: dict[str, tuple[Any, str]] = {
    "a_file_is_begun": (snapshot_writer, "_new_file"),
    "bytes_are_written": (snapshot_writer._Stream, "check_sums"),
    "files_are_complete": (snapshot_writer, "sync_directory"),
    "manifest": (Channel, "write_manifest"),
    "rename": (SnapshotDirectory, "_remove"),
    "renamed": (snapshot_directory, "sync_directory"),
    "latest": (Channel, "write_latest"),
    "latest_is_written": (os, "rename"),
    "prune": (SnapshotDirectory, "prune"),
    "put_aside": (SnapshotDirectory, "_delete"),
}
"""What the process is about to do when it is killed."""
NEW_IS_THERE = ("renamed", "latest", "latest_is_written", "prune", "put_aside")


class Publication(NamedTuple):
    manifest: Manifest


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_latest(source: Path, target: Path, rename: Callable[[Path, Path], None] = os.rename) -> None:
    if Path(target).name == "LATEST":
        die()
    rename(source, target)


def main(channel: Path, point: str, say: Callable[[str], object]) -> None:
    with SnapshotWriter(channel, keep=1, shard_bytes=300) as snapshots:
        if point == "hold":
            say("held")
            time.sleep(DEADLINE_S)  # until it is killed
        _, manifest = Channel(channel).read_publication(time.monotonic_ns() + int(DEADLINE_S * 1e9))
        if point in POINTS:
            setattr(*POINTS[point], die_at_latest if point == "latest_is_written" else die)
        snapshots.write(Publication(manifest))
        snapshots.wait(DEADLINE_S)
    say("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], lambda word: print(word, flush=True))
