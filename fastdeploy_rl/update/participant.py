"""One rank's part in each command: staged while it serves, run at a decode boundary, finished as the ranks decided.

Owns what this rank votes and what it does with each decision, on two threads that take turns: the manager's stages, the
engine's loop runs the stalled part. Refuses to know when commands come and who lives. Invariant: each command that was
staged here is finished here once, committed or undone, and said so; after that the runner is bound to one complete
version or to none."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import REBUILD, WAIT, Deadlines
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    LifecycleError,
    PeerLostError,
    UpdateRejectedError,
)
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.attempt import Failure, attempt
from fastdeploy_rl.update.rank_files import FOLLOWED, RankFiles, RankPart
from fastdeploy_rl.update.standby_commands import STANDBY_COMMANDS
from fastdeploy_rl.update.steps import RankUpdate
from fastdeploy_rl.update.transaction import (
    ClearCommand,
    KeepCommand,
    RankCommand,
    RankState,
    RecomputeCommand,
    StepObserver,
    UpdateCommand,
)
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Handover:
    """A command that all ranks decided to install, from the manager's thread to the engine's loop. `options`: of
    `record`."""

    record: CommandRecord
    command: RankCommand
    options: CommandOptions


class Participant:
    """`wake` is called when a command waits for the engine's loop. `observer` hears of the steps of updates."""

    def __init__(
        self,
        *,
        board: Board,
        rendezvous: BoardRendezvous,
        state: RankState,
        apply_mode: str,
        rollback: str,
        kv_policy: str = REBUILD,
        quiet_s: float = Deadlines.quiet_s,
        has_checksums: bool = True,
        observer: StepObserver,
        wake: Callable[[], None],
    ) -> None:
        """`quiet_s`: of a command that lets requests end, the part of its time in which they do not any more."""
        self.rank = rendezvous.rank
        self._board = board
        self._rendezvous = rendezvous
        self._files = RankFiles(board.run_dir)
        self._state = state
        self._apply_mode = apply_mode
        self._rollback = rollback
        self._kv_policy = kv_policy
        self._quiet_ns = int(quiet_s * 1e9)
        self._has_checksums = has_checksums
        self._observer = observer
        self._wake = wake
        self._handovers: queue.SimpleQueue[_Handover] = queue.SimpleQueue()
        self._awaited: _Handover | None = None
        """What was handed over last."""
        self._refused = 0
        """The last command that was refused at its boundary."""
        self._ending = threading.Lock()
        """Of a handover: it is refused, or taken back and finished. A refusal after that would unsay it."""
        self._replaced: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._owed: list[Callable[[], None]] = []
        """Memory of commands that are over, still to be let go; the manager's thread's."""

    @property
    def shown_version(self) -> str:
        """The version that this rank holds, live or asleep in host memory, as text; empty for none."""
        held = self._state.live or self._state.offloaded
        return "" if held is None else str(held.version)

    @property
    def live_version(self) -> str:
        """What this rank's parameters are bound to, as text; empty for none."""
        live = self._state.live
        return "" if live is None else str(live.version)

    @property
    def is_awaited(self) -> bool:
        """A command was handed over that `run` did not take yet."""
        return not self._handovers.empty()

    @property
    def is_draining(self) -> bool:
        """An update waits for the requests that have begun, so that no other one is to begin."""
        awaited = self._to_be_taken()
        is_update = awaited is not None and awaited.record.kind == CommandKind.UPDATE
        return is_update and self._num_waited_for(awaited) > 0

    def due_number(self, *, is_decoding: bool) -> int:
        """For the rank that knows of requests: the command that is awaited, where this is the boundary for it: what it
        lets come to an end has; else 0. What has not in time, or cannot (not `is_decoding`), is for the command to
        abort, or the reason for which it is refused: here, since another rank would not know of it, before any of them
        takes it."""
        awaited = self._to_be_taken()
        if awaited is None or awaited.record.number == self._refused:
            return 0
        num_left = self._num_waited_for(awaited)
        is_in_time = time.monotonic_ns() < awaited.record.deadline_ns - self._quiet_ns
        if not num_left or (awaited.options.aborts_late and not (is_decoding and is_in_time)):
            return awaited.record.number
        if not (is_decoding and is_in_time):
            self._refuse(awaited, num_left, is_decoding)
        return 0

    def _to_be_taken(self) -> _Handover | None:
        """What `is_awaited` speaks of. In this order: one that lies there was noted before."""
        return self._awaited if self.is_awaited else None

    def _num_waited_for(self, awaited: _Handover | None) -> int:
        if awaited is None or awaited.options.in_flight != WAIT:
            return 0
        return self._state.runner.num_requests(begun=awaited.record.kind == CommandKind.UPDATE)

    def _refuse(self, awaited: _Handover, num_left: int, is_decoding: bool) -> None:
        error: FastDeployRLError = DeadlineExceededError(
            f"{num_left} requests in flight did not come to their end in time; nothing changed, and they go on: "
            "give a longer deadline, or keep or abort them (mode, on_timeout)"
        )
        if not is_decoding:
            error = LifecycleError(
                f"{num_left} requests in flight cannot come to their end while the engine is paused; resume it first, "
                "or keep or abort them"
            )
        name, reason = type(error).__name__, str(error)
        with self._ending:
            if self.is_awaited:
                self._refused = awaited.record.number
                self._rendezvous.vote(self._refused, Ballot.FAILED, phase="failed", error=name, reason=reason)

    @property
    def has_replaced(self) -> bool:
        """A commit left memory behind that `retire_replaced` lets go."""
        return not self._replaced.empty()

    # --- the manager's thread ----------------------------------------------------------------------

    def retire_replaced(self) -> None:
        """The new version is live, whatever happens here: memory that somebody still looks at is reported, and let go
        later."""
        while not self._replaced.empty():
            self._owed.append(self._replaced.get_nowait().retire)
        owed, self._owed = self._owed, []
        for let_go in owed:
            failure = self._attempt(let_go)
            if failure is not None:
                _log.error("rank=%d event=leak reason=%r", self.rank, failure.text)
                self._owed.append(let_go)

    def stage(self, record: CommandRecord) -> bool:
        """Blocks until the engine's loop has taken the command, or it is over; whether all decided to install it."""
        self._rendezvous.vote(record.number, Ballot.STARTED, phase="staging")
        command = self._command(record)
        error = self._attempt(command.stage)
        if error is None:
            error = self._attempt(lambda: self._prepare_files(record, command))
        if record.kind == CommandKind.CLEAR:
            error = None  # a full disk keeps nobody from giving memory back
        if error is None:
            self._rendezvous.vote(record.number, Ballot.STAGED, phase="staged")
        else:
            self._rendezvous.vote(record.number, Ballot.REFUSED, phase="refused", error=error.name, reason=error.text)
        if self._decision(Question.INSTALL, record) is Decision.YES:
            self._hand_over(_Handover(record, command, CommandOptions.decode(record.options)))
            return True
        self._finish(record, command, Decision.NO, error)
        return False

    def _hand_over(self, handover: _Handover) -> None:
        """To the engine's loop; taken back when the deadline passes before it comes for it: then no rank can commit."""
        self._awaited = handover
        self._handovers.put(handover)
        self._wake()
        self._board.ring()  # a loop that was told of the command by rank 0 may be waiting for it already

        def is_over() -> bool:
            return self._handovers.empty() or self._is_refused(handover.record)

        self._board.wait_until(is_over, handover.record.deadline_ns)
        with contextlib.suppress(queue.Empty):
            with self._ending:
                handover = self._handovers.get_nowait()
            decision = self._decision(Question.COMMIT, handover.record)
            self._finish(handover.record, handover.command, decision, self._why_taken_back(handover.record))

    def _why_taken_back(self, record: CommandRecord) -> Failure:
        own = self._rendezvous.own
        if record.number == self._refused and own.reason:
            return Failure(own.error, own.reason)
        lost = sorted(self._board.lost_ranks())
        if lost:
            return Failure(PeerLostError.__name__, f"ranks {lost} died before all came to a decode boundary")
        if time.monotonic_ns() < record.deadline_ns:
            return Failure(UpdateRejectedError.__name__, "another rank refused the command at its decode boundary")
        return Failure(DeadlineExceededError.__name__, "its loop came to no decode boundary before the deadline")

    def _is_refused(self, record: CommandRecord) -> bool:
        """A rank died, or ran out of time: there is nothing to wait for any more."""
        try:
            return self._rendezvous.decided(Question.COMMIT, record.number) is Decision.NO
        except LifecycleError:
            return True

    def _prepare_files(self, record: CommandRecord, command: RankCommand) -> None:
        part = RankPart(command.report(), command.receipt())
        self._files.reserve_part(self.rank, record.number, part)
        if part.receipt is not None:
            self._files.write_staged(self.rank, record.number, part)

    def _command(self, record: CommandRecord) -> RankCommand:
        if record.kind == CommandKind.CLEAR:
            return ClearCommand(self._state, record.deadline_ns)
        if record.kind == CommandKind.RECOMPUTE:
            return RecomputeCommand(self._state)
        options = CommandOptions.decode(record.options)
        if standby := STANDBY_COMMANDS.get(record.kind):
            return standby(self._state, options, record.deadline_ns)
        version, live = WeightVersion(record.epoch, record.step), self._state.live
        if record.kind == CommandKind.RESTORE and live is not None and live.version == version:
            return KeepCommand(self._state, options.tags, record.deadline_ns)
        update = RankUpdate(
            version=version,
            content_digest=record.content_digest,
            deadline_ns=record.deadline_ns,
            runner=self._state.runner,
            source=self._state.source,
            plans=self._state.plans,
            arenas=self._state.arenas,
            apply_mode=self._apply_mode,
            rollback=self._rollback,
            kv_policy=options.kv or self._kv_policy,
            in_flight=options.in_flight,
            brings=options.tags,
            has_checksums=self._has_checksums,
            num_threads=self._state.num_threads,
            num_staging_threads=self._state.num_staging_threads,
            copy_speed=self._state.copy_speed,
            old=live,
        )
        return UpdateCommand(self._state, update, self._observer)

    # --- the engine's loop -------------------------------------------------------------------------

    def run(self, number: int) -> None:
        """The stalled part of command `number`, on every rank at the same boundary; at most until the command's
        deadline.

        Never raises because a command is rejected: then the runner is where it was."""
        handover = self._await_handover(number)
        if handover is None:
            self._empty_kv_cache()
            return
        record, command = handover.record, handover.command
        stalled_since = time.monotonic()
        error = self._attempt(command.stall)
        if error is None:
            self._rendezvous.vote(number, Ballot.VERIFIED, phase="verified")
        else:
            self._rendezvous.vote(number, Ballot.FAILED, phase="failed", error=error.name, reason=error.text)
        self._finish(record, command, self._decision(Question.COMMIT, record), error, stalled_since)

    def _empty_kv_cache(self) -> None:
        """After a boundary that this rank missed: the others may have been there, and have undone what they did. Pages
        are handed out for all ranks by one, and hold nothing on those any more."""
        runner, held = self._state.runner, self._state.live or self._state.offloaded
        if runner.num_ranks > 1 and held is not None and runner.has_kv_cache:
            digest = held.content_digest
            self._attempt(lambda: runner.rebuild_kv_cache(digest))

    def _await_handover(self, number: int) -> _Handover | None:
        """What the manager's thread staged for `number`; None when that was taken back, or did not come before the
        command's deadline."""
        record = self._rendezvous.current()

        def is_over() -> bool:
            own = self._rendezvous.own
            return (own.command, own.ballot) == (number, Ballot.FINISHED)

        # Of a command that is over there is nothing: what may lie there is the next one's, for its own boundary.
        if record.number == number and not is_over():
            self._board.wait_until(lambda: not self._handovers.empty() or is_over(), record.deadline_ns)
            with contextlib.suppress(queue.Empty):
                return self._handovers.get_nowait()
        _log.error("command=%d rank=%d event=missed_boundary", number, self.rank)
        return None

    # --- both threads, one after the other ---------------------------------------------------------

    def _decision(self, question: Question, record: CommandRecord) -> Decision:
        try:
            return self._rendezvous.await_decision(question, record.number, record.deadline_ns)
        except LifecycleError:
            return Decision.NO  # the board went on without this rank

    def _finish(
        self,
        record: CommandRecord,
        command: RankCommand,
        decision: Decision,
        error: Failure | None,
        stalled_since: float | None = None,
    ) -> None:
        """Follows the decision and says so. A stalled part that can neither be committed nor undone fences this
        rank."""
        is_committed = decision is Decision.YES
        failure = self._follow(command.commit if is_committed else command.undo)
        stall_seconds = 0.0 if stalled_since is None else time.monotonic() - stalled_since
        fence_reason = ""
        if failure is not None and stalled_since is not None:
            fence_reason = f"rank {self.rank} could not {'commit' if is_committed else 'undo'}: {failure.text}"
            self._fence(command)
        elif failure is not None:
            self._owed.append(command.undo)
        part = RankPart(
            report=structs.replace(command.report(error.text if error else ""), stall_seconds=stall_seconds),
            receipt=command.receipt() if is_committed and not fence_reason else None,
            fence_reason=fence_reason,
        )
        if is_committed:
            self._replaced.put(command)
        self._tell(record.number, part, error)
        outcome = "fenced" if fence_reason else ("committed" if is_committed else "undone")
        version = self.shown_version or "-"
        _log.info("command=%d rank=%d outcome=%s version=%s", record.number, self.rank, outcome, version)

    def _tell(self, number: int, part: RankPart, error: Failure | None) -> None:
        """The last word on a command; the vote comes last: whoever reads it finds the rest."""
        self._attempt(lambda: self._files.write_part(self.rank, number, part))
        self._rendezvous.show(version=self.shown_version)
        self._rendezvous.vote(
            number,
            Ballot.FINISHED,
            phase="fenced" if part.fence_reason else FOLLOWED,
            error=error.name if error else "",
            reason=error.text if error else "",
        )

    def _follow(self, act: Callable[[], None]) -> Failure | None:
        """A commit or an undo: what failed of it is tried once more, and changed nothing that the second time needs."""
        failure = self._attempt(act)
        return None if failure is None else self._attempt(act)

    def _fence(self, command: RankCommand) -> None:
        """Nothing of a torn version stays within reach of a request, and nothing of it is held. What fails of it keeps
        the rest from nothing."""
        runner, live = self._state.runner, self._state.live
        self._attempt(lambda: runner.abort_requests("the engine is fenced"))
        self._attempt(runner.drop_graphs)
        self._attempt(runner.drop_kv_cache)
        self._attempt(runner.unbind)
        self._state.live = None
        self._attempt(command.abandon)
        self._attempt(self._state.release_offloaded)
        if live is not None:
            self._attempt(lambda: live.release(self._state.arenas))

    def _attempt(self, act: Callable[[], None]) -> Failure | None:
        return attempt(act, self.rank)
