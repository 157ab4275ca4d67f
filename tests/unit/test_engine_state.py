"""Rank 0's account of the engine against foreign stores into the word: one order, none lost, none made up."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.lifecycle import LegacyCommand
from fastdeploy_rl.update.committed import Committed
from fastdeploy_rl.update.engine_state import EngineState
from tests.process.numpy_engine import free_port

NORMAL, UPDATE, CLEAR = 0, 1, -1


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def state(stack: ExitStack) -> EngineState:
    """Of an engine that serves."""
    board = Board.create(free_port(), num_ranks=1)
    stack.callback(board.close)
    state = EngineState(board)
    stack.callback(state.close)
    state.start(Committed("1.1", "ab" * 32, "ipc"))
    return state


@pytest.fixture
def word(state: EngineState, stack: ExitStack) -> StatusWord:
    """As a trainer has it."""
    word = StatusWord(WEIGHTS_WORD, state._board.port)
    stack.callback(word.close)
    return word


def test_another_command_that_was_stored_meanwhile_is_the_next_one(state: EngineState, word: StatusWord) -> None:
    word.store(UPDATE)
    assert state.take_legacy_command() is LegacyCommand.UPDATE
    word.store(CLEAR)
    state.end_legacy_command()
    assert word.load() == CLEAR
    assert state.take_legacy_command() is LegacyCommand.CLEAR


def test_equal_stores_before_the_outcome_are_one_command(state: EngineState, word: StatusWord) -> None:
    word.store(UPDATE)
    assert state.take_legacy_command() is LegacyCommand.UPDATE
    word.store(UPDATE)
    assert state.take_legacy_command() is None
    state.end_legacy_command()
    assert (word.load(), state.take_legacy_command()) == (NORMAL, None)
    word.store(UPDATE)
    assert state.take_legacy_command() is LegacyCommand.UPDATE


def test_what_the_engine_shows_takes_no_command_away(state: EngineState, word: StatusWord) -> None:
    """A store that nobody has looked at yet, while a command of the board pauses the engine."""
    word.store(UPDATE)
    state.pause()
    state.show()
    assert word.load() == UPDATE
    assert state.take_legacy_command() is LegacyCommand.UPDATE


def test_a_command_that_is_stored_while_the_engine_is_about_to_show_something_is_the_next_one(
    state: EngineState, word: StatusWord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it looked at the word, and before it stores what is true."""
    word.store(UPDATE)
    assert state.take_legacy_command() is LegacyCommand.UPDATE
    with monkeypatch.context() as between:
        between.setattr(state, "_show_others", lambda: word.store(CLEAR))
        state.end_legacy_command()
    assert word.load() == CLEAR
    assert state.take_legacy_command() is LegacyCommand.CLEAR
