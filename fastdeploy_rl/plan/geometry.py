"""Boxes of tensors as strided two-dimensional strips: the arithmetic of plans.

A box is a range of indices along each axis, seen at once by three affine maps from indices to byte offsets: `source`
(where it is published), `whole` (its place in the whole published tensor) and `target` (the rank's parameter). Owns the
cut of such a box into as few strips as two dimensions allow. Refuses to know tensors, segments and ranks. Invariant:
the strips of a box hold each of its elements once.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple


class Axis(NamedTuple):
    """`size` indices, and how many bytes further the next one lies in each map."""

    size: int
    source: int
    whole: int
    target: int


class Strip(NamedTuple):
    """`rows` rows of `width` elements. Offsets are bytes from the box's first element, strides bytes between rows.

    `is_transposing`: the elements of a source row lie `target_stride` apart in the target, those of one source column
    are a target row; else both sides have the same rows.
    """

    rows: int
    width: int
    source: int
    source_stride: int
    whole: int
    whole_stride: int
    target: int
    target_stride: int
    is_transposing: bool


@lru_cache(maxsize=1 << 14)
def strides_of(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of a C-contiguous tensor with elements of `item` bytes."""
    strides = [item] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@lru_cache(maxsize=1 << 14)
def strips(axes: tuple[Axis, ...], source_item: int, target_item: int) -> tuple[Strip, ...]:
    """The strips of a box that is not empty, in no particular order."""
    rest = _merged(axes)
    fast = rest[-1] if rest and rest[-1].target == target_item else None
    if fast is None or _is_row(fast, source_item):
        return tuple(_plain(rest, fast, source_item, target_item))
    turned = next((axis for axis in rest if _is_row(axis, source_item)), None)
    if turned is None:
        return tuple(_plain(rest, None, source_item, target_item))
    return tuple(_transposing([axis for axis in rest if axis is not turned and axis is not fast], turned, fast))


def _is_row(axis: Axis, source_item: int) -> bool:
    """A part that is one index wide has such rows where the whole tensor, for whose checksum they count, has none."""
    return axis.source == axis.whole == source_item


def _merged(axes: Sequence[Axis]) -> list[Axis]:
    """The same box with the fewest axes: those of one index left out, and neighbours joined where every map goes on
    from the end of the inner one. Sorted from the target's slowest to its fastest."""
    joined: list[Axis] = []
    for axis in sorted((axis for axis in axes if axis.size != 1), key=lambda axis: -axis.target):
        outer = joined[-1] if joined else None
        if (
            outer is not None
            and outer.source == axis.size * axis.source
            and outer.whole == axis.size * axis.whole
            and outer.target == axis.size * axis.target
        ):
            joined[-1] = Axis(outer.size * axis.size, axis.source, axis.whole, axis.target)
        else:
            joined.append(axis)
    return joined


def _plain(axes: list[Axis], fast: Axis | None, source_item: int, target_item: int) -> Iterator[Strip]:
    """Rows along the axis that is fastest on both sides (without one, single elements); the longest other axis counts
    them, so that there are few strips."""
    others = axes if fast is None else axes[:-1]
    width = 1 if fast is None else fast.size
    if not others:
        yield Strip(1, width, 0, width * source_item, 0, width * source_item, 0, width * target_item, False)
        return
    count = max(others, key=lambda axis: axis.size)
    for source, whole, target in _offsets([axis for axis in others if axis is not count]):
        yield Strip(count.size, width, source, count.source, whole, count.whole, target, count.target, False)


def _transposing(others: list[Axis], turned: Axis, fast: Axis) -> Iterator[Strip]:
    """`turned` is the source's fastest axis, `fast` the target's."""
    for source, whole, target in _offsets(others):
        yield Strip(fast.size, turned.size, source, fast.source, whole, fast.whole, target, turned.target, True)


def _offsets(axes: list[Axis]) -> Iterator[tuple[int, int, int]]:
    for index in product(*(range(axis.size) for axis in axes)):
        pairs = list(zip(index, axes, strict=True))
        yield (
            sum(at * axis.source for at, axis in pairs),
            sum(at * axis.whole for at, axis in pairs),
            sum(at * axis.target for at, axis in pairs),
        )
