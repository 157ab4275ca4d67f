"""NCCL groups of two processes on two devices: shut down and started again, as around a sleep, they sum as before.

Not run on a GPU so far."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl import config
from fastdeploy_rl.memory.cuda_ipc import CudaDevice

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0


def free_endpoints() -> list[str]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


@contextmanager
def started(rank: int, endpoints: list[str]) -> Iterator["subprocess.Popen[str]"]:
    environ = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "FLAGS_selected_gpus": str(rank),
    }
    command = [sys.executable, "-m", "tests.gpu.nccl_rank", str(rank)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=config.child_environ(environ), cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_groups_that_were_shut_down_and_started_again_sum_as_before(two_devices: list[CudaDevice], paddle: Any) -> None:
    from tests.gpu.nccl_rank import NUM_ROUNDS, expected_sum

    endpoints = free_endpoints()
    with ExitStack() as stack:
        processes = [stack.enter_context(started(rank, endpoints)) for rank in range(2)]
        printed = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    for text in printed:
        assert json.loads(text.splitlines()[-1]) == [expected_sum(number) for number in range(NUM_ROUNDS)]
