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


class DeviceBlock(NamedTuple):
    """An allocation of another process, as far as it is read: `num_bytes` from its base on, which stand at `start` of
    the segment."""

    handle: bytes
    start: int
    num_bytes: int


class DeviceSegment(NamedTuple):
    """Allocations on one device as one run of bytes, in order, no two of them adjacent. `device`: an index or
    identifier, in this process; `holder`: who is to have exported them, for messages."""

    device: str
    holder: str
    blocks: tuple[DeviceBlock, ...]

    @property
    def num_bytes(self) -> int:
        return max((block.start + block.num_bytes for block in self.blocks), default=0)


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
        span = wanted._replace(stride=0, rows=1, row_bytes=wanted.stop - wanted.offset)
        if has_close_rows(wanted) and self._place(wanted.segment, span.offset, span.row_bytes) is not None:
            self._read_close_rows(wanted)
            return
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
        block = self._place(segment, offset, len(window))
        if block is None:
            raise ValueError(f"{len(window)} bytes at {offset} of segment {segment} lie in no allocation")
        memory = self._opened.memory(self._segments[segment], block)
        with driver_errors(f"reading device memory of {self._segments[segment].holder}"):
            memory.read(offset - block.start, window)

    def _place(self, segment: int, offset: int, num_bytes: int) -> DeviceBlock | None:
        """The allocation in which all of these bytes lie."""
        blocks = self._segments[segment].blocks
        number = bisect_right(blocks, offset, key=lambda block: block.start) - 1
        if number < 0 or offset + num_bytes > blocks[number].start + blocks[number].num_bytes:
            return None
        return blocks[number]

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

    def memory(self, segment: DeviceSegment, block: DeviceBlock) -> _native.CudaMemory:
        known = self._memory.get((segment.device, block.handle))
        if known is not None:
            return known
        context, what = self._context(segment.device), f"device memory of {segment.holder}"
        try:
            with driver_errors(f"{what} cannot be opened"):
                memory = context.open(block.handle, block.num_bytes)
        except CudaError as error:
            raise CudaError(f"{error}: {_ADVICE}") from error
        self._resources.callback(memory.close)
        with driver_errors(f"{what} is none"):
            base, num_bytes = context.address_range(memory.address)
        if base + num_bytes < memory.address + block.num_bytes:
            raise CudaError(f"{what} has {num_bytes} bytes, its metadata speaks of {block.num_bytes}: {_ADVICE}")
        self._memory[segment.device, block.handle] = memory
        return memory

    def _context(self, device: str) -> _native.CudaContext:
        if device not in self._contexts:
            try:
                self._contexts[device] = open_device(device)[1]
            except CudaUnavailableError as error:
                raise CudaUnavailableError(f"{error}: {_ADVICE}") from error
        return self._contexts[device]

    def close(self) -> None:
        self._memory.clear()
        with driver_errors("closing device memory"):
            self._resources.close()
        self._contexts.clear()


def _check_ranges(ranges: Sequence[ByteRange], segments: Sequence[DeviceSegment]) -> None:
    for each in ranges:
        if not 0 <= each.segment < len(segments) or min(each) < 0 or each.stop > segments[each.segment].num_bytes:
            raise ValueError(f"{each} is outside of the {len(segments)} segments")
