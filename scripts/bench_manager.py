"""What keeping weights live costs while nothing is updated: decoding with the manager on against off.

The same runner, real model, one rank, decodes the same tokens with the same weights in the same memory, in turns off -
on - off; each pair of neighbours sees the same machine. On: the manager's and the coordinator's threads run, its event
is polled before each step, as the engine's loop does. Off: none of it exists."""

import secrets
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from bench_row import Row, at_most, seconds_of

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.control.generation import GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.rank import COLD_VERSION
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.manager import DynamicWeightManager, InitialWeights, ManagerConfig
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig

TOKENS = 64
ALLOWED = 1.05


def manager_rows(model_dir: Path, runs: int) -> list[Row]:
    runner = EmbeddedRunner(model_dir, 0, 1, None, max_num_seqs=1, max_model_len=256)
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_bench") as folder:
        views = runner.load()
        _without_manager(runner, views)
        triples = [
            (
                _without_manager(runner, views),
                _with_manager(runner, views, Path(folder)),
                _without_manager(runner, views),
            )
            for _ in range(runs)
        ]
    off = statistics.median((before + after) / 2 for before, _, after in triples)
    ratio = statistics.median(2 * on / (before + after) for before, on, after in triples)
    name = "decode, manager on beside off (pairs)"
    return [at_most(name, off * ratio, "s", "off", off, ALLOWED * off, "<= 1.05")]


def _without_manager(runner: EmbeddedRunner, views: Mapping[str, TensorView]) -> float:
    runner.bind(views)
    runner.rebuild_kv_cache("0" * 64)
    seconds = seconds_of(lambda: _decode(runner, lambda: 0))
    runner.unbind()
    return seconds


def _with_manager(runner: EmbeddedRunner, views: Mapping[str, TensorView], channel: Path) -> float:
    runner.bind(views)
    source = registry.create("ipc", SourceConfig(channel=channel))
    with ExitStack() as stack:
        board = Board.create(20000 + secrets.randbelow(40000), num_ranks=1)
        stack.callback(board.close)
        config = ManagerConfig("ipc")
        manager = DynamicWeightManager(runner=runner, board=board, rank=0, source=source, config=config)
        stack.callback(manager.close)
        manager.start(InitialWeights(COLD_VERSION, views))
        return seconds_of(lambda: _decode(runner, manager.poll))


def _decode(runner: EmbeddedRunner, poll: Callable[[], int]) -> None:
    options = SamplingOptions(temperature=0.0)
    runner.scheduler.submit("bench", GenerationRequest([1, 2, 3, 4], TOKENS, options, ignore_eos=True))
    while True:
        poll()
        step = runner.scheduler.schedule()
        if step is None:
            return
        runner.accept(step, runner.execute(step))
        runner.scheduler.take_outputs()
