"""What a foreign process stored into the legacy word is not taken for our own: after another store, and when one rank 0
dies after the other."""

from collections.abc import Iterator

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import STATUS_OFFSET, StatusRecord
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.lifecycle import LegacyCommand
from fastdeploy_rl.update.committed import Committed
from fastdeploy_rl.update.engine_state import EngineState
from tests.process.numpy_engine import free_port

COMMITTED = Committed("1.1", "ab" * 32, "ipc")
NORMAL, UPDATE, CLEAR, CLEARED = 0, 1, -1, -2


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


@pytest.fixture
def word(board: Board) -> Iterator[StatusWord]:
    word = StatusWord(WEIGHTS_WORD, board.port)
    yield word
    word.close()


@pytest.fixture
def serving(board: Board) -> Iterator[EngineState]:
    """A rank 0 that dies."""
    state = EngineState(board)
    state.start(COMMITTED)
    yield state
    state.close()


@pytest.fixture
def successors(board: Board) -> Iterator[list[EngineState]]:
    states = [EngineState(board) for _ in range(3)]
    yield states
    for state in states:
        state.close()


def take_over(state: EngineState, board: Board, committed: Committed | None = COMMITTED) -> None:
    state.take_over(board.read(StatusRecord, STATUS_OFFSET), committed)


def test_a_command_that_reads_like_a_fence_is_not_taken_for_it(
    board: Board, word: StatusWord, serving: EngineState, successors: list[EngineState]
):
    """Stored before rank 0 died; successors that show UPDATING, and nothing of theirs in the word, died too."""
    word.store(UPDATE)
    for state in successors:
        take_over(state, board)
        assert word.load() == UPDATE
    assert successors[-1].take_legacy_command() is LegacyCommand.UPDATE


def test_what_rank_0_left_in_the_word_at_a_fence_is_no_command(
    board: Board, word: StatusWord, serving: EngineState, successors: list[EngineState]
):
    serving.fence("ranks [1] died", is_torn=False)
    assert word.load() == UPDATE
    take_over(successors[0], board)
    assert successors[0].take_legacy_command() is None
    successors[0].start(COMMITTED)
    assert (word.load(), successors[0].take_legacy_command()) == (NORMAL, None)


def test_a_word_that_lags_behind_the_record_follows_at_once(
    board: Board, word: StatusWord, serving: EngineState, successors: list[EngineState]
):
    """Rank 0 wrote that the engine is cleared, and died before it put that into the word."""
    serving.clear(1)
    word.store(NORMAL)
    take_over(successors[0], board, committed=None)
    assert (word.load(), successors[0].take_legacy_command()) == (CLEARED, None)


def test_a_command_that_was_stored_over_another_store_is_not_taken_for_the_one_before(
    word: StatusWord, serving: EngineState
):
    """It reads like the one that just ended, but something else stood there when that ended."""
    word.store(CLEAR)
    assert serving.take_legacy_command() is LegacyCommand.CLEAR
    word.store(UPDATE)
    serving.end_legacy_command()
    word.store(CLEAR)
    assert serving.take_legacy_command() is LegacyCommand.CLEAR
    serving.end_legacy_command()
    assert (word.load(), serving.take_legacy_command()) == (NORMAL, None)


def test_a_word_that_is_ahead_of_the_record_is_no_command(
    board: Board, word: StatusWord, serving: EngineState, successors: list[EngineState], monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 put UPDATING into the word for a command of the board, and died before it could write down that it did."""
    records = iter([serving._write_record, lambda: None])
    monkeypatch.setattr(serving, "_write_record", lambda: next(records)())
    serving.fence("ranks [1] died", is_torn=False)
    assert word.load() == UPDATE
    take_over(successors[0], board)
    assert successors[0].take_legacy_command() is None
