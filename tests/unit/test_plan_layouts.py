"""Any trainer's layout into any engine's: random models, publications and ranks, planned and carried out twice.

The truth is computed with numpy alone, from logical tensors to what each rank must hold. A plan is executed by a slow
interpreter of its regions and by the native core; bytes, live sums and receipts must agree with the truth.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.checksum import ZERO, add, contribution, of_bytes
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.dtypes import numpy_dtype
from fastdeploy_rl.errors import ConfigurationError, StepFailedError
from fastdeploy_rl.manifest import Fused, Manifest, Part, Run, Segment, Tensor, build_manifest, decode, encode
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.plan import AliasSource, Plan, PlannedParameter, PlannedRegion, RegionKind
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.plan.proofs import check_plan, check_reads
from fastdeploy_rl.update.planned_transfer import transfer_planned

Array = NDArray[Any]
FLOATS = ("F32", "F16", "BF16")


# --- values, and how they look in each dtype


def numbers(shape: tuple[int, ...], first: int) -> Array:
    """Whole numbers up to 250: exact in every dtype, so that casts are."""
    return (np.arange(first, first + int(np.prod(shape, dtype=int))) % 251).reshape(shape)


def as_dtype(values: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (np.array(values, np.float32, order="C").view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(numpy_dtype(dtype))


# --- a publication, as a trainer of any kind would make it


@dataclass
class Publication:
    """Tensors in one segment for each part number, every part 512-aligned; `edges` cut `axis` into parts."""

    segments: list[bytearray] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        stored: Array,
        dtype: str,
        *,
        axis: int | None = None,
        edges: tuple[int, ...] = (),
        is_transposed: bool = False,
        fused: Fused | None = None,
    ) -> None:
        data = as_dtype(stored, dtype)
        spans = [(0, 0)] if axis is None else list(pairwise(edges))
        pieces = [data] if axis is None else [data.take(range(*span), axis) for span in spans]
        parts = tuple(
            Part(number, self._append(number, piece.tobytes()), *span)
            for number, (piece, span) in enumerate(zip(pieces, spans, strict=True))
        )
        checksum = of_bytes(data.tobytes()).hex()
        self.tensors.append(Tensor(name, dtype, data.shape, axis, parts, checksum, is_transposed, fused))

    def _append(self, number: int, piece: bytes) -> int:
        while len(self.segments) <= number:
            self.segments.append(bytearray())
        segment = self.segments[number]
        segment.extend(bytes(-len(segment) % 512))
        segment.extend(piece)
        return len(segment) - len(piece)

    @property
    def manifest(self) -> Manifest:
        segments = [Segment("shm", f"arena-{i}", len(data), i, 0) for i, data in enumerate(self.segments)]
        manifest = build_manifest("1.1", "full", segments, self.tensors, self.aliases)
        assert decode(encode(manifest)) == manifest
        return manifest

    def mapped(self) -> list[Mapping]:
        mappings = [Mapping.private(max(len(data), 1)) for data in self.segments]
        for mapping, data in zip(mappings, self.segments, strict=True):
            memoryview(mapping)[: len(data)] = data
        return mappings


# --- the truth: what a rank must hold, from the logical tensors alone


def held_by(spec: ParameterSpec, logical: dict[str, Array], rank: int, num_ranks: int) -> bytes:
    parts = [logical[part.name] for part in spec.fused] or [padded(spec, logical[spec.name])]
    held = [part.swapaxes(-1, -2) if spec.is_transposed else part for part in parts]
    if spec.shard_axis is not None:
        held = [np.split(part, num_ranks, spec.shard_axis)[rank] for part in held]
    return as_dtype(np.concatenate(held, spec.fused_axis) if spec.fused else held[0], spec.dtype).tobytes()


def padded(spec: ParameterSpec, values: Array) -> Array:
    if spec.vocab_rows is None:
        return values
    rows = spec.shape[-1] if spec.is_transposed and len(spec.shape) == 2 else spec.shape[0]
    filled = np.zeros((rows, *values.shape[1:]), values.dtype)
    filled[: spec.vocab_rows] = values[: spec.vocab_rows]
    return filled


# --- a slow interpreter of plans


def execute(parameter: PlannedParameter, segments: list[bytearray]) -> bytes:
    """Also checks that each byte of the parameter is written once."""
    target = np.zeros(parameter.num_bytes, np.uint8)
    written = np.zeros(parameter.num_bytes, int)
    for region in parameter.regions:
        if region.kind is RegionKind.READ:
            continue
        for row, data in enumerate(target_rows(region, segments)):
            start = region.target_offset + row * region.target_stride
            target[start : start + len(data)] = np.frombuffer(data, np.uint8)
            written[start : start + len(data)] += 1
    assert (written == 1).all()
    return target.tobytes()


def target_rows(region: PlannedRegion, segments: list[bytearray]) -> list[bytes]:
    if region.kind is RegionKind.ZERO:
        return [bytes(region.row_bytes)] * region.rows
    rows = source_rows(region, segments)
    if region.transpose_item:
        item = region.transpose_item
        rows = [b"".join(row[at : at + item] for row in rows) for at in range(0, region.row_bytes, item)]
    return [converted(row, region.cast) for row in rows]


def source_rows(region: PlannedRegion, segments: list[bytearray]) -> list[bytes]:
    starts = [region.source_offset + row * region.source_stride for row in range(region.rows)]
    rows = [bytes(segments[region.segment][start : start + region.row_bytes]) for start in starts]
    assert all(len(row) == region.row_bytes for row in rows), "a region leaves its segment"
    return rows


def converted(row: bytes, cast: str) -> bytes:
    if cast == "none":
        return row
    source, target = cast.split("_")
    bits = np.frombuffer(row, numpy_dtype(source))
    values = (bits.astype(np.uint32) << 16).view(np.float32) if source == "BF16" else bits
    return as_dtype(values, target).tobytes()


def sums_read(plans: list[Plan], segments: list[bytearray], manifest: Manifest) -> dict[str, str]:
    """What the ranks' receipts add up to."""
    sums = {tensor.name: ZERO for tensor in manifest.tensors}
    totals = {tensor.name: tensor.num_bytes for tensor in manifest.tensors}
    for plan in plans:
        for region in (region for planned in (*plan.parameters, *plan.readings) for region in planned.regions):
            for row, data in enumerate(source_rows(region, segments) if region.owns_read else ()):
                place = region.read_offset + row * region.read_stride
                sums[region.tensor] = add(sums[region.tensor], contribution(data, place, totals[region.tensor]))
    return {name: value.hex() for name, value in sums.items()}


# --- random cases


@dataclass(frozen=True)
class Case:
    publication: Publication
    specs: list[ParameterSpec]
    logical: dict[str, Array]
    num_ranks: int


def swapped(axis: int, num_axes: int, is_transposed: bool) -> int:
    return 2 * num_axes - 3 - axis if is_transposed and axis >= num_axes - 2 else axis


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = Case(Publication(), [], {}, draw(st.integers(1, 3)))
    for number in range(draw(st.integers(1, 3))):
        draw(st.sampled_from([groups, vocabularies, plain_tensors]))(draw, case, f"w{number}", 1 + 1000 * number)
    return case


def plain_tensors(draw: st.DrawFn, case: Case, name: str, first: int) -> None:
    """A single tensor of up to four axes, cast or not, perhaps empty."""
    shape = draw(st.lists(st.integers(0, 3) | st.just(5), max_size=4))
    shard = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    if shard is not None:
        shape[shard] *= case.num_ranks
    source, target = draw(dtypes())
    values = numbers(tuple(shape), first)
    case.logical[name] = values
    case.specs.append(spec_of(draw, name, values.shape, shard, target))
    publish(draw, case, name, values, source)


def groups(draw: st.DrawFn, case: Case, name: str, first: int) -> None:
    """Several tensors that trainer, engine, both or neither fuse along one axis."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    shard = draw(st.none() | st.integers(0, len(shape) - 1))
    if shard is not None and shard != axis:
        shape[shard] *= case.num_ranks
    unit = case.num_ranks if shard == axis else 1
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]).map(unit.__mul__), min_size=2, max_size=3))
    source, target = draw(dtypes())
    values = {
        f"{name}.{index}": numbers((*shape[:axis], size, *shape[axis + 1 :]), first + 300 * index)
        for index, size in enumerate(sizes)
    }
    case.logical.update(values)
    if draw(st.booleans()):
        case.specs.append(fused_spec(draw, name, values, axis, shard, target))
    else:
        case.specs.extend(spec_of(draw, each, value.shape, shard, target) for each, value in values.items())
    if draw(st.booleans()):
        publish_fused(draw, case, name, values, axis, source)
    else:
        for each, value in values.items():
            publish(draw, case, each, value, source)


def vocabularies(draw: st.DrawFn, case: Case, name: str, first: int) -> None:
    """A padded vocabulary, which trainer and engine pad each in their own way."""
    used, hidden = draw(st.integers(0, 5)), case.num_ranks * draw(st.integers(1, 2))
    held = -(-(used + draw(st.integers(0, 4))) // case.num_ranks) * case.num_ranks
    source, target = draw(dtypes())
    values = numbers((used + draw(st.integers(0, 3)), hidden), first)
    spec = spec_of(draw, name, (held, hidden), draw(st.sampled_from([None, 0, 1])), target)
    case.logical[name] = values
    case.specs.append(ParameterSpec(**{**fields(spec), "vocab_rows": used}))
    publish(draw, case, name, values, source)
    draw(st.sampled_from([nothing, tie, untie]))(draw, case, name, values, source)


def nothing(draw: st.DrawFn, case: Case, name: str, values: Array, dtype: str) -> None:
    """The usual case."""


def untie(draw: st.DrawFn, case: Case, name: str, values: Array, dtype: str) -> None:
    """The trainer ties a second name to the first, the engine holds it on its own, in another way."""
    held, hidden = case.num_ranks * draw(st.integers(0, 3)), values.shape[1]
    used = draw(st.integers(0, min(held, values.shape[0])))
    spec = spec_of(draw, f"{name}.alias", (held, hidden), draw(st.sampled_from([None, 0, 1])), case.specs[-1].dtype)
    case.specs.append(ParameterSpec(**{**fields(spec), "vocab_rows": used}))
    case.logical[spec.name] = values
    case.publication.aliases[spec.name] = name


def tie(draw: st.DrawFn, case: Case, name: str, values: Array, dtype: str) -> None:
    """A second name of the same parameter, which the trainer publishes too or not."""
    case.specs.append(
        ParameterSpec(
            **{**fields(case.specs[-1]), "name": f"{name}.tied", "coverage": Coverage.TIED} | {"tied_to": name}
        )
    )
    if draw(st.booleans()):
        twin = case.publication.tensors[-1]
        cut = cuts(draw, twin.shape)
        stored = values.swapaxes(-1, -2) if twin.is_transposed else values
        case.publication.add(f"{name}.tied", stored, dtype, **cut, is_transposed=twin.is_transposed)


def fields(spec: ParameterSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ParameterSpec.__slots__}


def dtypes() -> st.SearchStrategy[tuple[str, str]]:
    """(published, the engine's)"""
    cast = st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS))
    return cast | st.sampled_from(["F64", "I64", "I32", "I16", "U8"]).map(lambda dtype: (dtype, dtype))


def spec_of(draw: st.DrawFn, name: str, shape: tuple[int, ...], shard: int | None, dtype: str) -> ParameterSpec:
    is_transposed = len(shape) > 1 and draw(st.booleans())
    held = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
    axis = None if shard is None else swapped(shard, len(shape), is_transposed)
    return ParameterSpec(name, dtype, held, axis, is_transposed=is_transposed)


def fused_spec(
    draw: st.DrawFn, name: str, values: dict[str, Array], axis: int, shard: int | None, dtype: str
) -> ParameterSpec:
    spec = spec_of(draw, name, np.concatenate(list(values.values()), axis).shape, shard, dtype)
    parts = tuple(FusedPart(each, value.shape[axis]) for each, value in values.items())
    at = swapped(axis, len(spec.shape), spec.is_transposed)
    return ParameterSpec(**{**fields(spec), "fused": parts, "fused_axis": at})


def publish(draw: st.DrawFn, case: Case, name: str, values: Array, dtype: str) -> None:
    is_transposed = values.ndim > 1 and draw(st.booleans())
    stored = values.swapaxes(-1, -2) if is_transposed else values
    case.publication.add(name, stored, dtype, **cuts(draw, stored.shape), is_transposed=is_transposed)


def publish_fused(draw: st.DrawFn, case: Case, name: str, values: dict[str, Array], axis: int, dtype: str) -> None:
    """Each tensor in runs, the runs of all of them in any order."""
    runs = [
        Run(each, start, stop)
        for each, value in values.items()
        for start, stop in spans(draw(st.lists(st.integers(0, value.shape[axis]), max_size=2)), value.shape[axis])
    ]
    runs = draw(st.permutations(runs))
    stored = np.concatenate([values[run.name].take(range(run.start, run.stop), axis) for run in runs], axis)
    is_transposed = stored.ndim > 1 and draw(st.booleans())
    stored = stored.swapaxes(-1, -2) if is_transposed else stored
    fused = Fused(swapped(axis, stored.ndim, is_transposed), tuple(runs))
    cut = cuts(draw, stored.shape)
    case.publication.add(f"{name}.fused", stored, dtype, **cut, is_transposed=is_transposed, fused=fused)


def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> dict[str, Any]:
    axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
    if axis is None:
        return {}
    inner = draw(st.lists(st.integers(0, shape[axis]), max_size=3))
    return {"axis": axis, "edges": (0, *sorted(inner), shape[axis])}


def spans(inner: list[int], size: int) -> list[tuple[int, int]]:
    edges = [0, *sorted(inner), size]
    return list(pairwise(edges))


# --- the laws


def plans_of(case: Case) -> list[Plan]:
    manifest = case.publication.manifest
    return [make_plan(manifest, case.specs, rank, case.num_ranks) for rank in range(case.num_ranks)]


@settings(deadline=None, max_examples=250)
@given(cases())
def test_every_rank_holds_what_numpy_says_and_receipts_add_up(case: Case) -> None:
    plans, segments, manifest = plans_of(case), case.publication.segments, case.publication.manifest
    check_reads(manifest, plans)
    for plan in plans:
        check_plan(plan)
        for parameter in plan.parameters:
            spec = next(spec for spec in case.specs if spec.name == parameter.name)
            live = held_by(spec, case.logical, plan.rank, case.num_ranks)
            assert execute(parameter, segments) == live
            if parameter.alias is not None and live:
                start = parameter.alias.offset
                assert segments[parameter.alias.segment][start : start + len(live)] == live
    assert sums_read(plans, segments, manifest) == {tensor.name: tensor.checksum for tensor in manifest.tensors}


@settings(deadline=None, max_examples=250)
@given(cases(), st.integers(1, 3))
def test_the_native_core_moves_and_sums_up_what_was_planned(case: Case, num_threads: int) -> None:
    manifest, mapped = case.publication.manifest, case.publication.mapped()
    read = {tensor.name: ZERO for tensor in manifest.tensors}
    for plan in plans_of(case):
        homes = {p.name: TensorView(dirty(p.num_bytes), 0, p.dtype, p.local_shape) for p in plan.parameters}
        planned = [*plan.parameters, *plan.readings]
        sums = transfer_planned(planned, manifest, mapped, homes, num_threads)
        assert transfer_planned(planned, manifest, mapped, {}, num_threads) == sums
        for name, value in sums.read.items():
            read[name] = add(read[name], value)
        for parameter in plan.parameters:
            spec = next(spec for spec in case.specs if spec.name == parameter.name)
            live = held_by(spec, case.logical, plan.rank, case.num_ranks)
            assert homes[parameter.name].numpy().tobytes() == live
            assert sums.live[parameter.name] == of_bytes(live)
    assert {name: value.hex() for name, value in read.items()} == {t.name: t.checksum for t in manifest.tensors}


def dirty(num_bytes: int) -> Mapping:
    """Memory that held something else before."""
    mapping = Mapping.private(max(num_bytes, 1))
    memoryview(mapping)[:] = b"\xaa" * mapping.num_bytes
    return mapping


# --- what is aliased, and why the rest is not


def fused_of(publication: Publication, *runs: Run, axis: int = 1, parts: int | None = None) -> None:
    """One F32 tensor "qk" of two rows, whose columns are these runs."""
    width = sum(run.stop - run.start for run in runs)
    cut: dict[str, Any] = {}
    if parts is not None:
        cut = {"axis": axis, "edges": tuple(range(0, width + 1, width // parts))}
    publication.add("qk", numbers((2, width), 1), "F32", **cut, fused=Fused(axis, runs))


Q, K, Q0, Q1, K0, K1 = (
    *(Run("q", 0, 4), Run("k", 0, 2)),
    *(Run("q", 0, 2), Run("q", 2, 4), Run("k", 0, 1), Run("k", 1, 2)),
)
QK = ParameterSpec("qk_proj", "F32", (2, 6), 1, fused=(FusedPart("q", 4), FusedPart("k", 2)), fused_axis=1)
SPLIT = [ParameterSpec("q", "F32", (2, 4), 1), ParameterSpec("k", "F32", (2, 2), 1)]


def planned(publication: Publication, specs: list[ParameterSpec], rank: int = 0, num_ranks: int = 1) -> Plan:
    return make_plan(publication.manifest, specs, rank, num_ranks)


def test_what_both_sides_fuse_alike_is_one_region_and_an_alias() -> None:
    publication = Publication()
    fused_of(publication, Q, K)
    (parameter,) = planned(publication, [QK]).parameters
    assert (parameter.alias, parameter.sources) == (AliasSource(0, 0), ("qk",))
    assert [(region.rows, region.row_bytes) for region in parameter.regions] == [(1, 48)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_publication_fused_for_each_rank_is_aliased_by_each(rank: int) -> None:
    """[q_0 | k_0 | q_1 | k_1], cut in two."""
    publication = Publication()
    fused_of(publication, Q0, K0, Q1, K1, parts=2)
    (parameter,) = planned(publication, [QK], rank, 2).parameters
    assert parameter.alias == AliasSource(rank, 0)


def test_what_only_one_side_fuses_is_copied_and_says_so() -> None:
    publication = Publication()
    fused_of(publication, Q, K)
    assert [p.why_not_alias for p in planned(publication, SPLIT).parameters] == [
        "slice of columns is not contiguous"
    ] * 2
    publication = Publication()
    publication.add("q", numbers((2, 4), 1), "F32")
    publication.add("k", numbers((2, 2), 9), "F32")
    (parameter,) = planned(publication, [QK]).parameters
    assert parameter.why_not_alias == "gathered from 2 published regions"
    assert parameter.sources == ("q", "k")


def test_rows_of_a_fused_tensor_are_aliased_where_they_lie() -> None:
    publication = Publication()
    publication.add("qk", numbers((6, 2), 1), "F32", fused=Fused(0, (Q, K)))
    specs = [ParameterSpec("q", "F32", (4, 2), 0), ParameterSpec("k", "F32", (2, 2), 0)]
    assert [p.alias for p in planned(publication, specs).parameters] == [AliasSource(0, 0), AliasSource(0, 32)]


def test_a_transposed_square_is_turned() -> None:
    publication = Publication()
    publication.add("w", numbers((3, 3), 1), "F32", is_transposed=True)
    (parameter,) = planned(publication, [ParameterSpec("w", "F32", (3, 3), None)]).parameters
    assert parameter.why_not_alias == "transposed"
    (region,) = parameter.regions
    assert (region.rows, region.row_bytes, region.transpose_item) == (3, 12, 4)


def test_what_both_sides_transpose_is_aliased() -> None:
    publication = Publication()
    publication.add("w", numbers((3, 2), 1), "F32", is_transposed=True)
    (parameter,) = planned(publication, [ParameterSpec("w", "F32", (3, 2), 0, is_transposed=True)]).parameters
    assert parameter.alias == AliasSource(0, 0)


def test_a_row_needs_no_turning() -> None:
    publication = Publication()
    publication.add("w", numbers((1, 5), 1), "F32", is_transposed=True)
    assert planned(publication, [ParameterSpec("w", "F32", (5, 1), None)]).parameters[0].alias == AliasSource(0, 0)


def test_surplus_rows_of_a_vocabulary_are_read_by_one_rank_and_do_not_stop_an_alias() -> None:
    publication = Publication()
    publication.add("embed", numbers((7, 2), 1), "F32")
    spec = ParameterSpec("embed", "F32", (4, 2), 0, vocab_rows=4)
    plans = [planned(publication, [spec], rank, 2) for rank in range(2)]
    assert [plan.parameters[0].alias for plan in plans] == [AliasSource(0, 0), AliasSource(0, 16)]
    surplus = [[r for r in plan.parameters[0].regions if r.kind is RegionKind.READ] for plan in plans]
    assert [[(r.source_offset, r.row_bytes, r.owns_read) for r in regions] for regions in surplus] == [
        [(32, 24, True)],
        [],
    ]
    assert [plan.read_bytes for plan in plans] == [16 + 24, 16]


def test_an_engine_that_pads_more_fills_its_rows_with_zero() -> None:
    publication = Publication()
    publication.add("embed", numbers((5, 2), 1), "F32")
    spec = ParameterSpec("embed", "F32", (8, 2), 0, vocab_rows=5)
    plans = [planned(publication, [spec], rank, 2) for rank in range(2)]
    assert [plan.parameters[0].why_not_alias for plan in plans] == ["", "padded with rows of zero"]
    assert [region.kind for region in plans[1].parameters[0].regions] == [RegionKind.COPY, RegionKind.ZERO]
    assert plans[1].read_bytes == 8


# --- plans that break their promises are found


BROKEN = {
    "nobody counts it": lambda region: region._replace(owns_read=False),
    "read elsewhere": lambda region: region._replace(read_offset=4),
    "half of it": lambda region: region._replace(rows=1),
}


@pytest.mark.parametrize("case", BROKEN)
def test_plans_that_do_not_count_each_byte_once_are_found(case: str) -> None:
    publication = Publication()
    fused_of(publication, Q, K)
    plan = planned(publication, SPLIT)
    check_reads(publication.manifest, [plan])
    first, second = plan.parameters
    broken = replace(second, regions=(BROKEN[case](second.regions[0]),))
    with pytest.raises(StepFailedError, match="plans of 1 ranks: qk is not read and counted exactly once"):
        check_reads(publication.manifest, [replace(plan, parameters=(first, broken))])


def test_a_transposing_region_that_misses_its_target_is_found() -> None:
    publication = Publication()
    publication.add("w", numbers((3, 2), 1), "F32", is_transposed=True)
    plan = planned(publication, [ParameterSpec("w", "F32", (2, 3), None)])
    check_plan(plan)
    (parameter,) = plan.parameters
    astray = replace(parameter, regions=(parameter.regions[0]._replace(target_stride=8),))
    with pytest.raises(StepFailedError, match="w is not written exactly once"):
        check_plan(replace(plan, parameters=(astray,)))


def test_a_fused_part_that_does_not_divide_is_refused_by_name() -> None:
    publication = Publication()
    fused_of(publication, Q, K)
    odd = ParameterSpec("qk", "F32", (2, 6), 1, fused=(FusedPart("q", 3), FusedPart("k", 3)), fused_axis=1)
    with pytest.raises(ConfigurationError, match="qk: its part q of 3 indices does not divide over 2 ranks"):
        make_plan(publication.manifest, [odd], 0, 2)
