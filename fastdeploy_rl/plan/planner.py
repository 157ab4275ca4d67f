"""The plan of one rank: which published bytes become which bytes of its parameters.

Owns the geometry (slices of C-contiguous tensors as strided 2-D regions) and two promises: each byte of a parameter is
written by exactly one region, and each byte of a published tensor that some parameter takes is *owned* (counted in
receipts) by exactly one region of one rank. Refuses to know where memory is and who moves it.

All offsets, strides and sizes are in bytes. A plan holds for the manifest it was made from: `layout_digest` says how
tensors are split, not where in a segment they lie.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from fastdeploy_rl.coverage import Coverage, ParameterSpec, check_coverage
from fastdeploy_rl.dtypes import cast_between, itemsize
from fastdeploy_rl.errors import ConfigurationError, StepFailedError
from fastdeploy_rl.manifest import Manifest, Part, Tensor


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """`rows` rows of `row_bytes` (counted in the source) of one part of a published tensor.

    Source places are inside the segment, target places inside this rank's parameter (rows after `cast`). `read_*`:
    where the rows lie in the whole published tensor, for its checksum. `owns_read`: this rank counts these source bytes
    in the receipt; every rank that needs them reads them all the same.
    """

    tensor: str
    segment: int
    source_offset: int
    source_stride: int
    rows: int
    row_bytes: int
    target_offset: int
    target_stride: int
    cast: str
    read_offset: int
    read_stride: int
    owns_read: bool


@dataclass(frozen=True, slots=True)
class AliasSource:
    """Published bytes that are the parameter as they are: from `offset` of that segment on."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter of this rank. `source`: the tensor of the manifest that feeds
    it; `dtype` and `local_shape`: the engine's; `alias`: where the published bytes
    can be used in place, else None and `why_not_alias` says why in words."""

    name: str
    source: str
    dtype: str
    local_shape: tuple[int, ...]
    num_bytes: int
    regions: tuple[PlannedRegion, ...]
    alias: AliasSource | None
    why_not_alias: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does. Tied parameters have no entry: they share the one they
    are tied to. `readings`: published bytes that no parameter takes, which this rank
    reads and counts so that receipts cover them. `aliased_bytes` and `copied_bytes` count parameter bytes (where
    aliases may be used), `read_bytes` all published bytes that the regions read."""

    rank: int
    num_ranks: int
    layout_digest: str
    parameters: tuple[PlannedParameter, ...]
    readings: tuple[PlannedParameter, ...]
    aliased_bytes: int
    copied_bytes: int
    read_bytes: int


def make_plan(manifest: Manifest, specs: Sequence[ParameterSpec], rank: int, num_ranks: int) -> Plan:
    """Plans one rank of `num_ranks`; the model's `specs` have global shapes and are the same on every rank.

    Raises ConfigurationError where the model cannot be split over that many ranks, CoverageError where publication and
    model do not match.
    """
    if not 0 <= rank < num_ranks:
        raise ConfigurationError(f"rank {rank} is none of {num_ranks} ranks")
    check_divisible(specs, num_ranks)
    sources = check_coverage(manifest, specs).sources
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    parameters = []
    planned: set[str] = set()
    for spec in specs:
        if spec.coverage is Coverage.UPDATED:
            tensor = tensors[sources[spec.name]]
            # Two parameters may take the same published tensor: the first one's bytes count.
            counts = tensor.name not in planned and (rank == 0 or spec.shard_axis is not None)
            planned.add(tensor.name)
            parameters.append(_plan_parameter(tensor, spec, rank, num_ranks, counts))
    readings = [_plan_reading(tensor) for tensor in manifest.tensors if tensor.name not in planned] if rank == 0 else []
    return _total(manifest.layout_digest, parameters, readings, rank, num_ranks)


class LastPlan:
    """Plans one rank of a model again and again, and plans anew only
    where a publication is laid out otherwise than the one before."""

    def __init__(self, specs: Sequence[ParameterSpec], rank: int, num_ranks: int) -> None:
        self._specs, self._rank, self._num_ranks = specs, rank, num_ranks
        self._places: tuple[str, list[tuple[str, tuple[Part, ...]]]] | None = None
        self._plan: Plan | None = None

    def make(self, manifest: Manifest) -> Plan:
        """As `make_plan`. Whether tied names agree depends on checksums, so coverage is checked each time."""
        places = manifest.layout_digest, [(tensor.name, tensor.parts) for tensor in manifest.tensors]
        if self._plan is not None and places == self._places:
            check_coverage(manifest, self._specs)
            return self._plan
        self._plan = make_plan(manifest, self._specs, self._rank, self._num_ranks)
        self._places = places
        return self._plan


def _plan_reading(tensor: Tensor) -> PlannedParameter:
    """All of a published tensor, read and counted whole by one rank: for tensors that no parameter takes, such as the
    second name of a tied group that was published under both. They need no home, only a place in the receipt."""
    spec = ParameterSpec(tensor.name, tensor.dtype, tensor.shape, None)
    return _plan_parameter(tensor, spec, 0, 1, True)


def check_divisible(specs: Sequence[ParameterSpec], num_ranks: int) -> None:
    """Raises ConfigurationError that names the first parameter which cannot be split evenly over that many ranks."""
    for spec in specs:
        if spec.shard_axis is None:
            continue
        if not 0 <= spec.shard_axis < len(spec.shape):
            raise ConfigurationError(f"{spec.name}: shard axis {spec.shard_axis} is no axis of {list(spec.shape)}")
        if spec.shape[spec.shard_axis] % num_ranks:
            raise ConfigurationError(
                f"{spec.name}: axis {spec.shard_axis} of {list(spec.shape)} does not divide over {num_ranks} ranks; "
                f"choose a tensor-parallel size that divides {spec.shape[spec.shard_axis]}"
            )


def check_plan(plan: Plan) -> None:
    """Raises StepFailedError unless every byte of every parameter is written by exactly one region."""
    for parameter in plan.parameters:
        if not _is_tiled(parameter):
            raise StepFailedError(f"plan of rank {plan.rank}: {parameter.name} is not written exactly once")


def _is_tiled(parameter: PlannedParameter) -> bool:
    starts, stops = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for region in parameter.regions:
        rows = region.target_offset + region.target_stride * np.arange(region.rows, dtype=np.int64)
        starts.append(rows)
        stops.append(rows + _target_row_bytes(region))
    start, stop = np.sort(np.concatenate(starts)), np.sort(np.concatenate(stops))
    return np.array_equal(np.append(start, parameter.num_bytes), np.insert(stop, 0, 0))


def _target_row_bytes(region: PlannedRegion) -> int:
    return {"none": region.row_bytes, "F32_BF16": region.row_bytes // 2, "BF16_F32": region.row_bytes * 2}[region.cast]


def _total(
    layout_digest: str,
    parameters: Sequence[PlannedParameter],
    readings: Sequence[PlannedParameter],
    rank: int,
    num_ranks: int,
) -> Plan:
    aliased = sum(parameter.num_bytes for parameter in parameters if parameter.alias)
    return Plan(
        rank=rank,
        num_ranks=num_ranks,
        layout_digest=layout_digest,
        parameters=tuple(parameters),
        readings=tuple(readings),
        aliased_bytes=aliased,
        copied_bytes=sum(parameter.num_bytes for parameter in parameters) - aliased,
        read_bytes=sum(region.rows * region.row_bytes for parameter in parameters for region in parameter.regions),
    )


class _Window(NamedTuple):
    """A slice [start, stop) of one axis; axis -1: everything."""

    axis: int
    start: int
    stop: int

    def span(self, axis: int, size: int) -> tuple[int, int]:
        return (self.start, self.stop) if axis == self.axis else (0, size)


_WHOLE = _Window(-1, 0, 0)


def _plan_parameter(tensor: Tensor, spec: ParameterSpec, rank: int, num_ranks: int, counts: bool) -> PlannedParameter:
    local = _local_window(spec, rank, num_ranks)
    local_shape = tuple(stop - start for start, stop in (local.span(axis, n) for axis, n in enumerate(spec.shape)))
    num_bytes = prod(local_shape) * itemsize(spec.dtype)
    regions = tuple(_regions(tensor, spec, local, counts)) if num_bytes else ()
    why_not = _why_not_alias(tensor, spec, regions)
    return PlannedParameter(
        name=spec.name,
        source=tensor.name,
        dtype=spec.dtype,
        local_shape=local_shape,
        num_bytes=num_bytes,
        regions=regions,
        alias=None if why_not else _alias_source(tensor, regions),
        why_not_alias=why_not,
    )


def _local_window(spec: ParameterSpec, rank: int, num_ranks: int) -> _Window:
    if spec.shard_axis is None:
        return _WHOLE
    share = spec.shape[spec.shard_axis] // num_ranks
    return _Window(spec.shard_axis, rank * share, (rank + 1) * share)


def _why_not_alias(tensor: Tensor, spec: ParameterSpec, regions: Sequence[PlannedRegion]) -> str:
    if tensor.dtype != spec.dtype:
        return f"dtype {tensor.dtype} -> {spec.dtype}"
    if len(regions) > 1:
        return f"gathered from {len(regions)} published regions"
    if regions and regions[0].rows > 1 and regions[0].source_stride != regions[0].row_bytes:
        return "slice of columns is not contiguous"
    return ""


def _alias_source(tensor: Tensor, regions: Sequence[PlannedRegion]) -> AliasSource:
    if regions:
        return AliasSource(regions[0].segment, regions[0].source_offset)
    return AliasSource(tensor.parts[0].segment, tensor.parts[0].offset)


def _regions(tensor: Tensor, spec: ParameterSpec, local: _Window, counts: bool) -> Iterator[PlannedRegion]:
    """What this rank takes of each part, in the order of the parts."""
    cast = cast_between(tensor.dtype, spec.dtype)
    if cast is None:
        raise StepFailedError(f"{spec.name}: no cast from {tensor.dtype} to {spec.dtype}")
    size, target_size = itemsize(tensor.dtype), itemsize(spec.dtype)
    for part in tensor.parts:
        held = _held_window(tensor, part)
        for rows, width, source, target, whole in _strips(tensor.shape, held, local):
            yield PlannedRegion(
                tensor=tensor.name,
                segment=part.segment,
                source_offset=part.offset + source.offset * size,
                source_stride=source.stride * size,
                rows=rows,
                row_bytes=width * size,
                target_offset=target.offset * target_size,
                target_stride=target.stride * target_size,
                cast=cast,
                read_offset=whole.offset * size,
                read_stride=whole.stride * size,
                owns_read=counts,
            )


def _held_window(tensor: Tensor, part: Part) -> _Window:
    return _WHOLE if tensor.shard_axis is None else _Window(tensor.shard_axis, part.start, part.stop)


class _Rows(NamedTuple):
    """Where the first row of a strip begins in one layout, and how far apart its rows are; in elements."""

    offset: int
    stride: int


class _Strip(NamedTuple):
    """Equally spaced rows of `width` elements that source, target and the whole tensor all hold as rows."""

    rows: int
    width: int
    source: _Rows
    target: _Rows
    whole: _Rows


def _strips(shape: tuple[int, ...], held: _Window, local: _Window) -> Iterator[_Strip]:
    """The intersection of two windows of a tensor as strips.

    At most two axes are cut. Behind the last cut everything is contiguous in all
    three layouts: that is the row. Rows are equally spaced as far out as the other
    cut axis reaches; beyond it (only 3-D tensors and up) each index is a strip.
    """
    shape = shape or (1,)
    cuts = sorted({w.axis for w in (held, local) if w.axis >= 0 and (w.start, w.stop) != (0, shape[w.axis])})
    last = cuts[-1] if cuts else 0
    first = cuts[0] if len(cuts) == 2 else None
    inner = prod(shape[last + 1 :])
    low, high = _overlap(last, shape[last], held, local)
    first_low, first_high = (0, 1) if first is None else _overlap(first, shape[first], held, local)
    outer = 1 if first is None else prod(shape[:first])
    between = prod(shape[0 if first is None else first + 1 : last])
    rows, width = max(first_high - first_low, 0) * between, max(high - low, 0) * inner
    if not rows or not width:
        return

    def place(window: _Window, index: int) -> _Rows:
        start, stop = window.span(last, shape[last])
        first_start, first_stop = (0, 1) if first is None else window.span(first, shape[first])
        stride = (stop - start) * inner
        row = (index * (first_stop - first_start) + first_low - first_start) * between
        return _Rows(row * stride + (low - start) * inner, stride if rows > 1 else width)

    for index in range(outer):
        yield _Strip(rows, width, place(held, index), place(local, index), place(_WHOLE, index))


def _overlap(axis: int, size: int, held: _Window, local: _Window) -> tuple[int, int]:
    held_start, held_stop = held.span(axis, size)
    local_start, local_stop = local.span(axis, size)
    return max(held_start, local_start), min(held_stop, local_stop)
