"""A plan's regions as native jobs: what is read, copied and summed up in one pass over published bytes.

Owns the translation of a `PlannedRegion` into the native core's `Region`, and the sums that come back. Refuses to know
when it happens and what follows from the sums. Invariant: the sums cover exactly the planned regions, each once.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fastdeploy_rl._native import Mapping, Place, Region, transfer
from fastdeploy_rl.checksum import ZERO, Fletcher4, add
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.plan import PlannedParameter, PlannedRegion, RegionKind
from fastdeploy_rl.update.pace import Pace, in_pieces


class Sums(NamedTuple):
    """`read`: what this rank counts, by tensor; `live`: what its parameters hold then, by parameter."""

    read: dict[str, Fletcher4]
    live: dict[str, Fletcher4]


def transfer_arriving(
    batches: Iterable[Sequence[PlannedParameter]],
    manifest: Manifest,
    segments: Sequence[Mapping],
    homes: dict[str, TensorView],
    num_threads: int,
    pace: Pace | None = None,
) -> Sums:
    """`transfer_planned` of each batch as soon as it is there, at that pace; no parameter may come twice."""
    sums, totals = Sums({}, {}), _totals(manifest)
    for planned in _pieces(batches):
        begun = time.monotonic()
        found = _transferred(planned, totals, segments, homes, num_threads)
        if pace is not None:
            pace.rest(time.monotonic() - begun)
        sums.live.update(found.live)
        sums.read.update((name, add(sums.read.get(name, ZERO), read)) for name, read in found.read.items())
    return sums


def _pieces(batches: Iterable[Sequence[PlannedParameter]]) -> Iterator[Sequence[PlannedParameter]]:
    for batch in batches:
        yield from in_pieces(batch, lambda parameter: parameter.num_bytes)


def copy_arriving(
    batches: Iterable[Sequence[PlannedParameter]],
    segments: Sequence[Mapping],
    homes: dict[str, TensorView],
    num_threads: int,
) -> None:
    """Copies what comes to its home: no sums, so nothing is known of what was copied."""
    for planned in batches:
        jobs = [(p, region) for p in planned for region in p.regions if region.kind is RegionKind.COPY]
        native = [_region(segments, p, region, None, homes[p.name]) for p, region in jobs]
        native += _zero_fills(planned, homes)
        try:
            transfer(native, num_threads)
        finally:
            native.clear()


def transfer_planned(
    planned: Sequence[PlannedParameter],
    manifest: Manifest,
    segments: Sequence[Mapping],
    homes: dict[str, TensorView],
    num_threads: int,
) -> Sums:
    """Reads all that is planned from `segments` (those of the manifest, in its order), copies what has a home, and sums
    up both sides in the same pass. Zeroes the padding of what has a home: zero bytes add nothing to any sum."""
    return _transferred(planned, _totals(manifest), segments, homes, num_threads)


def _totals(manifest: Manifest) -> dict[str, int]:
    """Bytes of whole tensors. Worked out once for all batches of a version, of which there may be as many."""
    return {tensor.name: tensor.num_bytes for tensor in manifest.tensors}


def _transferred(
    planned: Sequence[PlannedParameter],
    totals: dict[str, int],
    segments: Sequence[Mapping],
    homes: dict[str, TensorView],
    num_threads: int,
) -> Sums:
    jobs = [(p, r) for p in planned for r in p.regions if r.kind is not RegionKind.ZERO]
    native = [_region(segments, p, region, totals, homes.get(p.name)) for p, region in jobs]
    native += _zero_fills(planned, homes)
    sums = Sums({}, {parameter.name: ZERO for parameter in planned})
    try:
        results = transfer(native, num_threads)
    finally:
        native.clear()  # a failure's frames must not keep views of published memory alive
    for (parameter, region), (read, live) in zip(jobs, results[: len(jobs)], strict=True):
        if live is not None:
            sums.live[parameter.name] = add(sums.live[parameter.name], Fletcher4(*live))
        if region.owns_read:
            sums.read[region.tensor] = add(sums.read.get(region.tensor, ZERO), Fletcher4(*(read or ZERO)))
    return sums


def _region(
    segments: Sequence[Mapping],
    parameter: PlannedParameter,
    planned: PlannedRegion,
    totals: dict[str, int] | None,
    home: TensorView | None,
) -> Region:
    """The job of one planned region: a copy into `home`, or a mere read where there is none or nothing to write.
    `totals`: bytes of whole tensors; None sums nothing up."""
    is_read = planned.kind is RegionKind.READ
    target = None if is_read else home
    has_live = totals is not None and not is_read
    return Region(
        source=segments[planned.segment],
        source_offset=planned.source_offset,
        source_stride=planned.source_stride,
        rows=planned.rows,
        row_bytes=planned.row_bytes,
        target=None if target is None else target.mapping,
        target_offset=0 if target is None else target.offset + planned.target_offset,
        target_stride=0 if target is None else planned.target_stride,
        cast=planned.cast,
        read_place=Place(planned.read_offset, planned.read_stride, totals[planned.tensor])
        if totals is not None and planned.owns_read
        else None,
        live_place=Place(planned.target_offset, planned.target_stride, parameter.num_bytes) if has_live else None,
        transpose_item=planned.transpose_item,
    )


def _zero_fills(planned: Sequence[PlannedParameter], homes: dict[str, TensorView]) -> list[Region]:
    """All from one row of zero bytes, as long as the longest that is needed."""
    fills = [
        (homes[parameter.name], region)
        for parameter in planned
        for region in parameter.regions
        if region.kind is RegionKind.ZERO and parameter.name in homes
    ]
    zeros = bytes(max((region.row_bytes for _, region in fills), default=0))
    return [
        Region(
            source=zeros,
            source_offset=0,
            source_stride=0,
            rows=region.rows,
            row_bytes=region.row_bytes,
            target=home.mapping,
            target_offset=home.offset + region.target_offset,
            target_stride=region.target_stride,
        )
        for home, region in fills
    ]
