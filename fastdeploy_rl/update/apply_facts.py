"""What one rank knows of the ways to take staged weights over, gathered while it serves; apply_choice.py weighs it.

Owns the measuring. Takes nothing: no arena, no lease, no graph. Invariant: a way whose addresses are known is asked for
by these addresses, any other by none."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import KEEP
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.free_memory import free_memory
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import StagedSource
from fastdeploy_rl.update.apply_choice import ApplyFacts, CopySpeed, why_no_alias
from fastdeploy_rl.update.live_weights import LiveWeights
from fastdeploy_rl.update.packing import packed_bytes
from fastdeploy_rl.update.placement import arena_bytes, copied_parameters, placed

Item = TypeVar("Item")


@dataclass(frozen=True)
class Weighed:
    """What a rank asks about before it chooses. `has_graphs`: graphs are to be in place after the update."""

    plan: Plan
    staged: StagedSource
    manifest: Manifest
    old: LiveWeights | None
    arenas: ArenaPair
    runner: ModelRunner
    rollback: str
    has_checksums: bool
    has_graphs: bool
    copy_speed: CopySpeed

    def facts(self) -> ApplyFacts:
        """Memory is what all ranks need together: they stage at the same time."""
        plan, ranks = self.plan, self.runner.num_ranks
        alias, arena = copied_parameters(plan, may_alias=True), copied_parameters(plan, may_alias=False)
        overwrites = self._overwritten_bytes()
        return ApplyFacts(
            why_no_alias=why_no_alias(
                aliasable_bytes=0 if alias == arena else plan.aliased_bytes,
                is_immutable=self.staged.is_immutable,
                is_copied_unless_asked=self.staged.is_copied_unless_asked,
            ),
            is_lent=any(segment.is_borrowed for segment in self.manifest.segments),
            overwrites=overwrites,
            has_checksums=self.has_checksums,
            rollback=self.rollback,
            alias_recapture_s=self._recapture_s(may_alias=True),
            arena_recapture_s=self._recapture_s(may_alias=False),
            copy_bytes_per_s=self.copy_speed.bytes_per_s,
            alias_needs=self._fresh_bytes(arena_bytes(alias)) * ranks,
            arena_needs=self._fresh_bytes(arena_bytes(arena)) * ranks,
            copy_needs=self._way_back_bytes() * ranks if overwrites else 0,
            free_bytes=free_memory(),
        )

    def _overwritten_bytes(self) -> int:
        """Of parameters that all lie in memory of the engine's own; else 0."""
        old = self.old
        if old is None or old.staged is not None or self.runner.fills_parameters:
            return 0
        views = [view for view in old.views.values() if view.num_bytes]
        return sum(view.num_bytes for view in views) if all(view.mapping.is_writable for view in views) else 0

    def _recapture_s(self, *, may_alias: bool) -> float:
        if not self.has_graphs:
            return 0.0
        copied = copied_parameters(self.plan, may_alias=may_alias)
        arena = self._arena_for(arena_bytes(copied))
        if copied and arena is None:
            return self.runner.recapture_seconds({})  # fresh memory: nobody has captured anything there
        return self.runner.recapture_seconds(placed(self.plan, copied, self.staged.segments, arena))

    def _arena_for(self, num_bytes: int) -> Mapping | None:
        return self.arenas.next_mapping(num_bytes) if num_bytes else None

    def _fresh_bytes(self, num_bytes: int) -> int:
        return num_bytes if self._arena_for(num_bytes) is None else 0

    def _way_back_bytes(self) -> int:
        """Of refetch it is not known yet whether it will do; who asks for it has no memory to spare."""
        if self.old is None or self.rollback != KEEP:
            return 0
        return self._fresh_bytes(packed_bytes([view.num_bytes for view in self.old.views.values()]))


class TimedArrivals(Iterator[Item]):
    """What comes, and how many `seconds` it let itself be waited for."""

    def __init__(self, arrivals: Iterator[Item]) -> None:
        self._arrivals = arrivals
        self.seconds = 0.0

    def __next__(self) -> Item:
        started = time.monotonic()
        try:
            return next(self._arrivals)
        finally:
            self.seconds += time.monotonic() - started
