"""When rank 0 came to each phase of a command, as it shows them on the board; told by the board's bell, not by
looking again and again."""

import threading
import time
from types import TracebackType
from typing import NamedTuple

from fastdeploy_rl.board.board import Board

LAST_S = 600.0


class Mark(NamedTuple):
    """From `at` (time.monotonic) on rank 0 was in this phase."""

    at: float
    phase: str


class PhaseWatch:
    """`marks` grows while its with statement lasts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.marks: list[Mark] = []
        self._is_over = False
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> "PhaseWatch":
        self._board = Board.attach(self._port)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        self._board.abandon_waits()
        self._watcher.join()
        self._board.close()

    def _watch(self) -> None:
        self._board.wait_until(self._look, time.monotonic_ns() + int(LAST_S * 1e9))

    def _look(self) -> bool:
        phase = self._board.read_rank(0).phase
        if not self.marks or self.marks[-1].phase != phase:
            self.marks.append(Mark(time.monotonic(), phase))
        return self._is_over
