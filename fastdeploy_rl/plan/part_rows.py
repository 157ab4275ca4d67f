"""A part of a tensor as rows of the whole: which place in the tensor's checksum its bytes have, as they follow each
other in their segment.

Pure arithmetic over a manifest; refuses to know files and memory. Invariant: the pieces of a part are its bytes in
order, and those of all parts of a tensor are the bytes of the whole, each once.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from fastdeploy_rl.dtypes import itemsize
from fastdeploy_rl.manifest import Part, Tensor


class PartRows(NamedTuple):
    """`rows` rows of `row_bytes`, packed from `source_offset` of the part's segment on; in the whole tensor they lie
    `place_stride` apart from `place_offset` on."""

    source_offset: int
    rows: int
    row_bytes: int
    place_offset: int
    place_stride: int

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


def rows_of(tensor: Tensor, part: Part) -> PartRows:
    """All of the part; no rows where it has no bytes."""
    axis = tensor.shard_axis
    if not tensor.part_bytes(part):
        return PartRows(part.offset, 0, 0, 0, 0)
    if axis is None:
        return PartRows(part.offset, 1, tensor.num_bytes, 0, tensor.num_bytes)
    inner = prod(tensor.shape[axis + 1 :]) * itemsize(tensor.dtype)
    length = part.stop - part.start
    return PartRows(
        part.offset, prod(tensor.shape[:axis]), length * inner, part.start * inner, tensor.shape[axis] * inner
    )


def pieces_of(tensor: Tensor, part: Part, max_bytes: int) -> Iterator[PartRows]:
    """The part in order: so many whole rows, or so much of one row, as `max_bytes` allow."""
    source, rows, row_bytes, place, stride = rows_of(tensor, part)
    step = max_bytes // max(row_bytes, 1)
    if step:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield PartRows(source + first * row_bytes, count, row_bytes, place + first * stride, stride)
        return
    for row in range(rows):
        for at in range(0, row_bytes, max_bytes):
            size = min(max_bytes, row_bytes - at)
            yield PartRows(source + row * row_bytes + at, 1, size, place + row * stride + at, size)
