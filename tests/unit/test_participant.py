"""A rank's loop and its manager's thread about one command: whoever comes last finds what the other did."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot, CommandRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import AUTO, KEEP, WAIT
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.participant import Participant, _Handover
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    with closing(Board.create(free_port(), num_ranks=2)) as board:
        yield board


def make_participant(board: Board, num_requests: Callable[..., int]) -> tuple[Participant, BoardRendezvous]:
    rendezvous = BoardRendezvous(board, 0)
    state: Any = SimpleNamespace(runner=SimpleNamespace(num_requests=num_requests))
    anybody: Any = None
    participant = Participant(
        board=board,
        rendezvous=rendezvous,
        state=state,
        apply_mode=AUTO,
        rollback=KEEP,
        observer=anybody,
        wake=lambda: None,
    )
    return participant, rendezvous


def hand_over(participant: Participant, number: int) -> None:
    options = CommandOptions(WAIT)
    deadline_ns = time.monotonic_ns() + 60_000_000_000
    record = CommandRecord(number, CommandKind.PAUSE, 0, 0, deadline_ns, "", options.encode())
    command: Any = None
    participant._awaited = _Handover(record, command, options)
    participant._handovers.put(participant._awaited)


def test_requests_that_cannot_end_refuse_a_command_once(board: Board) -> None:
    participant, rendezvous = make_participant(board, lambda *, begun: 1)
    hand_over(participant, 7)
    assert not participant.is_due(is_decoding=False)
    assert (rendezvous.own.command, rendezvous.own.ballot) == (7, Ballot.FAILED)


def test_a_command_that_was_taken_back_meanwhile_stays_finished(board: Board) -> None:
    """Else rank 0 would be waited for, and ended, that has finished."""

    def take_back(*, begun: bool) -> int:
        participant._handovers.get_nowait()
        rendezvous.vote(7, Ballot.FINISHED)
        return 1

    participant, rendezvous = make_participant(board, take_back)
    hand_over(participant, 7)
    assert not participant.is_due(is_decoding=False)
    assert (rendezvous.own.command, rendezvous.own.ballot) == (7, Ballot.FINISHED)
