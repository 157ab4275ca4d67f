"""Which version was published last: looked up now and then, so that a request that wants a fresh one need not wait for
it.

Owns the thread that looks. Refuses to know who wants it. Invariant: what it told last was published; a source that does
not answer, or cannot say it without bringing bytes, changes nothing.
"""

import logging
import threading
import time
from collections.abc import Callable

from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.sources.base import WeightSource
from fastdeploy_rl.update.transaction import as_step_failure

_log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_MAX_PERIOD_S = 5.0
"""Where a source does not answer, or takes its time, it is asked less and less often."""
_MAX_SHARE = 0.05
"""Of the time that looking may take, up to that."""


class NewestVersion:
    """`tell` gets the version as text, again and again; empty where nothing is published, or nobody can say.
    `resolve_s`: how long one look may take."""

    def __init__(self, source: WeightSource, tell: Callable[[str], None], resolve_s: float) -> None:
        self._source = source
        self._tell = tell
        self._resolve_ns = int(resolve_s * 1e9)
        self._is_stopping = threading.Event()
        self.thread = threading.Thread(target=self._look_out, name="fastdeploy_rl-newest", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """The thread ends when its present look does."""
        self._is_stopping.set()

    def _look_out(self) -> None:
        period_s = _PERIOD_S
        while not self._is_stopping.wait(period_s):
            begun = time.monotonic()
            is_answered = self._look()
            least_s = _PERIOD_S if is_answered else min(2 * period_s, _MAX_PERIOD_S)
            period_s = min(max(least_s, (time.monotonic() - begun) / _MAX_SHARE), _MAX_PERIOD_S)

    def _look(self) -> bool:
        try:
            with as_step_failure("look for the newest version", 0):
                newest = self._source.newest_version(deadline_ns=time.monotonic_ns() + self._resolve_ns)
        except FastDeployRLError as error:
            _log.debug("event=newest_unknown reason=%r", str(error))
            return False
        self._tell("" if newest is None else str(newest))
        return True
