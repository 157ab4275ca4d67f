"""One rank put together: collectives, runner, source, board and weight manager around the loop.

Owns the order in which they are made and given back, on a first start and in the seat of a rank that died. Refuses to
know processes; worker.py is one. Importing it imports Paddle, which takes seconds. Invariant: whatever ends the loop,
leases, mappings and threads are given back.
"""

import gc
import logging
import time
from contextlib import ExitStack
from pathlib import Path

import paddle

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.engines.embedded.loop import Follower, Leader
from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Ready, WorkerConfig, WorkerSocket
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.manager import DynamicWeightManager, InitialWeights, ManagerConfig
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

COLD_VERSION = WeightVersion(0, 0)
"""Of weights that came from the checkpoint: before everything a trainer publishes, whose epochs begin with 1."""


def run(config: WorkerConfig, connection: WorkerSocket) -> None:
    """Loads, says Ready, and serves until told to stop. The errors of the tree."""
    paddle.disable_signal_handler()  # its handlers turn an orderly SIGTERM into a page of traceback
    begun = time.monotonic()
    with ExitStack() as stack:
        collectives = stack.enter_context(_join(config))
        runner = _runner(config, collectives)
        manager = _manager(config, runner, stack)
        weight_bytes = _load(runner, manager)
        manager.rejoin(collectives)
        gc.freeze()  # what is there now stays: no collection needs to walk it in the middle of a step
        seconds = time.monotonic() - begun
        connection.send(Ready(config.rank, weight_bytes, seconds), timeout_s=config.deadlines.send_s)
        _log.info("phase=ready weight_bytes=%d seconds=%.3f", weight_bytes, seconds)
        manager.await_living()  # where more than one rank died
        _loop(config, runner, manager, collectives, connection).run()
    _log.info("phase=stopped")


def _join(config: WorkerConfig) -> ShmCollectives:
    """Attached only: the ranks meet when all have their seats."""
    return ShmCollectives(
        config.collectives_segment,
        config.rank,
        config.num_ranks,
        create=False,
        slot_bytes=SLOT_BYTES,
        timeout_s=config.deadlines.step_s,
        generation=0,
    )


def _runner(config: WorkerConfig, collectives: ShmCollectives) -> EmbeddedRunner:
    return EmbeddedRunner(
        Path(config.model_dir),
        config.rank,
        config.num_ranks,
        collectives,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        has_prefix_cache=config.has_prefix_cache,
    )


def _manager(config: WorkerConfig, runner: EmbeddedRunner, stack: ExitStack) -> DynamicWeightManager:
    source = registry.create(config.load_strategy, _source_config(config, runner))
    board = Board.attach(config.board_port)
    stack.callback(board.close)
    settings = ManagerConfig(
        load_strategy=config.load_strategy,
        apply_mode=config.apply_mode,
        deadlines=config.deadlines,
        num_copy_threads=config.num_copy_threads,
        num_staging_threads=max(1, config.num_copy_threads // 2),  # the others' cores go on decoding
        rollback=config.rollback,
        kv_policy=config.kv_policy,
        is_restarted_on_death=config.is_restarted_on_death,
        has_checksums=config.has_checksums,
    )
    manager = DynamicWeightManager(runner=runner, board=board, rank=config.rank, source=source, config=settings)
    stack.callback(manager.close)
    return manager


def _source_config(config: WorkerConfig, runner: EmbeddedRunner) -> SourceConfig:
    return SourceConfig(
        channel=Path(config.channel),
        model_dir=Path(config.model_dir),
        rank=config.rank,
        num_ranks=config.num_ranks,
        parameters=tuple(runner.parameters()),
        num_threads=config.num_copy_threads,
        rsync_config=config.rsync_config,
    )


def _load(runner: EmbeddedRunner, manager: DynamicWeightManager) -> int:
    """Takes the seat, with the model's own weights where the engine is at those; returns the bytes of this rank's
    weights. Keeps no view: an update must be able to free them."""
    if not manager.needs_cold_start():
        manager.start(None)
        return 0
    views = runner.load()
    runner.bind(views)
    manager.start(InitialWeights(COLD_VERSION, views))
    return sum(view.num_bytes for view in views.values())


def _loop(
    config: WorkerConfig,
    runner: EmbeddedRunner,
    manager: DynamicWeightManager,
    collectives: ShmCollectives,
    connection: WorkerSocket,
) -> Leader | Follower:
    if config.rank == 0:
        return Leader(runner, manager, collectives, connection, deadlines=config.deadlines)
    return Follower(runner, manager, collectives, timeout_s=config.deadlines.step_s)
