"""Rank 0's coordinator: takes requests one by one, carries each out on all ranks, and tells how it ended.

Owns the order of requests and what the engine shows of itself. Refuses to touch a weight, to know how a dead rank comes
back (recovery.py), and what is written about a command (chronicle.py). Invariant: each request gets exactly one
outcome, and what the engine shows of itself follows from outcomes only.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import StatusRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    FastDeployRLError,
    FencedError,
    LifecycleError,
    NoPublicationError,
    NotServingError,
    PeerLostError,
    VersionRegressError,
)
from fastdeploy_rl.lifecycle import LegacyCommand, Residency, Tag
from fastdeploy_rl.receipt import RankReceipt, Receipt, check_reads, check_replicas, differing, merge, with_live
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.sources.base import ResolvedPublication, WeightSource
from fastdeploy_rl.update.chronicle import Chronicle
from fastdeploy_rl.update.committed import (
    CHECKPOINT,
    Committed,
    committed_version,
    untold_command,
    was_committed,
)
from fastdeploy_rl.update.conductor import CommandOutcome, Conductor
from fastdeploy_rl.update.engine_state import EngineState
from fastdeploy_rl.update.newest_version import NewestVersion
from fastdeploy_rl.update.rank_files import RankFiles, RankPart, applied_of, receipts_of
from fastdeploy_rl.update.recovery import Recovery
from fastdeploy_rl.update.requests import (
    BoardRequest,
    CommandRequest,
    LegacyRequest,
    RestoreRequest,
    next_board_request,
    running_requests,
)
from fastdeploy_rl.update.standby import Standby
from fastdeploy_rl.update.transaction import as_step_failure
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_LOOK_AROUND_NS = 200_000_000
"""Between doorbells: slots of vanished clients are freed this often."""
_KEEP_PERIOD_S = 0.08
"""A vanished name is to be back within 100 ms."""
WATCH_PERIOD_US = 2000
"""A plain store of a foreign process is to be seen within 10 ms. Each look takes a core from decoding for a moment:
a thousand a second cost some percent of the tokens on two cores."""


class Coordinator:
    """Two threads on rank 0 between `start` and `stop`: one serves requests, one keeps the words' names and notices who
    died.

    `on_fault` is called with the reason when one of them ends by an error: no command can be carried out any more."""

    def __init__(
        self,
        *,
        board: Board,
        rendezvous: BoardRendezvous,
        source: WeightSource,
        load_strategy: str,
        deadlines: Deadlines,
        is_restarted_on_death: bool,
        has_checksums: bool = True,
        replicated: frozenset[str] = frozenset(),
        on_fault: Callable[[str], None],
        wake: Callable[[], None],
        await_loops: Callable[[], None] | None = None,
        refused: Mapping[CommandKind, str] = MappingProxyType({}),
    ) -> None:
        """`await_loops`: as LegacyRequest wants it, where loops that are not ours look at the word.
        `is_restarted_on_death`: somebody starts a rank again that died, or that is condemned. `has_checksums` False:
        ranks bring no sums, so that there are no receipts. `replicated`: parameters of which every rank has all. `wake`
        is called when the engine's loop may go on. `refused`: commands that are none for this engine, and why."""
        self.state = EngineState(board)
        self._wake_loop, self._await_loops, self._refused = wake, await_loops, refused
        self._board = board
        self._source = source
        self._load_strategy = load_strategy
        self._deadlines = deadlines
        self._has_checksums, self._replicated = has_checksums, replicated
        self._on_fault = on_fault
        files = RankFiles(board.run_dir)
        self._chronicle = Chronicle(board, files, self.state)
        condemn = board.condemn if is_restarted_on_death else None
        self._conductor = Conductor(rendezvous, files, deadlines.finish_s, condemn)
        self._recovery = Recovery(
            rendezvous,
            self._conductor,
            source,
            deadlines,
            is_restarted_on_death=is_restarted_on_death,
            has_checksums=has_checksums,
            replicated=replicated,
        )
        self._standby = Standby(self.state, self._conductor, self._chronicle, rendezvous, quiet_s=deadlines.quiet_s)
        self._newest = NewestVersion(source, self.state.note_newest, deadlines.resolve_s)
        self._rendezvous = rendezvous
        self._is_taking_over = False
        self._whole_generation = 0
        self._handlers: dict[CommandKind, Callable[[CommandRequest], CommandOutcome]] = {
            CommandKind.UPDATE: self._update,
            CommandKind.CLEAR: self._clear,
            CommandKind.RECOMPUTE: self._recompute,
            CommandKind.RESTORE: lambda request: self._restore(request.deadline_ns),
            CommandKind.PAUSE: self._standby.pause,
            CommandKind.RESUME: self._standby.resume,
            CommandKind.SLEEP: self._standby.sleep,
            CommandKind.WAKE: self._wake,
        }
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=f"fastdeploy_rl-{name}", daemon=True)
            for name, body in (("coordinator", self._serve_requests), ("keeper", self._keep_words))
        ]
        self._watcher: _native.WordWatcher | None = None

    # --- life --------------------------------------------------------------------------------------

    def start(self, cold: list[RankReceipt], layout_digest: str) -> None:
        """The engine serves from here on, on the weights of a cold start; it is cleared where there was none.
        `layout_digest`: of the model's own tensors, for what no trainer published."""
        self._recovery.start(layout_digest)
        if cold:
            receipt = merge(cold, source=CHECKPOINT, layout_digest=layout_digest)
            self._chronicle.keep_receipt(receipt)
            self.state.start(Committed(receipt.version, receipt.content_digest, CHECKPOINT))
        else:
            self.state.start_cleared()
        self._run()

    def take_over(self, layout_digest: str) -> None:
        """In the place of a rank 0 that died: what that one left is brought to its end before anything new begins."""
        self._recovery.start(layout_digest)
        self._is_taking_over = True
        status = self._board.read(StatusRecord, layout.STATUS_OFFSET)
        committed = committed_version(self._board, self._load_strategy)
        self.state.take_over(status, committed, untold_command(self._board))
        self._run()

    def _run(self) -> None:
        self._watch()
        for thread in self._threads:
            thread.start()
        self._newest.start()

    @property
    def is_taking_over(self) -> bool:
        """In the place of a rank 0 that died, and not done yet with what that one left."""
        return self._is_taking_over

    def is_whole(self) -> bool:
        """Every rank is there and holds the version that is served. May be called by another thread."""
        generation = self._board.generation
        if self._board.lost_ranks() or not self.state.is_whole:
            return False
        if generation != self._whole_generation and not self._recovery.is_needed():
            self._whole_generation = generation
        return generation == self._whole_generation

    def stop(self) -> None:
        """Ends the threads; DeadlineExceededError names one that goes on. The board's waits must have been
        abandoned."""
        begun = time.monotonic()
        self._is_stopping.set()
        self._board.ring_doorbell()
        self._newest.stop()
        for thread in (*self._threads, self._newest.thread):
            if thread.is_alive():
                thread.join(self._deadlines.stop_s)
        if self._watcher is not None:
            self._watcher.stop()
        self.state.close()
        late = [thread.name for thread in (*self._threads, self._newest.thread) if thread.is_alive()]
        if late:
            raise DeadlineExceededError.waiting_for(f"end of {', '.join(late)} on rank 0", since_s=begun)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self._on_fault(f"{threading.current_thread().name}: {type(error).__name__}: {error}")
            raise

    def _watch(self) -> None:
        """(Re)starts the watcher of the word, which may be another segment than before."""
        if self._watcher is not None:
            self._watcher.stop()
        word = self.state.weights_word.mapping
        self._watcher = _native.WordWatcher(word, 0, self._board.mapping, layout.DOORBELL_OFFSET, WATCH_PERIOD_US)
        self._board.ring_doorbell()

    def _keep_words(self) -> None:
        """Whatever a command takes, a vanished name is back soon, and a rank that died is noticed."""
        while not self._is_stopping.wait(_KEEP_PERIOD_S):
            self.state.follow_words(self._watch)
            if self._recovery.look_for_dead(self._board.run_dir):
                self._board.ring_doorbell()

    # --- requests ----------------------------------------------------------------------------------

    def _serve_requests(self) -> None:
        if self._is_taking_over:
            self._take_over()
            self._is_taking_over = False
        heard = 0
        while not self._is_stopping.is_set():
            heard = self._board.wait_doorbell(heard, time.monotonic_ns() + _LOOK_AROUND_NS)
            while not self._is_stopping.is_set() and (request := self._next_request()) is not None:
                self._serve(request)
            if self._holds_leftovers() and not self._is_stopping.is_set():
                self._drop_everything()

    def _next_request(self) -> CommandRequest | None:
        """What the ranks need comes first: no command can be carried out without one of them."""
        if self._recovery.is_needed():
            return RestoreRequest(_from_now(self._deadlines.rejoin_s + self._deadlines.update_s))
        command = self.state.take_legacy_command()
        if command is None:
            return next_board_request(self._board)
        is_update = command is LegacyCommand.UPDATE
        allowed_s = self._deadlines.update_s if is_update else self._deadlines.clear_s
        return LegacyRequest(command, self.state, _from_now(allowed_s), self._await_loops)

    def _serve(self, request: CommandRequest) -> CommandOutcome:
        started = time.monotonic()
        previous = self.state.live_version
        try:
            with as_step_failure(request.kind.name.lower(), 0):
                outcome = self._carry_out(request)
        except FastDeployRLError as error:
            outcome = CommandOutcome(Outcome.REJECTED, error, version=request.version)
        if outcome.outcome is Outcome.FENCED:
            self._chronicle.forget_receipt()
            self.state.fence(str(outcome.error))
        elif outcome.lost and self.state.committed is not None:
            self._fence_without(outcome.lost)
        self._chronicle.tell(request, previous, outcome, time.monotonic() - started, self._conductor.number)
        if outcome.outcome is Outcome.FENCED:
            self._drop_everything()
        return outcome

    def _fence_without(self, lost: frozenset[int]) -> None:
        """Until those that died are back, and hold what the others do."""
        self.state.fence(f"ranks {sorted(lost)} died", is_torn=False)

    def _carry_out(self, request: CommandRequest) -> CommandOutcome:
        if why := self._refused.get(request.kind):
            raise LifecycleError(why)
        try:
            return self._handlers[request.kind](request)
        finally:
            if self.state.is_serving:
                self._wake_loop()  # requests that waited may go on

    def _wake(self, request: CommandRequest) -> CommandOutcome:
        """Weights that were dropped come from where updates come from."""
        woken = request.options.tags
        if Tag.WEIGHT in woken and self.state.lifecycle.weight is Residency.DROPPED:
            return self._update(request)
        return self._standby.wake(request)

    # --- the kinds of command ----------------------------------------------------------------------

    def _update(self, request: CommandRequest) -> CommandOutcome:
        resolved = self._resolve(request)
        outcome = self._try_update(request, resolved)
        while (other := self._instead_of(resolved, request, outcome)) is not None:
            reason = str(outcome.error)
            _log.warning("version=%s event=passed_over instead=%s reason=%r", resolved.version, other.version, reason)
            resolved = other
            outcome = self._try_update(request, resolved)
        return outcome

    def _instead_of(
        self, tried: ResolvedPublication, request: CommandRequest, outcome: CommandOutcome
    ) -> ResolvedPublication | None:
        """Whoever asked for the newest version means the one that replaced it while ranks were about to take it; and
        where its bytes are damaged, the newest that is whole, if that is newer than what is live."""
        is_over = outcome.outcome is not Outcome.REJECTED or time.monotonic_ns() >= request.deadline_ns
        if request.version or is_over:
            return None
        if isinstance(outcome.error, NoPublicationError):
            found = self._resolve(request)
            return found if found.version > tried.version else None
        if isinstance(outcome.error, ChecksumMismatchError):
            return self._undamaged(tried, request)
        return None

    def _undamaged(self, tried: ResolvedPublication, request: CommandRequest) -> ResolvedPublication | None:
        self._source.discredit(tried)
        try:
            found = self._resolve(request)
        except FastDeployRLError as none:
            _log.warning("version=%s event=damaged instead=none reason=%r", tried.version, str(none))
            return None
        last = self.state.last_version
        is_new = not last or found.version > WeightVersion.parse(last)
        is_other = _identity(found) != _identity(tried)
        return found if is_new and is_other else None

    def _try_update(self, request: CommandRequest, resolved: ResolvedPublication) -> CommandOutcome:
        version, manifest = resolved.version, resolved.manifest
        woken = frozenset(Tag) if request.wakes_all else request.options.tags | {Tag.WEIGHT}
        if self._is_live_already(resolved) and not request.is_forced and not woken & self.state.asleep:
            return CommandOutcome(Outcome.DONE, version=str(version), receipt=self._chronicle.receipt)
        self._check_direction(version, request)
        before = self.state.lifecycle
        request.begin(self._conductor.number + 1)
        ends_pause = request.kind is CommandKind.WAKE
        options = request.options._replace(tags=self.state.due(woken), woken=woken, ends_pause=ends_pause)
        self.state.bring(options.tags)
        outcome = self._conductor.lead(
            CommandKind.UPDATE,
            deadline_ns=self._standby.deadline_ns(request),
            version=version,
            content_digest=manifest.content_digest,
            options=options,
            check_staged=partial(self._check_staged, request, resolved),
        )
        outcome.version = str(version)
        if outcome.outcome is Outcome.DONE:
            request.commit()
            live = Committed(str(version), manifest.content_digest, self._load_strategy)
            self._adopt(outcome, live, options)
        elif outcome.outcome is Outcome.REJECTED:
            if outcome.lost and self.state.committed is not None:
                self._fence_without(outcome.lost)
            self.state.undo_update(before)
        return outcome

    def _check_staged(
        self, request: CommandRequest, resolved: ResolvedPublication, parts: list[RankPart]
    ) -> Receipt | None:
        """Before anything is touched: what all ranks read together is what was published; and it is told what a way
        back would cost."""
        manifest = resolved.manifest
        self._chronicle.tell_staged(request, str(resolved.version), parts)
        if not self._has_checksums:
            return None
        receipts = receipts_of(parts)
        merged = merge(receipts, source=self._load_strategy, layout_digest=manifest.layout_digest)
        check_reads(merged, {tensor.name: tensor.checksum for tensor in manifest.tensors})
        check_replicas(receipts, self._replicated)
        return merged

    def _resolve(self, request: CommandRequest) -> ResolvedPublication:
        """What is asked for; a bare step number, as FastDeploy writes it, means one of the channel's present epoch."""
        text, deadline_ns = request.version, request.deadline_ns
        if not text:
            found = self._source.resolve(None, deadline_ns=deadline_ns)
            self.state.note_newest(str(found.version))
            return found
        # The epoch is asked for only where it is missing: a source may have nothing that is the latest.
        epoch = self._source.current_epoch(deadline_ns=deadline_ns) if text.isdigit() else 0
        wanted = WeightVersion.parse(text, current_epoch=epoch)
        return self._source.resolve(wanted, deadline_ns=deadline_ns)

    def _is_live_already(self, resolved: ResolvedPublication) -> bool:
        shown = self.state.live_version, self.state.content_digest
        return self.state.is_live and shown == (str(resolved.version), resolved.manifest.content_digest)

    def _check_direction(self, version: WeightVersion, request: CommandRequest) -> None:
        last = self.state.last_version
        if last and version < WeightVersion.parse(last) and not request.is_forced:
            raise VersionRegressError(
                f"version {version} would go back from {last}; nothing changed; force the update if that is meant"
            )

    def _adopt(self, outcome: CommandOutcome, live: Committed, options: CommandOptions) -> None:
        """Every rank committed: receipt and version are the new ones. One that died since is brought forward first."""
        applied = applied_of(outcome.parts)
        if outcome.lost:
            self._fence_without(outcome.lost)
            self.state.adopt(live, self._conductor.number, applied, options)
            restored = self._restore(_from_now(self._deadlines.rejoin_s + self._deadlines.update_s))
            outcome.outcome, outcome.error, outcome.receipt = restored.outcome, restored.error, restored.receipt
            outcome.lost = restored.lost
            return
        if not self._has_checksums:
            self._chronicle.forget_receipt()
            self.state.finish_update(live, self._conductor.number, applied, options)
            return
        try:
            if outcome.checked is None:
                raise FencedError("the ranks committed what was never checked")
            outcome.receipt = receipt = with_live(outcome.checked, outcome.receipts)
        except FastDeployRLError as torn:
            outcome.outcome, outcome.error = Outcome.FENCED, torn
            return
        self._chronicle.keep_receipt(receipt)
        self.state.finish_update(live, self._conductor.number, applied, options)

    def _restore(self, deadline_ns: int) -> CommandOutcome:
        """Every rank holds the committed version again, those that were started anew as well; DONE or FENCED. Where no
        version is committed there is nothing to bring back, and what a fence could not drop without the dead is."""
        committed = self.state.committed
        if committed is not None:
            self.state.fence(self._recovery.reason(), is_torn=False)
        elif not self.state.is_empty:
            # What slept in the memory of the dead is gone, and so what the others have is of no use.
            who = self._recovery.who_died()
            self.state.fence(f"{who} while the engine slept; what it held is dropped: wake or update it")
            self._chronicle.forget_receipt()
        before = self.state.lifecycle
        due = self.state.due()
        self.state.bring(due)
        outcome = self._recovery.recover(committed, due, deadline_ns, lambda: self.state.undo_update(before))
        if committed is not None and outcome.outcome is Outcome.DONE:
            if outcome.receipt is not None:
                self._chronicle.keep_receipt(outcome.receipt)
            self.state.start(committed)
        elif outcome.outcome is Outcome.DONE and self.state.is_fenced and not self.state.is_empty:
            self._drop_everything()
        return outcome

    def _clear(self, request: CommandRequest) -> CommandOutcome:
        outcome = CommandOutcome(Outcome.DONE)
        if not self.state.is_empty:
            outcome = self._standby.lead_closed(request, request.options)
        if outcome.outcome is Outcome.DONE:
            self._chronicle.forget_receipt()
            self.state.forget_sleep()
            self.state.clear(self._conductor.number)
            request.commit()
        return outcome

    def _recompute(self, request: CommandRequest) -> CommandOutcome:
        receipt = self._chronicle.receipt
        if receipt is None:
            why = (
                "no version is live; update the engine" if self._has_checksums else "checksums are off (--no-checksums)"
            )
            raise NotServingError(f"there is no receipt to check: {why}")
        outcome = self._conductor.lead(request.kind, deadline_ns=request.deadline_ns)
        outcome.version = receipt.version
        if outcome.outcome is Outcome.DONE:
            outcome.receipt, outcome.differing = receipt, differing(receipt, outcome.receipts)
        return outcome

    def _holds_leftovers(self) -> bool:
        """A fence dropped nothing yet, as where a rank came to no decode boundary in time; all ranks are there now."""
        is_torn = self.state.is_fenced and self.state.committed is None
        return is_torn and not self.state.is_empty and not self._rendezvous.lost_ranks()

    def _drop_everything(self) -> None:
        """After a fence: what the ranks hold is dropped, as far as they still follow; the dead hold nothing. The word
        tells when."""
        try:
            cleared = self._conductor.lead(
                CommandKind.CLEAR,
                deadline_ns=_from_now(self._deadlines.clear_s),
                excused=self._rendezvous.lost_ranks(),
                must_follow=True,
            )
        except FastDeployRLError as error:
            cleared = CommandOutcome(Outcome.FENCED, error)
        if cleared.outcome is Outcome.DONE:
            self.state.clear(self._conductor.number)
        else:
            _log.error("event=fence_incomplete reason=%r", str(cleared.error))

    # --- in the place of another -------------------------------------------------------------------

    def _take_over(self) -> None:
        """What a rank 0 that died had begun: whoever waits for it is told what the commit word said."""
        left = running_requests(self._board)
        last = self._rendezvous.current()
        committed = last.number if was_committed(self._board, last) else 0
        took_effect = [request.took_effect(committed) for request in left]
        try:
            self._conductor.take_over()
        except FastDeployRLError as silent:
            _log.error("event=unfinished reason=%r", str(silent))
        restored = self._serve(RestoreRequest(_from_now(self._deadlines.rejoin_s + self._deadlines.update_s)))
        for request, is_done in zip(left, took_effect, strict=True):
            told = self._told_after_death(request, is_done, restored)
            self._chronicle.tell(request, "", told, 0.0, self._conductor.number)

    def _told_after_death(self, request: BoardRequest, is_done: bool, restored: CommandOutcome) -> CommandOutcome:
        version = self.state.live_version
        brings = request.kind in (CommandKind.UPDATE, CommandKind.WAKE)
        if is_done and brings and restored.outcome is Outcome.DONE and not version:
            gone = FencedError("every rank committed, and then ranks died: nothing is live any more; update the engine")
            return CommandOutcome(Outcome.FENCED, gone, version=request.version)
        if is_done:
            return CommandOutcome(restored.outcome, restored.error, version=version, receipt=restored.receipt)
        kind = request.kind.name.lower()
        lost = PeerLostError(f"rank 0 died before this {kind} took effect: nothing changed; ask again")
        return CommandOutcome(Outcome.REJECTED, lost, version=request.version)


def _identity(resolved: ResolvedPublication) -> tuple[WeightVersion, str]:
    return resolved.version, resolved.manifest.content_digest


def _from_now(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)
