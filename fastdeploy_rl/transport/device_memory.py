"""Transport out of another process's CUDA memory: ranges are copied into local memory, and nothing is kept open.

Owns the handles that are open during one fetch, each once however many tensors lie behind it. Refuses to know who
exported them and which version it was. Invariant: after `close` no memory of anybody is open here, and no context of a
device is held; what arrived is a copy, which no writer changes.

A handle is bytes of FastDeploy's metadata and not one of `memory.cuda_record`'s: nobody promises that the memory behind
it stays as it is while it is read. Whoever takes the bytes sums them up. Tested on testing.fake_cuda; not run on a GPU.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import CudaError, CudaUnavailableError, DeadlineExceededError, LifecycleError
from fastdeploy_rl.memory.cuda_record import driver_errors, open_device
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.buckets import Piece
from fastdeploy_rl.transport.files import chunks_of, has_close_rows

_ADVICE = "fastdeploy-rl doctor --ipc says what keeps this process from the trainer's device memory"


class DeviceAllocation(NamedTuple):
    """An allocation of another process, as far as it is read: `num_bytes` from its base on. `device`: an index or
    identifier, in this process; `holder`: who is to have exported it, for messages."""

    device: str
    holder: str
    handle: bytes
    num_bytes: int


class DeviceRun(NamedTuple):
    """`num_bytes` at `start` of a segment, which lie at `offset` of an allocation."""

    start: int
    num_bytes: int
    allocation: DeviceAllocation
    offset: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


class DeviceSegment(NamedTuple):
    """Device memory as one run of bytes, in order. `nearer`: where some of them lie too, and are read in place of the
    others; in order."""

    runs: tuple[DeviceRun, ...]
    nearer: tuple[DeviceRun, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.runs[-1].stop if self.runs else 0

    def run_at(self, place: int) -> DeviceRun | None:
        """Which has this byte."""
        return _run_at(self.nearer, place) or _run_at(self.runs, place)


def _run_at(runs: Sequence[DeviceRun], place: int) -> DeviceRun | None:
    number = bisect_right(runs, place, key=lambda run: run.start) - 1
    return runs[number] if number >= 0 and place < runs[number].stop else None


class DeviceReader:
    """Some segments, as long as they are read. Opens a device, and a handle, when the first byte of it is asked for,
    and keeps them until `close`. `check` raises where the handles are no longer those that are meant; it is asked
    before the first and after the last byte of each fetch."""

    def __init__(self, segments: Sequence[DeviceSegment], check: Callable[[], None]) -> None:
        self._segments = tuple(segments)
        self._check = check
        self._opened = _OpenedMemory()

    def open_fetch(self, ranges: Sequence[ByteRange], target: Mapping, deadline_ns: int) -> "DeviceFetch":
        """DeadlineExceededError where no time is left; ValueError for a range outside the segments."""
        return DeviceFetch(self._segments, ranges, target, deadline_ns, self._check, self._opened)

    def open_only_fetch(self, ranges: Sequence[ByteRange], target: Mapping, deadline_ns: int) -> "DeviceFetch":
        """As `open_fetch`; closing the fetch closes the reader too."""
        return DeviceFetch(self._segments, ranges, target, deadline_ns, self._check, self._opened, self.close)

    def close(self) -> None:
        self._opened.close()


def _nothing() -> None:
    """What a fetch ends beside itself."""


class DeviceFetch:
    """Ranges on their way out of device memory, read by whoever asks for `arrivals`."""

    def __init__(
        self,
        segments: Sequence[DeviceSegment],
        ranges: Sequence[ByteRange],
        target: Mapping,
        deadline_ns: int,
        check: Callable[[], None],
        opened: "_OpenedMemory",
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        """Made by a `DeviceReader`."""
        _check_ranges(ranges, segments)
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError("no time left to read device memory")
        check()
        self.num_bytes = 0
        self.is_closed = False
        self._segments = segments
        self._ranges = ranges
        self._deadline_ns = deadline_ns
        self._check = check
        self._target = memoryview(target)
        self._opened = opened
        self._on_close = on_close

    def arrivals(self) -> Iterator[Sequence[int]]:
        """As `Fetch.arrivals`. CudaError or CudaUnavailableError, with the way to find out why, where a handle cannot
        be opened."""
        begun = time.monotonic()
        for index, wanted in enumerate(self._ranges):
            for chunk in chunks_of(index, wanted):
                self._check_time(begun, index)
                self._read(chunk)
            self.num_bytes += wanted.num_bytes
            if index + 1 < len(self._ranges):
                yield [index]
        self._check()
        if self._ranges:
            yield [len(self._ranges) - 1]

    def _check_time(self, begun: float, index: int) -> None:
        if self.is_closed:
            raise LifecycleError("the fetch of device memory was closed")
        if time.monotonic_ns() >= self._deadline_ns:
            hint = f"{len(self._ranges) - index} of {len(self._ranges)} byte ranges are missing"
            raise DeadlineExceededError.waiting_for("bytes of device memory", since_s=begun, hint=hint)

    def _read(self, chunk: Piece) -> None:
        wanted = chunk.wanted
        if has_close_rows(wanted) and self._is_in_one_run(wanted):
            self._read_close_rows(wanted)
            return
        for row in range(wanted.rows):
            start = wanted.target_offset + row * wanted.row_bytes
            with self._target[start : start + wanted.row_bytes] as window:
                self._fill(window, wanted.segment, wanted.offset + row * wanted.stride)

    def _is_in_one_run(self, wanted: ByteRange) -> bool:
        run = self._segments[wanted.segment].run_at(wanted.offset)
        return run is not None and wanted.stop <= run.stop

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
            run = self._segments[segment].run_at(offset + done)
            if run is None:
                raise ValueError(f"byte {offset + done} of segment {segment} lies in no allocation")
            count = min(len(window) - done, run.stop - offset - done)
            memory = self._opened.memory(run.allocation)
            with window[done : done + count] as piece, driver_errors(f"reading {_named(run.allocation)}"):
                memory.read(run.offset + offset + done - run.start, piece)
            done += count

    def close(self) -> None:
        self.is_closed = True
        self._target.release()
        self._on_close()


class _OpenedMemory:
    """What is open on any device."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._contexts: dict[str, _native.CudaContext] = {}
        self._memory: dict[tuple[str, bytes], _native.CudaMemory] = {}

    def memory(self, allocation: DeviceAllocation) -> _native.CudaMemory:
        key = allocation.device, allocation.handle
        if key not in self._memory:
            memory = self._open(allocation)
            self._resources.callback(memory.close)
            self._check_size(memory, allocation)
            self._memory[key] = memory
        return self._memory[key]

    def _open(self, allocation: DeviceAllocation) -> _native.CudaMemory:
        context = self._context(allocation.device)
        try:
            with driver_errors(f"{_named(allocation)} cannot be opened"):
                return context.open(allocation.handle, allocation.num_bytes)
        except CudaError as error:
            raise CudaError(f"{error}: {_ADVICE}") from error

    def _check_size(self, memory: _native.CudaMemory, allocation: DeviceAllocation) -> None:
        with driver_errors(f"{_named(allocation)} is none"):
            base, num_bytes = self._context(allocation.device).address_range(memory.address)
        if base + num_bytes < memory.address + allocation.num_bytes:
            raise CudaError(
                f"{_named(allocation)} has {num_bytes} bytes, its metadata speaks of {allocation.num_bytes}: {_ADVICE}"
            )

    def _context(self, device: str) -> _native.CudaContext:
        if device not in self._contexts:
            try:
                self._contexts[device] = open_device(device)[1]
            except CudaUnavailableError as error:
                raise CudaUnavailableError(f"{error}: {_ADVICE}") from error
        return self._contexts[device]

    def close(self) -> None:
        self._memory.clear()
        try:
            with driver_errors("closing device memory"):
                self._resources.close()
        finally:
            self._contexts.clear()


def _named(allocation: DeviceAllocation) -> str:
    return f"device memory of {allocation.holder}"


def _check_ranges(ranges: Sequence[ByteRange], segments: Sequence[DeviceSegment]) -> None:
    for each in ranges:
        if not 0 <= each.segment < len(segments) or min(each) < 0 or each.stop > segments[each.segment].num_bytes:
            raise ValueError(f"{each} is outside of the {len(segments)} segments")
