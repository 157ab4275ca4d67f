"""Rank 0 dies while somebody waits: they are told what became of their own request, not of another one."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.layout import Ballot, CommandRecord, SlotState
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import PeerLostError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.testing.step_faults import Act, StepFault
from fastdeploy_rl.update.client import BoardClient
from tests.process.answering import soon, states
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_missed_and_fenced import wait_until
from tests.process.test_rank_death import await_recovery, check_whole
from tests.process.test_update_numpy import MODEL, publish

DEADLINES = Deadlines(update_s=20.0, attach_s=20.0, rejoin_s=20.0, finish_s=1.0)
MOST_TRIES = 100
FAULTY = "fastdeploy_rl.testing.faulty_worker"


def command(engine: NumpyEngine) -> CommandRecord:
    return engine.board.read(CommandRecord, layout.COMMAND_OFFSET)


def await_that(engine: NumpyEngine, condition: Callable[[], bool]) -> None:
    assert engine.board.wait_until(condition, soon(20)), engine.board.status()


def is_running(engine: NumpyEngine) -> bool:
    return SlotState.RUNNING in states(engine.board)


def spin_until(condition: Callable[[], bool]) -> None:
    """Without a pause: what is waited for lasts a millisecond."""
    last_ns = soon(20)
    while not condition():
        assert time.monotonic_ns() < last_ns


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_waits_is_told_of_the_commit_also_when_rank_0_dies_in_what_came_after(
    tmp_path: Path, first: int
) -> None:
    """Rank `first` dies at the commit, and rank 0 (again) while the engine comes back to the committed version."""
    with (
        NumpyEngine(
            MODEL, channel=tmp_path / "channel", deadlines=DEADLINES, is_restarted_on_death=True, module=FAULTY
        ) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
        BoardClient(engine.port) as asking,
        ThreadPoolExecutor(1) as pool,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        fault = StepFault(Act.KILL, "commit", "begin")
        assert engine.ask(first, "fault " + msgspec.json.encode(fault).decode()) == "armed"
        asked = pool.submit(asking.update, deadline_s=15.0)
        await_that(engine, lambda: first in engine.board.lost_ranks())
        number = command(engine).number
        await_that(
            engine, lambda: (record := engine.board.read_rank(2)).ballot == Ballot.FINISHED and record.command == number
        )
        os.kill(engine.workers[2].pid, signal.SIGSTOP)  # so that what comes after takes a while
        await_that(engine, lambda: command(engine).kind == CommandKind.RESTORE)
        os.kill(engine.board.read_rank(0).pid, signal.SIGKILL)
        os.kill(engine.workers[2].pid, signal.SIGCONT)
        report = asked.result(40)
        assert (report.outcome, report.version) == ("done", "1.2")
        wait_until(lambda: not engine.board.lost_ranks() and client.status().is_serving)
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


def test_nobody_is_told_done_of_an_update_that_was_never_announced(tmp_path: Path) -> None:
    """The command before, which somebody else asked for, was committed."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", deadlines=DEADLINES, is_restarted_on_death=True) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
        BoardClient(engine.port) as asking,
        ThreadPoolExecutor(1) as pool,
    ):
        for step in range(1, MOST_TRIES):
            publish(publisher, random_weights(MODEL, step), step)
            before = command(engine).number
            asked = pool.submit(asking.update, deadline_s=15.0)
            spin_until(lambda: is_running(engine))
            os.kill(engine.workers[0].pid, signal.SIGSTOP)
            is_in_time = step > 1 and is_running(engine) and command(engine).number == before
            os.kill(engine.workers[0].pid, signal.SIGKILL if is_in_time else signal.SIGCONT)
            if is_in_time:
                break
            asked.result(40)
        with pytest.raises(PeerLostError, match="rank 0 died before this update took effect: nothing changed"):
            asked.result(40)
        await_recovery(engine, client, 1)
        check_whole(engine, client, random_weights(MODEL, step - 1), f"1.{step - 1}")
        assert client.update().version == f"1.{step}"
