"""What every test is held to: it leaves no segment, descriptor, thread or process behind."""

import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

# A machine that does something else for a moment is no failure. In all else as this place has it, CI or not.
settings.register_profile("untimed", settings(deadline=None))
settings.load_profile("untimed")

_SETTLE_S = 5.0
_SEGMENT = re.compile(r"fastdeploy_rl|model_weights_status|kv_cache_status|prefix_tree_status")
_OURS = re.compile(r"/dev/shm/|/memfd:|socket:|pipe:|anon_inode:\[eventfd\]|.*fastdeploy_rl|.*/pytest-of-")
_RUN = "FASTDEPLOY_RL_TEST_RUN"


class _Held(NamedTuple):
    segments: frozenset[str]
    descriptors: Counter[str]
    threads: frozenset[str]
    processes: dict[int, int]
    """Process -> its parent."""


def pytest_configure() -> None:
    # Inherited by every process that a test starts, however deep, also after its parent died.
    os.environ[_RUN] = f"{os.getpid()}.{time.time_ns()}"
    # A run in a shell's background ignores Ctrl-C, and so would everything that it starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Compares what this run holds after the test with what it held before."""
    before = _held()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while left := _left(before, _held()):
        if time.monotonic() > deadline:
            pytest.fail("the test left behind: " + "; ".join(left))
        gc.collect()
        time.sleep(0.01)  # the loop is bounded by the deadline above: exiting peers need a moment


def _held() -> _Held:
    # The tracker that multiprocessing starts on first use stays for good, and is nobody's leak.
    tracker = resource_tracker._resource_tracker
    processes = (_children() | _processes_of_this_run()) - {os.getpid(), getattr(tracker, "_pid", None)}
    parents = {pid: _parent(pid) for pid in processes}
    return _Held(_segments(), _descriptors(getattr(tracker, "_fd", None)), _threads(), parents)


def _left(before: _Held, after: _Held) -> list[str]:
    segments = after.segments - before.segments
    found = {
        "segments": [] if segments and _is_shared_machine() else sorted(segments),
        "descriptors": sorted((after.descriptors - before.descriptors).elements()),
        "threads": sorted(after.threads - before.threads),
        "processes": _new_processes(before.processes, after.processes),
    }
    return [f"{what} {names}" for what, names in found.items() if names]


def _new_processes(before: dict[int, int], after: dict[int, int]) -> list[int]:
    """An engine that several tests share may start a worker again, in the place of one that died."""
    replaced = Counter(parent for pid, parent in before.items() if pid not in after and parent != os.getpid())
    new = []
    for pid in sorted(after.keys() - before.keys()):
        replaced[after[pid]] -= 1
        if replaced[after[pid]] < 0:
            new.append(pid)
    return new


def _segments() -> frozenset[str]:
    return frozenset(name for name in os.listdir("/dev/shm") if _SEGMENT.match(name))


def _descriptors(ignored: int | None) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if int(fd) > 2 and int(fd) != ignored and _OURS.match(target):
            # Libraries reopen sockets and pipes under new numbers: their count matters, not which they are.
            kinds[re.sub(r":\[\d+\]$", "", target)] += 1
    return kinds


def _threads() -> frozenset[str]:
    return frozenset(f"{thread.name}#{thread.ident}" for thread in threading.enumerate())


def _children() -> set[int]:
    children: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        children.update(map(int, _read(file).split()))
    return children


def _processes_of_this_run() -> set[int]:
    mark = f"{_RUN}={os.environ[_RUN]}"
    return {int(file.parent.name) for file in Path("/proc").glob("[0-9]*/environ") if mark in _read(file).split("\0")}


def _parent(pid: int) -> int:
    """0 for one that has ended."""
    fields = dict(line.split(":", 1) for line in _read(Path(f"/proc/{pid}/status")).splitlines())
    return int(fields.get("PPid", "0"))


def _is_shared_machine() -> bool:
    """Another run is using this package here and now; then a new segment may be its, and nothing tells whose it is."""
    ours = _processes_of_this_run() | {os.getpid()}
    strangers = (file for file in Path("/proc").glob("[0-9]*/maps") if int(file.parent.name) not in ours)
    return any("/fastdeploy_rl/_native." in _read(file) for file in strangers)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
