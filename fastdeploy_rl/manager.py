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
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fastdeploy_rl.board.board import Board, rank_lock_path
from fastdeploy_rl.board.layout import Ballot, CommandRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.config import (
    APPLY_MODES,
    AUTO,
    KEEP,
    KV_POLICIES,
    REBUILD,
    ROLLBACKS,
    Deadlines,
    check_checksums,
)
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    PeerLostError,
    StepFailedError,
)
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import WeightSource
from fastdeploy_rl.update.attempt import attempt
from fastdeploy_rl.update.cold_start import cold_weights, specs_digest
from fastdeploy_rl.update.committed import committed_version
from fastdeploy_rl.update.coordinator import Coordinator
from fastdeploy_rl.update.live_weights import audit
from fastdeploy_rl.update.participant import Participant
from fastdeploy_rl.update.rank_files import RankFiles, RankPart, receipts_of
from fastdeploy_rl.update.recovery import READY, STOPPED, TORN
from fastdeploy_rl.update.steps import RankUpdate, UpdateStep
from fastdeploy_rl.update.transaction import (
    RankState,
    StepObserver,
    rank_receipt,
)
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_HEARTBEAT_NS = 1_000_000_000
_STAGING_NICENESS = 10
"""Beside an engine that needs every core: staging gets a tenth of one that both want, and all that idle."""
_LEAST_PRIORITY = 19


@dataclass(frozen=True)
class ManagerConfig:
    """`apply_mode`, `rollback`, `kv_policy`: one each of config.APPLY_MODES, ROLLBACKS and KV_POLICIES, which say what
    they mean. `num_copy_threads`: threads of one rank's copies and checksums; `num_staging_threads`: of those while the
    engine serves, None for as many. `is_restarted_on_death`: somebody starts a rank again that died, or that is
    condemned on the board. `has_checksums` False: an update reads nothing that it need not copy, so nothing is proved
    and there is no receipt."""

    load_strategy: str
    apply_mode: str = AUTO
    deadlines: Deadlines = field(default_factory=Deadlines)
    num_copy_threads: int = 1
    num_staging_threads: int | None = None
    rollback: str = KEEP
    kv_policy: str = REBUILD
    is_restarted_on_death: bool = False
    has_checksums: bool = True

    def __post_init__(self) -> None:
        if self.apply_mode not in APPLY_MODES:
            raise ConfigurationError(f"apply mode must be one of {', '.join(APPLY_MODES)}, got {self.apply_mode!r}")
        if self.rollback not in ROLLBACKS:
            raise ConfigurationError(f"rollback must be one of {', '.join(ROLLBACKS)}, got {self.rollback!r}")
        if self.kv_policy not in KV_POLICIES:
            raise ConfigurationError(f"kv policy must be one of {', '.join(KV_POLICIES)}, got {self.kv_policy!r}")
        check_checksums(self.apply_mode, self.has_checksums)

    @property
    def staging_threads(self) -> int:
        return self.num_copy_threads if self.num_staging_threads is None else self.num_staging_threads


@dataclass(frozen=True)
class InitialWeights:
    """What a cold start loaded: this rank's slices, complete."""

    version: WeightVersion
    views: Mapping[str, TensorView]


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
        await_loops: Callable[[], None] | None = None,
        refused: Mapping[CommandKind, str] = MappingProxyType({}),
    ) -> None:
        """`refused`: commands that this engine has no part in, and why. `await_loops`, on rank 0, where the engine's
        loop looks at the status word itself: called before that tells how a command ended; returns when every rank's
        loop stands still for it. `observer` hears of the steps of updates on this rank, on the thread that carries them
        out."""
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
            num_staging_threads=config.staging_threads,
        )
        self._observer, self._await_loops, self._refused = observer, await_loops, refused
        self._lock = OwnerLock(rank_lock_path(board.run_dir, rank))
        self._last_command = 0
        self._overdue_ns = 0
        self._participant = Participant(
            board=board,
            rendezvous=self._rendezvous,
            state=self._state,
            apply_mode=config.apply_mode,
            rollback=config.rollback,
            kv_policy=config.kv_policy,
            quiet_s=config.deadlines.quiet_s,
            has_checksums=config.has_checksums,
            observer=self,
            wake=self._wake,
        )
        self._is_stopping = threading.Event()
        self._stager = threading.Thread(target=self._stage_commands, name="fastdeploy_rl-stager", daemon=True)
        self._fault = ""
        self._coordinator: Coordinator | None = None
        self.wake_fd = -1
        """Readable when `poll` may have something new; there is none before `start` and after `close`."""

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
        runner.recapture_graphs()
        runner.set_version(str(initial.version))

    def _take_seat(self) -> None:
        live = self._state.live
        receipt = None if live is None else rank_receipt(self.rank, live, live.live)
        self._files.write_part(self.rank, 0, RankPart(receipt=receipt))
        self._rendezvous.show(phase=READY, version=self._participant.shown_version)
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
        self._rendezvous.show(version=self._participant.shown_version)
        self._rendezvous.vote(self._last_command, Ballot.FINISHED, phase=READY)
        self._rendezvous.mark_back()
        _log.info("rank=%d event=taking_over after_command=%d", self.rank, self._last_command)
        if self.rank == 0:
            self._coordinator = self._new_coordinator()
            self._coordinator.take_over(specs_digest(self._state.runner.parameters()))

    def _new_coordinator(self) -> Coordinator:
        return Coordinator(
            board=self._board,
            rendezvous=self._rendezvous,
            source=self._source,
            load_strategy=self._config.load_strategy,
            deadlines=self._config.deadlines,
            is_restarted_on_death=self._config.is_restarted_on_death,
            has_checksums=self._config.has_checksums,
            replicated=_replicated(self._state.runner),
            on_fault=self._note_fault,
            wake=self._wake,
            await_loops=self._await_loops,
            refused=self._refused,
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
            stack.callback(self._participant.retire_replaced)
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
        self._state.release_offloaded()
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
    def is_admitting(self) -> bool:
        """On rank 0: new requests may come in."""
        return self._coordinator is not None and self._coordinator.state.is_serving

    @property
    def is_draining(self) -> bool:
        """A command waits for the requests that have begun, so that no other one is to begin."""
        return self._participant.is_draining

    @property
    def live_version(self) -> str:
        """On rank 0: what tokens are made with, as text; empty while nothing is live."""
        # Of a commit the coordinator hears a moment after this rank has followed it.
        is_live = self._coordinator is not None and bool(self._coordinator.state.live_version)
        return self._participant.live_version if is_live else ""

    @property
    def bound_version(self) -> str:
        """What this rank's parameters are bound to, as text; empty for none."""
        return self._participant.live_version

    def times_shown(self, value: LegacyStatus) -> int:
        """On rank 0: how often the status word came to read that, whatever a trainer stored a moment later."""
        return 0 if self._coordinator is None else self._coordinator.state.times_shown(value)

    def knock(self) -> None:
        """On rank 0, where the engine is cleared and its loops look at the status word alone: if a command waits for
        them, the word asks them to come."""
        if self._coordinator is not None and self._participant.is_awaited:
            self._coordinator.state.knock()

    def has_told(self, number: int) -> bool:
        """On rank 0: the outcome of command `number` is told, and the status word reads what is true since."""
        return self._coordinator is not None and self._coordinator.state.has_told(number)

    @property
    def newest_version(self) -> str:
        """On rank 0: the newest published version that is known of, as text; empty for none."""
        return self._coordinator.state.newest_version if self._coordinator is not None else ""

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
        is_decoding = self._coordinator is not None and self._coordinator.state.is_decoding
        return self._participant.due_number(is_decoding=is_decoding)

    def run(self, number: int) -> None:
        """The stalled part of command `number`, on every rank at the same boundary; at most until the command's
        deadline.

        Never raises because a command is rejected: then the runner is where it was."""
        self._participant.run(number)

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

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def _note_fault(self, reason: str) -> None:
        _log.critical("rank=%d event=fault reason=%r", self.rank, reason)
        self._fault = reason
        self._wake()

    def _stage_commands(self) -> None:
        try:
            _yield_to_decoding()
            self._follow_commands()
        except BaseException as error:
            self._note_fault(f"{type(error).__name__}: {error}")
            raise

    def _follow_commands(self) -> None:
        while not self._is_stopping.is_set():
            record = self._rendezvous.await_command(
                self._last_command, self._next_look_ns(), is_wanted=lambda: self._participant.has_replaced
            )
            self._participant.retire_replaced()
            if record is not None and not self._is_stopping.is_set():
                self._last_command = record.number
                self._overdue_ns = self._leader_overdue_ns(record) if self._participant.stage(record) else 0
            elif record is None:
                self._look_around()

    def _next_look_ns(self) -> int:
        heartbeat = time.monotonic_ns() + _HEARTBEAT_NS
        return min(heartbeat, self._overdue_ns) if self._overdue_ns else heartbeat

    def _look_around(self) -> None:
        """While no new command comes. The engine's loop may still be inside the last one, until that is FINISHED."""
        self._rendezvous.show()
        if self._rendezvous.own.ballot == Ballot.FINISHED:
            self._look_after_leader()
            self._look_after_memory()

    def _leader_overdue_ns(self, record: CommandRecord) -> int:
        """When rank 0 must have finished `record`; 0 on the ranks that do not look after it."""
        is_watched = self.rank == 1 and self._config.is_restarted_on_death
        return record.deadline_ns + int(2 * self._config.deadlines.finish_s * 1e9) if is_watched else 0

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
        """Published memory that parameters lie in: that whoever lent it is still there; and once after a commit what
        the stall did not read back: whoever wrote into it in between is noticed a moment later."""
        live = self._state.live
        if live is None or self._rendezvous.own.phase == TORN:
            return
        if live.staged is not None and not live.staged.is_vouched():
            self._declare_torn(f"the trainer that lent the memory of version {live.version} is gone; update again")
        elif not live.is_read_back:
            failure = attempt(lambda: audit(live, self.rank, self._config.staging_threads), self.rank)
            live.is_read_back = failure is None
            if failure is not None:
                self._declare_torn(failure.text)

    def _declare_torn(self, reason: str) -> None:
        """Rank 0 sees it and fences the engine. Where a command that was announced just before covers it, the next look
        finds it again."""
        _log.error("rank=%d event=torn reason=%r", self.rank, reason)
        self._rendezvous.show(phase=TORN, reason=reason)
        self._board.ring_doorbell()

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


def _yield_to_decoding() -> None:
    """For the calling thread and those that copy for it: decoding waits for its slowest thread at each layer."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + _STAGING_NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _LEAST_PRIORITY))


def _replicated(runner: ModelRunner) -> frozenset[str]:
    """Parameters that an update brings, and every rank has all of."""
    specs = runner.parameters() if runner.num_ranks > 1 else ()
    return frozenset(spec.name for spec in specs if spec.coverage is Coverage.UPDATED and spec.shard_axis is None)
