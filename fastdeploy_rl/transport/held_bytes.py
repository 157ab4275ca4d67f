"""Which bytes of a version somebody has: found where they lie, or cut out of what is asked for.

Owns the arithmetic of byte ranges alone. Refuses to know memory and whose bytes they are. Invariant: a byte is found
only where a range that was given has it, and what is cut is cut into pieces that together are what was to be cut.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.manifest import Segment
from fastdeploy_rl.plan.byte_range import ByteRange

_Numbers = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_MAX_ROWS = 1 << 24
"""Of the ranges of one question: more would be asked for to take our memory."""
_LIMIT = 2**62


class Piece(NamedTuple):
    """A part of range `number` of those that are wanted: rows as `range` says, but `target_stride` apart where they
    land."""

    number: int
    range: ByteRange
    target_stride: int

    @classmethod
    def whole(cls, number: int, wanted: ByteRange) -> "Piece":
        return cls(number, wanted, wanted.row_bytes)

    @property
    def is_packed(self) -> bool:
        """It lands as its range alone says."""
        return self.range.rows <= 1 or self.target_stride == self.range.row_bytes

    def by_rows(self, max_bytes: int) -> "Iterator[Piece]":
        """The same in pieces of whole rows, each of `max_bytes` at most where a row is not longer than that."""
        rows = max(1, max_bytes // max(1, self.range.row_bytes))
        for first in range(0, self.range.rows, rows):
            part = self.range._replace(
                offset=self.range.offset + first * self.range.stride,
                rows=min(rows, self.range.rows - first),
                target_offset=self.range.target_offset + first * self.target_stride,
            )
            yield self._replace(range=part)


class Cut(NamedTuple):
    """Pieces that together are what was cut, each with the number of what it was cut out of."""

    held: list[Piece]
    missing: list[Piece]


class Place(NamedTuple):
    """`rows` rows of `num_bytes` in the mapping, `stride` apart from `offset` on."""

    offset: int
    num_bytes: int
    stride: int
    rows: int


class HeldBytes:
    """Which bytes of a manifest's segments lie where in one mapping: runs, sorted, disjoint, and joined where they
    follow each other in both. Immutable."""

    def __init__(self, ranges: Sequence[ByteRange], segments: Sequence[Segment]) -> None:
        """`ranges`: what is held, and at which target offsets. ValueError for what is no range of the segments."""
        self._segments = segments
        if sum(each.num_bytes for each in segments) >= _LIMIT:
            raise ValueError("segments that no memory has")
        # One address space for all segments, one behind the other.
        self._bases = np.cumsum([0, *(each.num_bytes for each in segments)], dtype=np.int64)
        rows = _rows(ranges, segments, self._bases)
        self._starts, self._stops, self._offsets = _disjoint(rows)
        is_apart = np.ones(len(self._starts), np.bool_)
        is_apart[1:] = self._starts[1:] != self._stops[:-1]
        self._islands = np.cumsum(is_apart) - 1
        """By run: the stretch of published bytes without a gap that it is a part of."""
        edges = np.stack([self._starts[is_apart], self._stops[_is_last(is_apart)]], axis=1)
        self._edges = np.concatenate([[0], edges.reshape(-1), [np.iinfo(np.int64).max]])
        """Where islands begin and end, by turns, between two that no byte reaches."""

    def places(self, ranges: Sequence[ByteRange]) -> list[Place]:
        """Where the bytes lie, in order, row by row; neighbours joined, and rows of one pattern told as one.
        NoPublicationError where a byte is not held; ValueError for what is no range of the segments."""
        rows = _rows(ranges, self._segments, self._bases)
        first = np.searchsorted(self._starts, rows.starts, "right") - 1
        last = np.searchsorted(self._starts, rows.stops, "left") - 1
        self._check_held(rows, first, last)
        counts = last - first + 1
        run = np.repeat(first, counts) + _counted(counts)
        begin = np.maximum(np.repeat(rows.starts, counts), self._starts[run])
        end = np.minimum(np.repeat(rows.stops, counts), self._stops[run])
        return _patterns(*_joined(self._offsets[run] + begin - self._starts[run], end - begin))

    def _check_held(self, rows: "_Rows", first: _Numbers, last: _Numbers) -> None:
        """A row is here when one island of runs reaches from its first byte to its last."""
        is_held = first >= 0
        if len(self._starts):
            is_held &= (self._islands[first] == self._islands[last]) & (rows.stops <= self._stops[last])
        if is_held.all():
            return
        row = int(np.flatnonzero(~is_held)[0])
        segment = int(rows.segments[row])
        start, stop = (int(each[row] - self._bases[segment]) for each in (rows.starts, rows.stops))
        raise NoPublicationError(
            f"bytes {start} to {stop} of segment {self._segments[segment].locator!r} are not all held here "
            f"({int((~is_held).sum())} of {len(is_held)} rows)"
        )

    def cut(self, wanted: Sequence[Piece]) -> Cut:
        """In pieces that are held and pieces that are not. Ranges without bytes are in neither. ValueError for what is
        no range of the segments."""
        ranges, target_strides = [piece.range for piece in wanted], [piece.target_stride for piece in wanted]
        rows = _rows(ranges, self._segments, self._bases, target_strides)
        first = np.searchsorted(self._edges[2:-1:2], rows.starts, "right")
        counts = np.maximum(np.searchsorted(self._edges[1:-1:2], rows.stops, "left") - first, 0)
        # From its first byte to its last, a row is by turns missing and held.
        turns = 2 * counts + 1
        row, turn = np.repeat(np.arange(len(turns)), turns), _counted(turns)
        edge = 2 * first[row] + turn
        begins = np.clip(self._edges[edge], rows.starts[row], rows.stops[row])
        ends = np.clip(self._edges[edge + 1], rows.starts[row], rows.stops[row])
        held, missing = (
            self._pieces(wanted, rows, row[chosen], begins[chosen], ends[chosen])
            for chosen in ((turn % 2 == turned) & (begins < ends) for turned in (1, 0))
        )
        return Cut(held, missing)

    def _pieces(
        self, wanted: Sequence[Piece], rows: "_Rows", row: _Numbers, begins: _Numbers, ends: _Numbers
    ) -> list[Piece]:
        """Parts of rows as pieces: those that follow each other at equal distances as one."""
        # Those of one range by their place in its rows, and then by rows.
        order = np.lexsort((begins - rows.starts[row], rows.owners[row]))
        row, begins, sizes = row[order], begins[order], (ends - begins)[order]
        owners, targets = rows.owners[row], rows.targets[row] + begins - rows.starts[row]
        apart, landing_apart = np.diff(begins), np.diff(targets)
        goes_on = (owners[1:] == owners[:-1]) & (sizes[1:] == sizes[:-1])
        goes_on &= (apart >= sizes[1:]) & (landing_apart >= sizes[1:])
        is_first = np.ones(len(row), np.bool_)
        is_first[1:] = ~goes_on
        is_first[2:] |= goes_on[:-1] & ((apart[1:] != apart[:-1]) | (landing_apart[1:] != landing_apart[:-1]))
        firsts = np.flatnonzero(is_first)
        counts = np.diff(np.append(firsts, len(row)))
        stride, target_stride = (
            np.where(counts > 1, np.append(each, 0)[firsts], sizes[firsts]) for each in (apart, landing_apart)
        )
        segment = rows.segments[row]
        columns = (segment, begins - self._bases[segment], sizes, targets)
        segment, offset, size, target = (column[firsts] for column in columns)
        numbers = [wanted[owner].number for owner in owners[firsts].tolist()]
        fields = (segment, offset, stride, counts, size, target)
        ranges = map(ByteRange._make, zip(*(field.tolist() for field in fields), strict=True))
        return list(map(Piece, numbers, ranges, target_stride.tolist()))


class _Rows(NamedTuple):
    """Rows one by one: which range it is of, its segment, where it begins and ends, and where it lands. Begin and end
    count over all segments."""

    owners: _Numbers
    segments: _Numbers
    starts: _Numbers
    stops: _Numbers
    targets: _Numbers


def _rows(
    ranges: Sequence[ByteRange],
    segments: Sequence[Segment],
    bases: _Numbers,
    target_strides: Sequence[int] | None = None,
) -> _Rows:
    """In order; rows that follow each other without a gap as one, and none without bytes. `target_strides`: of each
    range, where they do not land packed. ValueError for what is no range of these segments."""
    try:
        numbers = np.fromiter(chain.from_iterable(ranges), np.int64, len(ranges) * len(ByteRange._fields))
    except OverflowError as error:
        raise ValueError(f"ranges that no memory has: {error}") from error
    table = numbers.reshape(len(ranges), len(ByteRange._fields))
    _check_ranges(table, segments)
    apart = table[:, 4].copy() if target_strides is None else np.array(target_strides, np.int64)
    is_one = (table[:, 2] == table[:, 4]) & (apart == table[:, 4])
    table[is_one, 4] *= table[is_one, 3]
    table[is_one, 3] = 1
    owners = np.flatnonzero((table[:, 3] > 0) & (table[:, 4] > 0))
    segment, offset, stride, count, size, target = table[owners].T
    if (num_rows := int(count.sum())) > _MAX_ROWS:
        raise ValueError(f"ranges of {num_rows} rows; at most {_MAX_ROWS} at a time")
    index = _counted(count)
    starts = np.repeat(bases[segment] + offset, count) + index * np.repeat(stride, count)
    sizes = np.repeat(size, count)
    return _Rows(
        np.repeat(owners, count),
        np.repeat(segment, count),
        starts,
        starts + sizes,
        np.repeat(target, count) + index * np.repeat(apart[owners], count),
    )


def _check_ranges(table: _Numbers, segments: Sequence[Segment]) -> None:
    if not len(table):
        return
    segment, offset, stride, count, size, _ = table.T
    if table.min() < 0 or segment.max() >= len(segments):
        raise ValueError(f"ranges of segments that are not: the manifest has {len(segments)}")
    # Once in floating point, where nothing wraps around.
    if (offset.astype(float) + count.astype(float) * np.maximum(stride, size)).max() >= _LIMIT:
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


def _disjoint(rows: _Rows) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Sorted runs (start, stop, target) of the same bytes, each byte in one of them."""
    order = np.argsort(rows.starts, kind="stable")
    starts, stops, targets = rows.starts[order], rows.stops[order], rows.targets[order]
    begins = starts.copy()
    begins[1:] = np.maximum(starts[1:], np.maximum.accumulate(stops)[:-1])
    targets = targets + begins - starts
    keep = begins < stops
    begins, stops, targets = begins[keep], stops[keep], targets[keep]
    is_first = np.ones(len(begins), np.bool_)
    is_first[1:] = (begins[1:] != stops[:-1]) | (targets[1:] != (targets + stops - begins)[:-1])
    return begins[is_first], stops[_is_last(is_first)], targets[is_first]


def _is_last(is_first: _Flags) -> _Flags:
    """Where groups end that begin there."""
    return np.append(is_first[1:], True)[: len(is_first)]


def _joined(offsets: _Numbers, sizes: _Numbers) -> tuple[_Numbers, _Numbers]:
    is_first = np.ones(len(offsets), np.bool_)
    is_first[1:] = offsets[1:] != (offsets + sizes)[:-1]
    firsts = np.flatnonzero(is_first)
    return offsets[firsts], np.add.reduceat(sizes, firsts) if len(firsts) else sizes


def _patterns(offsets: _Numbers, sizes: _Numbers) -> list[Place]:
    """Runs of one size, equally far apart, as one place: thousands of rows one by one would cost their server a
    microsecond each."""
    gaps = np.diff(offsets)
    goes_on = (sizes[1:] == sizes[:-1]) & (gaps >= sizes[1:])
    is_steady = goes_on[1:] & goes_on[:-1] & (gaps[1:] == gaps[:-1])
    is_first = np.ones(len(offsets), np.bool_)
    is_first[1:2] = ~goes_on[:1]
    is_first[2:] = ~(is_steady | (goes_on[1:] & ~goes_on[:-1]))
    firsts = np.flatnonzero(is_first)
    rows = np.diff(np.append(firsts, len(offsets)))
    strides = np.where(rows > 1, np.append(gaps, 0)[firsts], sizes[firsts])
    columns = (offsets[firsts], sizes[firsts], strides, rows)
    return list(map(Place._make, zip(*(column.tolist() for column in columns), strict=True)))
