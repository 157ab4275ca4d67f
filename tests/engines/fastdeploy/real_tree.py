"""FastDeploy's own code, where FASTDEPLOY_SRC names a source tree of it (2.6-dev): run in processes apart.

An import of `fastdeploy` rewires the loggers, leaves log files and warns; so it happens in a process of its own, which
is asked to call functions of modules beside this one (`real_peer.py` is its other side). A tree that is named and does
not import is an error, not a skip."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

VARIABLE = "FASTDEPLOY_SRC"
ROOT = Path(__file__).resolve().parents[3]
_HERE = "tests.engines.fastdeploy"
_PACKAGES = "triton py-cpuinfo gunicorn redis crcmod opentelemetry-sdk pyzmq partial-json-parser pynvml aiozmq"
_REASON = (
    f"{VARIABLE} names no FastDeploy source tree: check out FastDeploy (2.6-dev), "
    f"`.venv/bin/pip install {_PACKAGES}`, then `{VARIABLE}=/path scripts/test tests/engines/fastdeploy`"
)
_START_S = 60.0


def skip_without_real_tree() -> None:
    """At the head of a test module: leaves it out, with the reason."""
    if not os.environ.get(VARIABLE):
        pytest.skip(_REASON, allow_module_level=True)


class RealCaseError(Exception):
    """What FastDeploy's process, or a function in it, came to instead of an answer."""


class RealPeer:
    """A process that has imported FastDeploy; lives in a `with`. `scratch`: a directory for all that it writes."""

    def __init__(self, scratch: Path, **environment: str) -> None:
        self._log = scratch / "stderr.txt"
        scratch.mkdir(parents=True, exist_ok=True)
        self._environment = os.environ | environment_of(scratch) | environment

    def __enter__(self) -> "RealPeer":
        with open(self._log, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", f"{_HERE}.real_peer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                cwd=ROOT,
            )
        self._answer(_START_S)
        return self

    def call(self, function: str, *, deadline_s: float = 40.0, **arguments: Any) -> Any:
        """`MODULE.FUNCTION` of a module beside this one, with JSON in and out. RealCaseError with what it raised."""
        line = json.dumps({"function": f"{_HERE}.{function}", "arguments": arguments})
        with suppress(BrokenPipeError):  # there is no answer, then
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        return self._answer(deadline_s)

    def _answer(self, within_s: float) -> Any:
        """One line; read unbuffered, so that nothing of the next is taken."""
        deadline, line = time.monotonic() + within_s, b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self._process.send_signal(signal.SIGABRT)  # it says where its threads are
                self._process.wait(10)
                raise RealCaseError(f"no answer within {within_s} s; {self._tail()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise RealCaseError(f"FastDeploy's process ended with {self._process.wait(10)}; {self._tail()}")
            line += piece
        answer = json.loads(line)
        if "raised" in answer:
            raise RealCaseError(answer["raised"])
        return answer["returned"]

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("INFO "))[-8000:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


def environment_of(scratch: Path) -> dict[str, str]:
    """What an import of FastDeploy writes goes into `scratch`."""
    return {
        "PYTHONPATH": os.pathsep.join([os.environ.get(VARIABLE, ""), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "FD_LOG_DIR": str(scratch / "log"),
        "PROMETHEUS_MULTIPROC_DIR": str(scratch),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
