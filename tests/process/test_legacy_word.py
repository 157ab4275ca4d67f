"""The status word as foreign trainers use it: multiprocessing.shared_memory and numpy, nothing of ours."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.board.legacy import LegacySignal, word_name
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import EngineNotFoundError, UpdateRejectedError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, publish

FOREIGN = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
import numpy as np
name, command, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = SharedMemory(name=name)
word = np.ndarray((1,), dtype=np.int32, buffer=memory.buf)
word[0] = command
deadline = time.monotonic() + 20
while word[0] != wanted:
    if time.monotonic() > deadline:
        sys.exit(f"the word reads {word[0]}")
    time.sleep(0.001)
del word
memory.close()
"""

RECREATE = """
from multiprocessing.shared_memory import SharedMemory
import sys
old = SharedMemory(name=sys.argv[1])
old.unlink()
new = SharedMemory(name=sys.argv[1], create=True, size=4)
new.buf[:4] = bytes(4)
new.close()
old.close()
from multiprocessing import resource_tracker
resource_tracker.unregister("/" + sys.argv[1], "shared_memory")
"""


def foreign(port: int, command: int, wanted: int) -> None:
    """A process that knows the word only: writes, polls, exits; its resource tracker unlinks the name behind it."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            FOREIGN,
            word_name("model_weights_status", port),
            f"{command}",
            f"{wanted}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def eventually(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)  # polled by a deadline, as a foreign reader does


def test_foreign_trainers_update_one_after_another(tmp_path: Path):
    """Each update happens although each foreign exit takes the word's name away."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
    ):
        path = f"/dev/shm/{word_name('model_weights_status', engine.port)}"
        inode = os.stat(path).st_ino
        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step, "tp:3")
            foreign(engine.port, 1, 0)
            assert engine.holds(random_weights(MODEL, step))
            eventually(lambda: os.path.exists(path), "the name is restored")
            assert os.stat(path).st_ino == inode


def test_a_recreated_word_is_followed(tmp_path: Path):
    """FastDeploy's IPCSignal(create=True) unlinks and recreates: from then on the new segment is the word."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
    ):
        name = word_name("model_weights_status", engine.port)
        inode = os.stat(f"/dev/shm/{name}").st_ino
        subprocess.run([sys.executable, "-W", "ignore", "-c", RECREATE, name], check=True, timeout=60)
        assert os.stat(f"/dev/shm/{name}").st_ino != inode
        publish(publisher, random_weights(MODEL, 4), 1)
        foreign(engine.port, 1, 0)
        assert engine.holds(random_weights(MODEL, 4))


def test_clear_and_update_by_the_word(tmp_path: Path):
    """-1 ends in CLEARED with nothing left on any rank; 1 brings the newest version back."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        LegacySignal(engine.port) as signal,
    ):
        publish(publisher, random_weights(MODEL, 5), 1)
        signal.request_clear(10)
        assert engine.tokens() == [None] * 3
        signal.request_update(10)
        assert engine.holds(random_weights(MODEL, 5))


def test_a_rejected_update_returns_the_word_to_where_it_was(tmp_path: Path):
    """NORMAL if weights were live, CLEARED if not; the reason is told to clients of the board."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        LegacySignal(engine.port) as signal,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, {"norm": np.zeros(5, np.float32)}, 1)
        signal.request_update(10)
        assert engine.holds(random_weights(MODEL, 0))
        assert client.status().version == "0.0"
        signal.request_clear(10)
        with pytest.raises(UpdateRejectedError, match="-2"):
            signal.request_update(10)
        assert client.status().legacy_status == "CLEARED"


def test_a_value_that_is_no_command_is_put_right(tmp_path: Path):
    """A foreign 7 means nothing: the word shows the truth again and the next command is taken."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        LegacySignal(engine.port) as signal,
    ):
        publish(publisher, random_weights(MODEL, 6), 1)
        word = signal._word
        word.store(7)
        eventually(lambda: word.load() == 0, "the word shows NORMAL again")
        signal.request_update(10)
        assert engine.holds(random_weights(MODEL, 6))


def test_no_engine_at_the_port_is_an_error():
    with pytest.raises(EngineNotFoundError, match="no engine has status words at port 1"), LegacySignal(1):
        pass
