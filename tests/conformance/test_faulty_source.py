"""FaultySource: with nothing scripted it is the source inside; what is scripted happens at its call, and only there."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from source_suite import SourceSuite, assert_holds, plan_of, read, soon, weights

from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, NoPublicationError, NoSpaceError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.testing import Corrupt, Delay, Fail, FaultySource, Vanish


@pytest.fixture
def source(channel: Path) -> Iterator[FaultySource]:
    source = FaultySource(IpcSource(SourceConfig(channel)))
    yield source
    source.close()


class TestFaultySource(SourceSuite):
    pass


def stage(source: FaultySource):
    resolved = source.resolve(None, deadline_ns=soon())
    return resolved, source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())


def test_a_scripted_error_is_raised_at_its_call_and_holds_nothing(
    source: FaultySource, publisher: WeightPublisher
) -> None:
    source.then("stage", None, Fail(NoSpaceError("no room, as scripted")))
    publisher.publish(weights(1), step=1)
    stage(source)[1].release()
    with pytest.raises(NoSpaceError, match="as scripted"):
        stage(source)
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step, deadline_s=0.05)
    resolved, staged = stage(source)
    assert_holds(resolved.manifest, staged.segments, weights(4))
    assert source.num_calls == {"resolve": 3, "stage": 3, "release": 1, "trim": 0, "close": 0}
    staged.release()


def test_corrupt_bytes_differ_in_one_bit_and_the_published_ones_stay(
    source: FaultySource, publisher: WeightPublisher
) -> None:
    source.then("stage", Corrupt(offset=2))
    publisher.publish({"w": weights(1)["mask"]}, step=1)
    resolved, staged = stage(source)
    assert not staged.segments[0].is_writable
    found, true = (values["w"].view("u1") for values in (read(resolved.manifest, staged.segments), whole()))
    assert (found ^ true).tolist() == [0, 0, 1, 0, 0]
    staged.release()
    resolved, staged = stage(source)
    assert_holds(resolved.manifest, staged.segments, whole())
    staged.release()


def whole():
    return {"w": weights(1)["mask"]}


def test_a_delayed_call_goes_on_when_it_is_released(source: FaultySource, publisher: WeightPublisher) -> None:
    delay = Delay(threading.Event())
    source.then("resolve", delay)
    publisher.publish(weights(1), step=1)
    found = []
    asking = threading.Thread(target=lambda: found.append(source.resolve(None, deadline_ns=soon())))
    asking.start()
    assert delay.begun.wait(10)
    assert found == []
    delay.gate.set()
    asking.join(10)
    assert found[0].version.step == 1


def test_a_delayed_call_ends_at_its_deadline(source: FaultySource, publisher: WeightPublisher) -> None:
    source.then("resolve", Delay(threading.Event()))
    publisher.publish(weights(1), step=1)
    with pytest.raises(DeadlineExceededError, match="resolve stood still"):
        source.resolve(None, deadline_ns=time.monotonic_ns() + 20_000_000)
    assert source.resolve(None, deadline_ns=soon()).version.step == 1


def test_a_vanished_publication_stays_away_until_it_is_restored(
    source: FaultySource, publisher: WeightPublisher
) -> None:
    source.then("stage", Vanish())
    publisher.publish(weights(1), step=1)
    for _ in range(2):
        with pytest.raises(NoPublicationError, match="vanished"):
            stage(source)
    source.restore()
    stage(source)[1].release()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda source: source.then("resolve", Corrupt()),
        lambda source: source.then("fetch", Vanish()),
        lambda source: FaultySource(source, fetch=[None]),
    ],
)
def test_a_script_that_cannot_be_is_refused(source: FaultySource, wrong: Callable[[FaultySource], object]) -> None:
    with pytest.raises(ConfigurationError):
        wrong(source)


def test_a_byte_that_is_not_there_cannot_be_corrupted_and_no_lease_stays(
    source: FaultySource, publisher: WeightPublisher
) -> None:
    source.then("stage", Corrupt(segment=7))
    publisher.publish(weights(1), step=1)
    with pytest.raises(ConfigurationError, match="no byte 0 of segment 7"):
        stage(source)
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step, deadline_s=0.05)
