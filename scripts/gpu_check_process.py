"""One part of scripts/gpu_check as a process of its own: what hangs in a driver call can only be ended from outside.

Owns the process, its time limit and the lines it writes: a JSON object for each check. Knows nothing of CUDA."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PARTS = Path(__file__).with_name("gpu_check_parts.py")


class Check(NamedTuple):
    """`outcome`: passed, failed or skipped, the last two with a reason."""

    part: str
    name: str
    outcome: str
    seconds: float
    reason: str
    figures: dict[str, Any]


class PartSettings(NamedTuple):
    """`folder`: where processes meet; it is empty. `num_bytes`: of one copy."""

    part: str
    folder: str
    device: str
    num_bytes: int
    arrays: str


class SkippedError(Exception):
    """This check cannot run here; the text says why."""


class CheckFailedError(Exception):
    """Something was not as it must be; the text says what."""


def expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise CheckFailedError(f"not so: {what}")


class Recorder:
    """In the part's process: each `check` becomes a line on what was its standard output. Whatever else writes there,
    writes to standard error from now on."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Gives the figures, to be filled in. Nothing leaves it: a check that fails is told, and the next one runs."""
        figures: dict[str, Any] = {}
        began = time.monotonic()
        outcome, reason = "passed", ""
        try:
            yield figures
        except SkippedError as error:
            outcome, reason = "skipped", str(error)
        except Exception as error:
            traceback.print_exc()
            outcome, reason = "failed", f"{type(error).__name__}: {error}"
        check = Check(self._part, name, outcome, time.monotonic() - began, reason, figures)
        print(json.dumps(check._asdict()), file=self._lines, flush=True)


def run_part(settings: PartSettings, limit_s: float) -> Iterator[Check]:
    """The checks as they end; one more, failed, when the process was ended at its limit or ended badly by itself. It
    is gone afterwards, with all that it started."""
    if limit_s <= 0:
        yield _whole(settings.part, "no time was left for it")
        return
    command = [sys.executable, str(PARTS), *map(str, settings)]
    timed_out = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = threading.Timer(limit_s, _end_late, [process, timed_out])
        timer.start()
        try:
            yield from (Check(**json.loads(line)) for line in process.stdout or ())
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            timer.cancel()
            timer.join()
            _end(process)
    if timed_out.is_set():
        yield _whole(settings.part, f"not done after {limit_s:.0f} s")
    elif process.returncode:
        yield _whole(settings.part, f"its process ended with code {process.returncode}")


def _whole(part: str, reason: str) -> Check:
    return Check(part, "whole", "failed", 0.0, reason, {})


def _end_late(process: "subprocess.Popen[str]", timed_out: threading.Event) -> None:
    timed_out.set()
    _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """With its children, which are in its group. It was not waited for yet, so that the number is still its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
