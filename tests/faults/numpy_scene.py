"""The stage of a case on the numpy engine: three real processes, a publisher in this one."""

import json
import select
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.plan.conventions import Convention, TensorRule
from fastdeploy_rl.testing.step_faults import Act
from tests.faults.fault_cases import NUM_RANKS, Case
from tests.faults.fault_judge import Reference, Seen
from tests.faults.fault_scene import ANSWER_S, DEADLINE_S, FaultScene, SceneError, Weights
from tests.process.numpy_engine import NumpyEngine

DEADLINES = Deadlines(update_s=DEADLINE_S, clear_s=2.0, finish_s=0.35, rejoin_s=10.0, attach_s=30.0, step_s=30.0)

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
_TURNED = frozenset({"gate"})
"""Published the other way round, so that it must be copied in every mode."""


def as_published(name: str, shape: tuple[int, ...]) -> TensorRule:
    axis = _AXES[name]
    return TensorRule(name, 1 - axis, is_transposed=True) if name in _TURNED else TensorRule(name, axis)


def turned(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As the trainer has them."""
    return {name: np.ascontiguousarray(value.T) if name in _TURNED else value for name, value in weights.items()}


_TOLD_LINES = 40


class NumpyScene(FaultScene):
    """Channel and log are made in `folder`, which there is."""

    runner = "numpy"

    def __init__(self, setting: tuple[str, str], folder: Path) -> None:
        super().__init__(setting, DEADLINES)
        self._folder = folder
        self._seed = 0

    def open(self, stack: ExitStack) -> tuple[int, Path]:
        errors = stack.enter_context((self._folder / "log").open("ab"))
        channel = self._folder / "channel"
        self._engine = stack.enter_context(
            NumpyEngine(
                MODEL,
                channel=channel,
                num_ranks=NUM_RANKS,
                apply_mode=self.setting[0],
                rollback=self.setting[1],
                errors=errors,
                deadlines=self.deadlines,
                is_restarted_on_death=True,
                module="fastdeploy_rl.testing.faulty_worker",
            )
        )
        return self._engine.port, channel

    def next_version(self) -> tuple[Weights, Convention, Reference]:
        self._seed += 1
        weights = random_weights(MODEL, self._seed)
        reference = Reference.of([self._engine.expected(weights, rank) for rank in range(NUM_RANKS)])
        return turned(weights), as_published, reference

    def tell_faults(self, lines: Sequence[str]) -> list[object]:
        return self._ask_each([line if line == "disarm" else f"fault {line}" for line in lines])

    def pid(self, rank: int) -> int:
        return self._engine.workers[rank].pid

    def are_there(self) -> bool:
        return all(worker.poll() is None for worker in self._engine.workers)

    def see(self) -> Seen:
        dumps = self._ask_each(["dump"] * NUM_RANKS)
        tokens = self._ask_each(["token"] * NUM_RANKS)
        status = self.client.status()
        held = tuple({name: bytes.fromhex(text) for name, text in dump.items()} for dump in dumps)
        return Seen(held, tuple(tokens), status.is_serving, status.admission)

    def last_words(self) -> str:
        return "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-_TOLD_LINES:])

    def hit(self, case: Case) -> str:
        return _HIT_STAGED if case.act is Act.FLIP_STAGED else _HIT

    def _ask_each(self, questions: Sequence[str]) -> list[Any]:
        """Rank 0 last: the others look at theirs when it goes on with its loop, which its own question makes it do."""
        workers = self._engine.workers
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
