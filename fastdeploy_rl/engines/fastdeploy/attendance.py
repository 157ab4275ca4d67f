"""Which ranks' loops stand still for the status word, and what brings those here that FastDeploy's loop keeps away.

FastDeploy's loop looks at the word itself, on each rank, and writes it back; once its runner has returned it does
nothing but look, until it sees the value that it expects. So the word must not tell an outcome before every rank has
come, or one of them stands still alone; and a rank that begins to look late never sees a value that a trainer has
overwritten.

Owns the marks of the ranks, and the word's short changes that end such a wait. Refuses to know commands. Invariant: a
value that is no command is shown for a moment only, and only while some rank's loop is missing.
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
from fastdeploy_rl.lifecycle import LegacyCommand, LegacyStatus

_log = logging.getLogger(__name__)

_COMMANDS = frozenset(command.value for command in LegacyCommand)
_LOOK_S = 0.1
_PATIENCE_S = 3.0
"""Longer than a turn of the loop takes, but for the longest prefills."""
_SHOWN_S = 0.015
"""FastDeploy's loop looks every 10 ms."""


class Attendance:
    """Of the ranks of one engine, seen from one of them."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._offset = board, layout.attending_offset(rank)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, this rank's loop stands still for the word."""
        self._board.store(self._offset, 1)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """From here on it does not, whoever else still does."""
        self._board.store(self._offset, 0)

    def missing(self) -> list[int]:
        """Ranks that live and are not here."""
        lost = self._board.lost_ranks()
        ranks = (rank for rank in range(self._board.num_ranks) if rank not in lost)
        return [rank for rank in ranks if not self._board.load(layout.attending_offset(rank))]

    def await_all(self, within_s: float) -> None:
        """DeadlineExceededError names those that did not come."""
        begun, deadline_ns = time.monotonic(), time.monotonic_ns() + int(within_s * 1e9)
        if not self._board.wait_until(lambda: not self.missing(), deadline_ns) and (missing := self.missing()):
            raise DeadlineExceededError.waiting_for("loop that looks at the word", since_s=begun, missing=missing)


class LoopWatch:
    """A thread of rank 0's, inside a with statement, where FastDeploy's loop looks at the word.

    A command that waits while all loops wait for a trainer (the word reads CLEARED) is let in. A command in the word
    that some rank does not come for is taken out for a moment: that rank may still be waiting for the value which stood
    there before, and goes on when it sees it."""

    def __init__(self, attendance: Attendance, word: StatusWord, let_in: Callable[[], None]) -> None:
        """`let_in`: called while the word reads CLEARED."""
        self._attendance, self._word, self._let_in = attendance, word, let_in
        self._expected = LegacyStatus.NORMAL
        """What the ranks came for last, and so what a late one may still wait for."""
        self._missed_since: float | None = None
        self._is_overtaken = threading.Event()
        """A trainer was faster than the ranks' way back to their loops."""
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

    def note_left_for(self, value: LegacyStatus) -> None:
        """The ranks go back to FastDeploy's loop, which looks for that value. Where a trainer has stored another one
        already they are shown it."""
        self._expected = value
        if self._word.load() in _COMMANDS:
            self._is_overtaken.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            value = self._word.load()
            if value == LegacyStatus.CLEARED:
                self._let_in()
            if self._is_missed(value):
                self._show_expected(value)

    def _is_missed(self, value: int) -> bool:
        """Some rank does not come for a command: since it cannot, or for so long that it is no turn of the loop."""
        if value not in _COMMANDS or not self._attendance.missing():
            self._missed_since = None
            self._is_overtaken.clear()
            return False
        if self._is_overtaken.is_set():
            return True
        now = time.monotonic()
        self._missed_since = self._missed_since or now
        return now - self._missed_since >= _PATIENCE_S

    def _show_expected(self, value: int) -> None:
        _log.warning(
            "event=word_shown value=%s instead_of=%d for_ranks=%s",
            self._expected.name,
            value,
            self._attendance.missing(),
        )
        if self._word.exchange(value, self._expected) == value:
            time.sleep(_SHOWN_S)
            self._word.exchange(self._expected, value)
