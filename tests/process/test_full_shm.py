"""/dev/shm is full, and the run directory lies there too: an engine serves on, says why, and can be cleared."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.errors import PeerLostError
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.requests import next_board_request
from tests.process.answering import await_states
from tests.process.numpy_engine import free_port
from tests.process.private_shm import private_shm

SCENE = """
import contextlib, os, sys
from pathlib import Path
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, publish


def ask(what):
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        with BoardClient(engine.port) as client:
            print(what, getattr(getattr(client, what)(), "outcome", ""), client.status().is_serving)
    except FastDeployRLError as error:
        print(what, type(error).__name__, str(error), BoardClient(engine.port).__enter__().status().is_serving)
    else:
        assert len(os.listdir("/proc/self/fd")) == descriptors


channel = Path(sys.argv[1])
with NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine, WeightPublisher(channel) as publisher:
    publish(publisher, random_weights(MODEL, 1), 1)
    ask("update")
    publish(publisher, random_weights(MODEL, 2), 2)
    with open("/dev/shm/filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"x" * 4096)
    ask("update")
    print("old", engine.holds(random_weights(MODEL, 1)))
    ask("status")
    ask("clear")
    os.unlink("/dev/shm/filler")
    ask("update")
    print("new", engine.holds(random_weights(MODEL, 2)))
"""


def test_a_full_shm_fences_nobody_and_keeps_nobody_from_clearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = private_shm(8 << 20)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a /dev/shm of their own")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    command = [*prefix, sys.executable, "-c", SCENE, str(tmp_path / "channel")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    said = done.stdout.splitlines()
    assert said[:1] == ["update done True"], done.stderr[-2000:]
    assert said[1].startswith("update StepFailedError")
    assert said[1].endswith("True")
    assert "No space left on device" in said[1]
    assert said[2:] == ["old True", "status  True", "clear done False", "update done True", "new True"], said


def test_what_was_done_is_told_as_done_though_its_report_could_not_be_stored() -> None:
    board = Board.create(free_port(), num_ranks=1)

    def answered(ask: Callable[[], object]) -> object:
        asked = pool.submit(ask)
        await_states(board, lambda taken: taken == [SlotState.SUBMITTED])
        request = next_board_request(board)
        assert request is not None
        request.finish(UpdateReport(7, request.kind.name.lower(), "done", "", "", 0.0, 0.0, []))
        return asked.result(20)

    try:
        with ThreadPoolExecutor(1) as pool, BoardClient(board.port) as client:
            updated = answered(lambda: client.update("1.2"))
            assert isinstance(updated, UpdateReport)
            assert (updated.outcome, updated.version, updated.receipt) == ("done", "1.2", None)
            assert "report.7.json" in updated.reason
            cleared = answered(client.clear)
            assert isinstance(cleared, UpdateReport)
            assert (cleared.outcome, cleared.version) == ("done", "")
            with pytest.raises(PeerLostError, match="no receipt"):
                answered(lambda: client.receipt(recompute=True))
    finally:
        board.close()
