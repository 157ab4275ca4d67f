"""A plan's regions as native jobs: what is read, copied and summed up in one pass over published bytes.

Owns the translation of a `PlannedRegion` into the native core's `Region`, and the sums that come back. Refuses to know
when it happens and what follows from the sums. Invariant: the sums cover exactly the planned regions, each once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.manifest import Manifest, Tensor
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import PlannedParameter, PlannedRegion


class Sums(NamedTuple):
    """`read`: what this rank counts, by tensor; `live`: what its parameters hold then, by parameter."""

    read: dict[str, Fletcher4]
    live: dict[str, Fletcher4]


def transfer_planned(
    planned: Sequence[PlannedParameter],
    manifest: Manifest,
    segments: Sequence[Mapping],
    homes: dict[str, TensorView],
    num_threads: int,
) -> Sums:
    """Reads all that is planned from `segments` (those of the manifest, in its order), copies what has a home, and sums
    up both sides in the same pass."""
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    jobs = [(parameter, region) for parameter in planned for region in parameter.regions]
    results = transfer(
        [_region(segments, p, region, tensors[region.tensor], homes.get(p.name)) for p, region in jobs], num_threads
    )
    sums = Sums({}, {parameter.name: ZERO for parameter in planned})
    for (parameter, region), (read, live) in zip(jobs, results, strict=True):
        sums.live[parameter.name] = add(sums.live[parameter.name], Fletcher4(*(live or ZERO)))
        if region.owns_read:
            sums.read[region.tensor] = add(sums.read.get(region.tensor, ZERO), Fletcher4(*(read or ZERO)))
    return sums


def _region(
    segments: Sequence[Mapping],
    parameter: PlannedParameter,
    planned: PlannedRegion,
    tensor: Tensor,
    home: TensorView | None,
) -> Region:
    """The job of one planned region: a copy into `home`, or a mere read where there is none."""
    return Region(
        source=segments[planned.segment],
        source_offset=planned.source_offset,
        source_stride=planned.source_stride,
        rows=planned.rows,
        row_bytes=planned.row_bytes,
        target=None if home is None else home.mapping,
        target_offset=0 if home is None else home.offset + planned.target_offset,
        target_stride=0 if home is None else planned.target_stride,
        cast=planned.cast,
        read_place=Place(planned.read_offset, planned.read_stride, tensor.num_bytes) if planned.owns_read else None,
        live_place=Place(planned.target_offset, planned.target_stride, parameter.num_bytes),
    )
