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

_log = logging.getLogger(__name__)

_PERIOD_S = 0.25
_MAX_PERIOD_S = 5.0
"""Where a source does not answer, it is asked less and less often."""


class NewestVersion:
    """`tell` gets the version as text, again and again. `resolve_s`: how long one look may take."""

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
            period_s = _PERIOD_S if self._look() else min(2 * period_s, _MAX_PERIOD_S)

    def _look(self) -> bool:
        try:
            newest = self._source.newest_version(deadline_ns=time.monotonic_ns() + self._resolve_ns)
        except FastDeployRLError as error:
            _log.debug("event=newest_unknown reason=%r", str(error))
            return False
        if newest is not None:
            self._tell(str(newest))
        return newest is not None
