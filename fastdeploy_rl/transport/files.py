"""Transport out of plain files that nobody promised to leave alone: read into local memory, never mapped.

A file that its writer cuts or rewrites while it is mapped would end this process, or change live weights; one that is
read gives an error, or bytes whose checksums are wrong. Owns the identity of files and the threads that read them.
Refuses to know formats and who made the manifest. Invariant: bytes are given only from files that are, before and
after they were read, the ones that the manifest was made from.
"""

import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, NoPublicationError
from fastdeploy_rl.memory.regular_file import open_regular
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Fetch, Offer
from fastdeploy_rl.transport.buckets import Piece, part
from fastdeploy_rl.version import WeightVersion

_CHUNK_BYTES = 8 << 20
"""One thread's next piece of work: small against a tensor, large against a system call."""
_MAX_GAP_BYTES = 16 << 10
"""Between rows: reading more than that for nothing takes longer than another system call."""
_MAX_REMEMBERED = 4
"""Offers: a version is resolved shortly before it is staged."""


class FileIdentity(NamedTuple):
    """A file and what would change with its contents. `name`: in the directory of its publication."""

    name: str
    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class ClosableFetch(Fetch, Protocol):
    """A fetch that tells whether it has ended."""

    @property
    def is_closed(self) -> bool: ...


OpenFetch = Callable[[Sequence[ByteRange], Mapping, int], ClosableFetch]
"""Begins to bring ranges into a target, until a deadline: as `Transport.fetch`, of one version."""


class OfferedFiles(NamedTuple):
    """A version in `files` of a directory; segment number i of its manifest is file number i. `open_fetch`: where the
    files only say where the bytes lie, and its segments are others."""

    offer: Offer
    directory: Path
    files: tuple[FileIdentity, ...]
    open_fetch: OpenFetch | None = None


def identity_of(path: Path) -> FileIdentity:
    """Of the file that the path leads to. FileNotFoundError where there is none; NoPublicationError for what is no
    regular file."""
    return _identity(path, os.stat(path))


def _identity(path: Path, status: os.stat_result) -> FileIdentity:
    if not stat.S_ISREG(status.st_mode):
        raise NoPublicationError(f"{path} is no regular file")
    numbers = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return FileIdentity(path.name, *numbers)


class FileTransport:
    """`find`: the version that is to be had, or is asked for, and its files; as `Transport.offer`, from any thread."""

    def __init__(self, find: Callable[[WeightVersion | None, int], OfferedFiles], num_threads: int = 1) -> None:
        self._find = find
        self._num_threads = num_threads
        self._offered: dict[str, OfferedFiles] = {}
        self._lock = threading.Lock()
        self._fetches: list[ClosableFetch] = []

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError("no time left to look for files")
        found = self._find(version, deadline_ns)
        digest = found.offer.file_digest
        with self._lock:
            self._offered.pop(digest, None)
            self._offered[digest] = found
            if len(self._offered) > _MAX_REMEMBERED:
                del self._offered[next(iter(self._offered))]
        return found.offer

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> ClosableFetch:
        with self._lock:
            known = self._offered.get(offer.file_digest)
        if known is None:
            raise NoPublicationError(f"version {offer.version} is not to be had any more; update again")
        fetch = (
            FileFetch(known.directory, known.files, ranges, target, self._num_threads, deadline_ns)
            if known.open_fetch is None
            else known.open_fetch(ranges, target, deadline_ns)
        )
        self._fetches = [*(each for each in self._fetches if not each.is_closed), fetch]
        return fetch

    def trim(self) -> None:
        """Nothing is open between fetches."""

    def close(self) -> None:
        for fetch in self._fetches:
            fetch.close()
        self._fetches, self._offered = [], {}


class FileFetch:
    """Ranges on their way out of files. The threads end with `close`, which waits for the pieces that are being read:
    nothing can interrupt a disk, and they are read into `target`."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[FileIdentity],
        ranges: Sequence[ByteRange],
        target: Mapping,
        num_threads: int,
        deadline_ns: int,
    ) -> None:
        """Opens the files that are read. NoPublicationError where one is gone, or is another one by now;
        DeadlineExceededError where no time is left; ValueError for a range outside the files."""
        _check_ranges(ranges, files)
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to read files in {directory}")
        self.num_bytes = 0
        self._directory = directory
        self._files = files
        self._ranges = ranges
        self._deadline_ns = deadline_ns
        self._done: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._opened: dict[int, int] = {}
        self._target = memoryview(target)
        try:
            for segment in sorted({each.segment for each in ranges}):
                self._opened[segment] = self._open(segment)
        except BaseException:
            self._target.release()
            self._close_files()
            raise
        self._pool = ThreadPoolExecutor(num_threads, "fastdeploy_rl_read")
        self._missing = dict.fromkeys(range(len(ranges)), 0)
        chunks = [chunk for index, each in enumerate(ranges) for chunk in chunks_of(index, each)]
        for chunk in chunks:
            self._missing[chunk.range_index] += 1
        for chunk in chunks:
            self._pool.submit(self._read, chunk).add_done_callback(self._tell)

    def _open(self, segment: int) -> int:
        path = self._directory / self._files[segment].name
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise NoPublicationError(f"{path}: {error.strerror}, it was there before; update again") from error
        try:
            if _identity(path, os.fstat(descriptor)) != self._files[segment]:
                raise NoPublicationError(f"{path} was changed or replaced since it was looked at; update again")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_unwritten(self, segment: int, descriptor: int) -> None:
        """One that was removed or replaced meanwhile is whole for whoever has it open."""
        expected, status = self._files[segment], os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (expected.num_bytes, expected.mtime_ns):
            raise NoPublicationError(f"{self._directory / expected.name} was changed while it was read; update again")

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def arrivals(self) -> Iterator[Sequence[int]]:
        """As `Fetch.arrivals`."""
        begun = time.monotonic()
        complete = [index for index, missing in self._missing.items() if not missing]
        left = len(self._ranges) - len(complete)
        if complete and left:
            yield complete
            complete = []
        while left:
            if self.is_closed:
                raise LifecycleError(f"the fetch of files in {self._directory} was closed")
            found = [self._next(begun), *self._at_hand()]
            complete = [index for index in found if self._is_complete(index)]
            left -= len(complete)
            if left and complete:
                yield complete
        for segment, descriptor in self._opened.items():
            self._check_unwritten(segment, descriptor)
        if complete:
            yield complete

    def _next(self, begun: float) -> int:
        left_ns = self._deadline_ns - time.monotonic_ns()
        try:
            found = self._done.get(timeout=left_ns / 1e9) if left_ns > 0 else None
        except queue.Empty:
            found = None
        if found is None:
            raise DeadlineExceededError.waiting_for(f"bytes of files in {self._directory}", since_s=begun)
        if isinstance(found, BaseException):
            raise found
        return found

    def _at_hand(self) -> Iterator[int]:
        while True:
            try:
                found = self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(found, BaseException):
                raise found
            yield found

    def _is_complete(self, index: int) -> bool:
        """Takes one chunk of the range as read."""
        self._missing[index] -= 1
        self.num_bytes = self.num_bytes + (0 if self._missing[index] else self._ranges[index].num_bytes)
        return not self._missing[index]

    def _read(self, chunk: Piece) -> int:
        """The index of its range."""
        index, wanted = chunk
        if not self._is_closed.is_set():
            try:
                self._read_close_rows(wanted) if has_close_rows(wanted) else self._read_rows(wanted)
            except OSError as error:
                path = self._directory / self._files[wanted.segment].name
                raise NoPublicationError(f"{path} cannot be read: {error.strerror}") from error
        return index

    def _tell(self, future: "Future[int]") -> None:
        """Whatever happened to a chunk; one that was never begun interests nobody."""
        if not future.cancelled():
            self._done.put(future.exception() or future.result())

    def _read_rows(self, wanted: ByteRange) -> None:
        for row in range(wanted.rows):
            start = wanted.target_offset + row * wanted.row_bytes
            with self._target[start : start + wanted.row_bytes] as window:
                self._fill(window, wanted.segment, wanted.offset + row * wanted.stride)

    def _read_close_rows(self, wanted: ByteRange) -> None:
        """With what lies between them, which is left behind."""
        span = np.empty(wanted.stop - wanted.offset, np.uint8)
        self._fill(span.data, wanted.segment, wanted.offset)
        target: NDArray[np.uint8] = np.frombuffer(self._target, np.uint8, wanted.num_bytes, wanted.target_offset)
        rows = as_strided(span, (wanted.rows, wanted.row_bytes), (wanted.stride, 1))
        target.reshape(rows.shape)[...] = rows

    def _fill(self, window: memoryview, segment: int, offset: int) -> None:
        done = 0
        while done < len(window):
            with window[done:] as rest:
                num_bytes = os.preadv(self._opened[segment], [rest], offset + done)
            if not num_bytes:
                path = self._directory / self._files[segment].name
                raise NoPublicationError(
                    f"{path} was cut while it was read: it ends at byte {offset + done}; update again"
                )
            done += num_bytes

    def close(self) -> None:
        self._is_closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._target.release()
        self._close_files()

    def _close_files(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])


def _check_ranges(ranges: Sequence[ByteRange], files: Sequence[FileIdentity]) -> None:
    for each in ranges:
        if not 0 <= each.segment < len(files) or min(each) < 0 or each.stop > files[each.segment].num_bytes:
            raise ValueError(f"{each} is outside of the {len(files)} segments")


def has_close_rows(wanted: ByteRange) -> bool:
    """Whether what lies between the rows is so little that it is read along with them."""
    return wanted.rows > 1 and wanted.row_bytes <= wanted.stride <= wanted.row_bytes + _MAX_GAP_BYTES


def chunks_of(index: int, whole: ByteRange) -> Iterator[Piece]:
    """What one thread reads in one go: as many rows as are worth its while, with what lies between them, or pieces of
    longer ones."""
    wanted = whole.joined()
    rows = _CHUNK_BYTES // max(wanted.row_bytes, wanted.stride, 1)
    step = rows * wanted.row_bytes or _CHUNK_BYTES
    for start in range(0, wanted.num_bytes, step):
        for each in part(wanted, start, min(start + step, wanted.num_bytes)):
            yield Piece(index, each)
