"""One tensor-parallel rank as a process: `python -m fastdeploy_rl.engines.embedded.worker`, started by the supervisor
only.

Owns the putting together of one rank and its end. Refuses to know what happens in its loop. Invariant: it ends when
told, when its supervisor is gone, and on any error of its own, which it tells first; it never outlives its
supervisor.
"""

import contextlib
import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Failed, Ready, WorkerConfig, WorkerSocket
from fastdeploy_rl.errors import EngineError, FastDeployRLError
from fastdeploy_rl.version import WeightVersion

if TYPE_CHECKING:
    from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
    from fastdeploy_rl.manager import DynamicWeightManager

_log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
SEND_TIMEOUT_S = 10.0
COLD_VERSION = WeightVersion(0, 0)
"""Of weights that came from the checkpoint: before everything a trainer publishes, whose epochs begin with 1."""
_PR_SET_PDEATHSIG = 1


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(MAX_CONFIG_BYTES), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(config.parent_pid)
    _log_to_stderr(config.rank)
    connection = WorkerSocket(socket.socket(fileno=config.socket_fd))
    _watch_supervisor(connection.fileno())
    try:
        _run(config, connection)
    except Exception as error:
        _tell(connection, config.rank, error)
        return error.exit_code if isinstance(error, FastDeployRLError) else 1
    return 0


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills this process when its parent dies, however that dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before the line above


def _watch_supervisor(fd: int) -> None:
    """Ends this process when the supervisor closed its end: also where the kernel's signal does not reach us."""

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLRDHUP)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def _log_to_stderr(rank: int) -> None:
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"ts=%(asctime)s.%(msecs)03d level=%(levelname)s rank={rank} logger=%(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


def _tell(connection: WorkerSocket, rank: int, error: Exception) -> None:
    _log.error("fault=%s reason=%s", type(error).__name__, error, exc_info=not isinstance(error, FastDeployRLError))
    kind = type(error).__name__ if isinstance(error, FastDeployRLError) else EngineError.__name__
    text = str(error) if isinstance(error, FastDeployRLError) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(FastDeployRLError):  # the supervisor may be what is gone
        connection.send(Failed(rank, kind, text), timeout_s=SEND_TIMEOUT_S)


def _run(config: WorkerConfig, connection: WorkerSocket) -> None:
    # Imported here: Paddle takes seconds, and until then a worker must already be able to die and to complain.
    import paddle

    from fastdeploy_rl.board.board import Board
    from fastdeploy_rl.collectives.shm import ShmCollectives
    from fastdeploy_rl.config import Deadlines
    from fastdeploy_rl.engines.embedded.loop import Follower, Leader
    from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
    from fastdeploy_rl.manager import DynamicWeightManager, ManagerConfig
    from fastdeploy_rl.sources import registry
    from fastdeploy_rl.sources.base import SourceConfig

    paddle.disable_signal_handler()  # its handlers turn an orderly SIGTERM into a page of traceback
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        collectives = stack.enter_context(
            contextlib.closing(
                ShmCollectives(
                    config.collectives_segment,
                    config.rank,
                    config.num_ranks,
                    create=False,
                    slot_bytes=SLOT_BYTES,
                    timeout_s=config.step_s,
                )
            )
        )
        runner = EmbeddedRunner(
            Path(config.model_dir),
            config.rank,
            config.num_ranks,
            collectives,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
        source = registry.create(config.load_strategy, SourceConfig(channel=Path(config.channel)))
        stack.callback(source.close)
        board = Board.attach(config.board_port)
        stack.callback(board.close)
        settings = ManagerConfig(config.load_strategy, config.apply_mode, Deadlines(), config.num_copy_threads)
        manager = DynamicWeightManager(runner=runner, board=board, rank=config.rank, source=source, config=settings)
        stack.callback(manager.close)
        weight_bytes = _load(runner, manager)
        gc.freeze()  # what is there now stays: no collection needs to walk it in the middle of a step
        connection.send(Ready(config.rank, weight_bytes, time.monotonic() - begun), timeout_s=SEND_TIMEOUT_S)
        _log.info("phase=ready weight_bytes=%d seconds=%.3f", weight_bytes, time.monotonic() - begun)
        channel = collectives if config.num_ranks > 1 else None
        if config.rank == 0:
            Leader(runner, manager, channel, connection, timeout_s=config.step_s).run()
        else:
            Follower(runner, manager, collectives, timeout_s=config.step_s).run()
    _log.info("phase=stopped")


def _load(runner: "EmbeddedRunner", manager: "DynamicWeightManager") -> int:
    """Cold start; returns the bytes of this rank's weights. Keeps no view: an update must be able to free them."""
    from fastdeploy_rl.manager import InitialWeights

    views = runner.load()
    runner.bind(views)
    manager.start(InitialWeights(COLD_VERSION, views))
    return sum(view.num_bytes for view in views.values())


if __name__ == "__main__":
    sys.exit(main())
