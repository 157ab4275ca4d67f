"""Rank 0 calls and releases, another rank listens: on a real board, with both at the test's command."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.engines.fastdeploy.boundary import Boundary
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError, StepFailedError
from tests.process.numpy_engine import free_port

MEET_S = 0.2


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=2)
    yield board
    board.close()


@pytest.fixture
def leader(board: Board) -> Boundary:
    return Boundary(board, 0)


@pytest.fixture
def follower(board: Board) -> Boundary:
    return Boundary(board, 1)


def soon() -> int:
    return time.monotonic_ns() + 5_000_000_000


def test_who_listens_hears_calls_in_order_and_then_the_release(leader: Boundary, follower: Boundary) -> None:
    leader.call(7)
    assert follower.listen(soon()).number == 7
    leader.call(8)
    assert follower.listen(soon()).number == 8
    leader.release(8, StepFailedError("it was refused"))
    record = follower.listen(soon())
    assert follower.is_release(record)
    assert (record.number, record.error, record.reason) == (8, "StepFailedError", "it was refused")


def test_a_call_is_heard_once(leader: Boundary, follower: Boundary) -> None:
    leader.call(7)
    follower.listen(soon())
    with pytest.raises(DeadlineExceededError, match=r"no call of rank 0 .*ranks \[0\] missing"):
        follower.listen(time.monotonic_ns() + 10_000_000)


def test_a_call_to_a_round_is_for_that_round_alone(leader: Boundary, follower: Boundary) -> None:
    leader.call(7, at_round=3)
    assert [follower.number_at(turn) for turn in (1, 2, 3, 4)] == [0, 0, 7, 0]


def test_who_listens_is_not_called_by_what_was_for_a_round(leader: Boundary, follower: Boundary) -> None:
    leader.call(7, at_round=3)
    with pytest.raises(DeadlineExceededError):
        follower.listen(time.monotonic_ns() + 10_000_000)
    leader.call(7)
    assert follower.listen(soon()).number == 7


def test_a_release_that_nobody_waits_for_any_more_is_for_nobody(leader: Boundary, follower: Boundary) -> None:
    leader.release(0)
    with pytest.raises(DeadlineExceededError, match=r"ranks \[1\] missing"):
        leader.meet(MEET_S)
    leader.leave()
    follower.skip_stale()
    with pytest.raises(DeadlineExceededError):
        follower.listen(time.monotonic_ns() + 10_000_000)


def test_a_release_that_rank_0_still_waits_for_reaches_who_comes_late(leader: Boundary, follower: Boundary) -> None:
    leader.release(0)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(leader.meet, 5.0)
        follower.skip_stale()
        assert follower.is_release(follower.listen(soon()))
        follower.meet(5.0)
        meeting.result(5)


def test_a_meeting_that_failed_does_not_spoil_those_of_the_next_call(leader: Boundary, follower: Boundary) -> None:
    leader.call(7)
    follower.listen(soon())
    with pytest.raises(DeadlineExceededError, match=r"no meeting of the ranks .*ranks \[1\] missing"):
        leader.meet(MEET_S)
    leader.call(8)
    follower.listen(soon())
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(leader.meet, 5.0)
        follower.meet(5.0)
        meeting.result(5)


def test_who_waits_for_a_rank_0_that_is_dead_is_told(board: Board, leader: Boundary) -> None:
    other = Board.attach(board.port)
    follower = Boundary(other, 1)
    board.close()
    with pytest.raises(PeerLostError, match="rank 0"):
        follower.listen(None)
    other.close()


def test_a_reason_of_any_length_arrives_whole_in_its_characters(leader: Boundary, follower: Boundary) -> None:
    leader.release(0, StepFailedError("ü" * 500))
    reason = follower.listen(soon()).reason
    assert 100 < len(reason) < 500
    assert set(reason) == {"ü"}
