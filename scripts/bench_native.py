"""How fast the native core copies, sums, casts and transposes, against its plain copy of the bytes that are read.

Every figure is taken beside the plain copy of the same run, between the same warm buffers, with as many threads. The
matrices are the linear weights of a layer of Qwen2.5-0.5B, both ways round, one after the other: half a gigabyte."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from bench_row import Row, at_least, at_most, seconds_of

from fastdeploy_rl import config
from fastdeploy_rl._native import Mapping, Place, Region, transfer

NUM_BYTES = 512 << 20
SHAPES = ((896, 4864), (4864, 896))
RANKS = 2


class Matrix(NamedTuple):
    """One matrix in both buffers."""

    offset: int
    rows: int
    columns: int
    item: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.item

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


def matrices(item: int) -> Iterator[Matrix]:
    offset, number = 0, 0
    while True:
        matrix = Matrix(offset, *SHAPES[number % len(SHAPES)], item)
        if offset + matrix.num_bytes > NUM_BYTES:
            return
        yield matrix
        offset, number = offset + matrix.num_bytes, number + 1


@dataclass
class Case:
    """Regions that read `num_bytes`, and the plain copy of as many."""

    name: str
    regions: list[Region]
    plain: Region
    num_bytes: int
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)

    def measure(self, threads: int) -> None:
        self.plain_seconds.append(seconds_of(lambda: transfer([self.plain], threads)))
        self.seconds.append(seconds_of(lambda: transfer(self.regions, threads)))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def plain_median(self) -> float:
        return statistics.median(self.plain_seconds)


class Buffers:
    """A source full of noise and a target, both touched."""

    def __init__(self) -> None:
        self.source, self.target = Mapping.private(NUM_BYTES), Mapping.private(NUM_BYTES)
        np.frombuffer(self.source, np.uint64)[:] = np.random.default_rng(0).integers(
            0, 2**63, NUM_BYTES // 8, np.uint64
        )
        self.target.prefault(1)

    def case(self, name: str, item: int, region: Callable[["Buffers", Matrix], Region], share: int = 1) -> Case:
        """`region` reads one part in `share` of its matrix."""
        regions = [region(self, matrix) for matrix in matrices(item)]
        num_bytes = sum(matrix.num_bytes for matrix in matrices(item)) // share
        return Case(name, regions, self.plain(num_bytes), num_bytes)

    def plain(self, num_bytes: int) -> Region:
        return Region(
            source=self.source, source_offset=0, source_stride=0, rows=1, row_bytes=num_bytes, target=self.target
        )


def summed(buffers: Buffers, matrix: Matrix) -> Region:
    return Region(
        source=buffers.source,
        source_offset=matrix.offset,
        source_stride=0,
        rows=1,
        row_bytes=matrix.num_bytes,
        target=buffers.target,
        target_offset=matrix.offset,
        read_place=Place(0, 0, matrix.num_bytes),
        live_place=Place(0, 0, matrix.num_bytes),
    )


def column_slice(buffers: Buffers, matrix: Matrix) -> Region:
    width = matrix.row_bytes // RANKS
    return Region(
        source=buffers.source,
        source_offset=matrix.offset + width,
        source_stride=matrix.row_bytes,
        rows=matrix.rows,
        row_bytes=width,
        target=buffers.target,
        target_offset=matrix.offset // RANKS,
        target_stride=width,
        read_place=Place(width, matrix.row_bytes, matrix.num_bytes),
        live_place=Place(0, width, matrix.num_bytes // RANKS),
    )


def narrowed(buffers: Buffers, matrix: Matrix) -> Region:
    width = matrix.row_bytes // 2
    return Region(
        source=buffers.source,
        source_offset=matrix.offset,
        source_stride=matrix.row_bytes,
        rows=matrix.rows,
        row_bytes=matrix.row_bytes,
        target=buffers.target,
        target_offset=matrix.offset // 2,
        target_stride=width,
        cast="F32_BF16",
        read_place=Place(0, matrix.row_bytes, matrix.num_bytes),
        live_place=Place(0, width, matrix.num_bytes // 2),
    )


def transposed(buffers: Buffers, matrix: Matrix, *, is_summed: bool) -> Region:
    width = matrix.rows * matrix.item
    return Region(
        source=buffers.source,
        source_offset=matrix.offset,
        source_stride=matrix.row_bytes,
        rows=matrix.rows,
        row_bytes=matrix.row_bytes,
        target=buffers.target,
        target_offset=matrix.offset,
        target_stride=width,
        read_place=Place(0, matrix.row_bytes, matrix.num_bytes) if is_summed else None,
        live_place=Place(0, width, matrix.num_bytes) if is_summed else None,
        transpose_item=matrix.item,
    )


def moved(buffers: Buffers, matrix: Matrix) -> Region:
    return transposed(buffers, matrix, is_summed=False)


def moved_and_summed(buffers: Buffers, matrix: Matrix) -> Region:
    return transposed(buffers, matrix, is_summed=True)


def native_rows(runs: int) -> list[Row]:
    buffers, threads = Buffers(), config.num_copy_threads()
    copied = buffers.case("copy + both checksums", 2, summed)
    others = [
        (buffers.case("column slices + both checksums", 2, column_slice, RANKS), 0.6),
        (buffers.case("cast F32 to BF16 + both checksums", 4, narrowed), 0.6),
    ] + [
        (buffers.case(f"transpose {dtype}{what}", item, region), 0.35)
        for dtype, item in (("F32", 4), ("BF16", 2))
        for what, region in (("", moved), (" + both checksums", moved_and_summed))
    ]
    cases = [copied, *(case for case, _ in others)]
    for _ in range(runs):
        for case in cases:
            case.measure(threads)
    plain = copied.plain_median
    first = at_most(copied.name, copied.median, "s", "plain copy", plain, 1.2 * plain, "<= 1.2 passes")
    return [first, *(_speed_row(case, wanted) for case, wanted in others)]


def _speed_row(case: Case, wanted: float) -> Row:
    speed, limit = (case.num_bytes / 1e9 / seconds for seconds in (case.median, case.plain_median))
    return at_least(case.name, speed, "GB/s", "plain copy", limit, wanted * limit, f">= {wanted}")
