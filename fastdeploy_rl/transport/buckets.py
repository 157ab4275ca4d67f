"""Byte ranges put together into pieces of work of about one size, and what is left of one that was interrupted.

Pure. Owns how ranges are divided; refuses to know who brings them. Invariant: the buckets of some ranges have each of
their bytes once, in order, one Read can ask for each, and what has landed of a bucket is always its beginning.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.wire import MAX_RANGES, MAX_ROWS


class Piece(NamedTuple):
    """A range, or a part of one. `range_index`: of the whole one among those asked for."""

    range_index: int
    wanted: ByteRange


class Span(NamedTuple):
    """Bytes [start, stop) of the target."""

    start: int
    stop: int


class Bucket:
    """Pieces that are asked for together, and how many of their bytes have landed."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.num_bytes = sum(piece.wanted.num_bytes for piece in pieces)
        self.num_landed = 0
        self._num_complete = 0
        self._complete_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self.num_landed == self.num_bytes

    def land(self, num_bytes: int) -> list[Piece]:
        """That many more have landed; the pieces that are complete with them."""
        self.num_landed += num_bytes
        complete = []
        for piece in self.pieces[self._num_complete :]:
            if self._complete_bytes + piece.wanted.num_bytes > self.num_landed:
                break
            self._complete_bytes += piece.wanted.num_bytes
            complete.append(piece)
        self._num_complete += len(complete)
        return complete

    def missing(self) -> list[Piece]:
        """What has not landed: the rest of one piece, and all after it."""
        skip = self.num_landed - self._complete_bytes
        left = []
        for index, wanted in self.pieces[self._num_complete :]:
            left += [Piece(index, rest) for rest in part(wanted, skip, wanted.num_bytes)]
            skip = 0
        return left


def buckets(ranges: Sequence[ByteRange], bucket_bytes: int) -> Iterator[Bucket]:
    """`ranges` in order, in buckets of `bucket_bytes`, or less where one Read may ask for no more; a range that is
    larger than the rest of a bucket goes on in the next. Ranges without bytes are in none. Made one by one."""
    filling = _Filling(bucket_bytes)
    for index, whole in enumerate(ranges):
        wanted, start = whole.joined(), 0
        while start < wanted.num_bytes:
            if filling.is_full:
                yield filling.taken()
            start += filling.add(index, wanted, start)
    if filling.pieces:
        yield filling.taken()


class _Filling:
    """A bucket to be."""

    def __init__(self, bucket_bytes: int) -> None:
        self.pieces: list[Piece] = []
        self._bucket_bytes = bucket_bytes
        self._num_bytes = 0
        self._num_rows = 0

    @property
    def is_full(self) -> bool:
        # A part of a range is up to three: the end of a row, whole rows, the beginning of one. And what is left of an
        # interrupted bucket may be two more than it had.
        is_fine = max(len(self.pieces) + 5 - MAX_RANGES, self._num_rows + 5 - MAX_ROWS) > 0
        return is_fine or self._num_bytes == self._bucket_bytes

    def add(self, index: int, wanted: ByteRange, start: int) -> int:
        """As much of it from byte `start` on as there is room for; how many bytes these are."""
        room = min(self._bucket_bytes - self._num_bytes, (MAX_ROWS - self._num_rows - 4) * wanted.row_bytes)
        stop = min(wanted.num_bytes, start + room)
        for each in part(wanted, start, stop):
            self.pieces.append(Piece(index, each))
            self._num_rows += each.rows
        self._num_bytes += stop - start
        return stop - start

    def taken(self) -> Bucket:
        bucket = Bucket(self.pieces)
        self.pieces, self._num_bytes, self._num_rows = [], 0, 0
        return bucket


def part(wanted: ByteRange, start: int, stop: int) -> Iterator[ByteRange]:
    """Bytes [start, stop) of those that the range packs: the end of a row, whole rows, the beginning of one."""
    if start >= stop:
        return
    row, skip = divmod(start, wanted.row_bytes)
    if skip:
        end = min(stop, start + wanted.row_bytes - skip)
        yield _in_row(wanted, row, skip, start, end)
        row, start = row + 1, end
    rows = max(0, stop - start) // wanted.row_bytes
    if rows:
        place = wanted.target_offset + start
        yield wanted._replace(offset=wanted.offset + row * wanted.stride, rows=rows, target_offset=place)
        row, start = row + rows, start + rows * wanted.row_bytes
    if start < stop:
        yield _in_row(wanted, row, 0, start, stop)


def _in_row(wanted: ByteRange, row: int, skip: int, start: int, stop: int) -> ByteRange:
    """Bytes [start, stop) of the packed ones; they lie in this row, `skip` behind its beginning."""
    offset = wanted.offset + row * wanted.stride + skip
    num_bytes = stop - start
    return ByteRange(wanted.segment, offset, num_bytes, 1, num_bytes, wanted.target_offset + start)


def spans(pieces: Sequence[Piece]) -> list[Span]:
    """Where they land, in order; neighbours joined."""
    found: list[Span] = []
    for _, wanted in pieces:
        start, stop = wanted.target_offset, wanted.target_offset + wanted.num_bytes
        if found and found[-1].stop == start:
            start = found.pop().start
        found.append(Span(start, stop))
    return found
