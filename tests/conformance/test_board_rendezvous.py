"""The rendezvous on a board: the common suite, every rank with a mapping of its own, as processes have."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from rendezvous_suite import RendezvousSuite, at_once

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.errors import DeadlineExceededError
from tests.process.numpy_engine import free_port


@pytest.fixture
def seats() -> Iterator[list[BoardRendezvous]]:
    with ExitStack() as stack:
        owned = Board.create(free_port(), num_ranks=3)
        stack.callback(owned.close)
        seats = []
        for rank in range(3):
            board = Board.attach(owned.port)
            stack.callback(board.close)
            seats.append(BoardRendezvous(board, rank))
        yield seats


class TestBoardRendezvous(RendezvousSuite):
    pass


def test_what_a_rank_shows_keeps_its_vote(seats: list[BoardRendezvous]) -> None:
    """`show` is for onlookers: it must not take a ballot back."""
    for seat in seats:
        seat.vote(1, 2, phase="staged")
        seat.show(phase="draining", version="1.2")
    records = seats[0].await_votes(1, 2, at_once())
    assert {(record.ballot, record.phase, record.version) for record in records} == {(2, "draining", "1.2")}


def test_ranks_that_are_not_there_are_named(seats: list[BoardRendezvous]) -> None:
    seats[1].show(phase="ready")
    with pytest.raises(DeadlineExceededError, match=r"no start after .*; ranks \[0, 2\] missing"):
        seats[0].await_ranks(lambda record: record.phase == "ready", "start", at_once())
