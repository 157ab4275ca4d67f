"""The seam between an engine and whatever brings published bytes to it.

A new load strategy is one class with these methods and one line in the registry.
Owns the words only. Invariant, for every source: between `stage` and `release` the
segments' bytes are those of the manifest, or `stage` raised and nothing is held.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.version import WeightVersion

NOT_IMMUTABLE = "the source's memory does not stay as it is"
"""Why nothing may lie in, or be fetched again from, a source whose `is_immutable` is False; for reports."""


@dataclass(frozen=True)
class SourceConfig:
    """What a source may need to know. `channel`: the directory of `ipc` and `ipc_snapshot`."""

    channel: Path


class ResolvedPublication(NamedTuple):
    """A version that exists; nothing is held yet, so it may be superseded before it is staged."""

    version: WeightVersion
    manifest: Manifest


class StagedSource(Protocol):
    """A version whose bytes can be read until `release`."""

    @property
    def segments(self) -> tuple[Mapping, ...]:
        """One readable mapping per segment of the manifest, in its order."""
        ...

    @property
    def is_immutable(self) -> bool:
        """True: the memory stays as it is while staged, so parameters may alias it. False: it may be reused, copy
        it."""
        ...

    def is_vouched(self) -> bool:
        """Whether what `is_immutable` promised still holds: False once whoever promised it is gone, so that nobody
        would know if the memory changed. Parameters must not stay in it then. Cheap enough to ask all the time, from
        any thread; True for what holds no memory (any more)."""
        ...

    def release(self) -> None:
        """Lets go of the memory, then of the claim on it. SegmentError while arrays or tensors over a segment are
        alive: then all stays held, and a later call releases it. A second release does nothing."""
        ...


class WeightSource(Protocol):
    """Where versions come from. Deadlines are absolute CLOCK_MONOTONIC nanoseconds. `resolve` may be called from any
    thread, everything else from one."""

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """The given version, or the latest. NoPublicationError when it is not to be had, naming the one that is."""
        ...

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        """Brings the bytes that `plan` reads within reach. NoPublicationError when the version was superseded since."""
        ...

    def trim(self) -> None:
        """Gives back what is kept only to make the next `stage` quicker: the engine is cleared."""
        ...

    def close(self) -> None:
        """Releases everything that is still staged."""
        ...
