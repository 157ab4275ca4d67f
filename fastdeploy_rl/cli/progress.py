"""A progress bar for work that takes longer than a moment, where somebody watches; nothing where output is piped.

Owns when it appears. Refuses to know what the work is. Invariant: standard output is left alone, and the bar is gone
when the work is done."""

import sys
import time
from types import TracebackType
from typing import Any

_APPEARS_AFTER_S = 1.0


class SlowProgress:
    """A context manager; `update(done, total)` as often as one likes. Drawn on standard error, and only on a
    terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._is_drawable = True
        self._bar: Any = None
        self._task: Any = None

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes."""
        if self._bar is None and self._is_due():
            self._start(total)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def _start(self, total: int) -> None:
        try:
            self._bar = _make_bar()
        except ImportError:  # rich comes with [engine], which a trainer's environment need not have
            self._is_drawable = False
            return
        self._task = self._bar.add_task(self._what, total=total)
        self._bar.start()

    def _is_due(self) -> bool:
        return self._is_drawable and sys.stderr.isatty() and time.monotonic() - self._began > _APPEARS_AFTER_S

    def __enter__(self) -> "SlowProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _make_bar() -> Any:
    # Drawn by few: everybody else need not wait for the import.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
