"""Rank 0's conductor against ranks that the test plays on a board of its own."""

import time
from collections.abc import Iterator

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot, Decision
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.errors import DeadlineExceededError, FencedError, StepFailedError
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.update.conductor import CommandOutcome, Conductor
from fastdeploy_rl.update.rank_files import RankFiles, RankPart
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=2)
    yield board
    board.close()


def lead(conductor: Conductor) -> CommandOutcome:
    return conductor.lead(CommandKind.CLEAR, deadline_ns=time.monotonic_ns() + 50_000_000)


def test_no_command_is_announced_while_a_rank_has_not_followed_the_one_before(board: Board) -> None:
    """Else the words that it still has to read would be those of the next one: it would undo what was committed."""
    seats = [BoardRendezvous(board, rank) for rank in range(2)]
    conductor = Conductor(seats[0], RankFiles(board.run_dir), finish_s=0.05, condemn=None)
    for seat in seats:
        seat.vote(1, Ballot.VERIFIED)
    torn = lead(conductor)
    assert torn.outcome is Outcome.FENCED
    assert isinstance(torn.error, FencedError)
    seats[0].vote(1, Ballot.FINISHED)
    with pytest.raises(DeadlineExceededError, match=r"no vote FINISHED of command 1 .*; ranks \[1\] missing"):
        lead(conductor)
    assert seats[1].current().number == 1
    assert seats[1].decided(Question.COMMIT, 1) is Decision.YES
    seats[1].vote(1, Ballot.FINISHED)
    assert lead(conductor).outcome is Outcome.REJECTED
    assert seats[1].current().number == 2


@pytest.mark.parametrize(
    ("question", "reached"), [(Question.INSTALL, Ballot.STARTED), (Question.COMMIT, Ballot.STAGED)], ids=str
)
def test_nothing_is_decided_before_every_rank_has_voted_for_it(
    board: Board, question: Question, reached: Ballot
) -> None:
    """One rank is behind: the word reads NO when time is up, and never YES."""
    seats = [BoardRendezvous(board, rank) for rank in range(2)]
    conductor = Conductor(seats[0], RankFiles(board.run_dir), finish_s=0.05, condemn=None)
    seats[0].vote(1, Ballot.VERIFIED)
    seats[1].vote(1, reached)
    outcome = lead(conductor)
    assert outcome.outcome is not Outcome.DONE
    assert seats[1].decided(question, 1) is Decision.NO


def test_who_is_dead_is_not_condemned_with_those_who_are_silent(board: Board) -> None:
    """Its successor may be back by the time that somebody reads it."""
    seats = [BoardRendezvous(board, rank) for rank in range(2)]
    files = RankFiles(board.run_dir)
    condemned: list[int] = []
    conductor = Conductor(seats[0], files, finish_s=0.05, condemn=condemned.append)
    for rank, seat in enumerate(seats):
        files.write_staged(rank, 1, RankPart())
        seat.vote(1, Ballot.STAGED)

    def die(parts: list[RankPart]) -> Receipt:
        seats[0].mark_lost(1)
        raise StepFailedError("rank 1 is dead")

    deadline_ns = time.monotonic_ns() + 50_000_000
    outcome = conductor.lead(CommandKind.UPDATE, deadline_ns=deadline_ns, check_staged=die, must_follow=True)
    assert outcome.outcome is Outcome.FENCED
    assert condemned == [0]
