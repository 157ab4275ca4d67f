"""Updates of an engine that answers: what its requests notice, and what the ranks report.

The real model, one rank, `serve` as users run it, eight requests; weights that differ from version to version, each
published before it is asked for. A request of its own for each update, so that all meet contexts of the same length."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_load import Load, Token
from bench_phases import Mark, PhaseWatch
from demo_parts import Engine

from fastdeploy_rl.config import KEEP
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.rank_files import FOLLOWED

NORM = "model.norm.weight"
UPDATE_S = 60.0
SETTLE, QUIET, AFTER = 3, 8, 3
"""Tokens of each request: until their prompts are worked off, before an update, and after it."""


class Span(NamedTuple):
    """Of time.monotonic."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class LoadedUpdate:
    """One update under load. `quiet`: when only requests ran, before it; `asked`: from the call to its return."""

    tokens: Sequence[Token]
    marks: Sequence[Mark]
    report: UpdateReport
    quiet: Span
    asked: Span

    def steps(self) -> list[Span]:
        """Decode steps as a reader sees them: from one token of the first request to its next."""
        return [Span(*times) for times in pairwise(token.at for token in self.tokens if token.request == 0)]

    @property
    def step_s(self) -> float:
        """Median decode step without an update."""
        begin, end = self.quiet
        return statistics.median(step.seconds for step in self.steps() if begin <= step.begin and step.end <= end)

    @property
    def gap_s(self) -> float:
        """From the first request's last token of the old weights to its first of the new ones."""
        own = [token for token in self.tokens if token.request == 0]
        return next(new.at - old.at for old, new in pairwise(own) if new.version != old.version)

    @property
    def staging(self) -> Span:
        """From the first look at the publication until all its bytes are read and checked."""
        begin = next(mark.at for mark in self.marks if mark.phase == "stage")
        return Span(begin, next(mark.at for mark in self.marks if mark.at > begin and mark.phase != "stage"))

    @property
    def stall(self) -> Span:
        """As reported; its end as the board showed it."""
        end = next(mark.at for mark in self.marks if mark.at > self.staging.end and mark.phase == FOLLOWED)
        return Span(end - self.report.stall_seconds, end)

    @property
    def share_while_staging(self) -> float:
        """Decoding beside `stage`, over decoding alone: the time by which the steps that met it grew is what it
        took."""
        met = [step for step in self.steps() if step.end > self.staging.begin and step.begin < self.staging.end]
        lost = sum(step.seconds - self.step_s for step in met)
        return 1 - lost / self.staging.seconds


class Weights:
    """The model's own, in the engine's layout; each version has another norm at the end."""

    def __init__(self, model_dir: Path) -> None:
        with Checkpoint.open(model_dir) as checkpoint:
            self._tensors = dict(checkpoint.tensors())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def version(self, step: int) -> dict[str, np.ndarray]:
        return self._tensors | {NORM: self._tensors[NORM] * np.float32(1 + step / 1024)}


class Scene:
    """An engine, whoever publishes for it, and a client of its board."""

    def __init__(self, engine: Engine, publisher: WeightPublisher, client: BoardClient, weights: Weights) -> None:
        self.engine, self.client = engine, client
        self._publisher, self._weights = publisher, weights
        self._num_published = 0

    def publish(self) -> None:
        self._publisher.publish(self._weights.version(self._num_published), step=self._num_published)
        self._num_published += 1

    def update(self, kv: str, quiet: int = QUIET, after: int = AFTER) -> LoadedUpdate:
        """While the requests go on: they are kept."""
        return self._under_load(lambda: self.client.update(deadline_s=UPDATE_S, kv=kv), quiet, after)

    def update_paused(self) -> LoadedUpdate:
        """All of the update, its staging too, between a pause that keeps requests and a resume."""
        return self._under_load(self._pause_update_resume, QUIET, AFTER)

    def _pause_update_resume(self) -> UpdateReport:
        self.client.pause(KEEP, deadline_s=UPDATE_S)
        report = self.client.update(deadline_s=UPDATE_S, kv=KEEP)
        self.client.resume(deadline_s=UPDATE_S)
        return report

    def _under_load(self, act: Callable[[], UpdateReport], quiet: int, after: int) -> LoadedUpdate:
        self.publish()
        with Load(self.engine) as load, PhaseWatch(self.engine.board_port) as watch:
            settled = load.await_tokens(SETTLE)[-1].at
            asked = load.await_tokens(quiet)[-1].at
            report = act()
            done = time.monotonic()
            tokens = load.await_tokens(after)
        return LoadedUpdate(tokens, watch.marks, report, Span(settled, asked), Span(asked, done))


@contextmanager
def scene(model_dir: Path, weights: Weights, apply_mode: str) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench", dir="/dev/shm") as folder:
        channel = Path(folder) / "channel"
        engine = Engine(model_dir, 1, channel, Path(folder), options=("--apply-mode", apply_mode))
        try:
            engine.await_ready()
            with WeightPublisher(channel) as publisher, BoardClient(engine.board_port) as client:
                yield Scene(engine, publisher, client, weights)
        finally:
            engine.stop()
