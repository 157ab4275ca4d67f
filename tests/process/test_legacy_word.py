"""The status word as foreign trainers use it: multiprocessing.shared_memory and numpy, nothing of ours."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.board import legacy
from fastdeploy_rl.board.legacy import LegacySignal, StatusWord, create_words, unlink_words, word_name
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import EngineNotFoundError, UpdateRejectedError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine, free_port
from tests.process.test_update_numpy import MODEL, publish

FOREIGN = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
import numpy as np
name, command, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
deadline = time.monotonic() + 30
while True:
    try:
        memory = SharedMemory(name=name)
        break
    except FileNotFoundError:  # the tracker of another one took the name; its owner brings it back
        if time.monotonic() > deadline:
            raise
        time.sleep(0.001)
word = np.ndarray((1,), dtype=np.int32, buffer=memory.buf)
word[0] = command
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
new.buf[:4] = int(sys.argv[2]).to_bytes(4, "little")
new.close()
old.close()
from multiprocessing import resource_tracker
resource_tracker.unregister("/" + sys.argv[1], "shared_memory")
"""


def start_foreign(port: int, command: int, wanted: int) -> "subprocess.Popen[str]":
    """A process that knows the word only: writes, polls, exits; its resource tracker unlinks the name behind it."""
    arguments = [word_name("model_weights_status", port), f"{command}", f"{wanted}"]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FOREIGN, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # twenty at once would start a thread a core each
    )


def foreign(port: int, command: int, wanted: int) -> None:
    with start_foreign(port, command, wanted) as process:
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint


def recreate(name: str, value: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RECREATE, name, f"{value}"]
    subprocess.run(command, check=True, timeout=60)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)  # polled by a deadline, as a foreign reader does


def test_foreign_trainers_update_one_after_another(tmp_path: Path):
    """Each update happens although each foreign exit takes the word's name away."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        path = f"/dev/shm/{word_name('model_weights_status', engine.port)}"
        inode = os.stat(path).st_ino
        for step in range(1, 21):
            publish(publisher, random_weights(MODEL, step), step)
            foreign(engine.port, 1, 0)
            assert engine.holds(random_weights(MODEL, step))
            eventually(lambda: os.path.exists(path), "the name is restored")
            assert os.stat(path).st_ino == inode
        assert [(e.kind, e.outcome, e.version) for e in client.history()] == [
            ("update", "done", f"1.{step}") for step in range(1, 21)
        ]


def test_twenty_foreign_trainers_at_once_are_all_served(tmp_path: Path):
    """Equal stores coalesce: there may be fewer updates than processes, but each saw its store honoured, the newest
    version is live, and the word is still the same segment, under its name, when the last tracker is gone."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
        ExitStack() as stack,
    ):
        path = f"/dev/shm/{word_name('model_weights_status', engine.port)}"
        inode = os.stat(path).st_ino
        publish(publisher, random_weights(MODEL, 1), 1)
        trainers = [stack.enter_context(start_foreign(engine.port, 1, 0)) for _ in range(20)]
        complaints = [trainer.communicate(timeout=60)[1] for trainer in trainers]
        assert [trainer.returncode for trainer in trainers] == [0] * 20, complaints
        assert engine.holds(random_weights(MODEL, 1))
        history = client.history(100)
        assert 1 <= len(history) <= 20
        assert {(entry.kind, entry.outcome, entry.version) for entry in history} == {("update", "done", "1.1")}
        eventually(lambda: os.path.exists(path), "the name is restored")
        assert os.stat(path).st_ino == inode
        publish(publisher, random_weights(MODEL, 2), 2)
        foreign(engine.port, 1, 0)
        assert engine.holds(random_weights(MODEL, 2))


def test_a_recreated_word_is_followed(tmp_path: Path):
    """FastDeploy's IPCSignal(create=True) unlinks and recreates: from then on the new segment is the word."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
    ):
        name = word_name("model_weights_status", engine.port)
        inode = os.stat(f"/dev/shm/{name}").st_ino
        recreate(name, 0)
        assert os.stat(f"/dev/shm/{name}").st_ino != inode
        publish(publisher, random_weights(MODEL, 4), 1)
        foreign(engine.port, 1, 0)
        assert engine.holds(random_weights(MODEL, 4))
        eventually(lambda: os.path.exists(f"/dev/shm/{name}"), "the name is restored")
        followed = os.stat(f"/dev/shm/{name}").st_ino
        publish(publisher, random_weights(MODEL, 5), 2)
        recreate(name, 1)  # a request that stands in the new word before the engine ever looked at it
        with LegacySignal(engine.port) as signal:
            eventually(lambda: signal._word.load() == 0, "the request in the new word is answered")
        assert os.stat(f"/dev/shm/{name}").st_ino != followed
        assert engine.holds(random_weights(MODEL, 5))


@pytest.fixture
def word() -> Iterator[StatusWord]:
    port = free_port()
    create_words(port)
    try:
        word = StatusWord("model_weights_status", port)
        yield word
        word.close()
    finally:
        unlink_words(port)


def make_anew(word: StatusWord, data: bytes) -> Path:
    """In this process, so that it can happen between two steps of the keeper."""
    path = Path(f"/dev/shm/{word_name('model_weights_status', word._port)}")
    path.unlink()
    path.write_bytes(data)
    return path


def test_a_recreated_word_that_vanishes_while_it_is_followed_is_given_up_for_the_old_one(
    word: StatusWord, monkeypatch: pytest.MonkeyPatch
):
    path = make_anew(word, b"\1\0\0\0")
    link = os.link

    def vanished(source: str, target: str) -> None:
        path.unlink(missing_ok=True)
        link(source, target)

    monkeypatch.setattr(legacy.os, "link", vanished)
    assert not word.follow()
    monkeypatch.undo()
    assert not word.follow()
    assert path.read_bytes() == bytes(4)
    assert word.load() == 0
    word.store(-1)
    assert path.read_bytes() == b"\xff\xff\xff\xff"


def test_a_word_that_is_recreated_again_while_it_is_followed_is_followed_to_the_last(
    word: StatusWord, monkeypatch: pytest.MonkeyPatch
):
    make_anew(word, bytes(4))
    link = os.link

    def recreated(source: str, target: str) -> None:
        make_anew(word, b"\1\0\0\0")
        link(source, target)

    monkeypatch.setattr(legacy.os, "link", recreated)
    assert word.follow()
    monkeypatch.undo()
    word.follow()
    assert word.load() == 1


@pytest.mark.parametrize("data", [b"", b"\1"])
def test_a_word_without_its_size_is_not_followed_yet(word: StatusWord, data: bytes):
    path = make_anew(word, data)
    assert not word.follow()
    assert word.load() == 0
    path.write_bytes(b"\1\0\0\0")
    assert word.follow()
    assert word.load() == 1


def test_a_keeper_that_died_while_it_followed_a_word_leaves_no_name_behind(
    word: StatusWord, monkeypatch: pytest.MonkeyPatch
):
    class Killed(BaseException): ...

    def killed(source: str, target: str) -> None:
        raise Killed

    make_anew(word, bytes(4))
    monkeypatch.setattr(legacy.os, "replace", killed)
    with pytest.raises(Killed):
        word.follow()
    monkeypatch.undo()
    assert len(unlink_words(word._port)) == 7
    assert [name for name in os.listdir("/dev/shm") if str(word._port) in name] == []


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
