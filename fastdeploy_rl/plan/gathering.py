"""A plan over bytes that lie elsewhere, as the plan over one arena into which exactly those bytes were brought.

Owns which byte ranges are asked for, where each lands, and the compact plan that reads them there. Refuses to know who
brings them. Three promises: the compact plan makes of the arena what the plan makes of the published segments; every
byte that a parameter reads comes once for it; nothing that lands overlaps.

A parameter begins at a multiple of 512. One that needs no cast, no turning and no padding, and is filled in order of
its target, lands as it is, from however many places it comes, so that it can be used where it lies.
"""

from dataclasses import dataclass, replace

from fastdeploy_rl.manifest import aligned
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.plan import AliasSource, Plan, PlannedParameter, PlannedRegion, RegionKind

_WORD_BYTES = 8
"""Where a region may begin: at a multiple of every dtype's item."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """`plan` reads segment 0, the arena of `num_bytes`, and is for the rest as the plan it was made from. `needs`: for
    each entry of `plan.everything` the indices of the `ranges` that make it complete."""

    plan: Plan
    ranges: tuple[ByteRange, ...]
    needs: tuple[range, ...]
    num_bytes: int

    @property
    def fetched_bytes(self) -> int:
        """What is moved: `num_bytes` without the gaps."""
        return sum(each.num_bytes for each in self.ranges)


def gather(plan: Plan) -> Gathering:
    """What one rank has to fetch for `plan`, and the plan to follow then."""
    ranges: list[ByteRange] = []
    needs: list[range] = []
    moved: list[PlannedParameter] = []
    end = 0
    for number, parameter in enumerate(plan.everything):
        lands_whole = number < len(plan.parameters) and _lands_whole(parameter)
        compact, needed, end = _gathered(parameter, aligned(end), lands_whole)
        moved.append(compact)
        needs.append(range(len(ranges), len(ranges) + len(needed)))
        ranges += needed
    return Gathering(_with(plan, moved), tuple(ranges), tuple(needs), end)


def _with(plan: Plan, moved: list[PlannedParameter]) -> Plan:
    parameters = tuple(moved[: len(plan.parameters)])
    aliased = sum(parameter.num_bytes for parameter in parameters if parameter.alias)
    return replace(
        plan,
        parameters=parameters,
        readings=tuple(moved[len(plan.parameters) :]),
        aliased_bytes=aliased,
        copied_bytes=sum(parameter.num_bytes for parameter in parameters) - aliased,
    )


def _gathered(
    parameter: PlannedParameter, start: int, lands_whole: bool
) -> tuple[PlannedParameter, list[ByteRange], int]:
    """The parameter with its bytes from `start` on, the ranges that bring them there, and where they end."""
    ranges: list[ByteRange] = []
    regions: list[PlannedRegion] = []
    end = start
    for region in parameter.regions:
        if region.kind is RegionKind.ZERO:
            regions.append(region)
            continue
        # Regions that land whole are in order of the target already, and leave no gaps.
        place = end if lands_whole and region.kind is RegionKind.COPY else _word_aligned(end)
        end = place + region.rows * region.row_bytes
        _append(ranges, _range_of(region, place))
        regions.append(region._replace(segment=0, source_offset=place, source_stride=region.row_bytes))
    moved = replace(
        parameter,
        regions=tuple(regions),
        alias=AliasSource(0, start) if lands_whole else None,
        why_not_alias="" if lands_whole else parameter.why_not_alias,
    )
    return moved, ranges, end


def _lands_whole(parameter: PlannedParameter) -> bool:
    """Whether its regions, packed one behind the other, are the parameter."""
    filled = 0
    is_read_first = False
    for region in parameter.regions:
        if region.kind is RegionKind.READ:
            is_read_first = True
            continue
        is_as_published = region.kind is RegionKind.COPY and region.cast == "none" and not region.transpose_item
        if is_read_first or not is_as_published or region.target_offset != filled:
            return False
        filled += region.rows * region.row_bytes
    return filled == parameter.num_bytes


def _range_of(region: PlannedRegion, place: int) -> ByteRange:
    stride, rows, row_bytes = region.source_stride, region.rows, region.row_bytes
    return ByteRange(region.segment, region.source_offset, stride, rows, row_bytes, place).joined()


def _append(ranges: list[ByteRange], after: ByteRange) -> None:
    """As one with the last range where both are one run of bytes, or rows of one pattern."""
    joined = _joined(ranges[-1], after) if ranges else None
    if joined is None:
        ranges.append(after)
    else:
        ranges[-1] = joined


def _joined(before: ByteRange, after: ByteRange) -> ByteRange | None:
    if before.segment != after.segment or before.target_offset + before.num_bytes != after.target_offset:
        return None
    if before.rows == after.rows == 1 and before.offset + before.row_bytes == after.offset:
        num_bytes = before.row_bytes + after.row_bytes
        return before._replace(row_bytes=num_bytes, stride=num_bytes)
    stride = before.stride if before.rows > 1 else after.offset - before.offset
    goes_on = (
        before.row_bytes == after.row_bytes
        and stride >= before.row_bytes
        and before.offset + before.rows * stride == after.offset
        and (after.rows == 1 or after.stride == stride)
    )
    return before._replace(stride=stride, rows=before.rows + after.rows) if goes_on else None


def _word_aligned(offset: int) -> int:
    return -(-offset // _WORD_BYTES) * _WORD_BYTES
