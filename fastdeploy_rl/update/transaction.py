"""What one rank does for a command: staged while it serves, stalled at a decode boundary, then committed or undone.

Owns the order of the steps on one rank and their undoing. Refuses to know how the
ranks decide: the manager calls `commit` or `undo` as the ranks decided. Invariant:
until `commit` begins, `undo` brings back, bitwise, what was live before."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.config import COPY
from fastdeploy_rl.errors import FastDeployRLError, NotServingError, StepFailedError
from fastdeploy_rl.memory.arena import ArenaPair
from fastdeploy_rl.plan.planner import LastPlan
from fastdeploy_rl.receipt import RankReceipt
from fastdeploy_rl.report import RankReport, StepReport
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources.base import StagedSource, WeightSource
from fastdeploy_rl.update.live_weights import LiveWeights, live_checksums
from fastdeploy_rl.update.steps import STAGING_STEPS, STALLING_STEPS, RankUpdate, UpdateStep, unstage


@dataclass
class RankState:
    """What outlives a command on one rank. `live` is None while cleared."""

    runner: ModelRunner
    source: WeightSource
    plans: LastPlan
    arenas: ArenaPair
    num_threads: int
    live: LiveWeights | None = None


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
        """In reverse, each once; a step that cannot be undone does
        not keep the others from it, and is raised at the end."""
        with contextlib.ExitStack() as undoing:
            for step in self._begun:
                undoing.callback(self._undo, step)
            self._begun = []

    def _undo(self, step: UpdateStep) -> None:
        with as_step_failure(f"undo of {step.name}", self._update.runner.rank):
            step.undo(self._update)


class UpdateCommand:
    """UPDATE: the steps of steps.py.

    A committed version keeps the lease on the memory that its parameters point into until the next commit or clear.
    Where every parameter is a copy nothing points there: lease and mapping are let go right after the commit, so that
    the trainer has its arena (or the memory it lent) back while the engine serves, and a rank holds nothing but its
    weights and the save area of their size."""

    def __init__(self, state: RankState, update: RankUpdate, observer: StepObserver) -> None:
        self._state = state
        self._update = update
        self._steps = StepRunner(update, observer)
        self._is_aliasing = False
        self._spent: StagedSource | None = None

    def stage(self) -> None:
        self._steps.run(STAGING_STEPS)
        new, staged = self._update.new, self._update.staged
        self._is_aliasing = new is not None and staged is not None and new.lies_in(staged)

    def stall(self) -> None:
        self._steps.run(STALLING_STEPS[:-1])

    def commit(self) -> None:
        self._steps.run(STALLING_STEPS[-1:])
        new, old = self._update.new, self._state.live
        if new is None:
            raise StepFailedError("commit of an update that was never staged")
        self._state.runner.set_version(str(new.version))
        self._state.live = new
        if self._is_aliasing:
            new.staged = self._update.staged
        else:
            self._spent = self._update.staged
        if self._update.copies_in_place and old is not None:
            # The parameters live where they lived; what was saved for the way back is free again.
            new.arena, old.arena = old.arena, self._update.arena
        else:
            new.arena = self._update.arena
        self._update.staged = self._update.arena = None

    def retire(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._release_spent)
            if self._update.old is not None:
                self._update.old.release(self._state.arenas)

    def _release_spent(self) -> None:
        if self._spent is not None:
            self._spent.release()
            self._spent = None
            self._state.source.trim()

    def undo(self) -> None:
        self._steps.undo()

    def abandon(self) -> None:
        unstage(self._update)

    def report(self, error: str = "") -> RankReport:
        update, plan = self._update, self._update.plan
        not_aliased = update.not_aliased
        copied = 0 if plan is None else sum(p.num_bytes for p in plan.parameters if p.name in not_aliased)
        total = 0 if plan is None else plan.aliased_bytes + plan.copied_bytes
        is_copy = update.apply_mode == COPY
        return RankReport(
            rank=update.runner.rank,
            steps=self._steps.reports,
            apply_mode=update.apply_mode,
            aliased_bytes=0 if is_copy else total - copied,
            copied_bytes=total if is_copy else copied,
            not_aliased=not_aliased,
            error=error,
        )

    def receipt(self) -> RankReceipt | None:
        new = self._update.new
        return None if new is None else rank_receipt(self._update.runner.rank, new, new.live)


class _PlainCommand:
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


class ClearCommand(_PlainCommand):
    """CLEAR: everything goes. Nothing is destroyed before the commit."""

    def __init__(self, state: RankState, deadline_ns: int) -> None:
        super().__init__(state)
        self._deadline_ns = deadline_ns

    def stall(self) -> None:
        started = time.monotonic()
        self._state.runner.drain(self._deadline_ns)
        self._note("drain", started)

    def commit(self) -> None:
        started = time.monotonic()
        runner, live = self._state.runner, self._state.live
        num_bytes = 0 if live is None else sum(view.num_bytes for view in live.views.values())
        runner.abort_requests("the engine was cleared")
        runner.drop_kv_cache()
        runner.unbind()
        self._state.live = None
        if live is not None:
            live.release(self._state.arenas)
        self._state.arenas.drop()
        self._state.source.trim()
        self._note("clear", started, num_bytes)


class RecomputeCommand(_PlainCommand):
    """RECOMPUTE: reads live memory again and says what it sums up to now. Changes nothing."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._receipt: RankReceipt | None = None

    def stall(self) -> None:
        live, runner = self._state.live, self._state.runner
        if live is None:
            raise NotServingError("there are no weights to read: the engine is cleared")
        started = time.monotonic()
        found = live_checksums(dict(runner.bound()), self._state.num_threads)
        self._receipt = rank_receipt(runner.rank, live, found)
        self._note("recompute", started, sum(view.num_bytes for view in live.views.values()))

    def receipt(self) -> RankReceipt | None:
        return self._receipt


def rank_receipt(rank: int, weights: LiveWeights, live: dict[str, Fletcher4]) -> RankReceipt:
    return RankReceipt(
        rank=rank,
        version=str(weights.version),
        read={name: sums.hex() for name, sums in weights.read.items()},
        live={name: sums.hex() for name, sums in live.items()},
    )


@contextlib.contextmanager
def as_step_failure(what: str, rank: int) -> Iterator[None]:
    """Errors of the tree pass; any other becomes a StepFailedError
    that says where it happened, so that the ranks can vote."""
    try:
        yield
    except FastDeployRLError:
        raise
    except Exception as error:
        raise StepFailedError(f"rank {rank}, {what}: {type(error).__name__}: {error}") from error
