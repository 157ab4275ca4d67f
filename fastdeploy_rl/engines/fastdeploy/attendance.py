"""Which ranks' loops stand still for the status word, and what brings those here that FastDeploy's loop keeps away.

FastDeploy's loop looks at the word itself, on each rank, and writes it back; once its runner has returned it does
nothing but look, until it sees the value that it expects. So the word must not tell an outcome before every rank has
come, or one of them stands still alone; and a rank that begins to look late never sees a value that a trainer has
overwritten.

Owns the marks of the ranks, and the word's short changes that end such a wait. Refuses to know commands. Invariant:
what is not true is shown for a moment only, and only to a rank that looks for it in vain.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import StatusWord
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import DeadlineExceededError
from fastdeploy_rl.lifecycle import LegacyStatus

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_PATIENCE_S = 1.5
"""FastDeploy's loop looks every 10 ms, but once a second where its process groups stay while weights are away."""
_SHOWN_S = 0.015
_TELL_S = 10.0
"""Between two lines in the log."""

_ELSEWHERE, _HERE = 0, 1
_LOOKS_FOR = {LegacyStatus.NORMAL: 2, LegacyStatus.CLEARED: 3}
_EXPECTED = {mark: status for status, mark in _LOOKS_FOR.items()}


class Attendance:
    """Of the ranks of one engine, seen from one of them, whose mark it keeps."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._offset = board, layout.attending_offset(rank)
        self._mark, self._wanted = _ELSEWHERE, LegacyStatus.NORMAL

    def _show(self, mark: int) -> None:
        self._mark = mark
        self._board.store(self._offset, mark)

    @contextmanager
    def here(self, wanted: LegacyStatus) -> Iterator[None]:
        """Inside, this rank's loop stands still for the word; afterwards FastDeploy's looks for `wanted` there."""
        self._wanted = wanted
        self._show(_HERE)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """From here on it looks, whoever else still stands still."""
        if self._mark == _HERE:
            self._show(_LOOKS_FOR[self._wanted])

    def note_turn(self) -> None:
        """It has found what it looked for: its loop turns."""
        if self._mark != _ELSEWHERE:
            self._show(_ELSEWHERE)

    def _marks(self) -> dict[int, int]:
        """Of the ranks that live."""
        lost = self._board.lost_ranks()
        ranks = (rank for rank in range(self._board.num_ranks) if rank not in lost)
        return {rank: self._board.load(layout.attending_offset(rank)) for rank in ranks}

    def missing(self) -> list[int]:
        """Ranks that live and do not stand still for the word."""
        return [rank for rank, mark in self._marks().items() if mark != _HERE]

    def looking(self) -> dict[int, LegacyStatus]:
        """Ranks that live and were not seen since they began to look, and what for."""
        return {rank: _EXPECTED[mark] for rank, mark in self._marks().items() if mark in _EXPECTED}

    def await_all(self, within_s: float) -> None:
        """DeadlineExceededError names those that did not come."""
        begun, deadline_ns = time.monotonic(), time.monotonic_ns() + int(within_s * 1e9)
        if not self._board.wait_until(lambda: not self.missing(), deadline_ns) and (missing := self.missing()):
            raise DeadlineExceededError.waiting_for("loop that looks at the word", since_s=begun, missing=missing)


class LoopWatch:
    """A thread of rank 0's, inside a with statement, where FastDeploy's loop looks at the word.

    A command that waits while all loops wait for a trainer (the word reads CLEARED) is let in. A rank that looks for a
    value which a trainer has overwritten is shown it for a moment, as often as it takes."""

    def __init__(self, attendance: Attendance, word: StatusWord, let_in: Callable[[], None]) -> None:
        """`let_in`: called while the word reads CLEARED."""
        self._attendance, self._word, self._let_in = attendance, word, let_in
        self._told_s = -_TELL_S
        self._since: dict[int, float] = {}
        """Of ranks that look in vain."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fastdeploy_rl-loop-watch", daemon=True)

    def __enter__(self) -> "LoopWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(Deadlines.let_go_s)

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            value = self._word.load()
            if value == LegacyStatus.CLEARED:
                self._let_in()
            for expected in self._looked_for_in_vain(value):
                self._show(expected, value)

    def _looked_for_in_vain(self, value: int) -> set[LegacyStatus]:
        """For so long that FastDeploy's loop has not merely not looked again."""
        looking = {rank: expected for rank, expected in self._attendance.looking().items() if expected != value}
        now = time.monotonic()
        self._since = {rank: self._since.get(rank, now) for rank in looking}
        return {looking[rank] for rank, since in self._since.items() if now - since >= _PATIENCE_S}

    def _show(self, expected: LegacyStatus, value: int) -> None:
        if time.monotonic() - self._told_s > _TELL_S:
            self._told_s, ranks = time.monotonic(), sorted(self._since)
            _log.warning("event=word_shown value=%s instead_of=%d for_ranks=%s", expected.name, value, ranks)
        if self._word.exchange(value, expected) == value:
            time.sleep(_SHOWN_S)
            self._word.exchange(expected, value)
