"""Rank 0's conductor: takes requests one by one, makes each a command of all ranks, and tells how it ended.

Owns the order of commands, the two proposals of YES, the merged report and receipt. Refuses to touch a weight.
Invariant: each request gets exactly one outcome; until a command is decided and finished on every rank, no other
begins."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import (
    Ballot,
    CommandRecord,
    Decision,
    OutcomeRecord,
    RankRecord,
    RequestRecord,
    SlotState,
)
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.errors import FastDeployRLError, LifecycleError, StepFailedError, VersionRegressError, from_wire
from fastdeploy_rl.lifecycle import LegacyCommand
from fastdeploy_rl.memory.owner_lock import is_alive
from fastdeploy_rl.receipt import Receipt, check_reads, differing, merge, with_live
from fastdeploy_rl.report import CommandKind, Outcome, RankReport, UpdateReport
from fastdeploy_rl.sources.base import ResolvedPublication, WeightSource
from fastdeploy_rl.update.engine_state import EngineState
from fastdeploy_rl.update.rank_files import RankFiles, RankPart
from fastdeploy_rl.update.transaction import as_step_failure
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_LOOK_AROUND_NS = 200_000_000
"""Between doorbells: slots of vanished clients are freed this often."""
_KEEP_PERIOD_S = 0.05
_WATCH_PERIOD_US = 1000
_FINISH_GRACE_NS = 5_000_000_000
"""After a decision ranks only follow it; this long after the command's deadline they must have."""


class Request(Protocol):
    """What somebody asked for. `finish` tells them, once."""

    kind: CommandKind
    version: str
    is_forced: bool
    deadline_ns: int

    def finish(self, report: UpdateReport) -> None: ...


@dataclass
class Conduct:
    """How a command went: `error` is what spoke against it."""

    outcome: Outcome
    error: FastDeployRLError | None = None
    parts: list[RankPart] = field(default_factory=list)
    receipt: Receipt | None = None
    differing: list[tuple[str, int]] = field(default_factory=list)


class Coordinator:
    """Two threads on rank 0 between `start` and `stop`: one serves requests, one keeps the words' names."""

    def __init__(
        self,
        *,
        board: Board,
        rendezvous: BoardRendezvous,
        source: WeightSource,
        state: EngineState,
        load_strategy: str,
        legacy_deadline_s: float,
    ) -> None:
        self._board = board
        self._rendezvous = rendezvous
        self._source = source
        self._state = state
        self._load_strategy = load_strategy
        self._legacy_deadline_ns = int(legacy_deadline_s * 1e9)
        self._files = RankFiles(board.run_dir)
        self._receipt: Receipt | None = None
        self._number = 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastdeploy_rl-coordinator", daemon=True)
        self._keeper = threading.Thread(target=self._keep_words, name="fastdeploy_rl-keeper", daemon=True)
        self._watcher: _native.WordWatcher | None = None

    # --- life --------------------------------------------------------------------------------------

    def start(self, initial: list[RankPart] | None, content_layout: str) -> None:
        """The engine serves from here on, on a cold start's weights if `initial` says which."""
        if initial is None:
            self._state.start_cleared()
        else:
            receipts = [part.receipt for part in initial if part.receipt is not None]
            self._receipt = merge(receipts, source="checkpoint", layout_digest=content_layout)
            self._files.write_receipt(self._receipt)
            self._state.start(self._receipt.version, self._receipt.content_digest)
        self._watch()
        self._thread.start()
        self._keeper.start()

    def stop(self) -> None:
        """Ends the threads. The board's waits must have been abandoned."""
        self._is_stopping.set()
        self._board.ring_doorbell()
        self._thread.join()
        self._keeper.join()
        if self._watcher is not None:
            self._watcher.stop()
        self._state.close()

    def _watch(self) -> None:
        """(Re)starts the watcher of the word, which may be another segment than before."""
        if self._watcher is not None:
            self._watcher.stop()
        word = self._state.weights_word.mapping
        self._watcher = _native.WordWatcher(word, 0, self._board.mapping, layout.DOORBELL_OFFSET, _WATCH_PERIOD_US)
        self._board.ring_doorbell()

    def _keep_words(self) -> None:
        """Whatever a command takes, a vanished name is back soon."""
        while not self._is_stopping.wait(_KEEP_PERIOD_S):
            self._state.follow_words(self._watch)

    def _run(self) -> None:
        heard = 0
        while not self._is_stopping.is_set():
            heard = self._board.wait_doorbell(heard, time.monotonic_ns() + _LOOK_AROUND_NS)
            while not self._is_stopping.is_set() and (request := self._next_request()) is not None:
                self._serve(request)

    # --- requests ----------------------------------------------------------------------------------

    def _next_request(self) -> Request | None:
        command = self._state.take_legacy_command()
        if command is not None:
            return LegacyRequest(command, self._state, time.monotonic_ns() + self._legacy_deadline_ns)
        return next_board_request(self._board)

    def _serve(self, request: Request) -> None:
        started = time.monotonic()
        previous = self._state.version
        self._number += 1
        try:
            with as_step_failure(request.kind.name.lower(), 0):
                version, conduct = self._carry_out(request)
        except FastDeployRLError as error:
            version, conduct = request.version, Conduct(Outcome.REJECTED, error)
        report = self._report(request, version, previous, conduct, time.monotonic() - started)
        self._files.write_report(report)
        self._state.count_command()
        _log_report(report)
        request.finish(report)

    def _carry_out(self, request: Request) -> tuple[str, Conduct]:
        if request.kind is CommandKind.UPDATE:
            return self._update(request)
        if request.kind is CommandKind.CLEAR:
            return "", self._clear(request)
        return self._state.version, self._recompute(request)

    # --- the kinds of command ----------------------------------------------------------------------

    def _update(self, request: Request) -> tuple[str, Conduct]:
        resolved = self._resolve(request)
        if self._is_live_already(resolved) and not request.is_forced:
            return str(resolved.version), Conduct(Outcome.DONE, receipt=self._receipt)
        self._check_direction(resolved.version, request)
        before = self._state.lifecycle
        command = self._announce(request, resolved.version, resolved.manifest.content_digest)
        checked: list[Receipt] = []
        conduct = self._conduct(command, lambda: checked.append(self._check_staged(command, resolved)))
        if conduct.outcome is Outcome.REJECTED:
            self._state.undo_update(before)
        if conduct.outcome is Outcome.DONE:
            self._adopt(resolved.version, checked[0], conduct)
        return str(resolved.version), conduct

    def _resolve(self, request: Request) -> ResolvedPublication:
        """What is asked for; a bare step number, as FastDeploy writes it, means one of the channel's present epoch."""
        latest = self._source.resolve(None, deadline_ns=request.deadline_ns)
        if not request.version:
            return latest
        wanted = WeightVersion.parse(request.version, current_epoch=latest.version.epoch)
        return latest if wanted == latest.version else self._source.resolve(wanted, deadline_ns=request.deadline_ns)

    def _is_live_already(self, resolved: ResolvedPublication) -> bool:
        is_same = self._state.version == str(resolved.version) and not self._state.is_cleared
        return is_same and self._state.content_digest == resolved.manifest.content_digest

    def _check_direction(self, version: WeightVersion, request: Request) -> None:
        if self._state.version and version < WeightVersion.parse(self._state.version) and not request.is_forced:
            raise VersionRegressError(
                f"version {version} would go back from {self._state.version}; nothing changed; "
                "force the update if that is meant"
            )

    def _check_staged(self, command: CommandRecord, resolved: ResolvedPublication) -> Receipt:
        """Before anything is touched: what all ranks read together is what was published."""
        receipts = [self._files.read_staged(rank, command.number) for rank in range(self._board.num_ranks)]
        merged = merge(receipts, source=self._load_strategy, layout_digest=resolved.manifest.layout_digest)
        check_reads(merged, {tensor.name: tensor.checksum for tensor in resolved.manifest.tensors})
        return merged

    def _adopt(self, version: WeightVersion, checked: Receipt, conduct: Conduct) -> None:
        """Every rank committed: receipt and version are the new ones, at once."""
        receipts = [part.receipt for part in conduct.parts if part.receipt is not None]
        try:
            conduct.receipt = with_live(checked, receipts)
        except FastDeployRLError as torn:
            conduct.outcome, conduct.error = Outcome.FENCED, torn
            self._fence(str(torn))
            return
        self._receipt = conduct.receipt
        self._files.write_receipt(conduct.receipt)
        self._state.set_version(str(version), conduct.receipt.content_digest)
        self._state.finish_update()

    def _fence(self, reason: str) -> None:
        self._receipt = None
        self._files.remove_receipt()
        self._state.fence(reason)

    def _clear(self, request: Request) -> Conduct:
        if self._state.is_cleared:
            return Conduct(Outcome.DONE)
        self._state.pause()
        conduct = self._conduct(self._announce(request, None, ""), lambda: None)
        if conduct.outcome is Outcome.DONE:
            self._receipt = None
            self._files.remove_receipt()
            self._state.clear()
        else:
            self._state.resume()
        return conduct

    def _recompute(self, request: Request) -> Conduct:
        if self._receipt is None or self._state.is_cleared:
            raise LifecycleError("there is no receipt to check: the engine is cleared; update it first")
        conduct = self._conduct(self._announce(request, None, ""), lambda: None)
        if conduct.outcome is Outcome.DONE:
            found = [part.receipt for part in conduct.parts if part.receipt is not None]
            conduct.receipt, conduct.differing = self._receipt, differing(self._receipt, found)
        return conduct

    # --- one command over all ranks ----------------------------------------------------------------

    def _announce(self, request: Request, version: WeightVersion | None, content_digest: str) -> CommandRecord:
        command = CommandRecord(
            number=self._number,
            kind=request.kind,
            epoch=version.epoch if version else 0,
            step=version.step if version else 0,
            deadline_ns=request.deadline_ns,
            content_digest=content_digest,
        )
        _log.info(
            "command=%d kind=%s version=%s phase=announced", command.number, request.kind.name.lower(), version or "-"
        )
        self._rendezvous.announce(command)
        return command

    def _conduct(self, command: CommandRecord, check_staged: Callable[[], None]) -> Conduct:
        """Votes, decisions, votes: returns what all ranks came to."""
        error = self._propose(command, Question.INSTALL, Ballot.STAGED, check_staged)
        if error is None:
            error = self._propose(command, Question.COMMIT, Ballot.VERIFIED, lambda: None)
        is_done = error is None
        try:
            self._rendezvous.await_votes(command.number, Ballot.FINISHED, command.deadline_ns + _FINISH_GRACE_NS)
            parts = [self._files.read_part(rank, command.number) for rank in range(self._board.num_ranks)]
        except FastDeployRLError as lost:
            self._fence(str(lost))
            return Conduct(Outcome.FENCED, lost)
        fenced = next((part.fence_reason for part in parts if part.fence_reason), "")
        if fenced:
            self._fence(fenced)
            return Conduct(Outcome.FENCED, StepFailedError(fenced), parts)
        return Conduct(Outcome.DONE if is_done else Outcome.REJECTED, error, parts)

    def _propose(
        self, command: CommandRecord, question: Question, wanted: Ballot, check: Callable[[], None]
    ) -> FastDeployRLError | None:
        """Proposes YES when every rank reached `wanted` and `check` finds nothing; returns what spoke against it
        otherwise."""
        error: FastDeployRLError | None = None
        try:
            error = _first_objection(self._rendezvous.await_votes(command.number, wanted, command.deadline_ns))
            if error is None:
                check()
        except FastDeployRLError as found:
            error = found
        proposal = Decision.YES if error is None else Decision.NO
        decision = self._rendezvous.decide_once(question, command.number, proposal)
        if error is None and decision is Decision.NO:
            error = StepFailedError(f"a rank's deadline passed before the decision to {question.value}")
        return error if decision is Decision.NO else None

    # --- the story ---------------------------------------------------------------------------------

    def _report(self, request: Request, version: str, previous: str, conduct: Conduct, seconds: float) -> UpdateReport:
        ranks: list[RankReport] = [part.report for part in conduct.parts]
        return UpdateReport(
            command=self._number,
            kind=request.kind.name.lower(),
            outcome=conduct.outcome.name.lower(),
            version=version,
            previous_version=previous,
            seconds=seconds,
            stall_seconds=max((rank.stall_seconds for rank in ranks), default=0.0),
            ranks=ranks,
            error=type(conduct.error).__name__ if conduct.error else "",
            reason=str(conduct.error) if conduct.error else "",
            receipt=conduct.receipt,
            differing=conduct.differing,
        )


def _first_objection(records: list[RankRecord]) -> FastDeployRLError | None:
    against = [
        (rank, record) for rank, record in enumerate(records) if record.ballot in (Ballot.REFUSED, Ballot.FAILED)
    ]
    if not against:
        return None
    rank, record = against[0]
    also = f" (and {len(against) - 1} more ranks)" if len(against) > 1 else ""
    return from_wire(record.error, f"rank {rank}{also}: {record.reason}")


def _log_report(report: UpdateReport) -> None:
    _log.info(
        "command=%d kind=%s outcome=%s version=%s previous=%s seconds=%.4f stall_seconds=%.4f "
        "aliased_bytes=%d copied_bytes=%d reason=%r",
        report.command,
        report.kind,
        report.outcome,
        report.version or "-",
        report.previous_version or "-",
        report.seconds,
        report.stall_seconds,
        report.aliased_bytes,
        report.copied_bytes,
        report.reason,
    )


# --- where requests come from ----------------------------------------------------------------------


class LegacyRequest:
    """A value that a foreign process wrote into the status word."""

    def __init__(self, command: LegacyCommand, state: EngineState, deadline_ns: int) -> None:
        self.kind = CommandKind.UPDATE if command is LegacyCommand.UPDATE else CommandKind.CLEAR
        self.version = ""
        self.is_forced = False
        self.deadline_ns = deadline_ns
        self._state = state

    def finish(self, report: UpdateReport) -> None:
        self._state.end_legacy_command()


class BoardRequest:
    """A request in one of the board's slots; the client that claimed it waits for the outcome."""

    def __init__(self, board: Board, slot: int, record: RequestRecord) -> None:
        self.kind = CommandKind(record.kind)
        self.version = record.version
        self.is_forced = bool(record.is_forced)
        self.deadline_ns = record.deadline_ns
        self._board = board
        self._slot = slot

    def finish(self, report: UpdateReport) -> None:
        offset = layout.request_offset(self._slot)
        outcome = OutcomeRecord(Outcome[report.outcome.upper()], report.command, report.error, report.reason)
        self._board.write_plain(outcome, offset + layout.OUTCOME_IN_SLOT)
        token = layout.slot_token(self._board.load(offset))
        self._board.store(offset, layout.slot_word(token, SlotState.FINISHED))


def next_board_request(board: Board) -> BoardRequest | None:
    """The submitted request with the lowest ticket, now running; slots of dead clients are freed on the way."""
    submitted = []
    for slot in range(layout.NUM_REQUEST_SLOTS):
        word = board.load(layout.request_offset(slot))
        if word == SlotState.FREE:
            continue
        if not is_alive(client_lock_path(board.run_dir, layout.slot_token(word))):
            board.exchange(layout.request_offset(slot), word, SlotState.FREE)
        elif layout.slot_state(word) is SlotState.SUBMITTED:
            record = board.read_plain(RequestRecord, layout.request_offset(slot) + 8)
            submitted.append((record.ticket, slot, record, word))
    if not submitted:
        return None
    _, slot, record, word = min(submitted)
    board.store(layout.request_offset(slot), layout.slot_word(layout.slot_token(word), SlotState.RUNNING))
    return BoardRequest(board, slot, record)


def client_lock_path(run_dir: Path, token: int) -> Path:
    """The file whose lock a client holds while it uses the board."""
    return run_dir / "clients" / f"{token:016x}.lock"
