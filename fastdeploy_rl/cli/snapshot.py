"""`snapshot`: puts what is published on disk, once or each time, and lists what is there."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastdeploy_rl.cli.options import (
    Verbs,
    add_channel,
    add_deadline,
    add_json,
    add_verb,
    megabytes,
    positive,
    print_fields,
    print_json,
    print_line,
)
from fastdeploy_rl.cli.progress import SlowProgress
from fastdeploy_rl.config import Deadlines

if TYPE_CHECKING:
    from fastdeploy_rl.manifest import Manifest
    from fastdeploy_rl.publish.snapshot_directory import Entry, Snapshot, SnapshotDirectory
    from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter

_EXAMPLES = """\
  fastdeploy-rl snapshot                       # what is published now, for engines with --load-strategy ipc_snapshot
  fastdeploy-rl snapshot --follow --keep 5     # every version from now on, until Ctrl-C
  fastdeploy-rl snapshot --to /mnt/weights     # engines elsewhere: serve --ipc-dir /mnt/weights
  fastdeploy-rl snapshot --list"""
_LOOK_EVERY_S = 0.2
"""While following: between two looks at what is published."""


class _Publication(NamedTuple):
    """What a channel has, as `SnapshotWriter.write` takes it."""

    manifest: "Manifest"


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "snapshot", "write what is published to disk, where it outlives its trainer", _EXAMPLES)
    add_channel(parser)
    parser.add_argument(
        "--to",
        type=Path,
        metavar="DIR",
        help="directory that engines name with --ipc-dir; snapshots are below it (default: the channel)",
    )
    parser.add_argument("--keep", type=positive, default=3, metavar="N", help="remove older versions (default 3)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", action="store_true", help="go on with every version that comes, until interrupted")
    what.add_argument(
        "--list", action="store_true", help="show the versions that are there, and what is wrong with any"
    )
    add_deadline(parser, Deadlines.snapshot_s)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter

    writer = SnapshotWriter(options.ipc_dir, keep=options.keep, directory=options.to)
    if options.list:
        _print_list(writer.directory, as_json=options.json)
    elif options.follow:
        try:
            with writer:
                _follow(writer, options)
        except KeyboardInterrupt:
            return 0
    else:
        with writer:
            writer.channel.check()
            snapshot = _write(writer, options.deadline)
        _print_snapshot(snapshot, as_json=options.json)
    return 0


def _write(writer: "SnapshotWriter", deadline_s: float) -> "Snapshot | None":
    """What is published now, on disk. NoPublicationError where nothing is."""
    _, manifest = writer.channel.read_publication(time.monotonic_ns() + int(deadline_s * 1e9))
    with SlowProgress("writing") as progress:
        writer.write(_Publication(manifest), on_progress=progress.update)
        return writer.wait(deadline_s)


def _follow(writer: "SnapshotWriter", options: argparse.Namespace) -> None:
    from fastdeploy_rl.errors import NoPublicationError

    seen: object = None
    while True:
        # Before the trainer has come there is no channel, which is as good as an empty one.
        latest = writer.channel.read_latest() if writer.channel.path.is_dir() else None
        if latest is None or latest == seen:
            time.sleep(_LOOK_EVERY_S)
            continue
        try:
            snapshot = _write(writer, options.deadline)
            _print_snapshot(snapshot, as_json=options.json, is_one_of_many=True)
        except NoPublicationError as error:
            # Superseded, or taken back, before it could be leased; the next one comes, or has come.
            print(f"version {latest.version} is passed over: {error}", file=sys.stderr)
        seen = latest


def _print_snapshot(snapshot: "Snapshot | None", *, as_json: bool, is_one_of_many: bool = False) -> None:
    if snapshot is None:
        return
    found = _described(snapshot)
    if as_json:
        (print_line if is_one_of_many else print_json)(found)
    else:
        print(f"version {snapshot.version} is on disk: {megabytes(snapshot.num_bytes)}", flush=True)
        print_fields(**{name: found[name] for name in ("shards", "layout", "content_digest", "path")})


def _described(snapshot: "Snapshot") -> dict[str, Any]:
    manifest = snapshot.manifest
    return {
        "version": manifest.version,
        "num_bytes": snapshot.num_bytes,
        "num_tensors": len(manifest.tensors),
        "shards": len(manifest.segments),
        "layout": manifest.layout,
        "content_digest": manifest.content_digest,
        "path": str(snapshot.path),
    }


def _print_list(directory: "SnapshotDirectory", *, as_json: bool) -> None:
    found = [_examined(directory, entry) for entry in directory.entries()]
    if as_json:
        print_json([each for each in found if each is not None])
    elif not found:
        print(f"no snapshots in {directory.path}")
    else:
        for each in found:
            if each is not None:
                size = megabytes(each["num_bytes"]) if each["is_whole"] else f"broken: {each['reason']}"
                print(f"{each['version']:<12}  {size}")


def _examined(directory: "SnapshotDirectory", entry: "Entry") -> dict[str, Any] | None:
    """None for one that was removed meanwhile."""
    from fastdeploy_rl.errors import ManifestError

    try:
        snapshot = directory.read(entry)
    except ManifestError as error:
        path = str(directory.path / entry.name)
        return {"version": str(entry.version), "is_whole": False, "reason": str(error), "path": path}
    return {"is_whole": True, **_described(snapshot)} if snapshot is not None else None
