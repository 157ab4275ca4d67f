"""The stage of a case on the embedded engine: `serve` with three Paddle workers, asked over board and HTTP.

Bytes are read out of the workers' memory by the kernel; the first token of an answer must be what numpy makes of the
version's weights."""

import itertools
import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.plan.conventions import Convention, paddle_llama
from fastdeploy_rl.testing.step_faults import Act
from tests.engines.numpy_llama import logits
from tests.engines.served_engine import SIZES, Model, ServedEngine, greedy
from tests.faults.fault_cases import NUM_RANKS, Case
from tests.faults.fault_judge import Reference, Seen
from tests.faults.fault_scene import ANSWER_S, GOOD_DEADLINE_S, FaultScene, SceneError, Weights
from tests.faults.numpy_scene import DEADLINES
from tests.process.served_model import CONFIG

PADDLE_DEADLINES = replace(DEADLINES, update_s=GOOD_DEADLINE_S, rejoin_s=60.0, attach_s=120.0, finish_s=0.5)
"""A worker takes seconds to start. An update that is named a deadline still has half a second."""
PROMPT = (1, 2, 3)
_HIT = "model.layers.0.mlp.down_proj.weight"
_SEEDS = (1, 2, 3)


def is_possible(case: Case) -> bool:
    """Every tensor of the model can be used where it is published, so that in alias mode none is staged elsewhere."""
    return not (case.mode == "alias" and case.act is Act.FLIP_STAGED)


class FaultyServedEngine(ServedEngine):
    """Served by faulty_serve.py."""

    def __init__(self, model: Model, place: Path, *, setting: tuple[str, str], deadlines: Deadlines) -> None:
        mode, rollback = setting
        super().__init__(
            model, place, num_ranks=NUM_RANKS, apply_mode=mode, options=["--max-num-seqs", "2", "--rollback", rollback]
        )
        serve = str(Path(__file__).with_name("faulty_serve.py"))
        self._command[1:2] = [serve, msgspec.json.encode(deadlines).decode()]

    def tell_faults(self, rank: int, line: str) -> object:
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.settimeout(ANSWER_S)
            visitor.connect(f"\0{self._window}.{rank}.faults")
            with visitor.makefile("rw") as lines:
                lines.write(line + "\n")
                lines.flush()
                return json.loads(lines.readline())

    def first_token(self) -> int | None:
        """None where the request is refused."""
        answer = self.http.post("/v1/completions", json=greedy(PROMPT, 1))
        if answer.status_code == 503:
            return None
        if answer.status_code != 200:
            raise SceneError(f"{answer.status_code}: {answer.text}")
        token: int = answer.json()["choices"][0]["completion_token_ids"][0]
        return token


class ServedScene(FaultScene):
    """Models, log and channel are made in `folder`, which there is. Three models take turns as versions."""

    runner = "paddle"

    def __init__(self, setting: tuple[str, str], folder: Path) -> None:
        super().__init__(setting, PADDLE_DEADLINES)
        self._folder = folder

    def open(self, stack: ExitStack) -> tuple[int, Path]:
        models = [Model.write(self._folder / f"model{seed}", seed=seed, is_tied=False) for seed in _SEEDS]
        self._versions = itertools.cycle([(model, reference_of(model)) for model in models])
        place = self._folder / "engine"
        self._engine = stack.enter_context(
            FaultyServedEngine(models[-1], place, setting=self.setting, deadlines=self.deadlines)
        )
        self._engine.await_ready()
        return self._engine.board_port, self._engine.channel

    def next_version(self) -> tuple[Weights, Convention, Reference]:
        model, reference = next(self._versions)
        return model.weights, paddle_llama, reference

    def tell_faults(self, lines: Sequence[str]) -> list[object]:
        return [self._engine.tell_faults(rank, line) for rank, line in enumerate(lines)]

    def pid(self, rank: int) -> int:
        return self.board.read_rank(rank).pid

    def are_there(self) -> bool:
        return all(os.path.exists(f"/proc/{self.pid(rank)}/exe") for rank in range(NUM_RANKS))

    def see(self) -> Seen:
        token = self._engine.first_token()
        held = tuple(self._engine.bytes_of(rank) for rank in range(NUM_RANKS))
        status = self.client.status()
        return Seen(held, (token,) * NUM_RANKS, status.is_serving, status.admission)

    def last_words(self) -> str:
        return self._engine.logs()

    def hit(self, case: Case) -> str:
        return _HIT


def reference_of(model: Model) -> Reference:
    """By cutting, and by numpy's forward pass."""
    settings = CONFIG | SIZES | {"tie_word_embeddings": False}
    token = int(logits(settings, model.weights, PROMPT)[-1].argmax())
    return Reference(tuple(model.slices(rank, NUM_RANKS) for rank in range(NUM_RANKS)), (token,) * NUM_RANKS)
