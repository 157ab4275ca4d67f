"""Load strategy `ipc_snapshot`: versions on disk, mapped read-only; no trainer is needed.

Owns which snapshot is meant, and the mappings of its shards. Copies nothing and checks no bytes (whoever reads them
does, against the manifest). Invariant: what is staged are files whose sizes were those of the manifest when they were
opened, held open by their mappings: they outlast their removal by a writer that keeps only the newest.

Nobody changes a snapshot once it is there. Who cuts a file that is mapped, or takes away a network file system under
it, kills whoever reads the missing bytes (SIGBUS): with apply mode `alias` that is an engine that serves. Hence `auto`
copies: then files are read while an update is staged, and not after, and what cannot be read is an error (`bring_in`)
but for a moment. On NFS, files that another machine removed are
gone for those who have them mapped, too: there, `keep` as many versions as engines may lag behind.

Where there are no snapshots, files in other formats are looked for (`foreign_files`).
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    ManifestError,
    NoPublicationError,
    SegmentError,
)
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.regular_file import open_regular
from fastdeploy_rl.memory.tensor_view import check_unused
from fastdeploy_rl.plan.plan import Plan, PlannedParameter, RegionKind
from fastdeploy_rl.publish.snapshot_directory import Entry, Snapshot, SnapshotDirectory
from fastdeploy_rl.sources import foreign_files
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig, StagedSource
from fastdeploy_rl.sources.version_file import wanted_version
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_MAX_KNOWN = 16
"""Versions that were resolved and may still be staged; an update stages what it has just resolved."""


class SnapshotSource:
    """One engine process as a reader of `{channel}/snapshots`. Opens nothing before it is used."""

    def __init__(self, config: SourceConfig) -> None:
        self._directory = SnapshotDirectory(config.channel)
        self._model_dir = config.model_dir
        self._foreign = foreign_files.create(config)
        self._lock = threading.Lock()
        self._known: dict[object, Snapshot] = {}
        self._warned: set[str] = set()
        self._discredited: set[str] = set()
        self._staged: list[SnapshotStaged] = []

    # --- which version -----------------------------------------------------------------------------

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """The newest snapshot that is whole and not discredited, up to the version that `version.yaml` or `version.txt`
        of the model directory names, where one does; what is not whole on the way there is named in the log. By name,
        that version: NoPublicationError says what is wrong with it, and names the newest that is there. Where there
        are no snapshots, whole or not, what `foreign_files` finds."""
        with self._lock:
            found = self._newest(deadline_ns) if version is None else self._named(version)
            if found is not None:
                self._remember(found)
                return ResolvedPublication(found.version, found.manifest)
            if entries := self._directory.entries():
                raise NoPublicationError(self._missing_text(version, len(entries)))
        return self._foreign.resolve(version, deadline_ns=deadline_ns)

    def current_epoch(self, *, deadline_ns: int) -> int:
        """That of the newest snapshot, whole or not."""
        entries = self._directory.entries()
        return entries[0].version.epoch if entries else self.resolve(None, deadline_ns=deadline_ns).version.epoch

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        """The newest snapshot, whole or not. Of other files nobody knows it before they are read."""
        entries = self._directory.entries()
        return entries[0].version if entries else None

    def discredit(self, resolved: ResolvedPublication) -> None:
        with self._lock:
            snapshot = self._known.get(_key(resolved.manifest))
            if snapshot is not None:
                self._discredited.add(snapshot.path.name)
                _log.warning("snapshot=%s event=discredited path=%s", snapshot.version, snapshot.path)
                return
        self._foreign.discredit(resolved)

    def _newest(self, deadline_ns: int) -> Snapshot | None:
        """Looks again where versions went while it looked: newer ones have come then."""
        while True:
            entries = self._directory.entries()
            gone = False
            for entry in self._candidates(entries):
                try:
                    snapshot = self._directory.read(entry)
                except ManifestError as error:
                    self._warn(entry, error)
                    continue
                if snapshot is not None:
                    return snapshot
                gone = True
            if not gone:
                return None
            if time.monotonic_ns() >= deadline_ns:
                raise DeadlineExceededError(
                    f"snapshots in {self._directory.path} go faster than they can be read; let their writer keep more"
                )

    def _candidates(self, entries: Sequence[Entry]) -> list[Entry]:
        wanted = wanted_version(self._model_dir) if entries else None
        limit = wanted.in_epoch(entries[0].version.epoch) if wanted is not None else None
        return [
            entry
            for entry in entries
            if entry.name not in self._discredited and (limit is None or entry.version <= limit)
        ]

    def _named(self, version: WeightVersion) -> Snapshot | None:
        for entry in self._directory.entries():
            if entry.version == version:
                try:
                    return self._directory.read(entry)
                except ManifestError as error:
                    raise NoPublicationError(
                        f"version {version} is not to be had: {error}; {self._directory.path} has {self._newest_text()}"
                    ) from error
        return None

    def _warn(self, entry: Entry, error: ManifestError) -> None:
        if entry.name not in self._warned:
            self._warned.add(entry.name)
            _log.warning("snapshot=%s event=not_whole reason=%s", entry.version, error)

    def _newest_text(self) -> str:
        for entry in self._directory.entries():
            if entry.name not in self._discredited:
                with suppress(ManifestError):
                    if self._directory.read(entry) is not None:
                        return str(entry.version)
        return "no version that is whole"

    def _missing_text(self, version: WeightVersion | None, num_entries: int) -> str:
        path = self._directory.path
        if version is not None:
            return f"version {version} is not to be had: {path} has {self._newest_text()}"
        wanted = wanted_version(self._model_dir)
        limit = f" up to version {wanted.text}, which {wanted.path} asks for," if wanted is not None else ""
        return (
            f"none of the {num_entries} snapshots in {path}{limit} is whole and has the bytes that it should have; "
            "write another (fastdeploy-rl snapshot)"
        )

    def _remember(self, snapshot: Snapshot) -> None:
        self._known.pop(_key(snapshot.manifest), None)
        self._known[_key(snapshot.manifest)] = snapshot
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    # --- its bytes ---------------------------------------------------------------------------------

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        """Maps the shards that the plan reads; the others have an empty page in their place. All or, on an error,
        none."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to stage version {resolved.version}")
        with self._lock:
            snapshot = self._known.get(_key(resolved.manifest))
        if snapshot is None:
            return self._foreign.stage(resolved, plan, deadline_ns=deadline_ns)
        staged = SnapshotStaged(plan, _map_shards(snapshot, _touched(plan)))
        self._staged = [earlier for earlier in self._staged if not earlier.is_released] + [staged]
        return staged

    def trim(self) -> None:
        """Of mapped files nothing is kept: another version has others."""
        self._foreign.trim()

    def close(self) -> None:
        """Releases what is staged. SegmentError while parameters still lie in mapped files; unbind and close again."""
        for staged in self._staged:
            staged.release()
        self._staged = []
        self._foreign.close()


class SnapshotStaged:
    """A version that lies in mapped files: immutable, since nobody writes to a snapshot that is there."""

    is_immutable = True
    is_copied_unless_asked = True

    def __init__(self, plan: Plan, segments: tuple[Mapping, ...]) -> None:
        self.plan = plan
        self.segments = segments

    @property
    def is_released(self) -> bool:
        return all(mapping.is_closed for mapping in self.segments)

    def arrivals(self, *, deadline_ns: int) -> Iterator[Sequence[PlannedParameter]]:
        yield self.plan.everything

    def bring_in(self, planned: Sequence[PlannedParameter]) -> None:
        """A file that was cut, or that its disk does not read, is an error here; whoever just reads it is ended by
        SIGBUS."""
        for region in (region for parameter in planned for region in parameter.regions if region.rows):
            if region.kind is RegionKind.ZERO:
                continue
            num_bytes = (region.rows - 1) * region.source_stride + region.row_bytes
            try:
                self.segments[region.segment].bring_in(region.source_offset, num_bytes)
            except OSError as error:
                raise ChecksumMismatchError(
                    f"bytes of tensor {region.tensor!r} in shard {region.segment} of a snapshot cannot be read: "
                    f"{error.strerror}; the file was cut, or its disk is at fault: take another version"
                ) from error

    def is_vouched(self) -> bool:
        """The mapping itself keeps the file."""
        return True

    def release(self) -> None:
        for number, mapping in enumerate(self.segments):
            check_unused(mapping, f"shard {number} of a snapshot")
        for mapping in self.segments:
            mapping.close()


def _key(manifest: Manifest) -> object:
    return manifest.version, manifest.content_digest, manifest.segments


def _touched(plan: Plan) -> frozenset[int]:
    """The shards that the plan reads, or in which a parameter may lie."""
    read = {r.segment for p in plan.everything for r in p.regions if r.kind is not RegionKind.ZERO}
    return frozenset(read | {p.alias.segment for p in plan.parameters if p.alias is not None})


def _map_shards(snapshot: Snapshot, touched: frozenset[int]) -> tuple[Mapping, ...]:
    with ExitStack() as undo:
        mappings = []
        for number, segment in enumerate(snapshot.manifest.segments):
            mappings.append(_map_file(snapshot.path, segment) if number in touched else _nothing())
            undo.callback(mappings[-1].close)
        undo.pop_all()
    return tuple(mappings)


def _map_file(directory: Path, segment: Segment) -> Mapping:
    """Its size is looked at where it is opened, so that no other file can be meant."""
    path = directory / segment.locator
    try:
        descriptor = open_regular(path, follows_links=False)
    except FileNotFoundError as error:
        raise NoPublicationError(f"{path} was removed since it was found; update again") from error
    except OSError as error:
        raise NoPublicationError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        file_bytes = os.fstat(descriptor).st_size
        if file_bytes != segment.num_bytes:
            raise ManifestError(f"{path} has {file_bytes} bytes, its manifest says {segment.num_bytes}")
        return Mapping.map_fd(descriptor, segment.num_bytes, False)
    except OSError as error:
        raise SegmentError(f"{path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _nothing() -> Mapping:
    """A byte that nobody reads, mapped as read-only as the shards are."""
    descriptor = os.memfd_create("fastdeploy_rl-untouched", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 1)
        return Mapping.map_fd(descriptor, 1, False)
    finally:
        os.close(descriptor)
