"""A copy of this working tree in which one thing at a time is broken, and runs of tests in it.

Owns the copy, what is planted in it, and what a run of pytest says of it. Refuses to know laws. Invariant: whatever is
planted is gone again afterwards, bytecode included; the tree that was copied is never written to."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import mutants_probe

from tests.process.private_shm import private_shm

_SHM_BYTES = 4 << 30
_RUN_S = 600.0
_GIT_S = 60.0
_BUILT = "fastdeploy_rl/_native*.so", "fastdeploy_rl/testing/_fake_cuda*.so"
_NOT_A_KILL = re.compile(r"\b(SyntaxError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError)\b")
"""What a patch says that makes no program any more: nothing was shown about a law then."""


class MutantsError(Exception):
    """The script itself is at fault, or its list is stale: nothing was shown."""


class Break(NamedTuple):
    """`text`, which stands exactly once in `file`, is replaced by `instead`."""

    file: str
    text: str
    instead: str


class Verdict(NamedTuple):
    """`killed_by`: the test that failed first, and why; empty where all passed. `test_seconds`: of each that ran."""

    killed_by: str
    reason: str
    seconds: float
    test_seconds: dict[str, float]

    @property
    def is_killed(self) -> bool:
        return bool(self.killed_by)


class Copy:
    """Of the tree at `root`, as it is now; use it in a with statement."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stack = ExitStack()
        self.path = Path()

    def __enter__(self) -> "Copy":
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastdeploy_rl_mutants")))
            self.path, self._scratch = place / "tree", place / "scratch"
            self._scratch.mkdir()
            for name in _files(self._root):
                target = self.path / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._root / name, target)
            # Where segments of a broken program are left in, nobody else looks.
            self._prefix = private_shm(_SHM_BYTES) or []
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def planted(self, breaks: Sequence[Break]) -> Iterator[None]:
        """MutantsError, and nothing is planted, where a text does not stand there exactly once, or what comes of it is
        no Python."""
        former = {name: (self.path / name).read_text() for name in dict.fromkeys(each.file for each in breaks)}
        broken = broken_texts(former, breaks)
        try:
            for name, text in broken.items():
                self._write(name, text)
            yield
        finally:
            for name, text in former.items():
                self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        path = self.path / name
        path.write_text(text)
        # Bytecode is told from its source by size and seconds: neither need differ here.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def run(self, tests: Sequence[str], test_s: float) -> Verdict:
        """Up to the first that fails, or takes longer than `test_s`. MutantsError where pytest did not come as far as
        a test, where another package was tested, or where what was planted is no program."""
        begun = time.monotonic()
        probe = self._scratch / "probe.json"
        probe.unlink(missing_ok=True)
        code, output = self._pytest([*tests, f"--timeout={test_s:.0f}"], probe)
        if code not in (0, 1) or not probe.exists():
            raise MutantsError(f"pytest ended with {code}, which says nothing:\n{output[-4000:]}")
        told = json.loads(probe.read_text())
        if not Path(told["package"]).is_relative_to(self.path):
            raise MutantsError(f"the tests were run on {told['package']}, which is not of the copy at {self.path}")
        seconds = time.monotonic() - begun
        if code == 0:
            return Verdict("", "", seconds, told["seconds"])
        first = told["failed"][0]
        if found := _NOT_A_KILL.search(first["text"]):
            raise MutantsError(
                f"{found[0]} in {first['test']}: what is planted is no program:\n{first['text'][-4000:]}"
            )
        return Verdict(first["test"], _why(first["text"]), seconds, told["seconds"])

    def _pytest(self, arguments: Sequence[str], probe: Path) -> tuple[int, str]:
        basetemp = self._scratch / "basetemp"
        options = ["-x", "-q", "-p", "mutants_probe", "-p", "no:cacheprovider", f"--basetemp={basetemp}"]
        command = [*self._prefix, sys.executable, "-m", "pytest", *options, *arguments]
        paths = [str(self.path), str(Path(__file__).parent)]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            mutants_probe.PLACE: str(probe),
            "XDG_RUNTIME_DIR": str(self._scratch),
        }
        with subprocess.Popen(
            command,
            cwd=self.path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=_RUN_S)
            except subprocess.TimeoutExpired as late:
                raise MutantsError(f"pytest did not end within {_RUN_S:.0f} s") from late
            finally:
                # What a broken program left running: all of it is of the session that was just made.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output


def broken_texts(former: dict[str, str], breaks: Sequence[Break]) -> dict[str, str]:
    """Text of each file with its breaks; MutantsError where that cannot be."""
    broken = dict(former)
    for each in breaks:
        found = broken[each.file].count(each.text)
        if found != 1:
            raise MutantsError(f"{each.file} has {found} times, not once: {each.text!r}")
        broken[each.file] = broken[each.file].replace(each.text, each.instead)
    for name, text in broken.items():
        try:
            compile(text, name, "exec")
        except SyntaxError as error:
            raise MutantsError(f"{name}: what is planted is no Python: {error}") from error
    return broken


def _files(root: Path) -> list[str]:
    """Of the working tree, those that are not committed yet as well, the native core, and FakeCuda's driver."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True, timeout=_GIT_S).stdout
    built = [str(path.relative_to(root)) for pattern in _BUILT for path in root.glob(pattern)]
    return [name for name in [*dict.fromkeys(filter(None, listed.split("\0"))), *built] if (root / name).is_file()]


def _why(text: str) -> str:
    """One line of a failure: the first that pytest marks as the error."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (lines or text.strip().splitlines() or [""])[0][:200]
