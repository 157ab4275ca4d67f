"""How fast the native core copies, sums, casts and transposes, against its plain copy of the bytes that are read.

Every figure is taken beside the plain copy of the same run, between the same warm buffers, with as many threads. The
matrices are the linear weights of a layer of Qwen2.5-0.5B, both ways round, one after the other: half a gigabyte."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from bench_row import Row, at_least, at_most, seconds_of

from fastdeploy_rl import config
from fastdeploy_rl._native import Mapping, Place, Region, transfer

NUM_BYTES = 512 << 20
SHAPES = ((896, 4864), (4864, 896))
RANKS = 2
Job = dict[str, Any]
"""The arguments of a Region."""


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

    def case(self, name: str, item: int, job: Callable[["Buffers", Matrix], Job], share: int = 1) -> Case:
        """`job` reads one part in `share` of its matrix."""
        regions = [Region(**job(self, matrix)) for matrix in matrices(item)]
        num_bytes = sum(matrix.num_bytes for matrix in matrices(item)) // share
        return Case(name, regions, self.plain(num_bytes), num_bytes)

    def plain(self, num_bytes: int) -> Region:
        return Region(
            source=self.source, source_offset=0, source_stride=0, rows=1, row_bytes=num_bytes, target=self.target
        )


def without_checksums(job: Callable[[Buffers, Matrix], Job]) -> Callable[[Buffers, Matrix], Job]:
    return lambda buffers, matrix: job(buffers, matrix) | {"read_place": None, "live_place": None}


def whole(buffers: Buffers, matrix: Matrix) -> Job:
    return Job(
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


def column_slice(buffers: Buffers, matrix: Matrix) -> Job:
    width = matrix.row_bytes // RANKS
    return Job(
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


def narrowed(buffers: Buffers, matrix: Matrix) -> Job:
    width = matrix.row_bytes // 2
    return Job(
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


def transposed(buffers: Buffers, matrix: Matrix) -> Job:
    width = matrix.rows * matrix.item
    return Job(
        source=buffers.source,
        source_offset=matrix.offset,
        source_stride=matrix.row_bytes,
        rows=matrix.rows,
        row_bytes=matrix.row_bytes,
        target=buffers.target,
        target_offset=matrix.offset,
        target_stride=width,
        transpose_item=matrix.item,
        read_place=Place(0, matrix.row_bytes, matrix.num_bytes),
        live_place=Place(0, width, matrix.num_bytes),
    )


def native_rows(runs: int) -> list[Row]:
    buffers, threads = Buffers(), config.num_copy_threads()
    copied = buffers.case("copy + checksums", 2, whole)
    kinds = [
        ("column slices", 2, column_slice, RANKS, 0.6),
        ("cast F32 to BF16", 4, narrowed, 1, 0.6),
        ("transpose F32", 4, transposed, 1, 0.35),
        ("transpose BF16", 2, transposed, 1, 0.35),
    ]
    bare = [
        (buffers.case(name, item, without_checksums(job), share), wanted) for name, item, job, share, wanted in kinds
    ]
    full = [buffers.case(f"{name} + checksums", item, job, share) for name, item, job, share, _ in kinds]
    for _ in range(runs):
        for case in [copied, *(case for case, _ in bare), *full]:
            case.measure(threads)
    plain = copied.plain_median
    first = at_most(copied.name, copied.median, "s", "plain copy", plain, 1.2 * plain, "<= 1.2 passes")
    return [first, *(_speed_row(*case) for case in bare), *(_speed_row(case, 0.0) for case in full)]


def _speed_row(case: Case, wanted: float) -> Row:
    """`wanted` 0: for information."""
    speed, limit = (case.num_bytes / 1e9 / seconds for seconds in (case.median, case.plain_median))
    return at_least(
        case.name, speed, "GB/s", "plain copy", limit, wanted * limit, f">= {wanted}" if wanted else "none: to know"
    )
