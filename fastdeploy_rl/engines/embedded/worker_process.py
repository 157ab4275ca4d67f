"""One worker process as its supervisor holds it: started, watched, stopped.

Owns the child, its log file and its pidfd. Refuses to know what a worker does. Invariant: a started worker ends: by
itself, by `kill`, or through the kernel when its supervisor dies.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fastdeploy_rl.engines.embedded.messages import WorkerConfig

WORKER_MODULE = "fastdeploy_rl.engines.embedded.worker"
_LAST_LINE_BYTES = 4096


class WorkerProcess:
    """A running worker. `pidfd` becomes readable when it has ended."""

    def __init__(
        self, rank: int, child: "subprocess.Popen[bytes]", connection: socket.socket, log_path: Path, log_begin: int
    ) -> None:
        self.rank = rank
        self.connection = connection
        self.log_path = log_path
        self._child = child
        self._log_begin = log_begin
        self.pidfd = os.pidfd_open(child.pid)

    @classmethod
    def start(
        cls, config: WorkerConfig, *, log_dir: Path, environ: Mapping[str, str], module: str, keeps_log: bool
    ) -> "WorkerProcess":
        """Spawns rank `config.rank` with a socket of its own (`config.socket_fd` is filled in). Its output goes to the
        log, behind what another worker wrote there where `keeps_log`."""
        own, theirs = socket.socketpair()
        log_path = log_dir / f"workerlog.{config.rank}"
        try:
            with theirs, log_path.open("ab" if keeps_log else "wb") as log:
                log_begin = log.tell()
                child = subprocess.Popen(
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environ),
                    pass_fds=[theirs.fileno()],
                    # Ctrl-C on the terminal is for the supervisor alone: it stops the workers in order.
                    start_new_session=True,
                )
                _give_config(child, msgspec.structs.replace(config, socket_fd=theirs.fileno()))
            return cls(config.rank, child, own, log_path, log_begin)
        except BaseException:
            own.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self) -> None:
        self._child.kill()

    def describe_end(self) -> str:
        """How it ended, in words, with the last line it logged."""
        code = self._child.poll()
        if code is None:
            return f"rank {self.rank} (pid {self.pid}) is running"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = "" if code < 0 else _last_line(self.log_path, self._log_begin)  # who is killed has no time to say why
        return f"rank {self.rank} (pid {self.pid}) {how}" + (f": {last}" if last else "") + f"; see {self.log_path}"

    def release(self) -> None:
        """Gives back what is left of an ended worker; one that the kernel cannot end is left to it."""
        self._child.poll()
        os.close(self.pidfd)


def _give_config(child: "subprocess.Popen[bytes]", config: WorkerConfig) -> None:
    if child.stdin is None:
        return
    try:
        with child.stdin:
            child.stdin.write(msgspec.json.encode(config))
    except BrokenPipeError:
        pass  # died at once: its pidfd says so
    finally:
        child.stdin = None


def _last_line(path: Path, begin: int) -> str:
    """The last line after byte `begin`."""
    try:
        with path.open("rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - _LAST_LINE_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
