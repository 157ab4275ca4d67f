"""The stage of every case: an engine with the old version live, the new one published, an update that goes wrong; then
the judging, the mending, and one more good update, which leaves the old version of the next case.

One engine lives through many cases; what died is started again by whoever watches over it. `FaultScene` knows no
engine; `NumpyScene` is the one of the numpy runner."""

import json
import os
import select
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy_rl.board.board import board_name
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import FastDeployRLError, FencedError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import Published, WeightPublisher
from fastdeploy_rl.report import EngineStatus
from fastdeploy_rl.testing.step_faults import Act, StepFault, flip
from fastdeploy_rl.update.client import BoardClient
from tests.faults.fault_cases import NUM_RANKS, STAGING, Case, is_found_after_the_commit, promised
from tests.faults.fault_judge import TORN, Reference, Seen, differ_everywhere, outcome_of, what_is_torn
from tests.process.numpy_engine import NumpyEngine

DEADLINE_S = 0.5
DEADLINES = Deadlines(update_s=DEADLINE_S, clear_s=2.0, finish_s=0.2, rejoin_s=10.0, attach_s=30.0, step_s=30.0)
GOOD_DEADLINE_S = 5.0
"""Of updates that nothing befalls: whether they work is asked, not how fast."""
LATE_S = 0.5
"""No wait may exceed its deadline by more."""
AUDIT_S = 3.0
"""Aliased memory is read once more at a rank's next heartbeat, a second after the commit."""
SETTLE_S = DEADLINES.rejoin_s + DEADLINES.update_s + 2 * DEADLINES.finish_s + DEADLINES.clear_s
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
    stall_s = DEADLINE_S + 2 * DEADLINES.finish_s + 0.3
    """A stopped rank is woken after this, if it was not killed: by then all that is waited for is overdue."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._pool = ThreadPoolExecutor(1)
        self._old: Reference | None = None

    def __enter__(self) -> "FaultScene":
        with ExitStack() as stack:
            stack.enter_context(self._pool)
            self.open(stack)
            self.warm_up()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- what an engine must offer -----------------------------------------------------------------

    @abstractmethod
    def open(self, stack: ExitStack) -> None: ...

    @abstractmethod
    def publish(self) -> Version:
        """The next version; each differs from every other in every tensor."""

    @abstractmethod
    def update(self, version: Version, deadline_s: float) -> Told: ...

    @abstractmethod
    def clear(self) -> None: ...

    @abstractmethod
    def arm(self, case: Case, fault: StepFault) -> None: ...

    @abstractmethod
    def disarm(self, case: Case) -> bool:
        """True where the fault did not happen."""

    @abstractmethod
    def pid(self, rank: int) -> int: ...

    @abstractmethod
    def status(self) -> EngineStatus: ...

    @abstractmethod
    def is_whole(self) -> bool:
        """Nobody is dead, condemned, or about to be started again."""

    @abstractmethod
    def see(self) -> Seen: ...

    @abstractmethod
    def fault_of(self, case: Case, new: Version) -> StepFault: ...

    @abstractmethod
    def grown(self) -> list[str]:
        """What there is more of than after the warm-up."""

    # --- one case ----------------------------------------------------------------------------------

    def warm_up(self) -> None:
        for _ in range(4):
            self._update_well()

    def play(self, case: Case) -> Row:
        row = Row(case, self.runner, outcome=UNKNOWN)
        try:
            self._play(case, row)
        except (SceneError, FastDeployRLError, FutureTimeoutError, OSError) as error:
            row.failures.append(f"{type(error).__name__}: {error}")
            row.is_broken = True
        return row

    def _play(self, case: Case, row: Row) -> None:
        begun = time.monotonic()
        old, new = self._old, self.publish()
        if old is None or not differ_everywhere(old, new.reference):
            raise SceneError("the two versions do not differ in every tensor of every rank")
        if case.base == "cleared":
            self.clear()
            old = Reference.of([{}] * NUM_RANKS)
        fault = self.fault_of(case, new)
        self.arm(case, fault)
        told = self._update_under_fault(case, new)
        told_at = time.monotonic()
        self._settle(case)
        row.recovered_s = time.monotonic() - told_at
        row.told, seen = str(told), self.see()
        row.outcome = outcome_of(seen, old, new.reference)
        if row.outcome == TORN:
            row.failures.append(f"torn: {what_is_torn(seen, old, new.reference)}")
        row.failures += self._untrue(case, row.outcome, told, new)
        row.failures += self._overdue(case, told, row)
        if self.disarm(case):
            row.failures.append("the fault did not happen")
        if fault.act is Act.FLIP_FILE:
            flip(fault.target, fault.offset)
        row.seconds = time.monotonic() - begun
        self._update_well()
        row.failures += self.grown()

    def _update_under_fault(self, case: Case, new: Version) -> Told:
        pid = self.pid(case.rank)
        told = self._pool.submit(self.update, new, DEADLINE_S)
        if case.kind == "stall":
            self._wake_later(told, case, pid)
        return told.result(SETTLE_S + ANSWER_S)

    def _wake_later(self, told: "Future[Told]", case: Case, pid: int) -> None:
        """At the time, whether or not the caller was told before."""
        time.sleep(self.stall_s)  # the stall itself, not a wait for something
        if self.pid(case.rank) == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _settle(self, case: Case) -> None:
        """Until the engine serves or has dropped everything, with every rank in its place."""
        if is_found_after_the_commit(case):
            self._try_wait(lambda: not self.status().is_serving, AUDIT_S)
        if not self._try_wait(self._is_settled, SETTLE_S):
            raise SceneError(f"not settled after {SETTLE_S} s: {self.status()}")

    def _is_settled(self) -> bool:
        status = self.status()
        is_over = status.legacy_status in ("NORMAL", "CLEARED") and status.update == "idle"
        return is_over and self.is_whole()

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
        if outcome not in (promised(case), TORN):
            wrong.append(f"the outcome is {outcome}, and {promised(case)} is promised; the caller was told {told}")
        return wrong

    def _overdue(self, case: Case, told: Told, row: Row) -> list[str]:
        """Calls and recoveries that lasted longer than their deadlines allow."""
        allowed_s = DEADLINE_S + 2 * DEADLINES.finish_s
        if case.kind == "stall":
            allowed_s = max(allowed_s, self.stall_s)
        if case.kind in ("kill", "stall") and (case.rank == 0 or case.step not in STAGING):
            allowed_s += DEADLINES.rejoin_s  # a rank is started again before all is told
        late = []
        if told.seconds > allowed_s + LATE_S:
            late.append(f"the caller waited {told.seconds:.2f} s, {allowed_s:.2f} s were allowed")
        if row.recovered_s > SETTLE_S + LATE_S:
            late.append(f"the engine was back after {row.recovered_s:.2f} s, {SETTLE_S:.2f} s were allowed")
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


def play_all(cases: Sequence[Case], make_scene: Callable[[str], FaultScene]) -> Iterator[Row]:
    """One after the other, on as few engines as can be; `make_scene` makes one of a mode."""
    left = list(cases)
    while left:
        with make_scene(left[0].mode) as scene:
            while left and left[0].mode == scene.mode:
                row = scene.play(left.pop(0))
                yield row
                if row.is_broken:
                    break


# --- the numpy engine ------------------------------------------------------------------------------

MODEL = NumpyModel(
    (
        ParameterSpec("embed", "F32", (12, 40), 0),
        ParameterSpec("norm", "F32", (40,), None),
        ParameterSpec("layers.0.up", "BF16", (40, 18), 1),
        ParameterSpec("layers.0.down", "F32", (18, 40), 0),
        ParameterSpec("gate", "F32", (40, 18), 1),
        ParameterSpec("scale", "F32", (), None),
        ParameterSpec("empty", "F32", (0, 4), None),
    )
)
_AXES = {spec.name: spec.shard_axis for spec in MODEL.specs}
_HIT, _HIT_STAGED = "layers.0.down", "gate"
"""The tensors whose bytes are changed: each rank has its own part of them."""
_TURNED = frozenset({"gate"})
"""Published the other way round, so that it must be copied in every mode."""


def as_published(name: str, shape: tuple[int, ...]) -> TensorRule:
    axis = _AXES[name]
    return TensorRule(name, 1 - axis, is_transposed=True) if name in _TURNED else TensorRule(name, axis)


def _turned(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(value.T) if name in _TURNED else value for name, value in weights.items()}


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


class NumpyScene(FaultScene):
    """Three real processes, and a publisher in this one."""

    runner = "numpy"

    def __init__(self, mode: str, folder: Path) -> None:
        """Channel and log are made in `folder`, which there is."""
        super().__init__(mode)
        self._channel = folder / "channel"
        self._log = folder / "log"
        self._seed = 0
        self._baseline: list[Gauge] = []
        self._num_segments = 0

    def open(self, stack: ExitStack) -> None:
        errors = stack.enter_context(self._log.open("ab"))
        self.engine = stack.enter_context(
            NumpyEngine(
                MODEL,
                channel=self._channel,
                num_ranks=NUM_RANKS,
                apply_mode=self.mode,
                errors=errors,
                deadlines=DEADLINES,
                is_restarted_on_death=True,
                module="fastdeploy_rl.testing.faulty_worker",
            )
        )
        self._publisher = stack.enter_context(WeightPublisher(self._channel))
        self._client = stack.enter_context(BoardClient(self.engine.port))

    def warm_up(self) -> None:
        super().warm_up()
        self._baseline = self._gauges()
        self._num_segments = len(self._segments())

    def publish(self) -> Version:
        self._seed += 1
        weights = random_weights(MODEL, self._seed)
        published = self._publisher.publish(
            _turned(weights), step=self._seed, layout=f"tp:{NUM_RANKS}", convention=as_published, deadline_s=ANSWER_S
        )
        return Version(published, Reference.of([self.engine.expected(weights, rank) for rank in range(NUM_RANKS)]))

    def update(self, version: Version, deadline_s: float) -> Told:
        begun = time.monotonic()
        try:
            report = self._client.update(version.published.version, deadline_s=deadline_s)
        except FastDeployRLError as error:
            return Told(False, error.with_traceback(None), "", time.monotonic() - begun)
        digest = report.receipt.content_digest if report.receipt else ""
        return Told(report.outcome == "done", None, digest, time.monotonic() - begun)

    def clear(self) -> None:
        self._client.clear(deadline_s=GOOD_DEADLINE_S)

    def arm(self, case: Case, fault: StepFault) -> None:
        told = f"fault {msgspec.json.encode(fault).decode()}"
        answers = self._ask_each([told if rank == case.rank else "disarm" for rank in range(NUM_RANKS)])
        if answers[case.rank] != "armed":
            raise SceneError(f"rank {case.rank} was not armed: {answers}")

    def disarm(self, case: Case) -> bool:
        return any(self._ask_each(["disarm"] * NUM_RANKS))

    def pid(self, rank: int) -> int:
        return self.engine.workers[rank].pid

    def status(self) -> EngineStatus:
        return self._client.status()

    def is_whole(self) -> bool:
        board = self.engine.board
        is_living = all(worker.poll() is None for worker in self.engine.workers)
        return is_living and not board.lost_ranks() and not board.condemned_ranks()

    def see(self) -> Seen:
        dumps = self._ask_each(["dump"] * NUM_RANKS)
        tokens = self._ask_each(["token"] * NUM_RANKS)
        status = self.status()
        held = tuple({name: bytes.fromhex(text) for name, text in dump.items()} for dump in dumps)
        return Seen(held, tuple(tokens), status.is_serving, status.admission)

    def fault_of(self, case: Case, new: Version) -> StepFault:
        target, offset = "", 0
        if case.act is Act.FLIP_FILE:
            target, offset = place_of(new.published.manifest, _HIT, case.rank)
        elif case.act is Act.FLIP_PARAMETER:
            target = _HIT
        elif case.act is Act.FLIP_STAGED:
            target = _HIT_STAGED
        elif case.act in (Act.FLIP_RECORD, Act.FLIP_COUNTER):
            target = f"/dev/shm/{board_name(self.engine.port)}"
        return StepFault(case.act, case.step, case.when, target, offset, case.is_lasting)

    def grown(self) -> list[str]:
        """What is replaced is let go a moment after the commit."""
        if self._try_wait(lambda: not self._grown_now(), 2.0):
            return []
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

    def _gauges(self) -> list[Gauge]:
        return [Gauge.of(worker.pid) for worker in self.engine.workers]

    def _segments(self) -> list[str]:
        ours = (Channel(self._channel).key, str(self.engine.port))
        return [name for name in os.listdir("/dev/shm") if any(mark in name for mark in ours)]

    def _ask_each(self, questions: Sequence[str]) -> list[Any]:
        """Rank 0 last: the others look at theirs when it goes on with its loop, which its own question makes it do."""
        workers = self.engine.workers
        for rank in reversed(range(NUM_RANKS)):
            _tell(workers[rank], rank, questions[rank])
        return [_answer(worker, rank) for rank, worker in enumerate(workers)]


def _tell(worker: "subprocess.Popen[str]", rank: int, question: str) -> None:
    try:
        worker.stdin.write(question + "\n")
        worker.stdin.flush()
    except (OSError, ValueError) as error:
        raise SceneError(f"rank {rank} is gone: {error}") from error


def _answer(worker: "subprocess.Popen[str]", rank: int) -> Any:
    if not select.select([worker.stdout], [], [], ANSWER_S)[0]:
        raise SceneError(f"rank {rank} did not answer within {ANSWER_S:.0f} s")
    line = worker.stdout.readline()
    if not line:
        raise SceneError(f"rank {rank} died (exit code {worker.poll()})")
    return json.loads(line)
