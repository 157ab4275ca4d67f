"""One rank of a numpy engine as a process of its own: the smallest loop around a DynamicWeightManager.

    echo '{"port": 8190, "rank": 0, ...}' | python -m fastdeploy_rl.engines.numpy.worker

Rank 0 leads: it tells each command's number to the others through the tensor-parallel collectives, as an engine does
with its steps. The first line of standard input are the settings, the others commands for tests, each a JSON document;
answers go to standard output; end of input is the order to stop."""

import gc
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.config import AUTO, KEEP, Deadlines
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.errors import FastDeployRLError, PeerLostError
from fastdeploy_rl.manager import DynamicWeightManager, InitialWeights, ManagerConfig
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.model_group import ModelGroup
from fastdeploy_rl.runner import ModelRunner
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.update.transaction import StepObserver
from fastdeploy_rl.version import WeightVersion

SLOT_BYTES = 1 << 16
"""Of the segment of the collectives that whoever starts the workers makes."""
_IDLE_S = 0.2


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`seed` < 0: start without weights. `model_dir`: where FastDeploy's trainers write; empty: nowhere. `draft_specs`:
    of a second model, "draft"; empty: there is none. `is_draft_frozen`: no update changes it."""

    port: int
    rank: int
    num_ranks: int
    channel: str
    collectives: str
    specs: tuple[ParameterSpec, ...]
    draft_specs: tuple[ParameterSpec, ...] = ()
    is_draft_frozen: bool = False
    seed: int = 0
    apply_mode: str = AUTO
    rollback: str = KEEP
    load_strategy: str = "ipc"
    rsync_config: str = ""
    model_dir: str = ""
    metas_dir: str = ""
    has_checksums: bool = True
    deadlines: Deadlines = Deadlines(update_s=5.0, attach_s=20.0)
    is_restarted_on_death: bool = False
    num_copy_threads: int = 1


class Worker:
    """One rank; board and collectives must be there. `start`, then `loop` until standard input ends, then `close`."""

    def __init__(self, config: WorkerConfig, observer: StepObserver | None = None) -> None:
        self._config = config
        self._board = Board.attach(config.port)
        self._group = ShmCollectives(
            config.collectives,
            config.rank,
            config.num_ranks,
            create=False,
            slot_bytes=SLOT_BYTES,
            timeout_s=config.deadlines.step_s,
            generation=0,
        )
        self.runner = NumpyRunner(NumpyModel(config.specs), config.rank, config.num_ranks)
        self.draft: NumpyRunner | None = None
        self._models: ModelRunner = self.runner
        if config.draft_specs:
            self.draft = NumpyRunner(NumpyModel(config.draft_specs), config.rank, config.num_ranks)
            frozen = {"draft"} if config.is_draft_frozen else set()
            self._models = ModelGroup(self.runner, draft=self.draft, frozen=frozen)
        self._manager = DynamicWeightManager(
            runner=self._models,
            board=self._board,
            rank=config.rank,
            source=registry.create(config.load_strategy, self._source_config()),
            config=ManagerConfig(
                load_strategy=config.load_strategy,
                apply_mode=config.apply_mode,
                rollback=config.rollback,
                has_checksums=config.has_checksums,
                num_copy_threads=config.num_copy_threads,
                is_restarted_on_death=config.is_restarted_on_death,
                deadlines=config.deadlines,
            ),
            observer=observer,
        )

    def _source_config(self) -> SourceConfig:
        config = self._config
        return SourceConfig(
            channel=Path(config.channel),
            model_dir=Path(config.model_dir) if config.model_dir else None,
            rank=config.rank,
            num_ranks=config.num_ranks,
            parameters=tuple(self._models.parameters()),
            num_threads=config.num_copy_threads,
            rsync_config=config.rsync_config,
            metas_dir=Path(config.metas_dir) if config.metas_dir else None,
        )

    def start(self) -> None:
        initial = None
        is_cold = self._config.seed >= 0 and self._manager.needs_cold_start()
        if self.draft is not None and (is_cold or self._config.is_draft_frozen):
            self.draft.load(max(self._config.seed, 0) + 1)
        if is_cold:
            self.runner.load(self._config.seed)
            initial = InitialWeights(WeightVersion(0, 0), self._models.bound())
        self._manager.start(initial)
        self._manager.rejoin(self._group)

    def loop(self) -> None:
        """Until standard input ends on rank 0, which tells the others. Who loses a rank meets it again."""
        is_open = True
        while is_open:
            try:
                is_open = self._step()
            except PeerLostError:
                self._manager.rejoin(self._group)

    def _step(self) -> bool:
        is_open = True
        number = self._manager.poll() if self._config.rank == 0 else 0
        if self._config.rank == 0 and number == 0:
            is_open = self._serve_input(self._manager.wake_fd)
            number = self._manager.poll()
        is_open, number = self._share(is_open, number)
        if number:
            self._manager.run(number)
        if self._config.rank != 0:
            self._serve_input(-1)
        return is_open

    def _share(self, is_open: bool, number: int) -> tuple[bool, int]:
        told = msgspec.msgpack.encode((is_open, number)) if self._config.rank == 0 else None
        answer: tuple[bool, int] = msgspec.msgpack.decode(
            self._group.broadcast_bytes(told, 0, timeout_s=self._config.deadlines.step_s), type=tuple[bool, int]
        )
        return answer

    def _serve_input(self, wake_fd: int) -> bool:
        """Answers one line if there is one; rank 0 waits for it, or for its manager, a little while."""
        watched = [sys.stdin.fileno()] + ([wake_fd] if wake_fd >= 0 else [])
        if sys.stdin.fileno() not in select.select(watched, [], [], _IDLE_S if wake_fd >= 0 else 0)[0]:
            return True
        line = sys.stdin.readline()
        if not line:
            return False
        print(json.dumps(self._answer(line.strip())), flush=True)
        return True

    def _answer(self, question: str) -> Any:
        if question.startswith("busy "):
            print(json.dumps("begun"), flush=True)
            time.sleep(float(question.removeprefix("busy ")))  # a long forward pass
            return "done"
        if question == "objects":
            gc.collect()
            return sys.getallocatedblocks()
        if question.startswith("draft ") and self.draft is not None:
            return self._answer_of(self.draft, question.removeprefix("draft "))
        return self._answer_of(self.runner, question)

    def _answer_of(self, runner: NumpyRunner, question: str) -> Any:
        if question == "refuse bind":
            runner.bind = _refuse_to_bind  # type: ignore[method-assign]
            return "refusing"
        if question == "refuse one bind":
            runner.bind = partial(_refuse_one_bind, runner)  # type: ignore[method-assign]
            return "refusing"
        if question == "mend bind":
            del runner.bind
            return "mended"
        if question == "token":
            return runner.token() if self._can_compute else None
        if question == "answer":
            return [runner.token(), runner.version] if self._can_compute else None
        if question == "calls":
            return runner.calls
        if question == "dump":
            return {name: view.numpy().tobytes().hex() for name, view in runner.bound().items()}
        if question == "refuse one recapture":
            runner.recapture_graphs = partial(_refuse_one_recapture, runner)  # type: ignore[method-assign]
            return "refusing"
        if question.startswith("running "):
            runner.num_running = int(question.removeprefix("running "))
            return "running"
        if question == "graphs":
            return runner.has_graphs
        if question.startswith("spoil "):
            runner.bound()[question.removeprefix("spoil ")].numpy()[...] = 0
            return "spoilt"
        if question.startswith("address "):
            view = runner.bound()[question.removeprefix("address ")]
            return view.mapping.address + view.offset
        return {"error": f"unknown question {question!r}"}

    @property
    def _can_compute(self) -> bool:
        return self._manager.is_serving and self.runner.has_kv_cache

    def close(self) -> None:
        self._manager.close()
        self._group.close()
        self._board.close()


def _refuse_one_recapture(runner: NumpyRunner) -> int:
    del runner.recapture_graphs
    raise RuntimeError("told to refuse")


def _refuse_one_bind(runner: NumpyRunner, views: Mapping[str, TensorView]) -> None:
    del runner.bind
    _refuse_to_bind(views)


def _refuse_to_bind(views: Mapping[str, TensorView]) -> None:
    raise RuntimeError("told to refuse")


def main(make: Callable[[WorkerConfig], Worker] = Worker) -> int:
    worker = make(msgspec.json.decode(sys.stdin.readline(), type=WorkerConfig))
    try:
        worker.start()
        print(json.dumps("ready"), flush=True)
        worker.loop()
        worker.close()
    except FastDeployRLError as error:
        print(f"worker {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
