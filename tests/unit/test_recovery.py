"""Who counts as dead, where nobody but rank 0 looks: whose lock is free, and who did not leave in order."""

from collections.abc import Iterator

import pytest

from fastdeploy_rl.board.board import Board, rank_lock_path
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.conductor import Conductor
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.update.recovery import READY, STOPPED, Recovery
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=2)
    yield board
    board.close()


@pytest.fixture
def seats(board: Board) -> list[BoardRendezvous]:
    seats = [BoardRendezvous(board, rank) for rank in range(2)]
    for seat in seats:
        seat.show(phase=READY)
    return seats


def recovery_of(board: Board, seats: list[BoardRendezvous], is_restarted_on_death: bool) -> Recovery:
    conductor = Conductor(seats[0], RankFiles(board.run_dir), 0.1, None)
    source = IpcSource(SourceConfig(board.run_dir / "channel"))
    recovery = Recovery(seats[0], conductor, source, Deadlines(), is_restarted_on_death=is_restarted_on_death)
    recovery.start("")
    return recovery


def test_a_rank_whose_lock_is_free_is_dead(board: Board, seats: list[BoardRendezvous]) -> None:
    recovery = recovery_of(board, seats, is_restarted_on_death=False)
    with OwnerLock(rank_lock_path(board.run_dir, 1)):
        assert not recovery.look_for_dead(board.run_dir)
        assert not recovery.is_needed()
    assert recovery.look_for_dead(board.run_dir)
    assert board.lost_ranks() == {1}
    assert recovery.is_needed()
    assert "ranks [1] died" in recovery.reason()


def test_a_rank_that_left_in_order_is_not_dead(board: Board, seats: list[BoardRendezvous]) -> None:
    recovery = recovery_of(board, seats, is_restarted_on_death=False)
    seats[1].show(phase=STOPPED)
    assert not recovery.look_for_dead(board.run_dir)
    assert board.lost_ranks() == frozenset()


def test_whoever_starts_ranks_again_says_who_is_dead(board: Board, seats: list[BoardRendezvous]) -> None:
    """A mark of rank 0's could come after the successor."""
    recovery = recovery_of(board, seats, is_restarted_on_death=True)
    assert not recovery.look_for_dead(board.run_dir)
    board.mark_lost(1)
    assert recovery.look_for_dead(board.run_dir)
    assert recovery.is_needed()
