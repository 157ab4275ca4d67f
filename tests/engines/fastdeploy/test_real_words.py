"""FastDeploy's own IPCSignal and our words are the same words, whoever made them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import (
    KV_CACHE_WORD,
    PREFIX_TREE_WORD,
    WEIGHTS_WORD,
    WORDS,
    LegacySignal,
    StatusWord,
    create_words,
    unlink_words,
)
from fastdeploy_rl.errors import UpdateRejectedError
from fastdeploy_rl.lifecycle import LegacyStatus
from tests.engines.fastdeploy.real_tree import RealPeer, skip_without_real_tree
from tests.process.numpy_engine import free_port

skip_without_real_tree()
_SOON_S = 20.0


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("fastdeploy")) as peer:
        yield peer


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    yield port
    unlink_words(port)


def test_every_value_has_fastdeploys_name_and_number(peer: RealPeer) -> None:
    ours = {status.name: status.value for status in LegacyStatus}
    assert peer.call("real_words.values") == dict.fromkeys(
        ("ModelWeightsStatus", "KVCacheStatus", "PrefixTreeStatus"), ours
    )


def test_words_that_we_made_are_fastdeploys_words(peer: RealPeer, port: int) -> None:
    create_words(port)
    for value, name in enumerate(WORDS, start=-2):
        word = StatusWord(name, port)
        word.store(value)
        assert peer.call("real_words.attach", name=name, port=port) == value
        peer.call("real_words.store", name=name, port=port, value=1)
        assert word.load() == 1
        word.close()
        peer.call("real_words.clear", name=name, port=port)


def test_words_that_fastdeploy_made_are_ours_and_stay_when_we_go(peer: RealPeer, port: int) -> None:
    for name in (WEIGHTS_WORD, KV_CACHE_WORD, PREFIX_TREE_WORD):
        assert peer.call("real_words.create", name=name, port=port, value=-1) == f"{name}.{port}"
    board = Board.create(port, num_ranks=1, adopts_words=True)
    word = StatusWord(WEIGHTS_WORD, port)
    assert word.exchange(-1, -2) == -1
    assert peer.call("real_words.load", name=WEIGHTS_WORD, port=port) == -2
    assert peer.call("real_words.load", name=KV_CACHE_WORD, port=port) == -1
    word.close()
    board.close()
    for name in WORDS:
        assert Path(f"/dev/shm/{name}.{port}").exists()
        peer.call("real_words.clear", name=name, port=port)


@pytest.mark.parametrize(("command", "outcome"), [(1, 0), (-1, -2)])
def test_a_trainer_of_ours_is_answered_by_a_stock_word(peer: RealPeer, port: int, command: int, outcome: int) -> None:
    peer.call("real_words.create", name=WEIGHTS_WORD, port=port, value=0 if command < 0 else -2)
    asked = {"name": WEIGHTS_WORD, "port": port, "command": command, "outcome": outcome, "within_s": _SOON_S}
    seen: list[int] = []
    worker = threading.Thread(target=lambda: seen.append(peer.call("real_words.answer", **asked)))
    worker.start()
    with LegacySignal(port) as signal:
        signal.request_update(_SOON_S) if command > 0 else signal.request_clear(_SOON_S)
    worker.join(_SOON_S)
    assert seen == [command]
    peer.call("real_words.clear", name=WEIGHTS_WORD, port=port)


def test_a_stock_word_that_stays_cleared_is_a_rejection(peer: RealPeer, port: int) -> None:
    peer.call("real_words.create", name=WEIGHTS_WORD, port=port, value=-2)
    asked = {"name": WEIGHTS_WORD, "port": port, "command": 1, "outcome": -2, "within_s": _SOON_S}
    worker = threading.Thread(target=lambda: peer.call("real_words.answer", **asked))
    worker.start()
    with LegacySignal(port) as signal, pytest.raises(UpdateRejectedError, match="reads -2"):
        signal.request_update(_SOON_S)
    worker.join(_SOON_S)
    assert peer.call("real_words.load", name=WEIGHTS_WORD, port=port) == -2
    peer.call("real_words.clear", name=WEIGHTS_WORD, port=port)


def test_a_recreated_signal_is_followed_by_its_keeper(peer: RealPeer, port: int) -> None:
    peer.call("real_words.create", name=WEIGHTS_WORD, port=port, value=0)
    board = Board.create(port, num_ranks=1, adopts_words=True)
    keeper = StatusWord(WEIGHTS_WORD, port)
    peer.call("real_words.create", name=WEIGHTS_WORD, port=port, value=1)
    assert keeper.load() == 0
    assert keeper.follow()
    assert keeper.load() == 1
    keeper.close()
    board.close()
    peer.call("real_words.clear", name=WEIGHTS_WORD, port=port)
