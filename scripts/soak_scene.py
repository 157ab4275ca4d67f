"""What one stretch of a soak runs on: an engine, a trainer and request load, all real processes.

Owns their life, and the judging of every answer: the token that a rank gives must be the reference of the version that
it is stamped with. Refuses to know what is done to the engine; that is soak_rounds.py."""

import itertools
import json
import os
import queue
import random
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import soak_gauges as gauges
from soak_gauges import Gauge, Reading
from soak_model import model, reference_tokens
from soak_trainer import Flaw, Order, Start

from fastdeploy_rl.config import ALIAS_STRICT
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.report import CommandKind, EngineStatus, HistoryEntry
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

WAIT_S = 60.0
COLD = "0.0"
"""The version of the weights that the engine starts with: seed 0."""
MAX_TOLD = 20
TOLD_LINES = 20
OWN = (gauges.DESCRIPTORS, gauges.MAPPINGS, gauges.THREADS)
"""What this process is judged by. It has all the controllers, but also the soak's readings: its memory has to grow."""


class SoakError(Exception):
    """What the engine did is not what it has to do; the text says in which round."""


class Trainer:
    """The trainer's process: one order, one answer."""

    def __init__(self, channel: Path, num_ranks: int, strategy: str, errors: IO[bytes]) -> None:
        self._start = Start(str(channel), num_ranks, strategy)
        self._errors = errors

    def __enter__(self) -> "Trainer":
        command = [sys.executable, str(Path(__file__).with_name("soak_trainer.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        self._ask(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WAIT_S)
        self.process.stdout.close()

    def publish(self, order: Order) -> str:
        return self._ask(order)

    def num_objects(self) -> int:
        return self._ask(Order())

    def _ask(self, told: Start | Order) -> Any:
        self.process.stdin.write(msgspec.json.encode(told) + b"\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], WAIT_S)[0]:
            raise SoakError(f"the trainer did not answer within {WAIT_S:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise SoakError("the trainer died")
        return json.loads(line)


@dataclass
class Answers:
    """Of one rank. `refused`: it said that it serves nothing."""

    right: int = 0
    wrong: int = 0
    refused: int = 0
    told: list[str] = field(default_factory=list)

    def judge(self, rank: int, answer: Sequence[Any] | None, references: dict[str, tuple[int, ...]]) -> None:
        if answer is None:
            self.refused += 1
            return
        token, version = answer
        reference = references.get(version)
        if reference is not None and reference[rank] == token:
            self.right += 1
            return
        self.wrong += 1
        made_by = [other for other, tokens in list(references.items()) if tokens[rank] == token]
        if len(self.told) < MAX_TOLD:
            self.told.append(f"rank {rank}: stamped {version or 'nothing'}, made by {made_by or 'no version at all'}")


class RequestLoad:
    """A thread for each rank that asks it for tokens without a pause, and judges each. Other questions go between."""

    def __init__(self, engine: NumpyEngine, references: dict[str, tuple[int, ...]]) -> None:
        self._engine = engine
        self._references = references
        self.answers = [Answers() for _ in range(engine.num_ranks)]
        self._extra: list[queue.SimpleQueue[tuple[str, Future[Any]]]] = [queue.SimpleQueue() for _ in self.answers]
        self._faults: list[str] = []
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, args=(rank,), name=f"soak-load-{rank}", daemon=True)
            for rank in range(engine.num_ranks)
        ]

    def __enter__(self) -> "RequestLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def ask(self, question: str) -> list[Any]:
        """The answer of every rank to a question that begins now. SoakError when one does not come."""
        if self._faults:
            raise SoakError("; ".join(self._faults))
        futures: list[Future[Any]] = [Future() for _ in self._extra]
        for extra, future in zip(self._extra, futures, strict=True):
            extra.put((question, future))
        try:
            return [future.result(WAIT_S) for future in futures]
        except FutureTimeoutError as error:
            raise SoakError(f"not every rank answered {question!r} within {WAIT_S:.0f} s") from error

    def _follow(self, rank: int) -> None:
        while not self._is_over.is_set():
            try:
                question, future = self._extra[rank].get_nowait()
            except queue.Empty:
                question, future = "answer", Future()
            try:
                self._put(rank, question, future)
            except (OSError, SoakError) as error:
                self._faults.append(str(error))
                future.set_exception(SoakError(f"rank {rank}: {error}"))
                return

    def _put(self, rank: int, question: str, future: "Future[Any]") -> None:
        answer = self._engine.ask(rank, question)
        if answer is None and self._engine.workers[rank].poll() is not None:
            raise SoakError(f"rank {rank} died")
        if question == "answer":
            self.answers[rank].judge(rank, answer, self._references)
        future.set_result(answer)


class Scene:
    """Use in a with statement. One engine with one load strategy and apply mode, its trainer, its load."""

    def __init__(self, folder: Path, strategy: str, mode: str, num_ranks: int) -> None:
        self.strategy, self.mode, self.num_ranks = strategy, mode, num_ranks
        self.model = model(num_ranks)
        self.random = random.Random(f"{strategy} {mode}")
        self.references = {COLD: self._reference(0)}
        self._channel = folder / "channel"
        self._log = folder / "log"
        self._steps = itertools.count(1)
        self._last_command = 0

    def _reference(self, seed: int) -> tuple[int, ...]:
        return reference_tokens(self.model, random_weights(self.model, seed), self.num_ranks)

    def __enter__(self) -> "Scene":
        with ExitStack() as stack:
            errors = stack.enter_context(self._log.open("wb"))
            self.engine = stack.enter_context(
                NumpyEngine(
                    self.model,
                    channel=self._channel,
                    num_ranks=self.num_ranks,
                    apply_mode=self.mode,
                    load_strategy=self.strategy,
                    update_s=WAIT_S,
                    errors=errors,
                )
            )
            self.trainer = stack.enter_context(Trainer(self._channel, self.num_ranks, self.strategy, errors))
            self.client = stack.enter_context(BoardClient(self.engine.port))
            self.load = stack.enter_context(RequestLoad(self.engine, self.references))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    # --- what rounds do ----------------------------------------------------------------------------

    def publish(self, flaw: Flaw = "", layout: str = "") -> str:
        """The version's text. Without a flaw its reference is known before anybody can take it."""
        step = next(self._steps)
        if not flaw:
            self.references[f"1.{step}"] = self._reference(step)
        return self.trainer.publish(Order(step, step, layout or self._any_layout(), flaw))

    def _any_layout(self) -> str:
        cut = f"tp:{self.num_ranks}"
        return cut if self.mode == ALIAS_STRICT else self.random.choice(("full", cut))

    def live(self) -> str:
        """The version that is served; empty while the engine is cleared."""
        return _live(self.client.status())

    def check(self, expected: Sequence[str]) -> None:
        """Board, word and the next answer of every rank say one thing, which is one of those expected."""
        status = self.client.status()
        live = _live(status)
        if live not in expected:
            raise SoakError(f"version {live or 'none'} is live, expected {' or '.join(v or 'none' for v in expected)}")
        if status.legacy_status != ("NORMAL" if live else "CLEARED"):
            raise SoakError(f"the word reads {status.legacy_status} while version {live or 'none'} is live")
        for rank, answer in enumerate(self.load.ask("answer")):
            stamp = answer[1] if answer else ""
            if stamp != live:
                raise SoakError(f"rank {rank} answers by version {stamp or 'none'} while {live or 'none'} is live")

    def last_words(self) -> str:
        """What engine and trainer complained about last."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-TOLD_LINES:])

    # --- what is measured --------------------------------------------------------------------------

    def new_commands(self) -> list[HistoryEntry]:
        """Those that ended since the last call, without a gap: none is lost."""
        entries = [entry for entry in self.client.history(10_000) if entry.command > self._last_command]
        numbers = [entry.command for entry in entries]
        if numbers != list(range(self._last_command + 1, self.client.status().commands_done + 1)):
            raise SoakError(f"the history has commands {numbers} after {self._last_command}")
        self._last_command += len(numbers)
        return entries

    def read(self) -> dict[str, Reading]:
        """Every gauge of every process; always in the same state: one version just taken over, as it lies."""
        version = self.publish(layout=f"tp:{self.num_ranks}")
        self.client.update(deadline_s=WAIT_S)
        self.check([version])
        readings: dict[str, Reading] = {}
        for rank, objects in enumerate(self.load.ask("objects")):
            readings[f"rank {rank}"] = gauges.read_process(self.engine.workers[rank].pid, objects)
        readings["trainer"] = gauges.read_process(self.trainer.process.pid, self.trainer.num_objects())
        own = gauges.read_process(os.getpid(), 0)
        readings["controllers"] = {gauge: own[gauge] for gauge in OWN}
        marks = (str(self.engine.port), Channel(self._channel).key)
        readings["shared memory"] = gauges.read_memory(marks, (self._channel, self.engine.board.run_dir))
        return readings


def _live(status: EngineStatus) -> str:
    return status.version if status.is_serving else ""


@dataclass
class Counts:
    """Commands that ended, by what became of them; `updates` are those that changed what is live on every rank."""

    updates: int = 0
    rejected: int = 0
    cleared: int = 0

    def add(self, entries: Sequence[HistoryEntry]) -> None:
        for entry in entries:
            if entry.outcome == "fenced":
                raise SoakError(f"command {entry.command} fenced the engine: {entry.reason}")
            self.rejected += entry.outcome == "rejected"
            if entry.outcome == "done" and entry.num_ranks:
                self.updates += entry.kind == CommandKind.UPDATE.name.lower()
                self.cleared += entry.kind == CommandKind.CLEAR.name.lower()


@dataclass
class Readings:
    """All readings of a stretch, in order."""

    updates: list[float] = field(default_factory=list)
    values: dict[tuple[str, Gauge], list[float]] = field(default_factory=dict)

    def add(self, updates: int, readings: dict[str, Reading]) -> None:
        self.updates.append(updates)
        for who, reading in readings.items():
            for gauge, value in reading.items():
                self.values.setdefault((who, gauge), []).append(value)

    def slopes(self, stretch: str) -> list[gauges.Slope]:
        return [
            gauges.slope(f"{stretch}, {who}", gauge, self.updates, values)
            for (who, gauge), values in self.values.items()
        ]
