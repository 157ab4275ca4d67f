"""What every plan must keep, checked from the outside: each byte written once, each published byte counted once.

Owns the two proofs. Refuses to know how plans are made: it looks at their regions only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy_rl.errors import StepFailedError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.plan import Plan, PlannedRegion, RegionKind, after_cast


def check_plan(plan: Plan) -> None:
    """Raises StepFailedError unless every byte of every parameter is written by exactly one region."""
    for parameter in plan.parameters:
        written = [_rows_written(region) for region in parameter.regions if region.kind is not RegionKind.READ]
        if not _are_tiles(written, parameter.num_bytes):
            raise StepFailedError(f"plan of rank {plan.rank}: {parameter.name} is not written exactly once")


def check_reads(manifest: Manifest, plans: Sequence[Plan]) -> None:
    """Raises StepFailedError unless every published byte is owned by exactly one region of the ranks' plans together,
    read from where it lies. `plans`: those of all ranks."""
    owned: dict[str, list[PlannedRegion]] = {tensor.name: [] for tensor in manifest.tensors}
    for plan in plans:
        for planned in (*plan.parameters, *plan.readings):
            for region in planned.regions:
                if region.owns_read:
                    owned[region.tensor].append(region)
    for tensor in manifest.tensors:
        if not _are_tiles([_rows_read(region) for region in owned[tensor.name]], tensor.num_bytes):
            raise StepFailedError(f"plans of {len(plans)} ranks: {tensor.name} is not read and counted exactly once")


class _Rows(NamedTuple):
    """`num_rows` rows of `width` bytes, `stride` apart from `offset` on."""

    offset: int
    stride: int
    num_rows: int
    width: int


def _rows_read(region: PlannedRegion) -> _Rows:
    return _Rows(region.read_offset, region.read_stride, region.rows, region.row_bytes)


def _rows_written(region: PlannedRegion) -> _Rows:
    if not region.transpose_item:
        width = after_cast(region.row_bytes, region.cast)
        return _Rows(region.target_offset, region.target_stride, region.rows, width)
    count, width = region.row_bytes // region.transpose_item, after_cast(region.transpose_item, region.cast)
    return _Rows(region.target_offset, region.target_stride, count, region.rows * width)


def _are_tiles(rows: Sequence[_Rows], num_bytes: int) -> bool:
    """Whether each byte of that many lies in exactly one row."""
    starts = [row.offset + row.stride * np.arange(row.num_rows, dtype=np.int64) for row in rows if row.width]
    stops = [start + row.width for start, row in zip(starts, (row for row in rows if row.width), strict=True)]
    start = np.sort(np.concatenate([*starts, [num_bytes]]))
    stop = np.sort(np.concatenate([[0], *stops]))
    return np.array_equal(start, stop)
