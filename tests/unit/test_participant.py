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
from fastdeploy_rl.engines.numpy.runner import NumpyModel, NumpyRunner
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.participant import Participant, _Handover
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    with closing(Board.create(free_port(), num_ranks=2)) as board:
        yield board


def make_participant(board: Board, num_requests: Callable[..., int]) -> tuple[Participant, BoardRendezvous]:
    runner = NumpyRunner(NumpyModel(()), 0, board.num_ranks)
    runner.num_requests = num_requests  # type: ignore[method-assign]
    live = SimpleNamespace(content_digest="ab" * 32)
    rendezvous = BoardRendezvous(board, 0)
    state: Any = SimpleNamespace(runner=runner, live=live, offloaded=None)
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
    assert not participant.due_number(is_decoding=False)
    assert (rendezvous.own.command, rendezvous.own.ballot) == (7, Ballot.FAILED)


def test_a_command_that_was_taken_back_meanwhile_stays_finished(board: Board) -> None:
    """Else rank 0 would be waited for, and ended, that has finished."""

    def take_back(*, begun: bool) -> int:
        participant._handovers.get_nowait()
        rendezvous.vote(7, Ballot.FINISHED)
        return 1

    participant, rendezvous = make_participant(board, take_back)
    hand_over(participant, 7)
    assert not participant.due_number(is_decoding=False)
    assert (rendezvous.own.command, rendezvous.own.ballot) == (7, Ballot.FINISHED)


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_rank_that_misses_a_boundary_has_no_keys_and_values_that_others_may_have_lost(
    board: Board, has_cache: bool
) -> None:
    participant, rendezvous = make_participant(board, lambda *, begun: 0)
    runner: Any = participant._state.runner
    if has_cache:
        runner.keep_kv_cache("cd" * 32)
    rendezvous.announce(CommandRecord(7, CommandKind.UPDATE, 1, 1, time.monotonic_ns(), "", 0))
    rendezvous.vote(7, Ballot.FINISHED)
    participant.run(7)
    assert runner.calls == (["keep_kv_cache", "rebuild_kv_cache"] if has_cache else [])
