"""The seam between an engine and whatever brings published bytes to it.

A new load strategy is one class with these methods and one line in the registry.
Owns the words only. Invariant, for every source: what `arrivals` has given has the manifest's bytes, at the places
that `plan` names, until `release`; or an error was raised and nothing is held.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.plan import Plan, PlannedParameter
from fastdeploy_rl.version import WeightVersion

NOT_IMMUTABLE = "the source's memory does not stay as it is"
"""Why nothing may lie in, or be fetched again from, a source whose `is_immutable` is False; for reports."""
NOT_ASKED = "the source's memory is used in place only where that is asked for"
"""Why apply mode `auto` copies from a source that `is_copied_unless_asked`; for reports."""


@dataclass(frozen=True)
class SourceConfig:
    """What a source may need to know of the engine and of the place where weights come from.

    `channel`: the directory of `ipc` and `ipc_snapshot`, and where `rsync` looks for a server on this machine.
    `model_dir`: where FastDeploy's trainers leave `version.yaml` and their own files; None: nowhere. `parameters`: the
    engine's, global shapes. `rsync_config`: the JSON text of `--rsync-config`, empty where none was given. `metas_dir`:
    where FastDeploy's trainers leave `ipc_metas_{gpu}` and what they share; None: nowhere."""

    channel: Path
    model_dir: Path | None = None
    rank: int = 0
    num_ranks: int = 1
    parameters: tuple[ParameterSpec, ...] = ()
    num_threads: int = 1
    rsync_config: str = ""
    metas_dir: Path | None = None


class ResolvedPublication(NamedTuple):
    """A version that exists; nothing is held yet, so it may be superseded before it is staged."""

    version: WeightVersion
    manifest: Manifest


class StagedSource(Protocol):
    """A version whose bytes can be read until `release`."""

    @property
    def plan(self) -> Plan:
        """What `stage` was given, with the places in `segments` where the bytes lie now."""
        ...

    @property
    def segments(self) -> tuple[Mapping, ...]:
        """Readable mappings: those that `plan` counts."""
        ...

    @property
    def is_immutable(self) -> bool:
        """True: the memory stays as it is while staged, so parameters may alias it. False: it may be reused, copy
        it."""
        ...

    @property
    def is_copied_unless_asked(self) -> bool:
        """Apply mode `auto` copies, though the memory is immutable: to lie in it costs or risks something."""
        ...

    def arrivals(self, *, deadline_ns: int) -> Iterator[Sequence[PlannedParameter]]:
        """All of `plan.everything`, each once, in the order in which the bytes come within reach: what has been given
        can be read. Blocks for the next; called once. DeadlineExceededError, PeerLostError and NoPublicationError where
        not all bytes come; then `release` is still to be called."""
        ...

    def bring_in(self, planned: Sequence[PlannedParameter]) -> None:
        """Before some of what arrived is read. ChecksumMismatchError where its bytes cannot be had any more; memory
        always can."""
        ...

    def is_vouched(self) -> bool:
        """Whether what `is_immutable` promised still holds: False once whoever promised it is gone, so that nobody
        would know if the memory changed. Parameters must not stay in it then. Cheap enough to ask all the time, from
        any thread; True for what holds no memory (any more)."""
        ...

    def release(self) -> None:
        """Ends what still arrives, lets go of the memory, then of the claim on it. SegmentError while arrays or tensors
        over a segment are alive: then all stays held, and a later call releases it. A second release does nothing."""
        ...


def readable(
    staged: StagedSource, batches: Iterable[Sequence[PlannedParameter]]
) -> Iterator[Sequence[PlannedParameter]]:
    """The batches, each brought in before it is given."""
    for batch in batches:
        staged.bring_in(batch)
        yield batch


class WeightSource(Protocol):
    """Where versions come from. Deadlines are absolute CLOCK_MONOTONIC nanoseconds. All but `stage`,
    `trim` and `close` may be called from any thread, these from one."""

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """The given version, or the one that is wanted where none is named: the latest, as a rule. NoPublicationError
        when it is not to be had, naming the one that is."""
        ...

    def current_epoch(self, *, deadline_ns: int) -> int:
        """Which epoch a bare step number means, as FastDeploy writes it. NoPublicationError while there is none."""
        ...

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        """The newest that is published, whatever is wanted; None where there is none, or where that cannot be said
        without bringing its bytes."""
        ...

    def discredit(self, resolved: ResolvedPublication) -> None:
        """Its bytes were read and are not what its manifest says: `resolve` without a version gives an older one from
        now on, where there is one that is whole. By name it can still be had."""
        ...

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        """Begins to bring the bytes that `plan` reads within reach; `arrivals` tells when they are. NoPublicationError
        when the version was superseded since."""
        ...

    def trim(self) -> None:
        """Gives back what is kept only to make the next `stage` quicker: the engine is cleared."""
        ...

    def close(self) -> None:
        """Releases everything that is still staged."""
        ...
