"""Plans, carried out on real bytes by a slow executor: each byte lands where slicing puts it, and is counted once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fastdeploy_rl.checksum import ZERO, Fletcher4, add, contribution, of_bytes
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.dtypes import itemsize, numpy_dtype
from fastdeploy_rl.errors import ConfigurationError, CoverageError, StepFailedError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.plan.plan import AliasSource, Plan, PlannedParameter, PlannedRegion, RegionKind
from fastdeploy_rl.plan.planner import LastPlan, make_plan
from fastdeploy_rl.plan.proofs import check_plan, check_reads

# --- a publication with its bytes, and an executor


@dataclass(frozen=True)
class Source:
    """A tensor as a trainer has it, and how it publishes it."""

    name: str
    values: NDArray[np.float32]
    dtype: str = "F32"
    axis: int | None = None
    edges: tuple[int, ...] = ()

    def as_published(self) -> NDArray[np.generic]:
        return cast(self.values, self.dtype)


def cast(values: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Values here have no more bits than a BF16 holds, so that the cast is exact and cutting bits is enough."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(values.shape)
    return values


def values_of(shape: tuple[int, ...], first: int = 1) -> NDArray[np.float32]:
    bits = (np.arange(first, first + prod(shape), dtype=np.uint32) % 0x7F00) << 16
    return bits.view(np.float32).reshape(shape)


class Publication:
    """Every tensor's parts, one segment for each part number, each part 512-aligned."""

    def __init__(self, *sources: Source, aliases: dict[str, str] | None = None) -> None:
        self.sources = {source.name: source for source in sources}
        self.segments: list[bytearray] = []
        tensors = [self._add(source) for source in sources]
        segments = [Segment("shm", f"arena-{i}", len(data), i, 0) for i, data in enumerate(self.segments)]
        self.manifest: Manifest = build_manifest("1.1", "full", segments, tensors, aliases or {})

    def _add(self, source: Source) -> Tensor:
        data, parts = source.as_published(), []
        spans = [(0, 0)] if source.axis is None else list(zip(source.edges, source.edges[1:], strict=False))
        for number, (start, stop) in enumerate(spans):
            piece = data if source.axis is None else data.take(range(start, stop), source.axis)
            parts.append(Part(number, self._append(number, piece.tobytes()), start, stop))
        checksum = of_bytes(np.ascontiguousarray(data)).hex()
        return Tensor(source.name, source.dtype, data.shape, source.axis, tuple(parts), checksum)

    def _append(self, number: int, piece: bytes) -> int:
        while len(self.segments) <= number:
            self.segments.append(bytearray())
        segment = self.segments[number]
        segment.extend(bytes(-len(segment) % 512))
        segment.extend(piece)
        return len(segment) - len(piece)


def rows_of(region: PlannedRegion, data: bytes | bytearray) -> list[bytes]:
    starts = (region.source_offset + i * region.source_stride for i in range(region.rows))
    rows = [bytes(data[start : start + region.row_bytes]) for start in starts]
    assert all(len(row) == region.row_bytes for row in rows), "a region leaves its segment"
    return rows


def convert(row: bytes, how: str) -> bytes:
    if how == "F32_BF16":
        return (np.frombuffer(row, np.uint32) >> 16).astype(np.uint16).tobytes()
    if how == "BF16_F32":
        return (np.frombuffer(row, np.uint16).astype(np.uint32) << 16).tobytes()
    assert how == "none"
    return row


def execute(parameter: PlannedParameter, segments: Sequence[bytearray]) -> bytes:
    target, written = bytearray(parameter.num_bytes), np.zeros(parameter.num_bytes, int)
    for region in parameter.regions:
        for i, row in enumerate(rows_of(region, segments[region.segment])):
            start, piece = region.target_offset + i * region.target_stride, convert(row, region.cast)
            target[start : start + len(piece)] = piece
            written[start : start + len(piece)] += 1
    assert len(target) == parameter.num_bytes
    assert (written == 1).all()
    return bytes(target)


def local_slice(values: NDArray[np.float32], axis: int | None, rank: int, num_ranks: int) -> NDArray[np.float32]:
    return values if axis is None else np.split(values, num_ranks, axis)[rank]


def all_plans(publication: Publication, specs: Sequence[ParameterSpec], num_ranks: int) -> list[Plan]:
    return [make_plan(publication.manifest, specs, rank, num_ranks) for rank in range(num_ranks)]


def read_sums(plans: Sequence[Plan], publication: Publication) -> dict[str, Fletcher4]:
    """What the ranks' receipts add up to for each published tensor."""
    sums = dict.fromkeys(publication.sources, ZERO)
    totals = {tensor.name: tensor.num_bytes for tensor in publication.manifest.tensors}
    planned = [parameter for plan in plans for parameter in (*plan.parameters, *plan.readings)]
    for region in (region for parameter in planned for region in parameter.regions):
        if region.owns_read:
            for i, row in enumerate(rows_of(region, publication.segments[region.segment])):
                place = region.read_offset + i * region.read_stride
                sums[region.tensor] = add(sums[region.tensor], contribution(row, place, totals[region.tensor]))
    return sums


def live_sum(parameter: PlannedParameter, live: bytes) -> Fletcher4:
    sums = ZERO
    for region in parameter.regions:
        width = region.row_bytes * {"none": 2, "F32_BF16": 1, "BF16_F32": 4}[region.cast] // 2
        for i in range(region.rows):
            place = region.target_offset + i * region.target_stride
            sums = add(sums, contribution(live[place : place + width], place, parameter.num_bytes))
    return sums


# --- the laws


@st.composite
def cases(draw: st.DrawFn) -> tuple[Publication, list[ParameterSpec], int]:
    num_ranks = draw(st.integers(1, 4))
    sources, specs = [], []
    for number in range(draw(st.integers(1, 3))):
        sizes = st.integers(0, 3) | st.just(5)
        shape = list(draw(st.lists(sizes, max_size=4)))
        axis = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        if axis is not None:
            shape[axis] *= num_ranks
        held = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        cuts = [] if held is None else draw(st.lists(st.integers(0, shape[held]), max_size=3))
        edges = () if held is None else (0, *sorted(cuts), shape[held])
        dtype, target = draw(st.sampled_from(["F32", "BF16"])), draw(st.sampled_from(["F32", "BF16"]))
        name = f"w{number}"
        sources.append(Source(name, values_of(tuple(shape), 1 + 1000 * number), dtype, held, edges))
        specs.append(ParameterSpec(name, target, tuple(shape), axis))
    return Publication(*sources), specs, num_ranks


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_byte_lands_where_slicing_puts_it(case: tuple[Publication, list[ParameterSpec], int]) -> None:
    publication, specs, num_ranks = case
    for rank, plan in enumerate(all_plans(publication, specs, num_ranks)):
        check_plan(plan)
        for spec, parameter in zip(specs, plan.parameters, strict=True):
            values = local_slice(publication.sources[spec.name].values, spec.shard_axis, rank, num_ranks)
            expected = cast(values.copy(), spec.dtype)
            assert (parameter.name, parameter.dtype, parameter.local_shape) == (spec.name, spec.dtype, expected.shape)
            live = execute(parameter, publication.segments)
            assert live == expected.tobytes()
            assert live_sum(parameter, live) == of_bytes(live)


@settings(deadline=None, max_examples=150)
@given(cases())
def test_what_all_ranks_count_adds_up_to_the_manifest(case: tuple[Publication, list[ParameterSpec], int]) -> None:
    publication, specs, num_ranks = case
    sums = read_sums(all_plans(publication, specs, num_ranks), publication)
    assert {name: value.hex() for name, value in sums.items()} == {
        tensor.name: tensor.checksum for tensor in publication.manifest.tensors
    }


@settings(deadline=None, max_examples=100)
@given(cases())
def test_every_source_byte_is_owned_by_exactly_one_region(case: tuple[Publication, list[ParameterSpec], int]) -> None:
    publication, specs, num_ranks = case
    counted = {tensor.name: np.zeros(tensor.num_bytes, int) for tensor in publication.manifest.tensors}
    for plan in all_plans(publication, specs, num_ranks):
        for region in (region for parameter in plan.parameters for region in parameter.regions if region.owns_read):
            for i in range(region.rows):
                start = region.read_offset + i * region.read_stride
                counted[region.tensor][start : start + region.row_bytes] += 1
    assert all((times == 1).all() for times in counted.values())


@settings(deadline=None, max_examples=150)
@given(cases())
def test_an_alias_is_the_parameter_as_published(case: tuple[Publication, list[ParameterSpec], int]) -> None:
    publication, specs, num_ranks = case
    for plan in all_plans(publication, specs, num_ranks):
        for parameter in plan.parameters:
            assert (parameter.alias is None) == bool(parameter.why_not_alias)
            if parameter.alias is not None:
                start = parameter.alias.offset
                data = publication.segments[parameter.alias.segment][start : start + parameter.num_bytes]
                assert data == execute(parameter, publication.segments)


@settings(deadline=None)
@given(cases())
def test_totals_are_those_of_the_parameters(case: tuple[Publication, list[ParameterSpec], int]) -> None:
    publication, specs, num_ranks = case
    for plan in all_plans(publication, specs, num_ranks):
        sizes = [prod(parameter.local_shape) * itemsize(parameter.dtype) for parameter in plan.parameters]
        assert [parameter.num_bytes for parameter in plan.parameters] == sizes
        assert plan.aliased_bytes + plan.copied_bytes == sum(sizes)
        assert plan.aliased_bytes == sum(parameter.num_bytes for parameter in plan.parameters if parameter.alias)
        source_sizes = {spec.name: itemsize(publication.sources[spec.name].dtype) for spec in specs}
        read = sum(prod(parameter.local_shape) * source_sizes[parameter.name] for parameter in plan.parameters)
        assert plan.read_bytes == read


# --- which slices are aliased, and what regions look like


def one(spec: ParameterSpec, source: Source, rank: int, num_ranks: int) -> PlannedParameter:
    (parameter,) = make_plan(Publication(source).manifest, [spec], rank, num_ranks).parameters
    return parameter


def split(shape: tuple[int, ...], axis: int, num_parts: int) -> Source:
    edges = tuple(i * shape[axis] // num_parts for i in range(num_parts + 1))
    return Source("w", values_of(shape), axis=axis, edges=edges)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_publication_for_n_ranks_is_aliased_by_n_ranks(axis: int, num_ranks: int) -> None:
    shape = (6, 12, 18)
    for rank in range(num_ranks):
        parameter = one(ParameterSpec("w", "F32", shape, axis), split(shape, axis, num_ranks), rank, num_ranks)
        assert (parameter.alias, parameter.why_not_alias) == (AliasSource(rank, 0), "")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_replicated_tensor_is_aliased_by_every_rank_and_counted_by_the_first(rank: int) -> None:
    parameter = one(ParameterSpec("w", "F32", (6, 4), None), Source("w", values_of((6, 4))), rank, 3)
    (region,) = parameter.regions
    assert parameter.alias == AliasSource(0, 0)
    assert (region.rows, region.row_bytes, region.owns_read) == (1, 96, rank == 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rows_of_a_full_tensor_are_aliased_as_one_region(rank: int) -> None:
    parameter = one(ParameterSpec("w", "F32", (6, 4), 0), Source("w", values_of((6, 4))), rank, 3)
    (region,) = parameter.regions
    assert parameter.alias == AliasSource(0, 32 * rank)
    assert (region.rows, region.row_bytes, region.read_offset) == (1, 32, 32 * rank)


def test_a_full_tensor_is_aliased_by_a_single_rank_whatever_its_axis() -> None:
    for axis in (None, 0, 1):
        parameter = one(ParameterSpec("w", "F32", (6, 4), axis), Source("w", values_of((6, 4))), 0, 1)
        assert parameter.alias == AliasSource(0, 0)
        assert [region.rows for region in parameter.regions] == [1]


def test_columns_of_a_full_tensor_are_copied_row_by_row() -> None:
    parameter = one(ParameterSpec("w", "F32", (6, 4), 1), Source("w", values_of((6, 4))), 1, 2)
    assert parameter.alias is None
    assert parameter.why_not_alias == "slice of columns is not contiguous"
    (region,) = parameter.regions
    assert region == PlannedRegion(
        tensor="w",
        segment=0,
        source_offset=8,
        source_stride=16,
        rows=6,
        row_bytes=8,
        target_offset=0,
        target_stride=8,
        cast="none",
        read_offset=8,
        read_stride=16,
        owns_read=True,
    )


def test_a_slice_of_a_single_row_is_contiguous() -> None:
    """Its strides are its own width, so that whoever reads them sees one run of bytes."""
    parameter = one(ParameterSpec("w", "F32", (1, 8), 1), Source("w", values_of((1, 8))), 1, 2)
    (region,) = parameter.regions
    assert parameter.alias == AliasSource(0, 16)
    assert region.source_stride == region.target_stride == region.read_stride == region.row_bytes == 16


def test_parts_are_gathered_where_fewer_ranks_than_parts_run() -> None:
    parameter = one(ParameterSpec("w", "F32", (8, 4), 0), split((8, 4), 0, 4), 1, 2)
    assert parameter.why_not_alias == "gathered from 2 published regions"
    assert [(region.segment, region.target_offset) for region in parameter.regions] == [(2, 0), (3, 32)]


def test_a_part_is_split_where_more_ranks_than_parts_run() -> None:
    parameter = one(ParameterSpec("w", "F32", (8, 4), 0), split((8, 4), 0, 2), 3, 4)
    assert parameter.alias == AliasSource(1, 32)


def test_parts_split_along_the_other_axis_are_gathered() -> None:
    parameter = one(ParameterSpec("w", "F32", (6, 4), 1), split((6, 4), 0, 3), 0, 2)
    assert [(region.rows, region.row_bytes, region.target_offset) for region in parameter.regions] == [
        (2, 8, 0),
        (2, 8, 16),
        (2, 8, 32),
    ]


@pytest.mark.parametrize(
    ("source", "target", "how", "target_stride"), [("BF16", "F32", "BF16_F32", 8), ("F32", "BF16", "F32_BF16", 4)]
)
def test_a_cast_scales_the_target(source: str, target: str, how: str, target_stride: int) -> None:
    parameter = one(ParameterSpec("w", target, (6, 4), 1), Source("w", values_of((6, 4)), source), 1, 2)
    (region,) = parameter.regions
    assert parameter.why_not_alias == f"dtype {source} -> {target}"
    assert parameter.num_bytes == 12 * itemsize(target)
    assert (region.cast, region.row_bytes) == (how, 2 * itemsize(source))
    assert region.target_stride == target_stride
    assert (region.source_stride, region.read_stride) == (4 * itemsize(source), 4 * itemsize(source))


def test_a_scalar_is_one_aliased_region() -> None:
    parameter = one(ParameterSpec("w", "F32", (), None), Source("w", values_of(())), 0, 1)
    assert (parameter.local_shape, parameter.num_bytes, parameter.alias) == ((), 4, AliasSource(0, 0))
    assert [(region.rows, region.row_bytes) for region in parameter.regions] == [(1, 4)]


@pytest.mark.parametrize(("shape", "axis"), [((0, 4), 0), ((0, 4), 1), ((4, 0), 0), ((0,), None)])
def test_an_empty_tensor_needs_no_region_and_no_copy(shape: tuple[int, ...], axis: int | None) -> None:
    parameter = one(ParameterSpec("w", "F32", shape, axis), Source("w", values_of(shape)), 1, 2)
    assert (parameter.regions, parameter.num_bytes, parameter.alias) == ((), 0, AliasSource(0, 0))


# --- ties


def test_tied_parameters_have_no_entry_of_their_own() -> None:
    specs = [
        ParameterSpec("embed", "F32", (6, 4), 0),
        ParameterSpec("head", "F32", (6, 4), 0, Coverage.TIED, tied_to="embed"),
    ]
    for name in ("embed", "head"):
        plan = make_plan(Publication(Source(name, values_of((6, 4)))).manifest, specs, 0, 2)
        assert [(parameter.name, parameter.sources[0]) for parameter in plan.parameters] == [("embed", name)]


def test_a_tensor_that_feeds_two_parameters_is_counted_once() -> None:
    """A tied publication meets an untied model: both parameters get the bytes, the receipt counts them once."""
    publication = Publication(Source("embed", values_of((6, 4))), aliases={"head": "embed"})
    specs = [ParameterSpec("head", "F32", (6, 4), 1), ParameterSpec("embed", "F32", (6, 4), 0)]
    plans = all_plans(publication, specs, 2)
    for plan in plans:
        assert [parameter.sources[0] for parameter in plan.parameters] == ["embed", "embed"]
        assert [{r.owns_read for r in parameter.regions} for parameter in plan.parameters] == [{True}, {False}]
    assert read_sums(plans, publication)["embed"] == of_bytes(values_of((6, 4)))


def test_a_shared_tensor_is_counted_once_where_its_first_parameter_is_replicated() -> None:
    publication = Publication(Source("a", values_of((6, 4))), aliases={"b": "a"})
    specs = [ParameterSpec("a", "F32", (6, 4), None), ParameterSpec("b", "F32", (6, 4), 0)]
    assert read_sums(all_plans(publication, specs, 3), publication)["a"] == of_bytes(values_of((6, 4)))


def test_the_twin_that_no_parameter_takes_is_read_whole() -> None:
    """Published under both names, a tied group still gives a receipt of every published tensor."""
    values = values_of((6, 4))
    publication = Publication(Source("embed", values), Source("head", values, axis=1, edges=(0, 1, 4)))
    specs = [
        ParameterSpec("embed", "F32", (6, 4), 0),
        ParameterSpec("head", "F32", (6, 4), 0, Coverage.TIED, tied_to="embed"),
    ]
    plans = all_plans(publication, specs, 2)
    assert {parameter.sources[0] for plan in plans for parameter in plan.parameters} == {"embed"}
    (twin,) = plans[0].readings
    assert not plans[1].readings
    assert {region.kind for region in twin.regions} == {RegionKind.READ}
    check_reads(publication.manifest, plans)
    assert read_sums(plans, publication) == {"embed": of_bytes(values), "head": of_bytes(values)}


def test_parameters_that_take_nothing_are_not_planned() -> None:
    specs = [ParameterSpec("w", "F32", (2,), None), ParameterSpec("rope", "F32", (3,), None, Coverage.DERIVED)]
    plan = make_plan(Publication(Source("w", values_of((2,)))).manifest, specs, 0, 1)
    assert [parameter.name for parameter in plan.parameters] == ["w"]


# --- what cannot be planned


def test_a_model_that_does_not_divide_is_refused_with_the_way_out() -> None:
    publication = Publication(Source("w", values_of((9, 4))))
    with pytest.raises(ConfigurationError) as caught:
        make_plan(publication.manifest, [ParameterSpec("w", "F32", (9, 4), 0)], 0, 2)
    assert str(caught.value) == (
        "w: axis 0 of [9, 4] does not divide over 2 ranks; choose a tensor-parallel size that divides 9"
    )


def test_a_shard_axis_that_the_tensor_does_not_have_is_refused() -> None:
    publication = Publication(Source("w", values_of((9,))))
    with pytest.raises(ConfigurationError, match=r"w: shard axis 1 is no axis of \[9\]"):
        make_plan(publication.manifest, [ParameterSpec("w", "F32", (9,), 1)], 0, 1)


@pytest.mark.parametrize(("rank", "num_ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, num_ranks: int) -> None:
    publication = Publication(Source("w", values_of((4,))))
    with pytest.raises(ConfigurationError, match=f"rank {rank} is none of {num_ranks} ranks"):
        make_plan(publication.manifest, [ParameterSpec("w", "F32", (4,), 0)], rank, num_ranks)


def test_a_publication_that_does_not_fit_is_not_planned() -> None:
    publication = Publication(Source("w", values_of((4,))))
    with pytest.raises(CoverageError, match="w: shape expected"):
        make_plan(publication.manifest, [ParameterSpec("w", "F32", (5,), None)], 0, 1)


BROKEN = {
    "missing": lambda regions: regions[:-1],
    "twice": lambda regions: (*regions, regions[0]),
    "shifted": lambda regions: (regions[0]._replace(target_offset=4), *regions[1:]),
    "too long": lambda regions: (regions[0]._replace(row_bytes=regions[0].row_bytes + 4), *regions[1:]),
    "wrong stride": lambda regions: (regions[0]._replace(target_stride=4), *regions[1:]),
    "wrong cast": lambda regions: (regions[0]._replace(cast="F32_BF16"), *regions[1:]),
    "beyond": lambda regions: (*regions, regions[0]._replace(target_offset=96)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_plan_that_does_not_write_each_byte_once_is_found(case: str) -> None:
    source = Source("w", values_of((6, 4)), axis=0, edges=(0, 3, 6))
    plan = make_plan(Publication(source).manifest, [ParameterSpec("w", "F32", (6, 4), 1)], 1, 2)
    check_plan(plan)
    parameter = plan.parameters[0]
    broken = replace(plan, parameters=(replace(parameter, regions=BROKEN[case](parameter.regions)),))
    with pytest.raises(StepFailedError, match="plan of rank 1: w is not written exactly once"):
        check_plan(broken)


def test_numpy_names_agree_with_the_executor() -> None:
    assert cast(values_of((3,)), "BF16").dtype == numpy_dtype("BF16")


def test_a_known_layout_is_planned_once_and_another_order_anew() -> None:
    """Equal tensors that change places between publications lie elsewhere: the last plan must not be used again."""
    specs = [ParameterSpec("a", "F32", (4,), None), ParameterSpec("b", "F32", (4,), None)]
    ab = Publication(Source("a", values_of((4,))), Source("b", values_of((4,), 9))).manifest
    ba = Publication(Source("b", values_of((4,), 9)), Source("a", values_of((4,)))).manifest
    plans = LastPlan(specs, 0, 1)
    first = plans.make(ab)
    assert plans.make(ab) is first == make_plan(ab, specs, 0, 1)
    assert plans.make(ba) == make_plan(ba, specs, 0, 1) != first


def test_a_known_layout_does_not_hide_tied_names_that_disagree() -> None:
    """Coverage depends on checksums too: it is checked for every publication."""
    specs = [
        ParameterSpec("embed", "F32", (4,), None),
        ParameterSpec("head", "F32", (4,), None, Coverage.TIED, "embed"),
    ]
    plans = LastPlan(specs, 0, 1)
    plans.make(Publication(Source("embed", values_of((4,))), Source("head", values_of((4,)))).manifest)
    with pytest.raises(CoverageError, match="head: tied to embed, but published with other values"):
        plans.make(Publication(Source("embed", values_of((4,))), Source("head", values_of((4,), 9))).manifest)
