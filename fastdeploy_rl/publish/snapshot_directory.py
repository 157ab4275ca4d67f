"""The files of `{channel}/snapshots/`: versions of the weights that outlive their trainer and its memory.

    LOCK                                    flock of the one live writer
    LATEST                                  JSON as the channel's: what a writer finished last, `file` in its directory
    {version}-{digest16}/                   one version, whole; `digest16` begins the sha256 of its manifest's bytes
        manifest-{version}-{digest16}.json
        model-00001-of-0000N.safetensors    the manifest's segments
    .tmp-{hex}/                             one that is being written, or was when its writer died
    .old-{hex}/                             one that is being removed

Owns names, order and atomicity. Refuses to know tensors and how they get into the shards. Invariant: a version appears
by one rename, with every byte on the disk, and goes by one rename; nothing in a directory of that name ever changes.

The law of what counts: the newest directory that is whole, which is to say that the bytes of its manifest have the
digest of its name, and that each shard is there with the manifest's size. Whether the bytes of the shards are right,
only who reads them can tell. `LATEST` is for people and for programs that do not want to list: no reader here
depends on it, since a writer that died just before it wrote `LATEST` had finished its version all the same, and since
it knows nothing of a shard that was lost later. No time stamps are looked at. Works on a file system that several
machines share, where flock reaches across them: one writer, many readers.
"""

import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import ConfigurationError, ManifestError, VersionFormatError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.durable_files import storing, sync_directory
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_MAX_ENTRIES = 10_000
"""Whoever lists the directory looks at no more than these; a writer keeps a few."""
_VERSION_NAME = re.compile(r"([0-9]{1,19}\.[0-9]{1,19})-[0-9a-f]{16}", re.ASCII)
_LEFTOVER = re.compile(r"\.(?:tmp|old)-[0-9a-f]{12}", re.ASCII)


class Entry(NamedTuple):
    """A directory that is named as a version's; whether it is whole, `read` says."""

    version: WeightVersion
    name: str


@dataclass(frozen=True)
class Snapshot:
    """One whole version on disk. `manifest`: as the publication's, but that its segments are the files in `path`."""

    version: WeightVersion
    manifest: Manifest = field(repr=False)
    path: Path

    @property
    def num_bytes(self) -> int:
        """Of all its shards."""
        return sum(segment.num_bytes for segment in self.manifest.segments)


class SnapshotDirectory:
    """See the module. Nothing is opened or made before `open()`."""

    def __init__(self, channel: str | Path) -> None:
        self.path = Path(channel) / "snapshots"
        self._files = Channel(self.path)
        # The same few files are read again and again; their bytes are compared each time.
        self._decode = lru_cache(maxsize=4)(manifests.decode)

    @property
    def lock_path(self) -> Path:
        return self.path / "LOCK"

    def open(self) -> None:
        """Makes the directory (0700), or checks that it is ours and closed to others (ConfigurationError)."""
        open_private_directory(self.path)

    # --- reading -----------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """The versions that are named here, the newest first; none where there is no such directory.
        ConfigurationError where others could have put them there, or where there is more than anybody looks through."""
        try:
            check_private_directory(self.path)
            found = [entry for name in self._names() if (entry := _entry(name))]
        except FileNotFoundError:
            return []
        return sorted(found, reverse=True)

    def read(self, entry: Entry) -> Snapshot | None:
        """A version that is whole; None when it was removed since it was listed. ManifestError says what is wrong with
        one that is not whole."""
        path = self.path / entry.name
        try:
            manifest = self._read_manifest(entry)
            for segment in manifest.segments:
                _check_shard(path / segment.locator, segment)
        except ManifestError:
            if not os.path.lexists(path):
                return None
            raise
        return Snapshot(entry.version, manifest, path)

    def newest(self) -> Snapshot | None:
        """The newest that is whole."""
        return next(self._whole(), None)

    def _whole(self) -> Iterator[Snapshot]:
        for entry in self.entries():
            try:
                snapshot = self.read(entry)
            except ManifestError as error:
                _log.warning("snapshot=%s event=not_whole reason=%s", entry.version, error)
                continue
            if snapshot is not None:
                yield snapshot

    def _read_manifest(self, entry: Entry) -> Manifest:
        directory, file = Channel(self.path / entry.name), f"manifest-{entry.name}.json"
        try:
            data = directory.read(file, manifests.MAX_BYTES)
        except FileNotFoundError as error:
            raise ManifestError(f"{directory.path / file} is missing") from error
        digest = manifests.file_digest(data)
        if not entry.name.endswith(f"-{digest[:16]}"):
            raise ManifestError(f"{directory.path / file} is not what was written: its sha256 is {digest}")
        manifest = self._decode(data)
        if manifest.weight_version != entry.version:
            raise ManifestError(f"{directory.path / file} is version {manifest.version}, but its name says another")
        return manifest

    def _names(self) -> list[str]:
        with os.scandir(self.path) as entries:
            found = list(islice(entries, _MAX_ENTRIES + 1))
        if len(found) > _MAX_ENTRIES:
            raise ConfigurationError(
                f"{self.path} has more than {_MAX_ENTRIES} entries: which version is the newest is not looked for; "
                "remove what no snapshot writer made"
            )
        return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]

    # --- writing: under the lock -------------------------------------------------------------------

    def begin(self) -> Path:
        """An empty directory for the shards of a version; ends as `finish` or `discard` say."""
        path = self.path / f".tmp-{secrets.token_hex(6)}"
        with storing_snapshot(path):
            path.mkdir(mode=0o700)
        return path

    def finish(self, temporary: Path, manifest: Manifest) -> Snapshot:
        """Makes shards that are on the disk already a version, the latest. An error before the rename leaves what was
        there; one after it leaves the version, whole, and `LATEST` as it was."""
        latest = Channel(temporary).write_manifest(manifest)
        name = f"{manifest.version}-{latest.file_digest[:16]}"
        version, path = manifest.weight_version, self.path / name
        with storing_snapshot(path):
            # Of this version there can only be one that is not whole: a writer refuses to write a whole one again.
            self._remove(entry.name for entry in self.entries() if entry.version == version)
            os.rename(temporary, path)
            sync_directory(self.path)
        self._files.write_latest(Latest(manifest.version, f"{name}/{latest.file}", latest.file_digest))
        return Snapshot(version, manifest, path)

    def discard(self, temporary: Path) -> None:
        """Removes one that was begun and will not be finished."""
        shutil.rmtree(temporary, ignore_errors=True)

    def prune(self, keep: int) -> None:
        """Removes all versions older than the newest `keep` that are whole, and what earlier prunings could not remove.
        Whoever has files of theirs open or mapped keeps them."""
        kept = list(islice(self._whole(), keep))
        if len(kept) == keep:
            self._remove(entry.name for entry in self.entries() if entry.version < kept[-1].version)
        self.sweep()

    def sweep(self) -> None:
        """Removes what writers left that died in the middle."""
        for name in [name for name in self._names() if _LEFTOVER.fullmatch(name)]:
            self._delete(self.path / name)
        self._files.remove_superseded(())  # of the files of a channel, a half written LATEST may be here

    def _remove(self, names: Iterator[str]) -> None:
        """Out of sight at once; then away, as far as that is possible now."""
        for name in list(names):
            aside = self.path / f".old-{secrets.token_hex(6)}"
            with storing_snapshot(aside):
                os.rename(self.path / name, aside)
            self._delete(aside)

    def _delete(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except OSError as error:  # NFS keeps the names of files that are open here: the next sweep takes them
            _log.warning("directory=%s event=not_removed_yet reason=%s", path, error)


def _entry(name: str) -> Entry | None:
    match = _VERSION_NAME.fullmatch(name)
    try:
        return Entry(WeightVersion.parse(match[1]), name) if match else None
    except VersionFormatError:
        return None  # leading zeros, or numbers beyond all versions: no writer's


def _check_shard(path: Path, segment: manifests.Segment) -> None:
    if segment.kind != "file":
        raise ManifestError(f"{path} is memory of a publication ({segment.kind}), no file of a snapshot")
    try:
        status = os.lstat(path)
    except FileNotFoundError as error:
        raise ManifestError(f"{path} is missing") from error
    except OSError as error:
        raise ManifestError(f"{path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{path} is no regular file")
    if status.st_size != segment.num_bytes:
        raise ManifestError(f"{path} has {status.st_size} bytes, its manifest says {segment.num_bytes}")


def storing_snapshot(path: Path) -> AbstractContextManager[None]:
    """What the system says inside becomes NoSpaceError or SegmentError, naming `path`."""
    return storing(path, "make room, or keep fewer snapshots (keep=N)")
