"""Rank 0's coordinator by itself: its threads and their end."""

import threading
from collections.abc import Iterator

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import DeadlineExceededError
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.coordinator import Coordinator
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


def test_a_thread_that_does_not_end_is_named(board: Board) -> None:
    coordinator = Coordinator(
        board=board,
        rendezvous=BoardRendezvous(board, 0),
        source=IpcSource(SourceConfig(board.run_dir / "channel")),
        load_strategy="ipc",
        deadlines=Deadlines(stop_s=0.01),
        is_restarted_on_death=False,
        on_fault=lambda reason: None,
        wake=lambda: None,
    )
    goes_on = threading.Event()
    stubborn = threading.Thread(target=goes_on.wait, args=(20.0,), name="stubborn")
    stubborn.start()
    coordinator._threads = [stubborn]
    with pytest.raises(DeadlineExceededError, match="no end of stubborn on rank 0"):
        coordinator.stop()
    goes_on.set()
    stubborn.join(20)
