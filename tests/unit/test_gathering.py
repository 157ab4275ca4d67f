"""Gathering: what a rank fetches, and the plan over it, are worth as much as the plan over all segments."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_layouts import Array, Case, Publication, cases, execute, numbers, plans_of

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.manifest import Fused, Run
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.gathering import Gathering, gather
from fastdeploy_rl.plan.plan import AliasSource, Plan, PlannedRegion, RegionKind
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.plan.proofs import check_plan, check_reads
from fastdeploy_rl.update.planned_transfer import Sums, transfer_planned


def fetched(gathering: Gathering, segments: list[bytearray], filling: int = 0xA5) -> bytearray:
    """The arena, with everything else than what the ranges bring set to `filling`."""
    arena = np.full(gathering.num_bytes, filling, np.uint8)
    for each in gathering.ranges:
        rows = [each.offset + row * each.stride for row in range(each.rows)]
        taken = b"".join(segments[each.segment][start : start + each.row_bytes] for start in rows)
        assert len(taken) == each.num_bytes, "a range leaves its segment"
        arena[each.target_offset : each.target_offset + each.num_bytes] = np.frombuffer(taken, np.uint8)
    return bytearray(arena.tobytes())


def published_bytes(ranges: list[ByteRange] | list[PlannedRegion]) -> Counter[tuple[int, int]]:
    """(segment, byte) -> how often it is read."""
    counts: Counter[tuple[int, int]] = Counter()
    for each in ranges:
        offset, stride = (each.offset, each.stride) if isinstance(each, ByteRange) else each[2:4]
        for row in range(each.rows):
            counts.update((each.segment, offset + row * stride + at) for at in range(each.row_bytes))
    return counts


def reading(plan: Plan) -> list[PlannedRegion]:
    return [region for p in plan.everything for region in p.regions if region.kind is not RegionKind.ZERO]


def carried_out(case: Case, plan: Plan, mappings: list[Mapping]) -> tuple[Sums, dict[str, bytes]]:
    """By the native core, into memory that was not empty."""
    homes = {}
    for parameter in plan.parameters:
        home = Mapping.private(max(parameter.num_bytes, 1))
        memoryview(home)[:] = bytes([7]) * home.num_bytes
        homes[parameter.name] = TensorView(home, 0, parameter.dtype, parameter.local_shape)
    sums = transfer_planned(plan.everything, case.publication.manifest, mappings, homes, 1)
    return sums, {name: bytes(memoryview(view.mapping))[: view.num_bytes] for name, view in homes.items()}


def mapped(data: bytearray) -> Mapping:
    mapping = Mapping.private(max(len(data), 1))
    memoryview(mapping)[: len(data)] = data
    return mapping


# --- the laws


@settings(deadline=None, max_examples=80)
@given(cases())
def test_the_compact_plan_makes_of_the_arena_what_the_plan_makes_of_the_segments(case: Case) -> None:
    for plan in plans_of(case):
        gathering = gather(plan)
        arena = mapped(fetched(gathering, case.publication.segments))
        expected = carried_out(case, plan, case.publication.mapped())
        assert carried_out(case, gathering.plan, [arena]) == expected


@settings(deadline=None, max_examples=50)
@given(cases())
def test_all_ranks_compact_plans_keep_what_plans_promise(case: Case) -> None:
    plans = [gather(plan).plan for plan in plans_of(case)]
    for plan in plans:
        check_plan(plan)
    check_reads(case.publication.manifest, plans)


@settings(deadline=None, max_examples=80)
@given(cases())
def test_every_byte_that_a_parameter_reads_comes_once_for_it(case: Case) -> None:
    for plan in plans_of(case):
        gathering = gather(plan)
        assert [number for needed in gathering.needs for number in needed] == list(range(len(gathering.ranges)))
        for parameter, needed in zip(plan.everything, gathering.needs, strict=True):
            regions = [region for region in parameter.regions if region.kind is not RegionKind.ZERO]
            assert published_bytes([gathering.ranges[i] for i in needed]) == published_bytes(regions)


@settings(deadline=None, max_examples=80)
@given(cases())
def test_nothing_that_lands_overlaps_and_sizes_add_up(case: Case) -> None:
    for plan in plans_of(case):
        gathering = gather(plan)
        places = [(each.target_offset, each.target_offset + each.num_bytes) for each in gathering.ranges]
        assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
        assert all(0 <= start < stop <= gathering.num_bytes for start, stop in places)
        assert gathering.fetched_bytes == gathering.plan.read_bytes == plan.read_bytes
        assert gathering.num_bytes < plan.read_bytes + 512 * (len(plan.everything) + 1) + 8 * len(reading(plan))


@settings(deadline=None, max_examples=80)
@given(cases())
def test_an_alias_in_the_arena_is_the_parameter(case: Case) -> None:
    for plan in plans_of(case):
        gathering = gather(plan)
        arena = fetched(gathering, case.publication.segments)
        for before, parameter in zip(plan.parameters, gathering.plan.parameters, strict=True):
            assert (parameter.alias is None) == bool(parameter.why_not_alias)
            assert parameter.alias is not None or before.alias is None
            if parameter.alias is None:
                assert parameter.why_not_alias == before.why_not_alias
                continue
            start = parameter.alias.offset
            assert (parameter.alias.segment, start % 512) == (0, 0)
            assert arena[start : start + parameter.num_bytes] == execute(before, case.publication.segments)


@settings(deadline=None, max_examples=50)
@given(cases())
def test_totals_are_those_of_the_parameters(case: Case) -> None:
    for plan in plans_of(case):
        compact = gather(plan).plan
        assert compact.aliased_bytes == sum(p.num_bytes for p in compact.parameters if p.alias)
        assert compact.copied_bytes == sum(p.num_bytes for p in compact.parameters if not p.alias)
        kept = ("rank", "num_ranks", "layout_digest", "read_bytes")
        assert [getattr(compact, name) for name in kept] == [getattr(plan, name) for name in kept]
        assert [p.alias for p in compact.readings] == [None] * len(plan.readings)
        assert [p.why_not_alias for p in compact.readings] == [p.why_not_alias for p in plan.readings]


# --- what lands whole, and as how few ranges


def published(values: Array, dtype: str = "F32", name: str = "w", **how: object) -> Publication:
    publication = Publication()
    publication.add(name, values, dtype, **how)  # type: ignore[arg-type]
    return publication


def gathered(publication: Publication, *specs: ParameterSpec, rank: int = 0, num_ranks: int = 1) -> Gathering:
    return gather(make_plan(publication.manifest, list(specs), rank, num_ranks))


def test_columns_of_a_full_tensor_land_whole_from_one_strided_range() -> None:
    spec = ParameterSpec("w", "F32", (6, 4), 1)
    gathering = gathered(published(numbers((6, 4), 1)), spec, rank=1, num_ranks=2)
    (parameter,) = gathering.plan.parameters
    assert (parameter.alias, parameter.why_not_alias) == (AliasSource(0, 0), "")
    assert gathering.ranges == (ByteRange(0, 8, 16, 6, 8, 0),)
    assert gathering.num_bytes == parameter.num_bytes == 48


def test_parts_of_several_segments_land_whole() -> None:
    publication = published(numbers((8, 4), 1), axis=0, edges=(0, 2, 4, 6, 8))
    gathering = gathered(publication, ParameterSpec("w", "F32", (8, 4), 0), rank=1, num_ranks=2)
    assert gathering.plan.parameters[0].alias == AliasSource(0, 0)
    assert gathering.ranges == (ByteRange(2, 0, 32, 1, 32, 0), ByteRange(3, 0, 32, 1, 32, 32))


def test_what_the_engine_alone_fuses_lands_whole_where_it_is_fused_along_its_rows() -> None:
    publication = Publication()
    for name in ("q", "k"):
        publication.add(name, numbers((4, 4), 1), "F32")
    spec = ParameterSpec("qk", "F32", (8, 4), 0, fused=(FusedPart("q", 4), FusedPart("k", 4)))
    gathering = gathered(publication, spec, rank=1, num_ranks=2)
    assert gathering.plan.parameters[0].alias == AliasSource(0, 0)
    assert gathering.plan.copied_bytes == 0


def test_what_is_fused_along_columns_is_copied_and_says_why() -> None:
    publication = Publication()
    for name in ("q", "k"):
        publication.add(name, numbers((4, 4), 1), "F32")
    spec = ParameterSpec("qk", "F32", (4, 8), None, fused=(FusedPart("q", 4), FusedPart("k", 4)), fused_axis=1)
    gathering = gathered(publication, spec)
    (parameter,) = gathering.plan.parameters
    assert parameter.alias is None
    assert parameter.why_not_alias == "gathered from 2 published regions"
    assert gathering.plan.copied_bytes == 128
    assert [region.source_stride for region in parameter.regions] == [region.row_bytes for region in parameter.regions]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (ParameterSpec("w", "BF16", (6, 4), None), "dtype F32 -> BF16"),
        (ParameterSpec("w", "F32", (4, 6), None, is_transposed=True), "transposed"),
        (ParameterSpec("w", "F32", (8, 4), None, vocab_rows=6), "padded with rows of zero"),
    ],
)
def test_what_has_to_be_made_is_copied_for_the_reason_of_the_plan(spec: ParameterSpec, why: str) -> None:
    gathering = gathered(published(numbers((6, 4), 1)), spec)
    assert [(p.alias, p.why_not_alias) for p in gathering.plan.parameters] == [(None, why)]
    assert gathering.fetched_bytes == 96


def test_rows_of_interleaved_groups_are_asked_for_as_one_pattern() -> None:
    """Query rows of every group of a fused tensor: as many regions as groups, one range."""
    runs = [Run(name, 2 * i, 2 * i + 2) for i in range(4) for name in ("q", "k")]
    publication = published(numbers((16, 4), 1), name="qk", fused=Fused(0, tuple(runs)))
    specs = [ParameterSpec(name, "F32", (8, 4), None) for name in ("q", "k")]
    plan = make_plan(publication.manifest, specs, 0, 1)
    assert [len(p.regions) for p in plan.parameters] == [4, 4]
    gathering = gather(plan)
    assert gathering.ranges == (ByteRange(0, 0, 64, 4, 32, 0), ByteRange(0, 32, 64, 4, 32, 512))
    assert [p.alias for p in gathering.plan.parameters] == [AliasSource(0, 0), AliasSource(0, 512)]


def test_each_parameter_has_ranges_of_its_own_so_that_it_is_complete_by_itself() -> None:
    publication = Publication()
    for name in ("a", "b"):  # 512 bytes each, one behind the other
        publication.add(name, numbers((128,), 1), "F32")
    gathering = gathered(publication, *(ParameterSpec(name, "F32", (128,), None) for name in ("a", "b")))
    assert gathering.needs == (range(0, 1), range(1, 2))
    assert [each.target_offset for each in gathering.ranges] == [0, 512]


def test_two_ranks_fetch_half_each_and_what_is_replicated() -> None:
    publication = Publication()
    publication.add("w", numbers((64, 64), 1), "F32")
    publication.add("norm", numbers((64,), 1), "F32")
    specs = ParameterSpec("w", "F32", (64, 64), 1), ParameterSpec("norm", "F32", (64,), None)
    for rank in (0, 1):
        gathering = gathered(publication, *specs, rank=rank, num_ranks=2)
        assert gathering.fetched_bytes == 64 * 64 * 4 // 2 + 64 * 4
        assert gathering.num_bytes == gathering.fetched_bytes  # no gap: both sizes are multiples of 512, or come last


def test_a_twin_that_no_parameter_takes_is_fetched_by_the_rank_that_counts_it() -> None:
    publication = Publication()
    for name in ("embed", "head"):
        publication.add(name, numbers((6, 4), 1), "F32")
    specs = (
        ParameterSpec("embed", "F32", (6, 4), 0),
        ParameterSpec("head", "F32", (6, 4), 0, Coverage.TIED, tied_to="embed"),
    )
    assert [gathered(publication, *specs, rank=rank, num_ranks=2).fetched_bytes for rank in (0, 1)] == [48 + 96, 48]


def test_surplus_rows_are_fetched_behind_the_parameter_that_stays_whole() -> None:
    publication = published(numbers((6, 4), 1))
    gathering = gathered(publication, ParameterSpec("w", "F32", (4, 4), None, vocab_rows=4))
    (parameter,) = gathering.plan.parameters
    assert parameter.alias == AliasSource(0, 0)
    assert [region.source_offset for region in parameter.regions] == [0, 64]
    assert gathering.num_bytes == 96


def test_a_parameter_without_bytes_needs_no_range_and_is_where_it_begins() -> None:
    publication = published(numbers((0, 4), 1))
    gathering = gathered(publication, ParameterSpec("w", "F32", (0, 4), None))
    assert (gathering.ranges, gathering.needs, gathering.num_bytes) == ((), (range(0, 0),), 0)
    assert gathering.plan.parameters[0].alias == AliasSource(0, 0)


@given(st.integers(1, 4))
def test_regions_of_different_dtypes_begin_where_their_items_may(columns: int) -> None:
    publication = Publication()
    publication.add("q", numbers((1, columns), 1), "F16")
    publication.add("k", numbers((1, columns), 1), "F32")
    spec = ParameterSpec("qk", "F32", (2, columns), None, fused=(FusedPart("q", 1), FusedPart("k", 1)))
    (parameter,) = gathered(publication, spec).plan.parameters
    assert [region.source_offset % 4 for region in parameter.regions] == [0, 0]


def test_regions_out_of_the_order_of_their_target_do_not_land_whole() -> None:
    publication = published(numbers((8, 4), 1), axis=0, edges=(0, 4, 8))
    plan = make_plan(publication.manifest, [ParameterSpec("w", "F32", (8, 4), None)], 0, 1)
    (parameter,) = plan.parameters
    turned = replace(parameter, regions=parameter.regions[::-1])
    gathering = gather(replace(plan, parameters=(turned,)))
    assert gathering.plan.parameters[0].alias is None
    arena = fetched(gathering, publication.segments)
    assert execute(gathering.plan.parameters[0], [arena]) == execute(parameter, publication.segments)


def of_regions(*regions: PlannedRegion) -> Gathering:
    """A plan made by hand, of one parameter."""
    publication = published(numbers((64, 4), 1))
    plan = make_plan(publication.manifest, [ParameterSpec("w", "F32", (64, 4), None)], 0, 1)
    num_bytes = sum(region.rows * region.row_bytes for region in regions if region.kind is RegionKind.COPY)
    (parameter,) = plan.parameters
    return gather(replace(plan, parameters=(replace(parameter, regions=regions, num_bytes=num_bytes),)))


def region(offset: int, stride: int, rows: int, row_bytes: int, target: int) -> PlannedRegion:
    return PlannedRegion("w", 0, offset, stride, rows, row_bytes, target, row_bytes, "none", 0, stride, True)


def test_what_is_read_besides_must_not_stand_before_the_parameter() -> None:
    gathering = of_regions(region(0, 8, 1, 8, 0)._replace(kind=RegionKind.READ), region(16, 16, 1, 16, 0))
    assert gathering.plan.parameters[0].alias is None
    assert [each.source_offset for each in gathering.plan.parameters[0].regions] == [0, 8]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (region(64, 8, 1, 8, 0), region(32, 8, 1, 8, 8)),  # backwards
        (region(0, 8, 1, 8, 0), region(4, 8, 1, 8, 8)),  # overlapping
        (region(0, 16, 2, 8, 0), region(32, 24, 2, 8, 16)),  # the second goes on at another pace
        (region(0, 16, 2, 8, 0), region(40, 16, 2, 8, 16)),  # with a larger step in between
        (region(0, 16, 2, 8, 0), region(32, 16, 2, 4, 16)),  # in other rows
    ],
)
def test_rows_that_are_no_pattern_are_asked_for_apart(first: PlannedRegion, second: PlannedRegion) -> None:
    gathering = of_regions(first, second)
    assert [each[1:5] for each in gathering.ranges] == [each[2:6] for each in (first, second)]
    assert gathering.plan.parameters[0].alias == AliasSource(0, 0)


def test_patterns_that_go_on_are_one() -> None:
    gathering = of_regions(region(0, 16, 2, 8, 0), region(32, 16, 3, 8, 16), region(80, 8, 1, 8, 40))
    assert gathering.ranges == (ByteRange(0, 0, 16, 6, 8, 0),)
