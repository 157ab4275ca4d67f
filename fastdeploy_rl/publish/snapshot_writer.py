"""SnapshotWriter: puts published versions on disk while training goes on.

Owns one background thread, and the reading of published memory into shard files. It is one more reader of the channel:
what it writes it has leased, so that the publisher's arena is the copy it writes from, and stays as it is. Refuses to
know how files become a version (publish/snapshot_directory.py) and where bytes go in them (publish/snapshot_layout.py).
Invariant: what is finished has, byte for byte, the checksums of the manifest that was published; whatever fails, the
versions that were there stay, nothing half done is left, and no lease is held.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from fastdeploy_rl import config
from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.errors import (
    ChannelBusyError,
    ChecksumMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    LifecycleError,
    SegmentError,
    VersionRegressError,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.plan.part_rows import PartRows, pieces_of
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.channel_reader import ChannelReader, LeasedSegments
from fastdeploy_rl.publish.copying import OnProgress
from fastdeploy_rl.publish.durable_files import sync_directory
from fastdeploy_rl.publish.snapshot_directory import Snapshot, SnapshotDirectory, storing_snapshot
from fastdeploy_rl.publish.snapshot_layout import Entry, Shard, lay_out, snapshot_manifest

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20
"""Copied, summed up and written at once; it stays in the caches of most machines in between."""


class Publication(Protocol):
    """A version that can be leased on the channel: what `WeightPublisher.publish` returns."""

    @property
    def manifest(self) -> Manifest: ...


class SnapshotWriter:
    """The one writer of a directory of snapshots; use it in a `with`, from one thread.

    `channel`: where the versions are published; None for the default one. `directory`: the directory that engines name
    with --ipc-dir to load from, such as one on a file system that machines share; the snapshots are in `snapshots/`
    below it. None: the channel's own. `keep`: so many versions stay, older ones go. `shard_bytes`: no file has more
    bytes of tensors, but for one larger tensor.

    It leases what it writes and what waits to be written, two versions at most. A publisher with `max_arenas=4` or more
    is never kept waiting by it; one with 3 may be for as long as one version is written."""

    def __init__(
        self,
        channel: str | Path | None = None,
        *,
        keep: int = 3,
        shard_bytes: int = 4 << 30,
        directory: str | Path | None = None,
    ) -> None:
        for name, number in (("keep", keep), ("shard_bytes", shard_bytes)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigurationError(f"{name} must be a whole number from 1 on, got {number!r:.40}")
        self.channel = Channel(config.default_channel() if channel is None else channel)
        self.directory = SnapshotDirectory(self.channel.path if directory is None else directory)
        self.latest: Snapshot | None = None
        """The newest version that is on disk, of this writer or an earlier one."""
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._lock = OwnerLock(self.directory.lock_path)
        self._changed = threading.Condition()
        self._running: _Job | None = None
        self._pending: _Job | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_given_up = False

    def start(self) -> None:
        """Takes the directory, and removes what a writer left that died. ChannelBusyError, with its pid, where another
        is alive; NoSpaceError or SegmentError where nothing can be written."""
        if self._lock.is_held:
            raise LifecycleError(f"snapshot writer of {self.directory.path} is already started")
        self.directory.open()
        with ExitStack() as undo:
            try:
                with storing_snapshot(self.directory.lock_path):
                    self._lock.acquire()
            except SegmentError as error:
                if not is_alive(self.directory.lock_path):
                    raise
                owner = owner_of(self.directory.lock_path) or "unknown"
                raise ChannelBusyError(f"{self.directory.path} has a live snapshot writer ({owner})") from error
            undo.callback(self._lock.release)
            self.directory.sweep()
            self.latest = self.directory.newest()
            self._failure, self._is_given_up = None, False
            undo.pop_all()

    def write(self, published: Publication, *, on_progress: OnProgress | None = None) -> None:
        """Leases that version and returns; a background thread writes it. One that still waits for its turn then is
        given up for this newer one, and the log says so. A version that is on disk already is not written again.

        `on_progress(done, total)`, in bytes, is called from that thread. NoPublicationError: the version was superseded
        so long ago that its memory is gone. VersionRegressError: a newer one is on disk, or other contents of the same.
        Borrowed memory is leased until it is written, so `wait_released` waits for that."""
        manifest = published.manifest
        with self._changed:
            if not self._lock.is_held:
                raise LifecycleError(f"snapshot writer of {self.directory.path} is not started: use it in a with")
            if not self._is_new(manifest):
                return
            self._pend(_Job.lease(self.channel, manifest, on_progress))

    def wait(self, deadline_s: float = config.Deadlines.snapshot_s) -> Snapshot | None:
        """Returns `latest` when all that was given is written or given up. Raises what went wrong since the last call,
        once: NoSpaceError, SegmentError, ChecksumMismatchError; DeadlineExceededError names what is still written."""
        began = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(lambda: self._running is None, config.checked_deadline(deadline_s)):
                what = f"snapshot of version {self._running.version if self._running else ''}"
                raise DeadlineExceededError.waiting_for(what, since_s=began, hint=f"in {self.directory.path}")
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure
            return self.latest

    def close(self, deadline_s: float = config.Deadlines.snapshot_s) -> None:
        """Waits as `wait` does, and gives the directory up whatever came of it; what is not written then never will be.
        A second close does nothing."""
        if not self._lock.is_held:
            return
        try:
            self.wait(deadline_s)
        finally:
            self._give_up()

    def __enter__(self) -> "SnapshotWriter":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finishes what was given; where an error ends the `with`, gives it up instead."""
        if error is None:
            self.close()
        elif self._lock.is_held:
            self._give_up()

    # --- the queue: under `_changed` ---------------------------------------------------------------

    def _is_new(self, manifest: Manifest) -> bool:
        """False for what is on disk, is written now or waits for it. VersionRegressError for what is older."""
        jobs = [job.manifest for job in (self._pending, self._running) if job is not None]
        newest = jobs[0] if jobs else self.latest.manifest if self.latest is not None else None
        if newest is None or manifest.weight_version > newest.weight_version:
            return True
        if (manifest.version, manifest.content_digest) == (newest.version, newest.content_digest):
            return False
        raise VersionRegressError(
            f"version {manifest.version} cannot be written to {self.directory.path}, which has version "
            f"{newest.version}{' of other contents' if manifest.version == newest.version else ''}: name another "
            "directory, or remove what is there"
        )

    def _pend(self, job: "_Job") -> None:
        superseded, self._pending = self._pending, job
        if superseded is not None:
            _log.warning("snapshot=%s event=given_up superseded_by=%s", superseded.version, job.version)
            superseded.end()
        if self._running is None:
            self._running, self._pending = job, None
            self._thread = threading.Thread(target=self._run, args=(job,), name="fastdeploy_rl-snapshot")
            try:
                self._thread.start()
            except BaseException:
                self._running = self._thread = None
                job.end()
                raise

    def _run(self, job: "_Job | None") -> None:
        """The background thread: until nothing is pending."""
        while job is not None:
            failure: BaseException | None = None
            try:
                with ExitStack() as stack:
                    stack.callback(job.end)
                    self._write(job)
            except _GivenUpError:
                _log.warning("snapshot=%s event=given_up reason=%s", job.version, "the writer was closed")
            except BaseException as error:  # whatever it is, `wait` raises it
                _log.error("snapshot=%s event=failed reason=%s", job.version, error)
                failure = error
            job = self._next(failure)

    def _next(self, failure: BaseException | None) -> "_Job | None":
        with self._changed:
            self._failure = self._failure or failure
            self._running, self._pending = self._pending, None
            self._changed.notify_all()
            return self._running

    def _give_up(self) -> None:
        with self._changed:
            self._is_given_up = True
            pending, self._pending = self._pending, None
            if pending is not None:
                _log.warning("snapshot=%s event=given_up reason=%s", pending.version, "the writer was closed")
                pending.end()
        if self._thread is not None:
            self._thread.join(config.Deadlines.give_up_s)
            if self._thread.is_alive():
                raise DeadlineExceededError(
                    f"{self.directory.path} still writes version {self._running.version if self._running else ''} "
                    f"{config.Deadlines.give_up_s:g} s after it was told to give up; its lock stays until it does"
                )
        self._thread = None
        self._lock.release()

    # --- one version: in the background thread -----------------------------------------------------

    def _write(self, job: "_Job") -> None:
        began = time.monotonic()
        shards = lay_out(job.manifest, self._shard_bytes)
        manifest = snapshot_manifest(job.manifest, shards)
        temporary = self.directory.begin()
        try:
            _write_shards(temporary, shards, job, self._check_wanted)
            snapshot = self.directory.finish(temporary, manifest)
        except BaseException:
            self.directory.discard(temporary)
            raise
        self.latest = snapshot
        _log.info(
            "snapshot=%s directory=%s shards=%d bytes=%d seconds=%.3f",
            *(job.version, snapshot.path, len(shards), snapshot.num_bytes, time.monotonic() - began),
        )
        self.directory.prune(self._keep)

    def _check_wanted(self) -> None:
        if self._is_given_up:
            raise _GivenUpError


class _GivenUpError(Exception):
    """The writer is being closed."""


class _Job(NamedTuple):
    """A version to write, leased by a reader of its own."""

    manifest: Manifest
    reader: ChannelReader
    leased: LeasedSegments
    on_progress: OnProgress | None

    @classmethod
    def lease(cls, channel: Channel, manifest: Manifest, on_progress: OnProgress | None) -> "_Job":
        with ExitStack() as undo:
            reader = ChannelReader.open(channel)
            undo.callback(reader.close)
            job = cls(manifest, reader, reader.lease(manifest), on_progress)
            undo.pop_all()
        return job

    @property
    def version(self) -> str:
        return self.manifest.version

    def end(self) -> None:
        """Gives the lease back."""
        self.leased.release()
        self.reader.close()


# --- the bytes -------------------------------------------------------------------------------------


def _write_shards(directory: Path, shards: Sequence[Shard], job: _Job, check_wanted: Callable[[], None]) -> None:
    """Every shard, on the disk, and only bytes that are what the manifest says: ChecksumMismatchError otherwise."""
    stream = _Stream(job, check_wanted)
    for shard in shards:
        with _new_file(directory / shard.file) as file:
            file.write(shard.header)
            stream.write(file, shard.entries)
    stream.check_sums()
    with storing_snapshot(directory):
        sync_directory(directory)


class _Stream:
    """Published bytes on their way to the disk. They are copied out and summed up in one pass, and what is written is
    that copy: the sums are those of the very bytes in the file."""

    def __init__(self, job: _Job, check_wanted: Callable[[], None]) -> None:
        self._job = job
        self._total = sum(tensor.num_bytes for tensor in job.manifest.tensors)
        self._done = 0
        self._check_wanted = check_wanted
        self._chunk = Mapping.private(_CHUNK_BYTES)
        self._sums = {tensor.name: ZERO for tensor in job.manifest.tensors}

    def write(self, file: "_NewFile", entries: Sequence[Entry]) -> None:
        """All bytes of the entries, one after the other."""
        batch: list[tuple[Entry, PartRows]] = []
        filled = 0
        for entry in entries:
            for rows in pieces_of(entry.tensor, entry.source, _CHUNK_BYTES):
                if filled + rows.num_bytes > _CHUNK_BYTES:
                    self._flush(file, batch, filled)
                    batch, filled = [], 0
                batch.append((entry, rows))
                filled += rows.num_bytes
        self._flush(file, batch, filled)

    def _flush(self, file: "_NewFile", batch: Sequence[tuple[Entry, PartRows]], num_bytes: int) -> None:
        self._check_wanted()
        for (entry, _), sums in zip(batch, self._copy(batch), strict=True):
            self._sums[entry.tensor.name] = add(self._sums[entry.tensor.name], sums)
        with memoryview(self._chunk) as view:
            file.write(view[:num_bytes])
        self._done += num_bytes
        if self._job.on_progress is not None:
            self._job.on_progress(self._done, self._total)

    def _copy(self, batch: Sequence[tuple[Entry, PartRows]]) -> list[Fletcher4]:
        regions, at = [], 0
        for entry, rows in batch:
            regions.append(self._region(entry, rows, at))
            at += rows.num_bytes
        try:
            # One thread: a disk is no faster than that, and the trainer has use for the others.
            return [Fletcher4(*(read or ZERO)) for read, _ in transfer(regions, 1)]
        finally:
            regions.clear()  # a failure's frames must not keep views of published memory alive

    def _region(self, entry: Entry, rows: PartRows, at: int) -> Region:
        return Region(
            source=self._job.leased.segments[entry.source.segment],
            source_offset=rows.source_offset,
            source_stride=rows.row_bytes,
            rows=rows.rows,
            row_bytes=rows.row_bytes,
            target=self._chunk,
            target_offset=at,
            target_stride=rows.row_bytes,
            read_place=Place(rows.place_offset, rows.place_stride, entry.tensor.num_bytes),
        )

    def check_sums(self) -> None:
        wrong = [t.name for t in self._job.manifest.tensors if self._sums[t.name].hex() != t.checksum]
        if wrong:
            raise ChecksumMismatchError(
                f"{len(wrong)} tensors of version {self._job.version} are not what was published, first {wrong[0]!r}: "
                "no snapshot of it is kept; publish again"
            )


class _NewFile(NamedTuple):
    """A file that is being written: what the system says against that names it, and nothing else does, as the error of
    an `on_progress`."""

    path: Path
    descriptor: int

    def write(self, data: "bytes | memoryview") -> None:
        left = memoryview(data)
        with storing_snapshot(self.path):
            while left:
                left = left[os.write(self.descriptor, left) :]


@contextmanager
def _new_file(path: Path) -> Iterator[_NewFile]:
    """What was written to it is on the disk in the end."""
    with storing_snapshot(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _NewFile(path, descriptor)
        with storing_snapshot(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
