"""DynamicWeightManager: keeps one tensor-parallel rank of an engine on complete, verified weights.

One in each worker process. Its own thread follows the commands of the board and stages them while the engine serves;
the engine's loop gives it the decode boundary at which all ranks swap. Rank 0 also runs the coordinator. Refuses to
know models, requests and HTTP. Invariant: after `run`, the runner is bound to one complete version or to none.

A rank that died is started again by whoever watches over the processes, and takes its old seat; the others meet it in
a new generation of the collectives, which `rejoin` brings them into.

In the engine's loop:

    rank 0:       number = manager.poll()            # never blocks
                  tell `number` to every rank with the next step
    every rank:   if number: manager.run(number)     # the stalled part: drain .. commit
                  on PeerLostError of a collective: manager.rejoin(collectives), and on with the loop
"""

import contextlib
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from fastdeploy_rl.board.board import Board, rank_lock_path
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.config import APPLY_MODES, AUTO, KEEP, ROLLBACKS, Deadlines
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    LifecycleError,
    PeerLostError,
    StepFailedError,
    wire_text,
)
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import WeightSource
from fastdeploy_rl.update.cold_start import cold_weights, specs_digest
from fastdeploy_rl.update.committed import committed_version
from fastdeploy_rl.update.coordinator import Coordinator
from fastdeploy_rl.update.live_weights import audit
from fastdeploy_rl.update.rank_files import RankFiles, RankPart, receipts_of
from fastdeploy_rl.update.recovery import READY, STOPPED, TORN
from fastdeploy_rl.update.steps import RankUpdate, UpdateStep
from fastdeploy_rl.update.transaction import (
    ClearCommand,
    KeepCommand,
    RankCommand,
    RankState,
    RecomputeCommand,
    StepObserver,
    UpdateCommand,
    as_step_failure,
    rank_receipt,
)
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_HEARTBEAT_NS = 1_000_000_000


@dataclass(frozen=True)
class ManagerConfig:
    """`apply_mode`, `rollback`: one each of config.APPLY_MODES and ROLLBACKS, which say what they mean.
    `num_copy_threads`: threads of one rank's copies and checksums. `is_restarted_on_death`: somebody starts a rank
    again that died, or that is condemned on the board."""

    load_strategy: str
    apply_mode: str = AUTO
    deadlines: Deadlines = field(default_factory=Deadlines)
    num_copy_threads: int = 1
    rollback: str = KEEP
    is_restarted_on_death: bool = False

    def __post_init__(self) -> None:
        if self.apply_mode not in APPLY_MODES:
            raise ConfigurationError(f"apply mode must be one of {', '.join(APPLY_MODES)}, got {self.apply_mode!r}")
        if self.rollback not in ROLLBACKS:
            raise ConfigurationError(f"rollback must be one of {', '.join(ROLLBACKS)}, got {self.rollback!r}")


@dataclass(frozen=True)
class InitialWeights:
    """What a cold start loaded: this rank's slices, complete."""

    version: WeightVersion
    views: Mapping[str, TensorView]


@dataclass(frozen=True)
class _Handover:
    """A command that all ranks decided to install, from the manager's thread to the engine's loop."""

    record: CommandRecord
    command: RankCommand


class _Failure(NamedTuple):
    """An error as the board tells it: the name of its class, and its text."""

    name: str
    text: str


class DynamicWeightManager:
    """See the module. `runner` is called on the engine's loop thread only, but for its constant `parameters`."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        board: Board,
        rank: int,
        source: WeightSource,
        config: ManagerConfig,
        observer: StepObserver | None = None,
    ) -> None:
        """`observer` hears of the steps of updates on this rank, on the thread that carries them out."""
        self.rank = rank
        self._board = board
        self._source = source
        self._config = config
        self._rendezvous = BoardRendezvous(board, rank)
        self._files = RankFiles(board.run_dir)
        threads = config.num_copy_threads
        self._state = RankState(
            runner=runner,
            source=source,
            plans=LastPlan(runner.parameters(), rank, board.num_ranks),
            arenas=ArenaPair(threads),
            num_threads=threads,
        )
        self._handovers: queue.SimpleQueue[_Handover] = queue.SimpleQueue()
        self._replaced: queue.SimpleQueue[RankCommand] = queue.SimpleQueue()
        self._observer = observer
        self._lock = OwnerLock(rank_lock_path(board.run_dir, rank))
        self._last_command = 0
        self._is_audited = True
        self._overdue_ns = 0
        self._owed: list[Callable[[], None]] = []
        """Memory of commands that are over, still to be let go; the manager's thread's."""
        self._is_stopping = threading.Event()
        self._stager = threading.Thread(target=self._stage_commands, name="fastdeploy_rl-stager", daemon=True)
        self._fault = ""
        self._coordinator: Coordinator | None = None
        self.wake_fd = -1

    # --- life --------------------------------------------------------------------------------------

    @property
    def is_taking_over(self) -> bool:
        """This process takes the seat of a rank that died."""
        return self._rendezvous.own.incarnation > 1

    def needs_cold_start(self) -> bool:
        """The engine's weights are those that came with the model: `start` wants them. False where a rank takes over
        and the engine is at another version, or at none: these come from the channel."""
        if not self.is_taking_over:
            return True
        committed = committed_version(self._board, self._config.load_strategy)
        return committed is not None and committed.is_cold

    def start(self, initial: InitialWeights | None) -> None:
        """Takes this rank's seat at the board; on rank 0 returns when all ranks took theirs and the engine serves, or,
        where this process takes over from a dead rank 0, at once: then the engine serves when all ranks are whole.

        DeadlineExceededError names the ranks that did not come within `attach_s`."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock.acquire()
        if initial is not None:
            self._adopt(initial)
        if self.is_taking_over:
            self._take_over()
        else:
            self._take_seat()
        self._stager.start()

    def _adopt(self, initial: InitialWeights) -> None:
        runner = self._state.runner
        live = cold_weights(initial.version, dict(initial.views), runner, self._config.num_copy_threads)
        self._state.live = live
        runner.rebuild_kv_cache(live.content_digest)
        runner.set_version(str(initial.version))

    def _take_seat(self) -> None:
        live = self._state.live
        receipt = None if live is None else rank_receipt(self.rank, live, live.live)
        self._files.write_part(self.rank, 0, RankPart(receipt=receipt))
        self._rendezvous.show(phase=READY, version=self._shown_version)
        if self.rank == 0:
            deadline_ns = time.monotonic_ns() + int(self._config.deadlines.attach_s * 1e9)
            self._rendezvous.await_ranks(lambda record: record.phase == READY, "start of the engine", deadline_ns)
            parts = [self._files.read_part(rank, 0) for rank in range(self._board.num_ranks)]
            self._files.remove_command(0)
            self._coordinator = self._new_coordinator()
            self._coordinator.start(receipts_of(parts), specs_digest(self._state.runner.parameters()))

    def _take_over(self) -> None:
        """Of the present command this process knows nothing; whoever died in it has finished it."""
        self._last_command = self._rendezvous.current().number
        self._files.write_part(self.rank, self._last_command, RankPart(is_reborn=True))
        self._rendezvous.show(version=self._shown_version)
        self._rendezvous.vote(self._last_command, Ballot.FINISHED, phase=READY)
        self._rendezvous.mark_back()
        _log.info("rank=%d event=taking_over after_command=%d", self.rank, self._last_command)
        if self.rank == 0:
            self._coordinator = self._new_coordinator()
            self._coordinator.take_over(specs_digest(self._state.runner.parameters()))

    @property
    def _shown_version(self) -> str:
        return str(self._state.live.version) if self._state.live is not None else ""

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            board=self._board,
            rendezvous=self._rendezvous,
            source=self._source,
            load_strategy=self._config.load_strategy,
            deadlines=self._config.deadlines,
            is_restarted_on_death=self._config.is_restarted_on_death,
            on_fault=self._note_fault,
        )

    def close(self) -> None:
        """Ends the threads, lets go of weights and leases; what goes wrong on the way is raised at the end. The runner
        must not be used afterwards."""
        self._is_stopping.set()
        self._board.abandon_waits()
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.callback(self._rendezvous.show, phase=STOPPED)
            stack.callback(self._close_wake_fd)
            stack.callback(self._source.close)
            stack.callback(self._state.arenas.drop)
            stack.callback(self._let_go)
            stack.callback(self._retire_replaced)
            stack.callback(self._join_stager)
            if self._coordinator is not None:
                stack.callback(self._coordinator.stop)

    def _join_stager(self) -> None:
        if self._stager.is_alive():
            begun = time.monotonic()
            self._stager.join(self._config.deadlines.stop_s)
            if self._stager.is_alive():
                raise DeadlineExceededError.waiting_for(f"end of staging on rank {self.rank}", since_s=begun)

    def _let_go(self) -> None:
        live, self._state.live = self._state.live, None
        self._state.runner.unbind()
        if live is not None:
            live.release(self._state.arenas)

    def _close_wake_fd(self) -> None:
        if self.wake_fd >= 0:
            os.close(self.wake_fd)
            self.wake_fd = -1

    # --- the engine's loop -------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """A complete version is live on this rank."""
        return self._state.live is not None

    def is_whole(self) -> bool:
        """On rank 0: every rank is there and holds the version that is served: a forward pass is of one version.
        False while a rank is missing, comes back, or goes back to an older version; ask again."""
        return self._coordinator is not None and self._coordinator.is_whole()

    @property
    def is_settling(self) -> bool:
        """On a rank 0 that takes over: whether the engine will serve is not known yet."""
        return self._coordinator is not None and self._coordinator.is_taking_over

    def poll(self) -> int:
        """Number of the command whose stalled part every rank must `run` at this boundary; 0 when there is none.

        StepFailedError when a thread of the manager has died: this engine can take no command any more."""
        # The event first: one that comes after this look wakes the loop again, one before it is in the queue by now.
        if select.select([self.wake_fd], [], [], 0)[0]:
            os.eventfd_read(self.wake_fd)
        if self._fault:
            raise StepFailedError(f"rank {self.rank} cannot follow commands any more: {self._fault}")
        return 0 if self._handovers.empty() else self._rendezvous.current().number

    def run(self, number: int) -> None:
        """The stalled part of command `number`, on every rank at
        the same boundary; at most until the command's deadline.

        Never raises because a command is rejected: then the runner is where it was."""
        handover = self._await_handover(number)
        if handover is None:
            return
        record, command = handover.record, handover.command
        stalled_since = time.monotonic()
        error = self._attempt(command.stall)
        if error is None:
            self._rendezvous.vote(number, Ballot.VERIFIED, phase="verified")
        else:
            self._rendezvous.vote(number, Ballot.FAILED, phase="failed", error=error.name, reason=error.text)
        self._finish(record, command, self._decision(Question.COMMIT, record), error, stalled_since)

    def _await_handover(self, number: int) -> _Handover | None:
        """What the manager's own thread staged for `number`; None when that
        was taken back, or did not come before the command's deadline."""
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

    def condemn(self, silent: DeadlineExceededError) -> None:
        """Of a meeting of the collectives: the ranks that did not come are to be killed and started again. Where nobody
        does that, `silent` is raised."""
        if not self._config.is_restarted_on_death or not silent.missing:
            raise silent
        _log.error("rank=%d event=condemned silent_ranks=%s reason=%r", self.rank, sorted(silent.missing), str(silent))
        for rank in silent.missing:
            self._board.condemn(rank)

    def rejoin(self, collectives: Collectives) -> None:
        """After a PeerLostError of the collectives, and as a starting rank: a place in the present generation, when
        there is one that is newer than this rank's own. DeadlineExceededError when none is within `rejoin_s`."""
        begun_s = time.monotonic()
        deadline_ns = int((begun_s + self._config.deadlines.rejoin_s) * 1e9)
        while True:
            own = collectives.generation
            if not self._board.wait_until(lambda own=own: self._board.generation > own, deadline_ns):  # type: ignore[misc]
                raise DeadlineExceededError.waiting_for(
                    f"generation of the collectives after {own} for rank {self.rank}",
                    since_s=begun_s,
                    missing=self._board.lost_ranks(),
                    hint="nobody started the dead again",
                )
            try:
                return collectives.rejoin(self._board.generation)
            except PeerLostError:
                _log.info("rank=%d event=overtaken generation=%d", self.rank, collectives.generation)

    def await_living(self) -> None:
        """Before a meeting of the collectives: until no rank is lost any more, so that the time in which a successor
        loads the model is none of the meeting's. DeadlineExceededError when one is not back within `rejoin_s`."""
        begun = time.monotonic()
        deadline_ns = time.monotonic_ns() + int(self._config.deadlines.rejoin_s * 1e9)
        if not self._board.wait_until(lambda: not self._board.lost_ranks(), deadline_ns):
            lost = self._board.lost_ranks()
            raise DeadlineExceededError.waiting_for("return of dead ranks", since_s=begun, missing=lost)

    # --- the manager's thread ----------------------------------------------------------------------

    def _note_fault(self, reason: str) -> None:
        _log.critical("rank=%d event=fault reason=%r", self.rank, reason)
        self._fault = reason
        os.eventfd_write(self.wake_fd, 1)

    def _stage_commands(self) -> None:
        try:
            self._follow_commands()
        except BaseException as error:
            self._note_fault(f"{type(error).__name__}: {error}")
            raise

    def _follow_commands(self) -> None:
        while not self._is_stopping.is_set():
            record = self._rendezvous.await_command(
                self._last_command, self._next_look_ns(), is_wanted=lambda: not self._replaced.empty()
            )
            self._retire_replaced()
            if record is not None and not self._is_stopping.is_set():
                self._last_command = record.number
                self._stage(record)
            elif record is None:
                self._look_around()

    def _next_look_ns(self) -> int:
        heartbeat = time.monotonic_ns() + _HEARTBEAT_NS
        return min(heartbeat, self._overdue_ns) if self._overdue_ns else heartbeat

    def _look_around(self) -> None:
        """Between commands."""
        self._rendezvous.show()
        if self._rendezvous.own.ballot == Ballot.FINISHED:
            self._look_after_leader()
            self._look_after_memory()

    def _look_after_leader(self) -> None:
        """Rank 0 looks after the others; that it follows a decision itself is for the next rank to see."""
        if not self._overdue_ns or time.monotonic_ns() < self._overdue_ns:
            return
        self._overdue_ns = 0
        leader = self._board.read_rank(0)
        if (leader.command, leader.ballot) != (self._last_command, Ballot.FINISHED):
            _log.error("rank=%d event=condemned silent_rank=0 command=%d", self.rank, self._last_command)
            self._board.condemn(0)

    def _look_after_memory(self) -> None:
        """Published memory that parameters lie in: that whoever lent it is still there; and once after a commit that it
        still holds what was staged. The stall does not read it, so whoever wrote into it is noticed a moment later."""
        live = self._state.live
        if live is None or live.staged is None or self._rendezvous.own.phase == TORN:
            return
        if not live.staged.is_vouched():
            self._declare_torn(f"the trainer that lent the memory of version {live.version} is gone; update again")
        elif not self._is_audited:
            self._is_audited = True
            failure = self._attempt(lambda: audit(live, self.rank, self._config.num_copy_threads))
            if failure is not None:
                self._declare_torn(failure.text)

    def _declare_torn(self, reason: str) -> None:
        """Rank 0 sees it and fences the engine."""
        _log.error("rank=%d event=torn reason=%r", self.rank, reason)
        self._rendezvous.show(phase=TORN, reason=reason)
        self._board.ring_doorbell()

    def _retire_replaced(self) -> None:
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

    def _stage(self, record: CommandRecord) -> None:
        self._rendezvous.vote(record.number, Ballot.STARTED, phase="staging")
        command = self._command(record)
        error = self._attempt(command.stage)
        if error is None:
            error = self._attempt(lambda: self._prepare_files(record, command))
        if error is None:
            self._rendezvous.vote(record.number, Ballot.STAGED, phase="staged")
        else:
            self._rendezvous.vote(record.number, Ballot.REFUSED, phase="refused", error=error.name, reason=error.text)
        if self._decision(Question.INSTALL, record) is Decision.YES:
            self._hand_over(_Handover(record, command))
        else:
            self._finish(record, command, Decision.NO, error)

    def _hand_over(self, handover: _Handover) -> None:
        """To the engine's loop; taken back when the deadline passes before it comes for it: then no rank can commit."""
        self._overdue_ns = self._leader_overdue_ns(handover.record)
        self._handovers.put(handover)
        os.eventfd_write(self.wake_fd, 1)
        self._board.ring()  # a loop that was told of the command by rank 0 may be waiting for it already

        def is_over() -> bool:
            return self._handovers.empty() or self._is_refused(handover.record)

        self._board.wait_until(is_over, handover.record.deadline_ns)
        with contextlib.suppress(queue.Empty):
            handover = self._handovers.get_nowait()
            decision = self._decision(Question.COMMIT, handover.record)
            self._finish(handover.record, handover.command, decision, self._why_taken_back())

    def _why_taken_back(self) -> _Failure:
        lost = sorted(self._board.lost_ranks())
        if lost:
            return _Failure(PeerLostError.__name__, f"ranks {lost} died before all came to a decode boundary")
        return _Failure(DeadlineExceededError.__name__, "its loop came to no decode boundary before the deadline")

    def _leader_overdue_ns(self, record: CommandRecord) -> int:
        """When rank 0 must have finished `record`; 0 on the ranks that do not look after it."""
        is_watched = self.rank == 1 and self._config.is_restarted_on_death
        return record.deadline_ns + int(2 * self._config.deadlines.finish_s * 1e9) if is_watched else 0

    def _is_refused(self, record: CommandRecord) -> bool:
        """A rank died, or ran out of time: there is nothing to wait for any more."""
        try:
            return self._rendezvous.decided(Question.COMMIT, record.number) is Decision.NO
        except LifecycleError:
            return True

    def _prepare_files(self, record: CommandRecord, command: RankCommand) -> None:
        receipt = command.receipt()
        self._files.reserve_part(self.rank, record.number, RankPart(command.report(), receipt))
        if receipt is not None:
            self._files.write_staged(self.rank, record.number, RankPart(command.report(), receipt))

    def _command(self, record: CommandRecord) -> RankCommand:
        if record.kind == CommandKind.CLEAR:
            return ClearCommand(self._state, record.deadline_ns)
        if record.kind == CommandKind.RECOMPUTE:
            return RecomputeCommand(self._state)
        version, live = WeightVersion(record.epoch, record.step), self._state.live
        if record.kind == CommandKind.RESTORE and live is not None and live.version == version:
            return KeepCommand(self._state, record.deadline_ns)
        update = RankUpdate(
            version=version,
            content_digest=record.content_digest,
            deadline_ns=record.deadline_ns,
            runner=self._state.runner,
            source=self._source,
            plans=self._state.plans,
            arenas=self._state.arenas,
            apply_mode=self._config.apply_mode,
            rollback=self._config.rollback,
            num_threads=self._config.num_copy_threads,
            old=live,
        )
        return UpdateCommand(self._state, update, self)

    def begin(self, step: UpdateStep, update: RankUpdate) -> None:
        """As a StepObserver: the board shows which step this rank is at."""
        self._rendezvous.show(phase=step.name)
        if self._coordinator is not None:
            self._coordinator.state.begin(step.event)
        if self._observer is not None:
            self._observer.begin(step, update)

    def end(self, step: UpdateStep, update: RankUpdate) -> None:
        if self._observer is not None:
            self._observer.end(step, update)

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
        error: _Failure | None,
        stalled_since: float | None = None,
    ) -> None:
        """Follows the decision and says so. A stalled part that can
        neither be committed nor undone fences this rank."""
        is_committed = decision is Decision.YES
        failure = self._follow(command.commit if is_committed else command.undo)
        fence_reason = ""
        stall_seconds = 0.0 if stalled_since is None else time.monotonic() - stalled_since
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
            self._is_audited = False
        version = self._shown_version
        outcome = "fenced" if fence_reason else ("committed" if is_committed else "undone")
        self._attempt(lambda: self._files.write_part(self.rank, record.number, part))
        self._rendezvous.show(version=version)
        self._rendezvous.vote(
            record.number,
            Ballot.FINISHED,
            phase="fenced" if fence_reason else "idle",
            error=error.name if error else "",
            reason=error.text if error else "",
        )
        _log.info("command=%d rank=%d outcome=%s version=%s", record.number, self.rank, outcome, version or "-")

    def _follow(self, act: Callable[[], None]) -> _Failure | None:
        """A commit or an undo: what failed of it is tried once more, and changed nothing that the second time needs."""
        return self._attempt(act) and self._attempt(act)

    def _fence(self, command: RankCommand) -> None:
        """Nothing of a torn version stays within reach of a request, and nothing of it is held. What fails of it keeps
        the rest from nothing."""
        runner, live = self._state.runner, self._state.live
        self._attempt(lambda: runner.abort_requests("the engine is fenced"))
        self._attempt(runner.drop_kv_cache)
        self._attempt(runner.unbind)
        self._state.live = None
        self._attempt(command.abandon)
        if live is not None:
            self._attempt(lambda: live.release(self._state.arenas))

    def _attempt(self, act: Callable[[], None]) -> _Failure | None:
        """What went wrong, as text only: an exception's frames would keep views of published memory alive."""
        try:
            with as_step_failure("command", self.rank):
                act()
        except FastDeployRLError as error:
            is_unexpected = isinstance(error, StepFailedError)
            failure = _Failure(type(error).__name__, wire_text(error))
            _log.warning("rank=%d error=%s reason=%r", self.rank, *failure, exc_info=is_unexpected)
            return failure
        return None
