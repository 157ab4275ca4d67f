"""FastDeploy's queue of tasks, from the engine to every worker; here standard input, one JSON document a line.

A task is handed out to all ranks: rank 0 sees that there is one, and the last rank that reads it says so."""

import json
import os
from typing import Any, TextIO

import numpy as np

from tests.engines.fastdeploy.standin.control import ControlRequest
from tests.engines.fastdeploy.standin.ipc_signal import IPCSignal


class EngineWorkerQueue:
    """One rank's end. A worker whose engine is gone, as with a test run that was killed, ends when it looks here."""

    def __init__(self, stream: TextIO, client_id: int, num_client: int, port: int) -> None:
        self._stream = stream
        self._client_id = client_id
        self._pending: list[str] = []
        os.set_blocking(stream.fileno(), False)
        self._tail = ""
        self._reads = IPCSignal(
            name="standin_tasks_read", array=np.zeros(num_client, np.int32), dtype=np.int32, suffix=port, create=False
        )

    def exist_tasks(self) -> bool:
        self._take_in()
        return bool(self._pending)

    def get_tasks(self) -> tuple[list[Any], bool]:
        """The next task, and whether every rank has read it now."""
        while not self.exist_tasks():
            os.sched_yield()  # rank 0 has it, so it is here or on its way
        tasks = [_task(self._pending.pop(0))]
        reads = self._reads.value
        reads[self._client_id] += 1
        return tasks, bool((reads == reads[self._client_id]).all())

    def num_tasks(self) -> int:
        return len(self._pending)

    def clear_data(self) -> None:
        if self._pending:
            raise RuntimeError("a task came in the middle of a change of weights: FastDeploy loses it, and so would we")

    def _take_in(self) -> None:
        try:
            data = os.read(self._stream.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise SystemExit("the engine is gone")
        *lines, self._tail = (self._tail + data.decode()).split("\n")
        self._pending.extend(lines)


def _task(line: str) -> tuple[list[Any], int]:
    """A batch and its size: of one control request, or of requests for tokens."""
    task = json.loads(line)
    if "method" in task:
        return [ControlRequest.from_dict(task)], 1
    return task["requests"], len(task["requests"])
