"""Words between real processes: compare-and-swap, futex, watcher, signals."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import numpy as np
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl.memory.shared_segment import SharedSegment

FOREVER_NS = 60_000_000_000

PRELUDE = """
import sys, time
import numpy as np
from fastdeploy_rl import _native
from fastdeploy_rl.memory.shared_segment import SharedSegment
mapping = SharedSegment.attach(sys.argv[1], writable=True).mapping
def deadline(): return time.monotonic_ns() + 60_000_000_000
"""


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    segment = SharedSegment.create(f"fastdeploy_rl_test_words.{uuid4().hex[:12]}", 4096)
    yield segment
    segment.unlink()
    segment.close()


@contextmanager
def process(segment: SharedSegment, script: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of its own that runs `script`; it has ended when the block is left."""
    command = [sys.executable, "-c", PRELUDE + script, segment.name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with child:
            yield child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def result_of(child: "subprocess.Popen[str]") -> str:
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return out.strip()


def await_word(segment: SharedSegment, offset: int, old: int) -> None:
    assert _native.futex_wait_i32(segment.mapping, offset, old, time.monotonic_ns() + FOREVER_NS)


def test_increments_by_swap_and_by_addition_are_never_lost(segment: SharedSegment) -> None:
    script = """
for _ in range(5000):
    _native.add_u64(mapping, 0, 1)
    while True:
        seen = _native.load_u64(mapping, 8)
        if _native.compare_exchange_u64(mapping, 8, seen, seen + 1) == seen:
            break
"""
    with process(segment, script) as first, process(segment, script) as second, process(segment, script) as third:
        for child in (first, second, third):
            result_of(child)
    assert (_native.load_u64(segment.mapping, 0), _native.load_u64(segment.mapping, 8)) == (15_000, 15_000)


def test_one_of_many_claims_wins(segment: SharedSegment) -> None:
    script = """
_native.futex_wait_i32(mapping, 0, 0, deadline())
print(_native.compare_exchange_i32(mapping, 4, 0, int(sys.argv[1][-4:], 16) + 1))
"""
    with process(segment, script) as first, process(segment, script) as second:
        _native.ring_bell(segment.mapping, 0)
        seen = sorted(int(result_of(child)) for child in (first, second))
    claimed = _native.load_i32(segment.mapping, 4)
    assert claimed != 0
    assert seen == [0, claimed]


def test_bell_in_one_process_wakes_a_sleeper_in_another(segment: SharedSegment) -> None:
    script = """
_native.ring_bell(mapping, 4)
woken = _native.futex_wait_i32(mapping, 0, 0, deadline())
print(woken, _native.load_i32(mapping, 0))
"""
    with process(segment, script) as child:
        await_word(segment, 4, 0)
        _native.ring_bell(segment.mapping, 0)
        assert result_of(child) == "True 1"


def test_two_processes_play_ping_pong(segment: SharedSegment) -> None:
    script = """
for ball in range(200):
    assert _native.futex_wait_i32(mapping, 0, ball, deadline())
    _native.ring_bell(mapping, 4)
"""
    with process(segment, script) as child:
        for ball in range(200):
            _native.ring_bell(segment.mapping, 0)
            await_word(segment, 4, ball)
        result_of(child)
    assert _native.load_i32(segment.mapping, 4) == 200


def test_wake_says_how_many_slept(segment: SharedSegment) -> None:
    script = "_native.ring_bell(mapping, 4); print(_native.futex_wait_i32(mapping, 0, 0, deadline()))"
    with process(segment, script) as first, process(segment, script) as second:
        await_word(segment, 4, 0)
        await_word(segment, 4, 1)
        # A waiter that finds the word unchanged goes to sleep again, so waking alone does no harm; both sleep soon.
        limit = time.monotonic() + 30
        while _native.futex_wake_i32(segment.mapping, 0) != 2 and time.monotonic() < limit:
            time.sleep(0)
        _native.store_i32(segment.mapping, 0, 1)
        _native.futex_wake_i32(segment.mapping, 0)
        assert [result_of(first), result_of(second)] == ["True", "True"]


def test_interrupt_comes_through_a_sleeping_wait(segment: SharedSegment) -> None:
    script = """
try:
    _native.ring_bell(mapping, 4)
    _native.futex_wait_i32(mapping, 0, 0, deadline())
except KeyboardInterrupt:
    print("interrupted")
"""
    with process(segment, script) as child:
        await_word(segment, 4, 0)
        child.send_signal(signal.SIGINT)
        assert result_of(child) == "interrupted"


def test_signal_with_a_quiet_handler_does_not_end_the_wait(segment: SharedSegment) -> None:
    script = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: _native.ring_bell(mapping, 8))
_native.ring_bell(mapping, 4)
print(_native.futex_wait_i32(mapping, 0, 0, deadline()))
"""
    with process(segment, script) as child:
        await_word(segment, 4, 0)
        child.send_signal(signal.SIGUSR1)
        await_word(segment, 8, 0)
        _native.ring_bell(segment.mapping, 0)
        assert result_of(child) == "True"


def test_watcher_hears_a_plain_numpy_store_of_a_foreign_process(segment: SharedSegment) -> None:
    """The other side knows neither futex nor us: it stores into an array, as FastDeploy's signals do."""
    script = """
sys.stdin.readline()
np.frombuffer(mapping, np.int32)[0] = 1
print("stored")
"""
    watcher = _native.WordWatcher(segment.mapping, 0, segment.mapping, 4, 1000)
    try:
        with process(segment, script) as child:
            assert _native.load_i32(segment.mapping, 4) == 0
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
            await_word(segment, 4, 0)
            assert result_of(child) == "stored"
        assert np.frombuffer(segment.mapping, np.int32)[0] == 1
    finally:
        watcher.stop()


def test_watcher_hears_each_store_that_it_can_see(segment: SharedSegment) -> None:
    script = """
words = np.frombuffer(mapping, np.int32)
for value in (1, 0, -1, -2):
    heard = _native.load_i32(mapping, 4)
    words[0] = value
    assert _native.futex_wait_i32(mapping, 4, heard, deadline())
print("done")
"""
    watcher = _native.WordWatcher(segment.mapping, 0, segment.mapping, 4, 500)
    try:
        with process(segment, script) as child:
            assert result_of(child) == "done"
        assert _native.load_i32(segment.mapping, 4) == 4
    finally:
        watcher.stop()
