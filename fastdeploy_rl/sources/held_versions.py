"""What this rank fetched, for others to fetch from it: a shelf of versions whose bytes lie in this process's arenas.

Owns which bytes of which version are here, and who reads them. Refuses to know sockets and plans, and checks no bytes
(whoever reads them does, against the manifest). Invariant: bytes are given only between `hold` and `withdraw` of their
mapping, and when `withdraw` has returned nobody reads them.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import NoPublicationError, SegmentError
from fastdeploy_rl.manifest import Segment, encode
from fastdeploy_rl.transport.base import ByteRange, Offer, Run
from fastdeploy_rl.version import WeightVersion

_Numbers = NDArray[np.int64]
_LET_GO_S = 10.0
_MAX_ROWS = 1 << 24
"""Of the ranges of one question: more would be asked for to take our memory."""


class _Rows(NamedTuple):
    """Rows one by one: where each begins in its segment, how long it is, where it lands."""

    segments: _Numbers
    starts: _Numbers
    sizes: _Numbers
    targets: _Numbers


def _rows(ranges: Sequence[ByteRange], segments: Sequence[Segment]) -> _Rows:
    """In order; rows that follow each other without a gap as one, and none without bytes. ValueError for what is no
    range of these segments."""
    try:
        numbers = np.fromiter(chain.from_iterable(ranges), np.int64, len(ranges) * len(ByteRange._fields))
    except OverflowError as error:
        raise ValueError(f"ranges that no memory has: {error}") from error
    table = numbers.reshape(len(ranges), len(ByteRange._fields))
    _check_ranges(table, segments)
    is_one = table[:, 2] == table[:, 4]
    table[is_one, 4] *= table[is_one, 3]
    table[is_one, 3] = 1
    table = table[(table[:, 3] > 0) & (table[:, 4] > 0)]
    segment, offset, stride, count, size, target = table.T
    if (num_rows := int(count.sum())) > _MAX_ROWS:
        raise ValueError(f"ranges of {num_rows} rows; at most {_MAX_ROWS} at a time")
    index = _counted(count)
    return _Rows(
        np.repeat(segment, count),
        np.repeat(offset, count) + index * np.repeat(stride, count),
        np.repeat(size, count),
        np.repeat(target, count) + index * np.repeat(size, count),
    )


def _check_ranges(table: _Numbers, segments: Sequence[Segment]) -> None:
    if not len(table):
        return
    segment, offset, stride, count, size, _ = table.T
    if table.min() < 0 or segment.max() >= len(segments):
        raise ValueError(f"ranges of segments that are not: the manifest has {len(segments)}")
    # Once in floating point, where nothing wraps around.
    if (offset.astype(float) + count.astype(float) * np.maximum(stride, size)).max() >= 2**62:
        raise ValueError("ranges that no memory has")
    if ((count > 1) & (stride < size)).any():
        raise ValueError("ranges whose rows overlap")
    ends = offset + np.maximum(count - 1, 0) * stride + size
    if (ends > np.array([each.num_bytes for each in segments], np.int64)[segment]).any():
        raise ValueError("ranges that leave their segment")


def _counted(counts: _Numbers) -> _Numbers:
    """0 .. count - 1 for each count, one after the other."""
    firsts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(firsts, counts)


class HeldBytes:
    """Which bytes of a manifest's segments lie where in one mapping: runs, sorted, disjoint, and joined where they
    follow each other in both. Immutable."""

    def __init__(self, ranges: Sequence[ByteRange], segments: Sequence[Segment]) -> None:
        """`ranges`: what was fetched, and where it landed. What several of them have is found in one of them."""
        self._segments = segments
        rows = _rows(ranges, segments)
        # One address space for all segments, a byte between each two: runs of different ones never touch.
        self._bases = np.cumsum([0, *(each.num_bytes + 1 for each in segments)], dtype=np.int64)
        self._starts, self._stops, self._offsets = _disjoint(
            self._bases[rows.segments] + rows.starts, rows.sizes, rows.targets
        )
        is_apart = self._starts[1:] != self._stops[:-1]
        self._islands = np.cumsum(np.concatenate([[0], is_apart]), dtype=np.int64)[: len(self._starts)]

    @property
    def num_bytes(self) -> int:
        return int((self._stops - self._starts).sum())

    def places(self, ranges: Sequence[ByteRange]) -> list[tuple[int, int]]:
        """Offset in the mapping and number of bytes, in order, row by row; neighbours joined. NoPublicationError where
        a byte is not held; ValueError for what is no range of the segments."""
        rows = _rows(ranges, self._segments)
        starts = self._bases[rows.segments] + rows.starts
        stops = starts + rows.sizes
        first = np.searchsorted(self._starts, starts, "right") - 1
        last = np.searchsorted(self._starts, stops, "left") - 1
        self._check_held(rows, stops, first, last)
        counts = last - first + 1
        run = np.repeat(first, counts) + _counted(counts)
        begin = np.maximum(np.repeat(starts, counts), self._starts[run])
        end = np.minimum(np.repeat(stops, counts), self._stops[run])
        offsets, sizes = _joined(self._offsets[run] + begin - self._starts[run], end - begin)
        return list(zip(offsets.tolist(), sizes.tolist(), strict=True))

    def _check_held(self, rows: _Rows, stops: _Numbers, first: _Numbers, last: _Numbers) -> None:
        """A row is here when one island of runs reaches from its first byte to its last."""
        is_held = first >= 0
        if len(self._starts):
            is_held &= (self._islands[first] == self._islands[last]) & (stops <= self._stops[last])
        if not is_held.all():
            row = int(np.flatnonzero(~is_held)[0])
            start, locator = int(rows.starts[row]), self._segments[int(rows.segments[row])].locator
            raise NoPublicationError(
                f"bytes {start} to {start + int(rows.sizes[row])} of segment {locator!r} are not all held here "
                f"({int((~is_held).sum())} of {len(is_held)} rows)"
            )


def _disjoint(starts: _Numbers, sizes: _Numbers, offsets: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Sorted runs (start, stop, offset) of the same bytes, each byte in one of them."""
    order = np.argsort(starts, kind="stable")
    starts, sizes, offsets = starts[order], sizes[order], offsets[order]
    reached = np.maximum.accumulate(starts + sizes) if len(starts) else starts
    begin = starts.copy()
    begin[1:] = np.maximum(starts[1:], reached[:-1])
    offsets, stops = offsets + begin - starts, starts + sizes
    keep = begin < stops
    begin, stops, offsets = begin[keep], stops[keep], offsets[keep]
    is_new = np.ones(len(begin), np.bool_)
    is_new[1:] = (begin[1:] != stops[:-1]) | (offsets[1:] != offsets[:-1] + (stops - begin)[:-1])
    is_last = np.append(is_new[1:], True)[: len(begin)]
    return begin[is_new], stops[is_last], offsets[is_new]


def _joined(offsets: _Numbers, sizes: _Numbers) -> tuple[_Numbers, _Numbers]:
    is_new = np.ones(len(offsets), np.bool_)
    is_new[1:] = offsets[1:] != (offsets + sizes)[:-1]
    firsts = np.flatnonzero(is_new)
    return offsets[firsts], np.add.reduceat(sizes, firsts) if len(firsts) else sizes


class _Version:
    """A version in one mapping, and its readers. What only they need is made when the first of them comes."""

    def __init__(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        self.offer = offer
        self.mapping = mapping
        self.ranges = ranges
        self.readers: list[HeldReader] = []
        self.is_withdrawn = False

    @cached_property
    def manifest_bytes(self) -> bytes:
        return encode(self.offer.manifest)

    @cached_property
    def held(self) -> HeldBytes:
        return HeldBytes(self.ranges, self.offer.manifest.segments)


class HeldReader:
    """A version while a server's thread sends from it."""

    def __init__(self, shelf: "HeldVersions", version: _Version, on_withdraw: Callable[[], None]) -> None:
        self._shelf = shelf
        self._version = version
        self.on_withdraw = on_withdraw

    def runs(self, ranges: Sequence[ByteRange]) -> Sequence[Run]:
        places = self._version.held.places(ranges)
        return [Run(self._version.mapping, offset, num_bytes) for offset, num_bytes in places]

    def close(self) -> None:
        self._shelf._let_go(self._version, self)


class HeldVersions:
    """A Shelf of what was fetched by this rank; versions come and go with `hold` and `withdraw`. Thread-safe."""

    def __init__(self, let_go_s: float = _LET_GO_S) -> None:
        """`let_go_s`: how long `withdraw` waits for those who read."""
        self._let_go_s = let_go_s
        self._versions: list[_Version] = []
        self._changed = threading.Condition()

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        """From now on the version can be had here: `mapping` has the bytes of `ranges` at their target offsets, and
        keeps them until `withdraw`."""
        with self._changed:
            self._versions.append(_Version(offer, ranges, mapping))

    def withdraw(self, mapping: Mapping) -> None:
        """Ends every reader of it. Nothing happens for a mapping that is not held. SegmentError when one goes on
        reading for `let_go_s`: the memory must not be used for something else, and a later call tries again."""
        with self._changed:
            leaving = [version for version in self._versions if version.mapping is mapping]
            for version in leaving:
                version.is_withdrawn = True
            readers = [reader for version in leaving for reader in version.readers]
        for reader in readers:
            reader.on_withdraw()  # without the lock: the reader that it waits for wants to close
        with self._changed:
            self._await_gone(leaving)
            self._versions = [version for version in self._versions if version not in leaving]

    def _await_gone(self, leaving: list[_Version]) -> None:
        if not self._changed.wait_for(lambda: not any(version.readers for version in leaving), self._let_go_s):
            versions = ", ".join(str(version.offer.version) for version in leaving)
            raise SegmentError(
                f"version {versions} is still in use: {sum(len(version.readers) for version in leaving)} readers "
                f"fetch it from this rank and do not stop"
            )

    def offer(self, version: WeightVersion | None) -> tuple[WeightVersion, bytes]:
        with self._changed:
            here = {each.offer.version: each for each in self._versions if not each.is_withdrawn}
        if not here:
            raise NoPublicationError("nothing is published here: this rank holds no version that it could give")
        wanted = max(here) if version is None else version
        if wanted not in here:
            raise NoPublicationError(f"version {wanted} is not to be had: this rank has {max(here)}")
        return wanted, here[wanted].manifest_bytes

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> HeldReader:
        with self._changed:
            here = [v for v in self._versions if v.offer.file_digest == file_digest and not v.is_withdrawn]
            if not here:
                raise NoPublicationError(f"manifest {file_digest[:16]} is not held here (any more)")
            reader = HeldReader(self, here[-1], on_withdraw)
            here[-1].readers.append(reader)
            return reader

    def _let_go(self, version: _Version, reader: HeldReader) -> None:
        with self._changed:
            if reader in version.readers:
                version.readers.remove(reader)
                self._changed.notify_all()
