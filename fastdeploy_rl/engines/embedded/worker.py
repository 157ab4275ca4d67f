"""One tensor-parallel rank as a process: `python -m fastdeploy_rl.engines.embedded.worker`, started by the supervisor
only.

Owns the putting together of one rank and its end. Refuses to know what happens in its loop. Invariant: it ends when
told, when its supervisor is gone, and on any error of its own, which it tells first; it never outlives its supervisor.
"""

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading

import msgspec

from fastdeploy_rl.engines.embedded.messages import Failed, WorkerConfig, WorkerSocket
from fastdeploy_rl.errors import EngineError, FastDeployRLError

_log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_REASON = 2000
_PADDLE_HEADLINE = "Error Message Summary:"
_PADDLE_RULE = "-\n "
_PR_SET_PDEATHSIG = 1


def main() -> int:
    config = msgspec.json.decode(sys.stdin.buffer.read(MAX_CONFIG_BYTES), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(config.parent_pid)
    _log_to_stderr(config.rank)
    connection = WorkerSocket(socket.socket(fileno=config.socket_fd))
    _watch_supervisor(connection.fileno())
    try:
        # Imported here: Paddle takes seconds, and until then a worker must already be able to die and to complain.
        from fastdeploy_rl.engines.embedded import rank

        rank.run(config, connection)
    except Exception as error:
        _tell(connection, config, error)
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


def _tell(connection: WorkerSocket, config: WorkerConfig, error: Exception) -> None:
    _log.error("fault=%s reason=%s", type(error).__name__, error, exc_info=not isinstance(error, FastDeployRLError))
    with contextlib.suppress(FastDeployRLError):  # the supervisor may be what is gone
        connection.send(last_words(config.rank, error), timeout_s=config.deadlines.send_s)


def last_words(rank: int, error: Exception) -> Failed:
    """The reason on one line of bounded length. Paddle's errors bring a traceback of its C++ along, and say what is
    wrong at its end, under a headline; the log has all of it."""
    if isinstance(error, FastDeployRLError):
        kind, text = type(error).__name__, str(error)
    else:
        _, _, summary = str(error).rpartition(_PADDLE_HEADLINE)
        kind, text = EngineError.__name__, f"{type(error).__name__}: {summary.strip(_PADDLE_RULE)}"
    line = " ".join(text.split())
    return Failed(rank, kind, line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ...")


if __name__ == "__main__":
    sys.exit(main())
