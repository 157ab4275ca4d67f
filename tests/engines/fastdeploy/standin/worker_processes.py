"""The worker processes of one engine, as the engine sees them: started, given tasks, heard, ended with SIGTERM."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.engines.fastdeploy.standin.config import EngineLine
from tests.engines.fastdeploy.standin.control import ControlResponse

_ROOT = Path(__file__).parents[4]
_MODULE = "tests.engines.fastdeploy.standin.worker_loop"


class WorkerGoneError(RuntimeError):
    """A worker said nothing in time, or has ended."""


class _Worker:
    def __init__(self, line: EngineLine, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", _MODULE, json.dumps(line)],
            cwd=_ROOT,
            env={**environment, "FLAGS_selected_gpus": str(line.rank)},  # as paddle.distributed.launch gives it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._text = b""

    def write(self, document: Any) -> None:
        self.process.stdin.write(json.dumps(document).encode() + b"\n")
        self.process.stdin.flush()

    def read(self, deadline: float) -> Any:
        while b"\n" not in self._text:
            with selectors.DefaultSelector() as selector:
                selector.register(self.process.stdout, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerGoneError(f"worker {self.process.pid} said nothing in time")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerGoneError(f"worker {self.process.pid} ended with {self.process.wait(10)}")
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class WorkerProcesses:
    """One process a line; in rank order."""

    def __init__(self, lines: list[EngineLine], environment: Mapping[str, str]) -> None:
        self._workers = [_Worker(line, environment) for line in lines]

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [worker.process for worker in self._workers]

    def await_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank, worker in enumerate(self._workers):
            if worker.read(deadline) != "ready":
                raise WorkerGoneError(f"rank {rank} did not start")

    def put_tasks(self, task: dict[str, Any]) -> None:
        """Rank 0, which looks for tasks, is the last one that gets it."""
        for worker in reversed(self._workers):
            worker.write(task)

    def responses(self, request_id: str, timeout_s: float) -> list[ControlResponse]:
        """Of every rank; answers to earlier requests that came late are passed over."""
        deadline = time.monotonic() + timeout_s
        answers = []
        for worker in self._workers:
            answer = ControlResponse.from_dict(worker.read(deadline))
            while answer.request_id != request_id:
                answer = ControlResponse.from_dict(worker.read(deadline))
            answers.append(answer)
        return answers

    def end(self) -> None:
        for worker in self._workers:
            worker.process.send_signal(signal.SIGTERM)
            worker.process.send_signal(signal.SIGCONT)  # one that a test has stopped
        for worker in self._workers:
            worker.end()
