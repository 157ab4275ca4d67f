"""What every test is held to: it leaves no segment, descriptor, thread or child process behind."""

import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import pytest

_SETTLE_S = 5.0
_SEGMENT = re.compile(r"fastdeploy_rl|model_weights_status|kv_cache_status|prefix_tree_status")
_OURS = re.compile(r"/dev/shm/|/memfd:|socket:|pipe:|anon_inode:\[eventfd\]|.*fastdeploy_rl|.*/pytest-of-")


class _Held(NamedTuple):
    segments: frozenset[str]
    descriptors: Counter[str]
    threads: frozenset[str]
    children: frozenset[int]


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Compares what this process holds after the test with what it held before."""
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
    children = _children() - {getattr(tracker, "_pid", None)}
    return _Held(_segments(), _descriptors(getattr(tracker, "_fd", None)), _threads(), frozenset(children))


def _left(before: _Held, after: _Held) -> list[str]:
    found = {
        "segments": sorted(name for name in after.segments - before.segments if not _is_of_another_run(name)),
        "descriptors": sorted((after.descriptors - before.descriptors).elements()),
        "threads": sorted(after.threads - before.threads),
        "children": sorted(after.children - before.children),
    }
    return [f"{what} {names}" for what, names in found.items() if names]


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
            kinds[re.sub(r"\[\d+\]$", "", target)] += 1
    return kinds


def _threads() -> frozenset[str]:
    return frozenset(f"{thread.name}#{thread.ident}" for thread in threading.enumerate())


def _children() -> set[int]:
    children: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(map(int, file.read_text().split()))
        except FileNotFoundError:
            continue
    return children


def _is_of_another_run(name: str) -> bool:
    """Several runs of the suite share one /dev/shm: what a stranger's live process has mapped is not our leak."""
    try:
        # By inode: a segment may have a second link, and a mapping shows the name it was opened by.
        inode = str(os.stat(f"/dev/shm/{name}").st_ino)
    except FileNotFoundError:
        return True
    mine = _descendants()
    others = (maps for maps in Path("/proc").glob("[0-9]*/maps") if int(maps.parent.name) not in mine)
    return any(inode in _mapped_inodes(maps) for maps in others)


def _mapped_inodes(maps: Path) -> set[str]:
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line.split()[4] for line in lines if "/dev/shm/" in line}


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return mine
