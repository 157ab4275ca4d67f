"""The plan of one rank: which published bytes become which bytes of its parameters.

Owns the way from a publication and a model to strided 2-D regions, as intersections of boxes: a published part, the
whole published tensor and a rank's parameter are three affine maps from the indices of a *logical* tensor to bytes, so
that splitting, fusing, turning and padding on either side are one case. Two promises: each byte of a parameter is
written by exactly one region, and each published byte is *owned* (counted in receipts) by exactly one region of one
rank. Refuses to know where memory is and who moves it.

All offsets, strides and sizes are in bytes. A plan holds for the manifest it was made from: `layout_digest` says how
tensors are split, not where in a segment they lie.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from fastdeploy_rl.coverage import Coverage, CoverageReport, ParameterSpec, check_coverage
from fastdeploy_rl.dtypes import cast_between, itemsize
from fastdeploy_rl.errors import ConfigurationError, StepFailedError
from fastdeploy_rl.manifest import Manifest, Part, Tensor
from fastdeploy_rl.plan.geometry import Axis, strides_of, strips
from fastdeploy_rl.plan.logical import WHOLE, LogicalTensor, turned
from fastdeploy_rl.plan.plan import AliasSource, Plan, PlannedParameter, PlannedRegion, RegionKind, after_cast
from fastdeploy_rl.plan.stored import Slot, Taken, strips_into, strips_within


def make_plan(manifest: Manifest, specs: Sequence[ParameterSpec], rank: int, num_ranks: int) -> Plan:
    """Plans one rank of `num_ranks`; the model's `specs` have global shapes and are the same on every rank.

    Raises ConfigurationError where the model cannot be split over that many ranks, CoverageError where publication and
    model do not match.
    """
    return _plan_covered(manifest, _covered(manifest, specs, rank, num_ranks), specs, rank, num_ranks)


def _covered(manifest: Manifest, specs: Sequence[ParameterSpec], rank: int, num_ranks: int) -> CoverageReport:
    if not 0 <= rank < num_ranks:
        raise ConfigurationError(f"rank {rank} is none of {num_ranks} ranks")
    check_divisible(specs, num_ranks)
    return check_coverage(manifest, specs)


def _plan_covered(
    manifest: Manifest, covered: CoverageReport, specs: Sequence[ParameterSpec], rank: int, num_ranks: int
) -> Plan:
    parameters = []
    planned: set[str] = set()
    for spec in specs:
        if spec.coverage is Coverage.UPDATED:
            feeds = [covered.sources[needed.name] for needed in spec.logical]
            # Two parameters may take the same published tensor: the first one's bytes count.
            counts = [logical.name not in planned for logical in feeds]
            planned.update(logical.name for logical in feeds)
            parameters.append(_plan_parameter(spec, feeds, counts, rank, num_ranks))
    readings = [_plan_reading(logical) for logical in covered.unused] if rank == 0 else []
    return _total(manifest.layout_digest, parameters, readings, rank, num_ranks)


class LastPlan:
    """Plans one rank of a model again and again, and plans anew only
    where a publication is laid out otherwise than the one before."""

    def __init__(self, specs: Sequence[ParameterSpec], rank: int, num_ranks: int) -> None:
        self._specs, self._rank, self._num_ranks = specs, rank, num_ranks
        self._places: tuple[str, list[tuple[str, tuple[Part, ...]]]] | None = None
        self._has_doubles = False
        self._plan: Plan | None = None

    def make(self, manifest: Manifest) -> Plan:
        """As `make_plan`. Where tied names are published each for itself, whether they agree depends on checksums, and
        is checked each time."""
        places = manifest.layout_digest, [(tensor.name, tensor.parts) for tensor in manifest.tensors]
        if self._plan is not None and places == self._places:
            if self._has_doubles:
                check_coverage(manifest, self._specs)
            return self._plan
        covered = _covered(manifest, self._specs, self._rank, self._num_ranks)
        self._plan = _plan_covered(manifest, covered, self._specs, self._rank, self._num_ranks)
        self._places, self._has_doubles = places, bool(covered.unused)
        return self._plan


def check_divisible(specs: Sequence[ParameterSpec], num_ranks: int) -> None:
    """Raises ConfigurationError that names the first parameter which cannot be split evenly over that many ranks."""
    for spec in specs:
        if spec.shard_axis is None:
            continue
        if not 0 <= spec.shard_axis < len(spec.shape):
            raise ConfigurationError(f"{spec.name}: shard axis {spec.shard_axis} is no axis of {list(spec.shape)}")
        if spec.fused and spec.fused_axis == spec.shard_axis:
            split = [(f"its part {part.name} of {part.size} indices", part.size) for part in spec.fused]
        else:
            size = spec.shape[spec.shard_axis]
            split = [(f"axis {spec.shard_axis} of {list(spec.shape)}", size)]
        for what, size in split:
            if size % num_ranks:
                raise ConfigurationError(
                    f"{spec.name}: {what} does not divide over {num_ranks} ranks; "
                    f"choose a tensor-parallel size that divides {size}"
                )


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
        read_bytes=sum(
            region.rows * region.row_bytes
            for planned in (*parameters, *readings)
            for region in planned.regions
            if region.kind is not RegionKind.ZERO
        ),
    )


# --- the rank's parameter -------------------------------------------------------------------------


def _plan_parameter(
    spec: ParameterSpec, feeds: Sequence[LogicalTensor], counts: Sequence[bool], rank: int, num_ranks: int
) -> PlannedParameter:
    sizes, item = tuple(part.size for part in spec.fused), itemsize(spec.dtype)
    local_shape, slots = _local(
        spec.shape, item, spec.shard_axis, spec.is_transposed, sizes, spec.fused_axis, rank, num_ranks
    )
    written: list[PlannedRegion] = []
    read: list[PlannedRegion] = []
    for slot, logical, is_first in zip(slots, feeds, counts, strict=True):
        owns_read = is_first and (rank == 0 or spec.shard_axis is not None)
        written += _filled(logical, slot, spec, owns_read)
        if spec.vocab_rows is not None and is_first and rank == 0:
            read += _reads(logical, spec.vocab_rows)
    regions = _joined(written)
    why_not = _why_not_alias(feeds, spec, regions)
    return PlannedParameter(
        name=spec.name,
        sources=_stored_names(feeds),
        dtype=spec.dtype,
        local_shape=local_shape,
        num_bytes=prod(local_shape) * item,
        regions=(*regions, *read),
        alias=None if why_not else _alias_source(feeds[0].pieces[0].tensor, regions),
        why_not_alias=why_not,
    )


def _filled(logical: LogicalTensor, slot: Slot, spec: ParameterSpec, owns_read: bool) -> Iterator[PlannedRegion]:
    """All of a slot: what is published, and zeros where a vocabulary is padded."""
    cast = cast_between(logical.dtype, spec.dtype)
    if cast is None:
        raise StepFailedError(f"{spec.name}: no cast from {logical.dtype} to {spec.dtype}")
    if spec.vocab_rows is None:
        yield from _copies(logical, slot, cast, owns_read)
        return
    yield from _copies(logical, _with_tokens(slot, spec.vocab_rows), cast, owns_read)
    yield from _zeros(slot, spec.vocab_rows)


def _plan_reading(logical: LogicalTensor) -> PlannedParameter:
    """All of a published tensor, read and counted by one rank: for those that no parameter takes, such as the second
    name of a tied group that was published under both. They need no home, only a place in the receipt."""
    return PlannedParameter(
        name=logical.name,
        sources=_stored_names([logical]),
        dtype=logical.dtype,
        local_shape=(0,),
        num_bytes=0,
        regions=tuple(_reads(logical, 0)),
        alias=None,
        why_not_alias="no parameter takes it",
    )


def _stored_names(feeds: Sequence[LogicalTensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece.tensor.name for logical in feeds for piece in logical.pieces))


@lru_cache(maxsize=1 << 12)
def _local(
    shape: tuple[int, ...],
    item: int,
    shard_axis: int | None,
    is_transposed: bool,
    sizes: tuple[int, ...],
    fused_axis: int,
    rank: int,
    num_ranks: int,
) -> tuple[tuple[int, ...], tuple[Slot, ...]]:
    """A rank's shape of a parameter, and the slots of the logical tensors that it consists of, in order."""
    local_shape = tuple(n // num_ranks if axis == shard_axis else n for axis, n in enumerate(shape))
    strides = strides_of(local_shape, item)
    slots = []
    offset = 0
    for held in [(*shape[:fused_axis], size, *shape[fused_axis + 1 :]) for size in sizes] or [shape]:
        spans = tuple(
            (rank * (n // num_ranks), (rank + 1) * (n // num_ranks)) if axis == shard_axis else (0, n)
            for axis, n in enumerate(held)
        )
        if is_transposed:
            slots.append(Slot(turned(spans), offset, turned(strides), item))
        else:
            slots.append(Slot(spans, offset, strides, item))
        if sizes:
            start, stop = spans[fused_axis]
            offset += (stop - start) * strides[fused_axis]
    return local_shape, tuple(slots)


def _with_tokens(slot: Slot, vocab_rows: int) -> Slot:
    """The part of the slot that published rows fill."""
    (start, stop), *others = slot.spans
    return slot._replace(spans=((start, max(start, min(stop, vocab_rows))), *others))


# --- regions --------------------------------------------------------------------------------------


def _copies(logical: LogicalTensor, slot: Slot, cast: str, owns_read: bool) -> Iterator[PlannedRegion]:
    """What of the published tensor goes into the slot."""
    for piece in logical.pieces:
        if piece.axis != WHOLE and (
            piece.stop <= slot.spans[piece.axis][0] or piece.start >= slot.spans[piece.axis][1]
        ):
            continue  # most runs of an interleaved tensor belong to other ranks
        for taken in strips_into(slot, piece):
            yield _region(piece.tensor, taken, cast, owns_read, RegionKind.COPY)


def _reads(logical: LogicalTensor, first_row: int) -> Iterator[PlannedRegion]:
    """All published indices from `first_row` of axis 0 on (0: all of a tensor of any shape), owned and not written."""
    spans = tuple((first_row if axis == 0 else 0, size) for axis, size in enumerate(logical.shape))
    for piece in logical.pieces:
        for taken in strips_within(spans, piece):
            yield _region(piece.tensor, taken, "none", True, RegionKind.READ)


def _region(tensor: Tensor, taken: Taken, cast: str, owns_read: bool, kind: RegionKind) -> PlannedRegion:
    part = tensor.parts[taken.part]
    return PlannedRegion(
        tensor.name,
        part.segment,
        part.offset + taken.source,
        taken.source_stride,
        taken.rows,
        taken.row_bytes,
        taken.target,
        taken.target_stride,
        cast,
        taken.whole,
        taken.whole_stride,
        owns_read,
        taken.transpose_item,
        kind,
    )


def _zeros(slot: Slot, vocab_rows: int) -> Iterator[PlannedRegion]:
    """The rows of a padded vocabulary that carry no token. One row of zero bytes is enough to fill them all."""
    first, stop = max(slot.spans[0][0], vocab_rows), slot.spans[0][1]
    sizes = [stop - first, *(stop - start for start, stop in slot.spans[1:])]
    if min(sizes) <= 0:
        return
    offset = slot.offset + (first - slot.spans[0][0]) * slot.strides[0]
    for strip in strips(tuple(map(Axis, sizes, slot.strides, slot.strides, slot.strides)), slot.item, slot.item):
        rows, row_bytes, stride = strip.rows, strip.width * slot.item, strip.target_stride
        if rows == 1 and row_bytes > slot.strides[0] > slot.item:
            # All rows in one: apart, they need only one of them to copy from.
            rows, row_bytes, stride = row_bytes // slot.strides[0], slot.strides[0], slot.strides[0]
        yield PlannedRegion(
            tensor="",
            segment=0,
            source_offset=0,
            source_stride=0,
            rows=rows,
            row_bytes=row_bytes,
            target_offset=offset + strip.target,
            target_stride=stride,
            cast="none",
            read_offset=0,
            read_stride=0,
            owns_read=False,
            kind=RegionKind.ZERO,
        )


def _joined(regions: list[PlannedRegion]) -> list[PlannedRegion]:
    """In the order of the target, with neighbours joined that go on from each other in source, whole and target."""
    regions.sort(key=lambda region: region.target_offset)
    joined: list[PlannedRegion] = []
    for region in regions:
        before = joined[-1] if joined else None
        if before is not None and _goes_on(before, region):
            joined[-1] = _widened(before, region.row_bytes)
        else:
            joined.append(region)
    return joined


def _goes_on(before: PlannedRegion, after: PlannedRegion) -> bool:
    """Whether each row of `after` begins where the same row of `before` ends, on every side."""
    if (before.tensor, before.segment, before.rows, before.owns_read) != (
        after.tensor,
        after.segment,
        after.rows,
        after.owns_read,
    ):
        return False
    if before.kind is not RegionKind.COPY or after.kind is not RegionKind.COPY:
        return False
    if before.transpose_item or after.transpose_item:
        return False
    strides = [
        (region.source_stride, region.read_stride, region.target_stride)
        for region in (before, after)
        if region.rows > 1
    ]
    return (
        after.source_offset == before.source_offset + before.row_bytes
        and after.read_offset == before.read_offset + before.row_bytes
        and after.target_offset == before.target_offset + after_cast(before.row_bytes, before.cast)
        and strides[:1] == strides[1:]
    )


def _widened(region: PlannedRegion, more_bytes: int) -> PlannedRegion:
    """With longer rows; one long row where they now follow each other on every side."""
    row_bytes = region.row_bytes + more_bytes
    target_bytes = after_cast(row_bytes, region.cast)
    strides = (region.source_stride, region.read_stride, region.target_stride)
    rows = region.rows
    if strides == (row_bytes, row_bytes, target_bytes):
        row_bytes, target_bytes, rows = row_bytes * rows, target_bytes * rows, 1
    if rows > 1:
        return region._replace(row_bytes=row_bytes)
    return region._replace(
        rows=1, row_bytes=row_bytes, source_stride=row_bytes, read_stride=row_bytes, target_stride=target_bytes
    )


# --- aliases --------------------------------------------------------------------------------------


def _why_not_alias(feeds: Sequence[LogicalTensor], spec: ParameterSpec, regions: Sequence[PlannedRegion]) -> str:
    dtypes = dict.fromkeys(logical.dtype for logical in feeds if logical.dtype != spec.dtype)
    if dtypes:
        return f"dtype {', '.join(dtypes)} -> {spec.dtype}"
    if any(region.kind is RegionKind.ZERO for region in regions):
        return "padded with rows of zero"
    if any(region.transpose_item for region in regions):
        return "transposed"
    if len(regions) > 1:
        return f"gathered from {len(regions)} published regions"
    if regions and regions[0].rows > 1 and regions[0].source_stride != regions[0].row_bytes:
        return "slice of columns is not contiguous"
    if regions and regions[0].source_offset % itemsize(spec.dtype):
        return f"begins at byte {regions[0].source_offset}, which no element of {spec.dtype} can"
    return ""


def _alias_source(tensor: Tensor, regions: Sequence[PlannedRegion]) -> AliasSource:
    if regions:
        return AliasSource(regions[0].segment, regions[0].source_offset)
    return AliasSource(tensor.parts[0].segment, tensor.parts[0].offset)
