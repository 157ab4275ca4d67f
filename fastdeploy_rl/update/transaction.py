"""What one rank does for a command: staged while it serves, stalled at a decode boundary, then committed or undone.

Owns the order of the steps on one rank and their undoing. Refuses to know how the ranks decide: its caller calls
`commit` or `undo` as they did. Invariant: until `commit` begins, `undo` brings back, bitwise, what was live before."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.config import ALIAS, COPY, KEEP
from fastdeploy_rl.errors import FastDeployRLError, NotServingError, StepFailedError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.receipt import RankReceipt
from fastdeploy_rl.report import KV_KEPT, KV_LOST, KV_REBUILT, RankReport, StepReport
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import StagedSource, WeightSource
from fastdeploy_rl.update.apply_choice import ARENA, NOTHING_TO_ALIAS, CopySpeed
from fastdeploy_rl.update.live_weights import LiveWeights, OffloadedWeights, live_checksums
from fastdeploy_rl.update.steps import STAGING_STEPS, STALLING_STEPS, RankUpdate, UpdateStep, unstage
from fastdeploy_rl.update.way_back import WayBack

_log = logging.getLogger(__name__)


@dataclass
class RankState:
    """What outlives a command on one rank. `live` is None while no parameter is bound: cleared, or asleep; `offloaded`
    is what sleeps in host memory meanwhile."""

    runner: ModelRunner
    source: WeightSource
    plans: LastPlan
    arenas: ArenaPair
    num_threads: int
    num_staging_threads: int = 1
    live: LiveWeights | None = None
    offloaded: OffloadedWeights | None = None
    copy_speed: CopySpeed = field(default_factory=CopySpeed)

    def release_offloaded(self) -> None:
        """What sleeps is gone then; where nothing does, nothing happens."""
        offloaded, self.offloaded = self.offloaded, None
        if offloaded is not None:
            offloaded.release()


class RankCommand(Protocol):
    """One command on one rank. An error raised by `stage` or `stall` means: this rank is against; `undo` follows."""

    def stage(self) -> None:
        """While the engine serves; on the manager's own thread."""
        ...

    def stall(self) -> None:
        """On the engine's loop thread, at a decode boundary, up to the point where this rank can commit."""
        ...

    def commit(self) -> None:
        """After all ranks decided YES: rolls forward."""
        ...

    def retire(self) -> None:
        """After a commit, on the manager's own thread, while the engine serves again: lets go of what was replaced."""
        ...

    def undo(self) -> None:
        """After any rank decided NO, from wherever this one is."""
        ...

    def abandon(self) -> None:
        """After neither commit nor undo came through and nothing is bound any more: lets go of what it still holds."""
        ...

    def report(self, error: str = "") -> RankReport: ...

    def receipt(self) -> RankReceipt | None:
        """This rank's half of the proof, as far as it is known."""
        ...


class StepObserver(Protocol):
    """Hears of every step on this rank, on the thread that runs it. What it raises is that step's failure."""

    def begin(self, step: UpdateStep, update: RankUpdate) -> None:
        """Before `step.do`."""
        ...

    def end(self, step: UpdateStep, update: RankUpdate) -> None:
        """After `step.do` came through."""
        ...


class StepRunner:
    """Runs steps in order, times them, remembers them for undoing."""

    def __init__(self, update: RankUpdate, observer: StepObserver) -> None:
        self._update = update
        self._observer = observer
        self._begun: list[UpdateStep] = []
        self.reports: list[StepReport] = []

    def run(self, steps: Sequence[UpdateStep]) -> None:
        for step in steps:
            self._begun.append(step)
            with as_step_failure(step.name, self._update.runner.rank):
                self._observer.begin(step, self._update)
                started = time.monotonic()
                num_bytes = step.do(self._update)
                seconds = time.monotonic() - started
                self._observer.end(step, self._update)
            self.reports.append(StepReport(step=step.name, seconds=seconds, num_bytes=num_bytes))

    def undo(self) -> None:
        """In reverse. A step that cannot be undone does not keep the others from it; it stays to be undone by a later
        call, and the first such error is raised at the end."""
        first: FastDeployRLError | None = None
        for step in reversed(list(self._begun)):
            try:
                self._undo(step)
            except FastDeployRLError as error:
                first = first or error
            else:
                self._begun.remove(step)
        try:
            if first is not None:
                raise first
        finally:
            first = None  # else this frame and the error would keep each other, and memory that others want back

    def _undo(self, step: UpdateStep) -> None:
        with as_step_failure(f"undo of {step.name}", self._update.runner.rank):
            step.undo(self._update)


class _Rollback(NamedTuple):
    """The policy in force, what of the engine's own memory it takes, and why it is not the one that was asked for."""

    policy: str
    num_bytes: int
    reason: str


def _rollback_in_force(update: RankUpdate) -> _Rollback:
    way_back = update.way_back
    if way_back is not None:
        return _Rollback(way_back.policy, way_back.num_bytes, way_back.reason)
    if update.rollback == KEEP:
        return _Rollback(KEEP, 0, "")
    return _Rollback(KEEP, 0, "nothing was live" if update.old is None else "a rebind leaves the old weights in place")


class UpdateCommand:
    """UPDATE: the steps of steps.py.

    A committed version keeps the lease on the memory that its parameters point into until the next commit or clear.
    Where every parameter is a copy nothing points there: lease and mapping are let go right after the commit, so that
    the trainer has its arena (or the memory it lent) back while the engine serves, and a rank holds nothing but its
    weights and the save area of their size."""

    def __init__(self, state: RankState, update: RankUpdate, observer: StepObserver) -> None:
        self._state = state
        self._update = update
        if state.offloaded is not None:
            update.asleep_digest = state.offloaded.content_digest
        self._steps = StepRunner(update, observer)
        self._is_aliasing = False
        self._spent: list[StagedSource | WayBack | OffloadedWeights] = []
        self._rollback = _Rollback("", 0, "")

    def stage(self) -> None:
        self._steps.run(STAGING_STEPS)
        new, staged = self._update.new, self._update.staged
        self._is_aliasing = new is not None and staged is not None and new.lies_in(staged)
        self._rollback = _rollback_in_force(self._update)
        _log.info(
            "event=staged rank=%d version=%s rollback=%s rollback_bytes=%d rollback_reason=%r",
            self._update.runner.rank,
            self._update.version,
            *self._rollback,
        )

    def stall(self) -> None:
        self._steps.run(STALLING_STEPS[:-1])

    def commit(self) -> None:
        """Where it raises, nothing has changed hands, and it may be called again."""
        update, old = self._update, self._state.live
        new = update.new
        if new is None:
            raise StepFailedError("commit of an update that was never staged")
        self._steps.run(STALLING_STEPS[-1:])
        self._state.live = new
        if self._is_aliasing:
            new.staged = update.staged
        elif update.staged is not None:
            self._spent.append(update.staged)
        if update.way_back is not None:
            self._spent.append(update.way_back)
        if self._state.offloaded is not None:
            self._spent.append(self._state.offloaded)
            self._state.offloaded = None
        new.arena = update.arena
        if update.copies_in_place and old is not None:
            new.arena, old.arena = old.arena, None  # the parameters live where they lived
        update.staged = update.arena = update.way_back = None
        update.is_installed = False

    def retire(self) -> None:
        """What cannot be let go now a later call lets go."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._return_memory)
            stack.callback(self._release_spent)
            if self._update.old is not None:
                self._update.old.release(self._state.arenas)

    def _release_spent(self) -> None:
        while self._spent:
            self._spent[-1].release()
            self._spent.pop()

    def _return_memory(self) -> None:
        """What is kept only to be quicker next time: unless parameters lie in published memory, its mappings; and where
        memory is scarce, arenas."""
        if not self._is_aliasing:
            self._state.source.trim()
        if self._update.copies_in_place and self._update.rollback != KEEP:
            self._state.arenas.trim()

    def undo(self) -> None:
        self._steps.undo()

    def abandon(self) -> None:
        self._update.is_installed = False
        unstage(self._update)

    def report(self, error: str = "") -> RankReport:
        update, plan = self._update, self._update.plan
        not_aliased = update.not_aliased
        copied = 0 if plan is None else sum(p.num_bytes for p in plan.parameters if p.name in not_aliased)
        total = 0 if plan is None else plan.aliased_bytes + plan.copied_bytes
        is_copy = update.way == COPY
        applied, reason = self._applied()
        return RankReport(
            rank=update.runner.rank,
            steps=self._steps.reports,
            apply_mode=update.apply_mode,
            aliased_bytes=0 if is_copy else total - copied,
            copied_bytes=total if is_copy else copied,
            not_aliased=not_aliased,
            rollback=self._rollback.policy,
            rollback_bytes=self._rollback.num_bytes,
            rollback_reason=self._rollback.reason,
            kv=_kv_word(update),
            graphs_captured=update.graphs_captured,
            applied=applied,
            applied_reason=reason,
            error=error,
        )

    def _applied(self) -> tuple[str, str]:
        """How the weights are taken over, and why so; empty while, or because, they are not."""
        update = self._update
        if update.new is None:
            return "", ""
        applied = COPY if update.copies_in_place else ALIAS if self._is_aliasing else ARENA
        if update.choice is not None:
            return applied, update.choice.reason
        if applied == ARENA:
            return applied, "nothing was live that could be overwritten" if update.way == COPY else NOTHING_TO_ALIAS
        return applied, "as asked"

    def receipt(self) -> RankReceipt | None:
        new = self._update.new
        return None if new is None else rank_receipt(self._update.runner.rank, new, new.live)


def _kv_word(update: RankUpdate) -> str:
    if update.is_kv_lost:
        return KV_LOST
    is_kept = update.kv_policy == KEEP
    return "" if not update.is_kv_touched else (KV_KEPT if is_kept else KV_REBUILT)


class PlainCommand:
    """A command that stages nothing and has nothing to take back."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._steps: list[StepReport] = []

    def stage(self) -> None:
        return None

    def commit(self) -> None:
        return None

    def retire(self) -> None:
        return None

    def undo(self) -> None:
        return None

    def abandon(self) -> None:
        return None

    def report(self, error: str = "") -> RankReport:
        return RankReport(rank=self._state.runner.rank, steps=self._steps, error=error)

    def receipt(self) -> RankReceipt | None:
        return None

    def _note(self, step: str, started: float, num_bytes: int = 0) -> None:
        self._steps.append(StepReport(step=step, seconds=time.monotonic() - started, num_bytes=num_bytes))


class ClearCommand(PlainCommand):
    """CLEAR: everything goes. Nothing is destroyed before the commit."""

    def __init__(self, state: RankState, deadline_ns: int) -> None:
        super().__init__(state)
        self._deadline_ns = deadline_ns
        self._dropped: LiveWeights | None = None

    def stall(self) -> None:
        started = time.monotonic()
        self._state.runner.drain(self._deadline_ns)
        self._note("drain", started)

    def commit(self) -> None:
        started = time.monotonic()
        runner, live = self._state.runner, self._state.live
        num_bytes = 0 if live is None else sum(view.num_bytes for view in live.views.values())
        runner.abort_requests("the engine was cleared")
        runner.drop_graphs()
        runner.drop_kv_cache()
        runner.unbind()
        if live is not None:
            self._state.live, self._dropped = None, live
        self._state.release_offloaded()
        self._release_dropped()
        self._state.arenas.drop()
        self._state.source.trim()
        self._note("clear", started, num_bytes)

    def abandon(self) -> None:
        self._release_dropped()

    def _release_dropped(self) -> None:
        if self._dropped is not None:
            self._dropped.release(self._state.arenas)
            self._dropped = None


class KeepCommand(PlainCommand):
    """RESTORE on a rank that holds the version: it stays, and what a broken step left in the KV cache goes. `tags`:
    what is to be in place; the rest sleeps."""

    def __init__(self, state: RankState, tags: frozenset[Tag], deadline_ns: int) -> None:
        super().__init__(state)
        self._tags = tags
        self._deadline_ns = deadline_ns

    def stall(self) -> None:
        started = time.monotonic()
        runner = self._state.runner
        runner.drain(self._deadline_ns)
        if Tag.KV_CACHE in self._tags:
            runner.rebuild_kv_cache(_live(self._state).content_digest)
        else:
            runner.drop_kv_cache()
        self._note("rebuild_kv_cache", started)
        started = time.monotonic()
        if Tag.GRAPH in self._tags:
            runner.recapture_graphs()
        else:
            runner.drop_graphs()
        self._note("recapture_graphs", started)

    def receipt(self) -> RankReceipt:
        live = _live(self._state)
        return rank_receipt(self._state.runner.rank, live, live.live)


class RecomputeCommand(PlainCommand):
    """RECOMPUTE: reads live memory again and says what it sums up to now. Changes nothing."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._receipt: RankReceipt | None = None

    def stall(self) -> None:
        live, runner = _live(self._state), self._state.runner
        started = time.monotonic()
        runner.verify_bound()
        found = live_checksums(dict(runner.bound()), self._state.num_threads)
        self._receipt = rank_receipt(runner.rank, live, found)
        self._note("recompute", started, sum(view.num_bytes for view in live.views.values()))

    def receipt(self) -> RankReceipt | None:
        return self._receipt


def _live(state: RankState) -> LiveWeights:
    if state.live is None:
        raise NotServingError("there are no weights: the engine is cleared")
    return state.live


def rank_receipt(rank: int, weights: LiveWeights, live: dict[str, Fletcher4]) -> RankReceipt:
    return RankReceipt(
        rank=rank,
        version=str(weights.version),
        read={name: sums.hex() for name, sums in weights.read.items()},
        live={name: sums.hex() for name, sums in live.items()},
    )


@contextlib.contextmanager
def as_step_failure(what: str, rank: int) -> Iterator[None]:
    """Errors of the tree pass; any other becomes a StepFailedError that says where it happened, so that the ranks can
    vote."""
    try:
        yield
    except FastDeployRLError:
        raise
    except Exception as error:
        raise StepFailedError(f"rank {rank}, {what}: {type(error).__name__}: {error}") from error
