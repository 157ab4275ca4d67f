"""How long ranks take to decide together over the board, and to add up a token's activations over shared memory; beside
that Paddle's gloo, which engines on a CPU would use otherwise. Ranks are processes of their own."""

import os
import secrets
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from bench_row import Row, at_most

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.memory.shared_segment import SharedSegment

DECISIONS = 301
REDUCTIONS = 2001
GLOO_REDUCTIONS = 201
WARM_UP = 20
_VOTER = """
import sys, time
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
board = Board.attach(int(sys.argv[1]))
meeting = BoardRendezvous(board, int(sys.argv[2]))
print("ready", flush=True)
for number in range(1, int(sys.argv[3]) + 1):
    deadline_ns = time.monotonic_ns() + 10**10
    if meeting.await_command(number - 1, deadline_ns) is None: sys.exit("rank 0 went away")
    meeting.vote(number, Ballot.STAGED)
    meeting.await_decision(Question.INSTALL, number, deadline_ns)
    meeting.vote(number, Ballot.FINISHED)
board.close()
"""
_REDUCER = """
import sys, time
import numpy as np
from fastdeploy_rl.collectives.shm import ShmCollectives
group = ShmCollectives(sys.argv[1], int(sys.argv[2]), 2, create=False, slot_bytes=1 << 16, timeout_s=30.0)
values = np.ones(1024, np.float32)
seconds = []
for _ in range(int(sys.argv[3])):
    values[:] = 1
    started = time.perf_counter()
    group.all_reduce(values)
    seconds.append(time.perf_counter() - started)
group.close()
print(*seconds, flush=True)
"""
_GLOO = """
import sys, time
import paddle
import paddle.distributed as dist
paddle.set_device("cpu")
dist.init_parallel_env()
values = paddle.ones([1024], "float32")
seconds = []
for _ in range(int(sys.argv[3])):
    started = time.perf_counter()
    dist.all_reduce(values)
    seconds.append(time.perf_counter() - started)
dist.barrier()
print(*seconds, flush=True)
"""


def board_rows() -> list[Row]:
    decision = _decision_seconds()
    shm = _shm_seconds()
    gloo = _gloo_seconds()
    return [
        at_most("3 ranks decide over the board", decision, "s", "1 ms", 1e-3, 1e-3, "< 1 ms"),
        at_most("all_reduce of 4 KB, 2 ranks", shm, "s", "50 us", 50e-6, 50e-6, "< 50 us"),
        at_most("all_reduce of 4 KB, 2 ranks, beside gloo", shm, "s", "Paddle gloo", gloo, gloo, "<= 1"),
    ]


def _decision_seconds() -> float:
    """Median, from the command to the moment when rank 0 knows that every rank follows the decision: all votes, one
    decision, and all ranks' word that they read it."""
    port = 20000 + secrets.randbelow(40000)
    seconds = []
    with ExitStack() as stack:
        board = Board.create(port, num_ranks=3)
        stack.callback(board.close)
        for rank in (1, 2):
            command = [sys.executable, "-c", _VOTER, f"{port}", f"{rank}", f"{DECISIONS}"]
            voter = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(voter.kill)
            voter.stdout.readline()
        meeting = BoardRendezvous(board, 0)
        for number in range(1, DECISIONS + 1):
            deadline_ns = time.monotonic_ns() + 10**10
            started = time.perf_counter()
            meeting.announce(CommandRecord(number, 1, 0, 0, deadline_ns, ""))
            meeting.vote(number, Ballot.STAGED)
            meeting.await_votes(number, Ballot.STAGED, deadline_ns)
            meeting.decide_once(Question.INSTALL, number, Decision.YES)
            meeting.vote(number, Ballot.FINISHED)
            meeting.await_votes(number, Ballot.FINISHED, deadline_ns)
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[WARM_UP:])


def _shm_seconds() -> float:
    name = f"fastdeploy_rl_bench.{os.getpid()}.reduce"
    segment = SharedSegment.create(name, CollectiveGroup.required_bytes(2, 1 << 16))
    try:
        return _of_two(_REDUCER, name, REDUCTIONS, {})
    finally:
        segment.close()
        segment.unlink()


def _gloo_seconds() -> float:
    first = 20000 + secrets.randbelow(20000)
    endpoints = [f"127.0.0.1:{first + rank}" for rank in (0, 1)]
    return _of_two(
        _GLOO,
        "gloo",
        GLOO_REDUCTIONS,
        {
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_MASTER": f"127.0.0.1:{first + 2}",
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        },
        [{"PADDLE_TRAINER_ID": f"{rank}", "PADDLE_CURRENT_ENDPOINT": endpoints[rank]} for rank in (0, 1)],
    )


def _of_two(
    script: str, name: str, times: int, environ: dict[str, str], own: "list[dict[str, str]] | None" = None
) -> float:
    """Median seconds of one call, on the rank where it took longer; two processes run `script` at once."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", script, name, f"{rank}", f"{times}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=os.environ | environ | (own[rank] if own else {}),
                )
            )
            for rank in (0, 1)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        lines = [rank.communicate(timeout=120)[0].strip().splitlines() for rank in ranks]
    return max(statistics.median(list(map(float, line[-1].split()))[WARM_UP:]) for line in lines)
