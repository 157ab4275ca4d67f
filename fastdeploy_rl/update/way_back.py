"""How the old version comes back where an update copies into live parameters and fails: from a saved copy, from the
channel, or not at all.

Owns what is held for that between `stage` and the end of the update. Refuses to know when the way back is taken.
Invariant: `restore` returns only when live memory, read back, sums up to what the old version's receipt says. A rebind
needs none of this: there the old weights stay where they are."""

import time
from dataclasses import dataclass
from typing import ClassVar, Protocol

from fastdeploy_rl._native import Mapping, transfer
from fastdeploy_rl.config import KEEP, OFF, REFETCH
from fastdeploy_rl.errors import ChecksumMismatchError, NoPublicationError, StepFailedError
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.sources.base import NOT_IMMUTABLE, ResolvedPublication, StagedSource, WeightSource, readable
from fastdeploy_rl.update.live_weights import LiveWeights, check_sums, live_checksums
from fastdeploy_rl.update.pace import Pace, in_pieces
from fastdeploy_rl.update.packing import copies, packed_bytes, packed_views
from fastdeploy_rl.update.planned_transfer import Sums, transfer_arriving, transfer_planned


class WayBack(Protocol):
    """What is held so that an overwritten version can be had again."""

    policy: ClassVar[str]
    """The one of config.ROLLBACKS that is in force."""
    reason: str
    """Why not the one that was asked for; empty where it is."""

    @property
    def num_bytes(self) -> int:
        """Memory of the engine's own that is held for it."""
        ...

    def write(self, old: LiveWeights, num_threads: int) -> None:
        """Puts the old bytes into the parameters' memory, as far as they are to be had. May be called again."""
        ...

    def release(self) -> None:
        """Lets go of what is held. After success a further call does nothing."""
        ...


@dataclass
class KeptBytes:
    """`keep`: a copy of the old parameters in an arena of the engine's own."""

    arenas: ArenaPair
    arena: Mapping | None
    views: dict[str, TensorView]
    reason: str = ""
    policy: ClassVar[str] = KEEP

    @classmethod
    def take(cls, old: LiveWeights, arenas: ArenaPair, reason: str) -> "KeptBytes":
        """Takes an arena that has room for the old bytes; `save` fills it."""
        arena = arenas.acquire(packed_bytes([view.num_bytes for view in old.views.values()]))
        return cls(arenas, arena, packed_views(old.views, arena), reason)

    def save(self, old: LiveWeights, num_threads: int, pace: Pace) -> None:
        for names in in_pieces(old.views, lambda name: old.views[name].num_bytes):
            begun = time.monotonic()
            transfer(copies({name: old.views[name] for name in names}, self.views), num_threads)
            pace.rest(time.monotonic() - begun)

    @property
    def num_bytes(self) -> int:
        return 0 if self.arena is None else self.arena.num_bytes

    def write(self, old: LiveWeights, num_threads: int) -> None:
        transfer(copies(self.views, old.views), num_threads)

    def release(self) -> None:
        self.views = {}
        if self.arena is not None:
            self.arenas.release(self.arena)
            self.arena = None


@dataclass
class FormerVersion:
    """`refetch`: the old version, leased in the channel until the update has ended."""

    resolved: ResolvedPublication
    staged: StagedSource | None
    deadline_ns: int
    reason: str = ""
    policy: ClassVar[str] = REFETCH

    @classmethod
    def lease(cls, old: LiveWeights, source: WeightSource, plans: LastPlan, deadline_ns: int) -> "FormerVersion":
        """TrainerError or SegmentError where the version cannot be had. What is leased is not read before `check`."""
        resolved = source.resolve(old.version, deadline_ns=deadline_ns)
        if resolved.manifest.content_digest != old.content_digest:
            raise NoPublicationError(f"another publication has taken the place of version {old.version}")
        plan = plans.make(resolved.manifest)
        return cls(resolved, source.stage(resolved, plan, deadline_ns=deadline_ns), deadline_ns)

    def check(self, old: LiveWeights, num_threads: int) -> None:
        """Reads it once, so that it is known before anything is overwritten: NoPublicationError unless what would be
        written back is what is live."""
        if self.staged is None or not self.staged.is_immutable:
            raise NoPublicationError(NOT_IMMUTABLE)
        arrived = self._arrived(num_threads).live
        if any(arrived.get(name) != live for name, live in old.live.items()):
            raise NoPublicationError(f"the channel does not hold the bytes of version {old.version} any more")

    @property
    def num_bytes(self) -> int:
        return 0

    def write(self, old: LiveWeights, num_threads: int) -> None:
        staged = self._held()
        transfer_planned(staged.plan.parameters, self.resolved.manifest, staged.segments, old.views, num_threads)

    def _arrived(self, num_threads: int) -> Sums:
        staged = self._held()
        arrivals = readable(staged, staged.arrivals(deadline_ns=self.deadline_ns))
        return transfer_arriving(arrivals, self.resolved.manifest, staged.segments, {}, num_threads)

    def _held(self) -> StagedSource:
        if self.staged is None:
            raise StepFailedError("the former version was let go already")
        return self.staged

    def release(self) -> None:
        if self.staged is not None:
            self.staged.release()
            self.staged = None


@dataclass
class NoWayBack:
    """`off`: nothing is held, and what was overwritten is gone."""

    reason: str = ""
    policy: ClassVar[str] = OFF

    @property
    def num_bytes(self) -> int:
        return 0

    def write(self, old: LiveWeights, num_threads: int) -> None:
        return None

    def release(self) -> None:
        return None


def restore(way_back: WayBack, old: LiveWeights, rank: int, num_threads: int) -> None:
    """Brings the old bytes back and reads them; StepFailedError where they are not there in full."""
    way_back.write(old, num_threads)
    try:
        check_sums(live_checksums(old.views, num_threads), old, rank)
    except ChecksumMismatchError as error:
        raise StepFailedError(
            f"version {old.version} could not be brought back ({way_back.policy}): {error}"
        ) from error
