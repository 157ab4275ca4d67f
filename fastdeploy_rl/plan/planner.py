"""The plan of one rank: which published bytes become which bytes of its parameters.

Owns the way from a publication and a model to strided 2-D regions, as intersections of boxes: a published part, the
whole published tensor and a rank's parameter are three affine maps from the indices of a *logical* tensor to bytes, so
that splitting, fusing, turning and padding on either side are one case. Two promises: each byte of a parameter is
written by exactly one region, and each published byte is *owned* (counted in receipts) by exactly one region of one
rank. Refuses to know where memory is and who moves it.

All offsets, strides and sizes are in bytes. A plan holds for the manifest it was made from: `layout_digest` says how
tensors are split, not where in a segment they lie.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from operator import itemgetter, mul
from typing import NamedTuple

import numpy as np

from fastdeploy_rl.coverage import Coverage, ParameterSpec, check_coverage
from fastdeploy_rl.dtypes import cast_between, itemsize
from fastdeploy_rl.errors import ConfigurationError, StepFailedError
from fastdeploy_rl.manifest import Manifest, Part, Tensor
from fastdeploy_rl.plan.geometry import Axis, strides_of, strips
from fastdeploy_rl.plan.logical import WHOLE, LogicalTensor, Piece, turned, turned_axis


class RegionKind(Enum):
    """What a region does."""

    COPY = "copy"
    """brings published bytes into the parameter"""
    ZERO = "zero"
    """fills target rows with zero bytes (the padding of a vocabulary); nothing published is read"""
    READ = "read"
    """reads published bytes that no parameter takes, so that receipts cover them; nothing is written"""


class PlannedRegion(NamedTuple):
    """`rows` rows of `row_bytes` (counted in the source) of one part of a published tensor.

    Source places are inside the segment, target places inside this rank's parameter (after `cast`). `read_*`: where the
    rows lie in the whole published tensor, for its checksum. `owns_read`: this rank counts these source bytes in the
    receipt; every rank that needs them reads them all the same. `transpose_item`: 0, or bytes of a source element: then
    the target has row_bytes / transpose_item rows, `target_stride` apart, of `rows` elements each.
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
    transpose_item: int = 0
    kind: RegionKind = RegionKind.COPY


@dataclass(frozen=True, slots=True)
class AliasSource:
    """Published bytes that are the parameter as they are: from `offset` of that segment on."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter of this rank. `sources`: the tensors of the manifest that feed it;
    `dtype` and `local_shape`: the engine's; `alias`: where the published bytes
    can be used in place, else None and `why_not_alias` says why in words."""

    name: str
    sources: tuple[str, ...]
    dtype: str
    local_shape: tuple[int, ...]
    num_bytes: int
    regions: tuple[PlannedRegion, ...]
    alias: AliasSource | None
    why_not_alias: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank does. Tied parameters have no entry: they share the one they
    are tied to. `readings`: published tensors that no parameter takes, which this rank
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
    covered = check_coverage(manifest, specs)
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
        width = _after_cast(region.row_bytes, region.cast)
        return _Rows(region.target_offset, region.target_stride, region.rows, width)
    count, width = region.row_bytes // region.transpose_item, _after_cast(region.transpose_item, region.cast)
    return _Rows(region.target_offset, region.target_stride, count, region.rows * width)


def _after_cast(num_bytes: int, cast: str) -> int:
    if cast == "none":
        return num_bytes
    source, target = cast.split("_")
    return num_bytes // itemsize(source) * itemsize(target)


def _are_tiles(rows: Sequence[_Rows], num_bytes: int) -> bool:
    """Whether each byte of that many lies in exactly one row."""
    starts = [row.offset + row.stride * np.arange(row.num_rows, dtype=np.int64) for row in rows if row.width]
    stops = [start + row.width for start, row in zip(starts, (row for row in rows if row.width), strict=True)]
    start = np.sort(np.concatenate([*starts, [num_bytes]]))
    stop = np.sort(np.concatenate([[0], *stops]))
    return np.array_equal(start, stop)


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

Spans = tuple[tuple[int, int], ...]
"""[start, stop) along each axis of a logical tensor."""


class _Slot(NamedTuple):
    """Where this rank's share of a logical tensor lies inside its parameter:
    byte `offset` + sum over axes of (index - start of its span) * stride."""

    spans: Spans
    offset: int
    strides: tuple[int, ...]
    item: int


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


def _filled(logical: LogicalTensor, slot: _Slot, spec: ParameterSpec, owns_read: bool) -> Iterator[PlannedRegion]:
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
) -> tuple[tuple[int, ...], tuple[_Slot, ...]]:
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
            slots.append(_Slot(turned(spans), offset, turned(strides), item))
        else:
            slots.append(_Slot(spans, offset, strides, item))
        if sizes:
            start, stop = spans[fused_axis]
            offset += (stop - start) * strides[fused_axis]
    return local_shape, tuple(slots)


def _with_tokens(slot: _Slot, vocab_rows: int) -> _Slot:
    """The part of the slot that published rows fill."""
    (start, stop), *others = slot.spans
    return slot._replace(spans=((start, max(start, min(stop, vocab_rows))), *others))


# --- the published side ---------------------------------------------------------------------------


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


class _Taken(NamedTuple):
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


def _stored(piece: Piece) -> _Stored:
    tensor = piece.tensor
    cuts = tuple([(part.start, part.stop) for part in tensor.parts])
    return _Stored(tensor.shape, itemsize(tensor.dtype), tensor.is_transposed, tensor.shard_axis, cuts, *piece[1:])


@lru_cache(maxsize=1 << 14)
def _taken(stored: _Stored, slot: _Slot) -> tuple[_Taken, ...]:
    """What a slot takes of a piece."""
    found: list[_Taken] = []
    for block in _blocks(stored, slot.spans):
        low = [start for start, _ in block.spans]
        inside = [at - start for at, (start, _) in zip(low, slot.spans, strict=True)]
        target = slot.offset + sum(map(mul, inside, slot.strides))
        found += _strips_of(stored, block, slot.strides, slot.item, target)
    return tuple(found)


@lru_cache(maxsize=1 << 10)
def _untaken(stored: _Stored, spans: Spans) -> tuple[_Taken, ...]:
    """What is only read of a piece: as if it went where it is."""
    return tuple(
        taken
        for block in _blocks(stored, spans)
        for taken in _strips_of(stored, block, block.source_strides, stored.item, 0)
    )


def _strips_of(
    stored: _Stored, block: _Block, target_strides: tuple[int, ...], target_item: int, target: int
) -> Iterator[_Taken]:
    sizes = [stop - start for start, stop in block.spans]
    low = [start for start, _ in block.spans]
    source = block.source + sum(map(mul, low, block.source_strides))
    whole = block.whole + sum(map(mul, low, block.whole_strides))
    axes = tuple(map(Axis, sizes, block.source_strides, block.whole_strides, target_strides))
    for strip in strips(axes, stored.item, target_item):
        yield _Taken(
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


# --- regions --------------------------------------------------------------------------------------


def _copies(logical: LogicalTensor, slot: _Slot, cast: str, owns_read: bool) -> Iterator[PlannedRegion]:
    """What of the published tensor goes into the slot."""
    for piece in logical.pieces:
        if piece.axis != WHOLE and (
            piece.stop <= slot.spans[piece.axis][0] or piece.start >= slot.spans[piece.axis][1]
        ):
            continue  # most runs of an interleaved tensor belong to other ranks
        for taken in _taken(_stored(piece), slot):
            yield _region(piece.tensor, taken, cast, owns_read, RegionKind.COPY)


def _reads(logical: LogicalTensor, first_row: int) -> Iterator[PlannedRegion]:
    """All published indices from `first_row` of axis 0 on (0: all of a tensor of any shape), owned and not written."""
    spans = tuple((first_row if axis == 0 else 0, size) for axis, size in enumerate(logical.shape))
    for piece in logical.pieces:
        for taken in _untaken(_stored(piece), spans):
            yield _region(piece.tensor, taken, "none", True, RegionKind.READ)


def _region(tensor: Tensor, taken: _Taken, cast: str, owns_read: bool, kind: RegionKind) -> PlannedRegion:
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


def _zeros(slot: _Slot, vocab_rows: int) -> Iterator[PlannedRegion]:
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
        and after.target_offset == before.target_offset + _after_cast(before.row_bytes, before.cast)
        and strides[:1] == strides[1:]
    )


def _widened(region: PlannedRegion, more_bytes: int) -> PlannedRegion:
    """With longer rows; one long row where they now follow each other on every side."""
    row_bytes = region.row_bytes + more_bytes
    target_bytes = _after_cast(row_bytes, region.cast)
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
    return ""


def _alias_source(tensor: Tensor, regions: Sequence[PlannedRegion]) -> AliasSource:
    if regions:
        return AliasSource(regions[0].segment, regions[0].source_offset)
    return AliasSource(tensor.parts[0].segment, tensor.parts[0].offset)
