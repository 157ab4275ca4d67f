"""The engine's side of a board's request slots without an engine, and what tests say about slots."""

import threading
import time
from collections.abc import Callable

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.update.requests import BoardRequest, next_board_request, unread_commands


class Answering:
    """The engine's side of the slots: answers every request with the version it asked for, once the gate is open."""

    def __init__(self, board: Board) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.answered: list[str] = []
        self.requests: list[BoardRequest] = []
        self._board = board
        self._files = RankFiles(board.run_dir)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer_all)

    def __enter__(self) -> "Answering":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.gate.set()
        self._board.ring_doorbell()
        self._thread.join(10)

    def _answer_all(self) -> None:
        heard = 0
        while not self._is_over.is_set():
            heard = self._board.wait_doorbell(heard, soon(0.05))
            while (request := next_board_request(self._board)) is not None:
                self.begun.set()
                self.gate.wait(60)
                self.answered.append(request.version)
                self.requests.append(request)
                number, kind = len(self.answered), request.kind.name.lower()
                report = UpdateReport(number, kind, "done", request.version, "", 0.0, 0.0, [])
                self._files.write_report(report, unread_commands(self._board))
                request.finish(report)


def soon(seconds: float = 20.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def states(board: Board) -> list[SlotState]:
    """Of the slots that are not free."""
    words = [board.load(layout.request_offset(slot)) for slot in range(layout.NUM_REQUEST_SLOTS)]
    return sorted(SlotState(word & 7) for word in words if word)


def await_states(board: Board, wanted: Callable[[list[SlotState]], bool]) -> None:
    assert board.wait_until(lambda: wanted(states(board)), soon()), states(board)
