"""What of a published tensor, as its parts are stored, lies inside a box of a logical tensor.

Owns the published side of a plan: for each part, the two maps from logical indices to bytes (inside the part, inside
the whole tensor), and their intersection with what is wanted. Refuses to know parameters and models. Invariant: the
strips of disjoint boxes that tile a tensor read each of its bytes once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter, mul
from typing import NamedTuple

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.plan.geometry import Axis, strides_of, strips
from fastdeploy_rl.plan.logical import WHOLE, Piece, turned, turned_axis

Spans = tuple[tuple[int, int], ...]
"""[start, stop) along each axis of a logical tensor."""


class Slot(NamedTuple):
    """Where this rank's share of a logical tensor lies inside its parameter:
    byte `offset` + sum over axes of (index - start of its span) * stride."""

    spans: Spans
    offset: int
    strides: tuple[int, ...]
    item: int


class _Stored(NamedTuple):
    """A piece of a logical tensor as it is stored, but for the place of its parts: those are equal for
    the tensors of many layers, so what is taken of them is worked out once. `cuts`: the parts' spans along
    `shard_axis`; `axis` .. `stored_start`: as in `Piece`."""

    shape: tuple[int, ...]
    item: int
    is_transposed: bool
    shard_axis: int | None
    cuts: Spans
    axis: int
    start: int
    stop: int
    stored_start: int


class Taken(NamedTuple):
    """A strip of part number `part`; `source` is counted from the part's beginning."""

    part: int
    source: int
    source_stride: int
    rows: int
    row_bytes: int
    target: int
    target_stride: int
    whole: int
    whole_stride: int
    transpose_item: int


class _Block(NamedTuple):
    """What a part holds of a logical tensor, as two maps from the logical tensor's indices to bytes: inside the part
    (`source`), and inside the whole published tensor (`whole`). Offsets are those of index 0, ..., 0."""

    part: int
    spans: Spans
    source: int
    source_strides: tuple[int, ...]
    whole: int
    whole_strides: tuple[int, ...]


def strips_into(slot: Slot, piece: Piece) -> tuple[Taken, ...]:
    """What a slot takes of a piece; target places are inside the parameter."""
    return _taken(_stored(piece), slot)


def strips_within(spans: Spans, piece: Piece) -> tuple[Taken, ...]:
    """What of a piece lies within the spans, to be read only."""
    return _untaken(_stored(piece), spans)


def _stored(piece: Piece) -> _Stored:
    tensor = piece.tensor
    cuts = tuple([(part.start, part.stop) for part in tensor.parts])
    return _Stored(tensor.shape, itemsize(tensor.dtype), tensor.is_transposed, tensor.shard_axis, cuts, *piece[1:])


@lru_cache(maxsize=1 << 14)
def _taken(stored: _Stored, slot: Slot) -> tuple[Taken, ...]:
    found: list[Taken] = []
    for block in _blocks(stored, slot.spans):
        low = [start for start, _ in block.spans]
        inside = [at - start for at, (start, _) in zip(low, slot.spans, strict=True)]
        target = slot.offset + sum(map(mul, inside, slot.strides))
        found += _strips_of(stored, block, slot.strides, slot.item, target)
    return tuple(found)


@lru_cache(maxsize=1 << 10)
def _untaken(stored: _Stored, spans: Spans) -> tuple[Taken, ...]:
    # As if it went where it is.
    return tuple(
        taken
        for block in _blocks(stored, spans)
        for taken in _strips_of(stored, block, block.source_strides, stored.item, 0)
    )


def _strips_of(
    stored: _Stored, block: _Block, target_strides: tuple[int, ...], target_item: int, target: int
) -> Iterator[Taken]:
    sizes = [stop - start for start, stop in block.spans]
    low = [start for start, _ in block.spans]
    source = block.source + sum(map(mul, low, block.source_strides))
    whole = block.whole + sum(map(mul, low, block.whole_strides))
    axes = tuple(map(Axis, sizes, block.source_strides, block.whole_strides, target_strides))
    for strip in strips(axes, stored.item, target_item):
        yield Taken(
            part=block.part,
            source=source + strip.source,
            source_stride=strip.source_stride,
            rows=strip.rows,
            row_bytes=strip.width * stored.item,
            target=target + strip.target,
            target_stride=strip.target_stride,
            whole=whole + strip.whole,
            whole_stride=strip.whole_stride,
            transpose_item=stored.item if strip.is_transposing else 0,
        )


def _blocks(stored: _Stored, wanted: Spans) -> Iterator[_Block]:
    """The parts that hold some of the wanted indices; their spans are cut to these."""
    shift = stored.stored_start - stored.start
    spans = wanted if stored.axis == WHOLE else _cut(wanted, stored.axis, stored.start, stored.stop)
    whole_strides = _logical_strides(stored, stored.shape)
    shard = WHOLE if stored.shard_axis is None else _logical_axis(stored, stored.shard_axis)
    back = shift if shard == stored.axis else 0
    for part in range(len(stored.cuts)) if shard == WHOLE else _parts_within(stored.cuts, spans[shard], back):
        held, strides, source = spans, whole_strides, 0
        if shard != WHOLE:
            start, stop = stored.cuts[part]
            held = _cut(spans, shard, start - back, stop - back)
            strides = _logical_strides(stored, _part_shape(stored, stop - start))
            source = -start * strides[shard]
        if any(low >= high for low, high in held):
            continue
        whole = 0
        if stored.axis != WHOLE:
            source += shift * strides[stored.axis]
            whole = shift * whole_strides[stored.axis]
        yield _Block(part, held, source, strides, whole, whole_strides)


def _parts_within(cuts: Spans, span: tuple[int, int], back: int) -> range:
    """Numbers of the parts that hold some of these indices; `back` is how far stored ones are ahead of logical ones."""
    first = bisect_right(cuts, span[0] + back, key=itemgetter(1))
    return range(first, max(first, bisect_left(cuts, span[1] + back, key=itemgetter(0))))


def _cut(spans: Spans, axis: int, start: int, stop: int) -> Spans:
    low, high = spans[axis]
    return (*spans[:axis], (max(low, start), min(high, stop)), *spans[axis + 1 :])


def _logical_strides(stored: _Stored, stored_shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = strides_of(stored_shape, stored.item)
    return turned(strides) if stored.is_transposed else strides


def _logical_axis(stored: _Stored, axis: int) -> int:
    return turned_axis(axis, len(stored.shape)) if stored.is_transposed else axis


def _part_shape(stored: _Stored, size: int) -> tuple[int, ...]:
    return tuple(size if axis == stored.shard_axis else n for axis, n in enumerate(stored.shape))
