"""A plan as data: which published bytes one rank reads, and what becomes of them.

Owns the records that planner, update and command line speak of. Refuses to know how they come about (planner.py) and
what proves them right (proofs.py). All offsets, strides and sizes are in bytes.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fastdeploy_rl.dtypes import itemsize


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

    @property
    def everything(self) -> tuple[PlannedParameter, ...]:
        """All that is read: parameters, then readings."""
        return (*self.parameters, *self.readings)


def after_cast(num_bytes: int, cast: str) -> int:
    """What that many source bytes become."""
    if cast == "none":
        return num_bytes
    source, target = cast.split("_")
    return num_bytes // itemsize(source) * itemsize(target)
