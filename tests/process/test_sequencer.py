"""The Sequencer across threads and processes: the order is kept, and who waits in vain is told why."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, LifecycleError, SegmentError
from fastdeploy_rl.testing import Sequencer

PEER = """
import sys
from fastdeploy_rl.testing import Sequencer
order = Sequencer.attach(sys.argv[1])
for point in sys.argv[2:]:
    with order.at(point):
        print(point, flush=True)
order.close()
"""


def test_points_are_passed_in_order_whoever_comes_first(tmp_path: Path):
    """Two processes and two threads, each with every fourth point, write down what they pass."""
    points = [f"{number}" for number in range(20)]
    with Sequencer.create(points) as order, open(tmp_path / "passed", "ab", buffering=0) as passed:
        peers = [
            subprocess.Popen([sys.executable, "-c", PEER, order.name, *points[who::4]], stdout=passed) for who in (0, 1)
        ]
        threads = [threading.Thread(target=pass_all, args=(order, points[who::4], passed)) for who in (2, 3)]
        for thread in threads:
            thread.start()
        order.await_end()
        for thread in threads:
            thread.join(10)
        assert [peer.wait(10) for peer in peers] == [0, 0]
    assert (tmp_path / "passed").read_text().split() == points


def pass_all(order: Sequencer, points: list[str], passed: BinaryIO) -> None:
    for point in points:
        with order.at(point):
            passed.write(f"{point}\n".encode())


def test_a_point_that_nobody_passes_is_named():
    with Sequencer.create(["first", "second"], deadline_s=0.02) as order:
        with pytest.raises(DeadlineExceededError, match="nobody passed 'first'"):
            order.reach("second")
        order.reach("first")
        order.reach("second")
        order.await_end()


def test_a_block_that_raises_breaks_the_sequence_for_all():
    with Sequencer.create(["first", "second", "third"]) as order:
        order.reach("first")
        with pytest.raises(ZeroDivisionError), order.at("second"):
            raise ZeroDivisionError
        with pytest.raises(LifecycleError, match="broke at 'second'"):
            order.reach("third")
        with pytest.raises(LifecycleError, match="broke at 'second'"):
            order.await_end()


def test_a_point_is_passed_once():
    with Sequencer.create(["first", "second"]) as order:
        order.reach("first")
        with pytest.raises(LifecycleError, match="'first' was passed already"):
            order.reach("first")
        order.reach("second")


def test_a_point_is_passed_by_one_also_while_its_block_runs():
    with Sequencer.create(["first", "second"], deadline_s=0.02) as order:
        with order.at("first"):
            with pytest.raises(LifecycleError, match=r"'first' .*is just being passed"):
                order.reach("first")
            with pytest.raises(DeadlineExceededError, match="nobody passed 'first'"):
                order.reach("second")
        order.reach("second")
        order.await_end()


@pytest.mark.parametrize("points", [[], ["a", "a"], ["x" * 70_000]])
def test_points_that_cannot_be_a_sequence_are_refused(points: list[str]):
    with pytest.raises(ConfigurationError):
        Sequencer.create(points)


def test_unknown_points_and_sequences_are_errors():
    with Sequencer.create(["a"]) as order, pytest.raises(ConfigurationError, match="no point 'b'; the sequence has a"):
        order.reach("b")
    with pytest.raises(SegmentError):
        Sequencer.attach("fastdeploy_rl_sequencer.none")
