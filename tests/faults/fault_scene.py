"""The stage of every case: an engine with the old version live, the new one published, an update that goes wrong; then
the judging, the mending, and one more good update, which leaves the old version of the next case.

One engine lives through many cases; what died is started again by whoever watches over it. Knows the board, the channel
and the cases; what an engine is made of is its subclasses' affair (numpy_scene.py, served_scene.py)."""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import numpy as np

from fastdeploy_rl.board.board import Board, board_name
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import FastDeployRLError, FencedError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.conventions import Convention
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import Published, WeightPublisher
from fastdeploy_rl.testing.step_faults import Act, StepFault, flip
from fastdeploy_rl.update.client import BoardClient
from tests.faults.fault_cases import NUM_RANKS, STAGING, Case, is_found_after_the_commit, promised
from tests.faults.fault_judge import TORN, Reference, Seen, differ_everywhere, outcome_of, what_is_torn

Weights = Mapping[str, np.ndarray]

DEADLINE_S = 0.5
GOOD_DEADLINE_S = 5.0
"""Of updates that nothing befalls: whether they work is asked, not how fast."""
LATE_S = 0.5
"""No wait may exceed its deadline by more."""
AUDIT_S = 3.0
"""Aliased memory is read once more at a rank's next heartbeat, a second after the commit."""
ANSWER_S = 20.0

UNKNOWN = "unknown"
"""The outcome of a case that could not be judged."""


class SceneError(Exception):
    """The engine does not go on: this case, and whatever the scene could still have shown, is lost."""


@dataclass
class Told:
    """What the caller of the update got, and when."""

    is_done: bool
    error: FastDeployRLError | None
    digest: str
    seconds: float

    def __str__(self) -> str:
        return "done" if self.is_done else f"{type(self.error).__name__}: {self.error}"


@dataclass
class Row:
    """What one case came to. `failures`: what was not as it must be."""

    case: Case
    runner: str
    outcome: str = ""
    seconds: float = 0.0
    told: str = ""
    told_s: float = 0.0
    recovered_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    is_broken: bool = False
    """The engine did not go on; the next case needs another one."""


class Version(NamedTuple):
    published: Published
    reference: Reference


class FaultScene(ABC):
    """Use in a with statement."""

    runner = ""

    def __init__(self, setting: tuple[str, str], deadlines: Deadlines) -> None:
        """`setting`: one of fault_cases.SETTINGS."""
        self.setting = setting
        self.deadlines = deadlines
        self._pool = ThreadPoolExecutor(1)
        self._old: Reference | None = None
        self._baseline: list[Gauge] = []
        self._num_segments = 0
        self._num_published = 0

    def __enter__(self) -> "FaultScene":
        with ExitStack() as stack:
            stack.enter_context(self._pool)
            self.port, self.channel = self.open(stack)
            self.board = stack.enter_context(_attached(self.port))
            self.client = stack.enter_context(BoardClient(self.port))
            self._publisher = stack.enter_context(WeightPublisher(self.channel))
            self.warm_up()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- what an engine must offer -----------------------------------------------------------------

    @abstractmethod
    def open(self, stack: ExitStack) -> tuple[int, Path]:
        """Starts the engine; returns its board's port and its channel."""

    @abstractmethod
    def next_version(self) -> tuple[Weights, Convention, Reference]:
        """The trainer's tensors, what they are to the engine, and what it must then hold: each differs from those
        before in every tensor."""

    @abstractmethod
    def tell_faults(self, lines: Sequence[str]) -> list[object]:
        """To each rank's StepFaults: a StepFault or "disarm"; returns the answers."""

    @abstractmethod
    def pid(self, rank: int) -> int: ...

    @abstractmethod
    def are_there(self) -> bool:
        """Every worker lives, and whoever watches over them knows it."""

    @abstractmethod
    def see(self) -> Seen: ...

    @abstractmethod
    def last_words(self) -> str:
        """What the engine complained about last."""

    @abstractmethod
    def hit(self, case: Case) -> str:
        """The tensor whose byte is changed: each rank has its own part of it."""

    # --- what a case does --------------------------------------------------------------------------

    def publish(self) -> Version:
        weights, convention, reference = self.next_version()
        self._num_published += 1
        published = self._publisher.publish(
            weights,
            step=self._num_published,
            layout=f"tp:{NUM_RANKS}",
            convention=convention,
            deadline_s=ANSWER_S,
        )
        return Version(published, reference)

    def update(self, version: Version, deadline_s: float) -> Told:
        begun = time.monotonic()
        try:
            report = self.client.update(version.published.version, deadline_s=deadline_s)
        except FastDeployRLError as error:
            return Told(False, error.with_traceback(None), "", time.monotonic() - begun)
        digest = report.receipt.content_digest if report.receipt else ""
        return Told(report.outcome == "done", None, digest, time.monotonic() - begun)

    def _fault_of(self, case: Case, new: Version) -> StepFault:
        target, offset = "", 0
        if case.act is Act.FLIP_FILE:
            target, offset = place_of(new.published.manifest, self.hit(case), case.rank)
        elif case.act in (Act.FLIP_PARAMETER, Act.FLIP_STAGED):
            target = self.hit(case)
        elif case.act in (Act.FLIP_RECORD, Act.FLIP_COUNTER):
            target = f"/dev/shm/{board_name(self.port)}"
        return StepFault(case.act, case.step, case.when, target, offset, case.is_lasting)

    def _arm(self, case: Case, fault: StepFault) -> None:
        told = msgspec.json.encode(fault).decode()
        answers = self.tell_faults([told if rank == case.rank else "disarm" for rank in range(NUM_RANKS)])
        if answers[case.rank] != "armed":
            raise SceneError(f"rank {case.rank} was not armed: {answers}")

    # --- one case ----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        for _ in range(4):
            self._update_well()
        self._baseline = self._gauges()
        self._num_segments = len(self._segments())

    def play(self, case: Case) -> Row:
        row = Row(case, self.runner, outcome=UNKNOWN)
        try:
            self._play(case, row)
        except (SceneError, FastDeployRLError, FutureTimeoutError, OSError) as error:
            row.failures.append(f"{type(error).__name__}: {error}\n{self.last_words()}")
            row.is_broken = True
        return row

    def _play(self, case: Case, row: Row) -> None:
        begun = time.monotonic()
        old, new = self._old, self.publish()
        if old is None or not differ_everywhere(old, new.reference):
            raise SceneError("the two versions do not differ in every tensor of every rank")
        if case.base == "cleared":
            self.client.clear(deadline_s=GOOD_DEADLINE_S)
            old = Reference.of([{}] * NUM_RANKS)
        fault = self._fault_of(case, new)
        self._arm(case, fault)
        told = self._update_under_fault(case, new)
        told_at = time.monotonic()
        self._settle(case)
        row.recovered_s = time.monotonic() - told_at
        row.told, row.told_s, seen = str(told), told.seconds, self.see()
        row.outcome = outcome_of(seen, old, new.reference)
        if row.outcome == TORN:
            row.failures.append(f"torn: {what_is_torn(seen, old, new.reference)}")
        row.failures += self._untrue(case, row.outcome, told, new)
        row.failures += self._overdue(case, told, row)
        if any(self.tell_faults(["disarm"] * NUM_RANKS)):
            row.failures.append("the fault did not happen")
        if fault.act is Act.FLIP_FILE:
            flip(fault.target, fault.offset)
        row.seconds = time.monotonic() - begun
        self._update_well()
        row.failures += self._grown()

    @property
    def _stall_s(self) -> float:
        """A stopped rank is woken after this, if it was not killed: by then all that is waited for is overdue."""
        return DEADLINE_S + 2 * self.deadlines.finish_s + 0.3

    @property
    def _settle_s(self) -> float:
        """By then a dead rank is back, or the engine has dropped everything."""
        limits = self.deadlines
        return limits.rejoin_s + limits.update_s + 2 * limits.finish_s + limits.clear_s

    def _update_under_fault(self, case: Case, new: Version) -> Told:
        pid = self.pid(case.rank)
        told = self._pool.submit(self.update, new, DEADLINE_S)
        if case.kind == "stall":
            self._wake_later(case, pid)
        return told.result(self._settle_s + ANSWER_S)

    def _wake_later(self, case: Case, pid: int) -> None:
        """At the time, whether or not the caller was told before."""
        time.sleep(self._stall_s)  # the stall itself, not a wait for something
        if self.pid(case.rank) == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _settle(self, case: Case) -> None:
        """Until the engine serves or has dropped everything, with every rank in its place."""
        if is_found_after_the_commit(case):
            self._try_wait(lambda: not self.client.status().is_serving, AUDIT_S)
        if not self._try_wait(self._is_settled, self._settle_s):
            raise SceneError(f"not settled after {self._settle_s} s: {self.client.status()}")

    def _is_settled(self) -> bool:
        status = self.client.status()
        is_over = status.legacy_status in ("NORMAL", "CLEARED") and status.update == "idle"
        return is_over and self._is_whole()

    def _is_whole(self) -> bool:
        """Nobody is dead, condemned, or about to be started again."""
        return self.are_there() and not self.board.lost_ranks() and not self.board.condemned_ranks()

    def _try_wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        last = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > last:
                return False
            time.sleep(0.005)  # the period of looking
        return True

    def _untrue(self, case: Case, outcome: str, told: Told, new: Version) -> list[str]:
        """What the caller was told against what happened, and what is promised."""
        wrong = []
        if told.is_done and told.digest != new.published.manifest.content_digest:
            wrong.append(f"the receipt is not that of the publication: {told.digest}")
        is_found_later = is_found_after_the_commit(case) and outcome == "fenced"
        if told.is_done != (outcome == "new") and not is_found_later:
            wrong.append(f"the caller was told {told} while the outcome is {outcome}")
        if outcome == "old" and isinstance(told.error, FencedError):
            wrong.append(f"the caller was told that the engine is fenced, and it serves: {told}")
        if outcome not in (*promised(case), TORN):
            expected = " or ".join(promised(case))
            wrong.append(f"the outcome is {outcome}, and {expected} is promised; the caller was told {told}")
        return wrong

    def _overdue(self, case: Case, told: Told, row: Row) -> list[str]:
        """Calls and recoveries that lasted longer than their deadlines allow."""
        allowed_s = DEADLINE_S + 2 * self.deadlines.finish_s
        if case.kind == "stall":
            allowed_s = max(allowed_s, self._stall_s)
        if case.kind in ("kill", "stall") and (case.rank == 0 or case.step not in STAGING):
            allowed_s += self.deadlines.rejoin_s  # a rank is started again before all is told
        late = []
        if told.seconds > allowed_s + LATE_S:
            late.append(f"the caller waited {told.seconds:.2f} s, {allowed_s:.2f} s were allowed")
        if row.recovered_s > self._settle_s + LATE_S:
            late.append(f"the engine was back after {row.recovered_s:.2f} s, {self._settle_s:.2f} s were allowed")
        return late

    def _update_well(self) -> None:
        new = self.publish()
        told = self.update(new, GOOD_DEADLINE_S)
        if not told.is_done:
            raise SceneError(f"an update that nothing befalls failed: {told}")
        seen = self.see()
        if outcome_of(seen, new.reference, new.reference) == TORN:
            raise SceneError(f"after a good update: {what_is_torn(seen, new.reference, new.reference)}")
        self._old = new.reference

    # --- what must not grow ------------------------------------------------------------------------

    def _grown(self) -> list[str]:
        """What there is more of than after the warm-up; what is replaced is let go a moment after the commit."""
        self._try_wait(lambda: not self._grown_now(), AUDIT_S)
        return self._grown_now()

    def _grown_now(self) -> list[str]:
        grown = [
            f"rank {rank} has {now - before} more {name} than after the warm-up"
            for rank, gauges in enumerate(zip(self._baseline, self._gauges(), strict=True))
            for name, before, now in zip(Gauge._fields, *gauges, strict=True)
            if now > before
        ]
        num_segments = len(self._segments())
        if num_segments > self._num_segments:
            grown.append(f"{num_segments - self._num_segments} more segments than after the warm-up")
        return grown

    def _gauges(self) -> "list[Gauge]":
        return [Gauge.of(self.pid(rank)) for rank in range(NUM_RANKS)]

    def _segments(self) -> list[str]:
        ours = (Channel(self.channel).key, str(self.port))
        return [name for name in os.listdir("/dev/shm") if any(mark in name for mark in ours)]


def play_all(cases: Sequence[Case], make_scene: Callable[[tuple[str, str]], FaultScene]) -> Iterator[Row]:
    """One after the other, on as few engines as can be; `make_scene` makes one of a setting."""
    left = list(cases)
    while left:
        with make_scene(left[0].setting) as scene:
            while left and left[0].setting == scene.setting:
                row = scene.play(left.pop(0))
                yield row
                if row.is_broken:
                    break


@contextmanager
def _attached(port: int) -> Iterator[Board]:
    board = Board.attach(port)
    try:
        yield board
    finally:
        board.close()


def place_of(manifest: Manifest, name: str, rank: int) -> tuple[str, int]:
    """File and offset of a byte of that rank's part of a published tensor."""
    part = next(tensor for tensor in manifest.tensors if tensor.name == name).parts[rank]
    return f"/dev/shm/{manifest.segments[part.segment].locator}", part.offset


class Gauge(NamedTuple):
    """Of one process."""

    descriptors: int
    mappings: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Gauge":
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared = sum("/dev/shm/" in line or "fastdeploy_rl" in line.rpartition("/")[2] for line in lines)
        return cls(len(os.listdir(f"/proc/{pid}/fd")), shared, len(os.listdir(f"/proc/{pid}/task")))
