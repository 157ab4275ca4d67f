"""After a rank died: when that is noticed, how long its successor is waited for, and how all hold one version again.

Owns rank 0's view of who died and who came back. Refuses to start processes: whoever watches over them does. Invariant:
an engine that recovered holds, on every rank, the version that was committed last, proved as after an update."""

import time
from collections.abc import Callable
from pathlib import Path

from fastdeploy_rl.board.board import rank_lock_path
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import ChecksumMismatchError, FastDeployRLError, FencedError, PeerLostError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.memory.owner_lock import is_alive
from fastdeploy_rl.receipt import Receipt, check_replicas, merge, with_live
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.sources.base import WeightSource
from fastdeploy_rl.update.committed import Committed
from fastdeploy_rl.update.conductor import CommandOutcome, Conductor
from fastdeploy_rl.update.rank_files import RankPart, receipts_of
from fastdeploy_rl.version import WeightVersion

READY, STOPPED, TORN = "ready", "stopped", "torn"
"""Phases that a rank shows: it has taken its seat; it leaves it in order; what it holds is not whole any more."""


class Recovery:
    """Used by the coordinator's thread; `look_for_dead` and `is_needed` by others as well."""

    def __init__(
        self,
        rendezvous: BoardRendezvous,
        conductor: Conductor,
        source: WeightSource,
        deadlines: Deadlines,
        *,
        is_restarted_on_death: bool,
        has_checksums: bool = True,
        replicated: frozenset[str] = frozenset(),
    ) -> None:
        self._has_checksums, self._replicated = has_checksums, replicated
        self._rendezvous = rendezvous
        self._conductor = conductor
        self._source = source
        self._deadlines = deadlines
        self._is_restarted_on_death = is_restarted_on_death
        self._incarnations: list[int] = []
        self._given_up: frozenset[int] = frozenset()
        self._layout_digest = ""

    def start(self, layout_digest: str) -> None:
        """Every rank has taken its seat. `layout_digest`: of the model's own tensors."""
        self._layout_digest = layout_digest
        self._incarnations = [record.incarnation for record in self._rendezvous.records()]

    def look_for_dead(self, run_dir: Path) -> bool:
        """True while a rank is lost. Where nobody else watches over the processes, ranks whose locks are free are
        marked here; whoever starts ranks again marks them first, so that no mark comes after the successor."""
        lost = self._rendezvous.lost_ranks()
        if self._is_restarted_on_death:
            return bool(lost)
        for rank, record in enumerate(self._rendezvous.records()[1:], 1):
            if rank not in lost and record.phase != STOPPED and not is_alive(rank_lock_path(run_dir, rank)):
                self._rendezvous.mark_lost(rank)
        return bool(self._rendezvous.lost_ranks())

    def is_needed(self) -> bool:
        """A rank died, or came back, or found what it holds damaged, since the last recovery."""
        records = self._rendezvous.records()
        is_reborn = any(record.incarnation > known for record, known in zip(records, self._incarnations, strict=True))
        is_torn = any(record.phase == TORN for record in records)
        return is_reborn or is_torn or not self._rendezvous.lost_ranks() <= self._given_up

    def reason(self) -> str:
        """Why the engine does not serve meanwhile."""
        torn = self._what_is_torn()
        return torn or f"{self.who_died()}; the engine serves again when all hold the same version"

    def who_died(self) -> str:
        lost = sorted(self._rendezvous.lost_ranks())
        return f"ranks {lost} died" if lost else "a rank died and is back"

    def recover(
        self, committed: Committed | None, due: frozenset[Tag], deadline_ns: int, undone: Callable[[], None]
    ) -> CommandOutcome:
        """Waits for the successors of dead ranks, then brings every rank to `committed`: DONE or FENCED. `due`: what is
        to be in place then. `undone` is called after each attempt that came to nothing because one more rank died."""
        try:
            self._check_whole()
            self._await_back(deadline_ns)
            outcome = self._restored(committed, due)
            while outcome.lost and outcome.outcome is not Outcome.FENCED and time.monotonic_ns() < deadline_ns:
                undone()
                self._await_back(deadline_ns)
                outcome = self._restored(committed, due)
        except FastDeployRLError as error:
            outcome = CommandOutcome(Outcome.FENCED, FencedError(f"not recovered: {error}"))
        if outcome.outcome is not Outcome.DONE or outcome.lost:
            outcome.outcome = Outcome.FENCED
        self._given_up = self._rendezvous.lost_ranks()
        return outcome

    def _check_whole(self) -> None:
        torn = self._what_is_torn()
        if torn:
            raise FencedError(torn)

    def _what_is_torn(self) -> str:
        """Empty where no rank says so of what it holds."""
        records = enumerate(self._rendezvous.records())
        return next((f"rank {rank}: {record.reason}" for rank, record in records if record.phase == TORN), "")

    def _await_back(self, deadline_ns: int) -> None:
        lost = sorted(self._rendezvous.lost_ranks())
        if lost and not self._is_restarted_on_death:
            raise PeerLostError(f"ranks {lost} died, and nobody starts them again")
        last_ns = min(deadline_ns, time.monotonic_ns() + int(self._deadlines.rejoin_s * 1e9))
        self._rendezvous.await_ranks(lambda record: bool(record.phase), f"return of ranks {lost}", last_ns)

    def _restored(self, committed: Committed | None, due: frozenset[Tag]) -> CommandOutcome:
        incarnations = [record.incarnation for record in self._rendezvous.records()]
        deadline_ns = time.monotonic_ns() + int(self._deadlines.update_s * 1e9)
        outcome = CommandOutcome(Outcome.DONE) if committed is None else self._lead(committed, due, deadline_ns)
        self._incarnations = incarnations
        return outcome

    def _lead(self, committed: Committed, due: frozenset[Tag], deadline_ns: int) -> CommandOutcome:
        version = WeightVersion.parse(committed.version)
        layout_digest = self._layout_digest
        if not committed.is_cold:
            layout_digest = self._source.resolve(version, deadline_ns=deadline_ns).manifest.layout_digest

        def check_staged(parts: list[RankPart]) -> Receipt:
            receipts = receipts_of(parts)
            merged = merge(receipts, source=committed.source, layout_digest=layout_digest)
            if merged.content_digest != committed.content_digest:
                raise ChecksumMismatchError(f"the ranks do not hold version {version} as it was committed")
            check_replicas(receipts, self._replicated)
            return merged

        outcome = self._conductor.lead(
            CommandKind.RESTORE,
            deadline_ns=deadline_ns,
            version=version,
            content_digest=committed.content_digest,
            options=CommandOptions(tags=due),
            check_staged=check_staged if self._has_checksums else None,
        )
        outcome.version = committed.version
        if outcome.outcome is Outcome.DONE and not outcome.lost and outcome.checked is not None:
            outcome.receipt = with_live(outcome.checked, outcome.receipts)
        return outcome
