"""The `ipc` source: the common suite, and what only shared memory has."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from source_suite import SourceSuite, assert_holds, plan_of, soon, weights

from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, ManifestError, NoPublicationError
from fastdeploy_rl.memory.shared_segment import unlink_segment
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture
def publisher(channel: Path) -> Iterator[WeightPublisher]:
    with WeightPublisher(channel, max_arenas=2) as publisher:
        yield publisher


@pytest.fixture
def source(channel: Path) -> Iterator[IpcSource]:
    source = registry.create("ipc", SourceConfig(channel))
    assert isinstance(source, IpcSource)
    yield source
    source.close()


class TestIpcSource(SourceSuite):
    pass


def _changed(resolved: ResolvedPublication, **changes: object) -> ResolvedPublication:
    segment = msgspec.structs.replace(resolved.manifest.segments[0], **changes)
    return resolved._replace(manifest=msgspec.structs.replace(resolved.manifest, segments=(segment,)))


def test_an_engine_may_look_before_its_trainer_has_come(source: IpcSource, channel: Path) -> None:
    with pytest.raises(NoPublicationError, match="no channel"):
        source.resolve(None, deadline_ns=soon())
    assert not channel.exists()
    with WeightPublisher(channel) as publisher:
        published = publisher.publish(weights(1), step=1)
        assert source.resolve(None, deadline_ns=soon()).version == published.version


def test_a_lease_keeps_the_publisher_out_until_it_is_released(source: IpcSource, publisher: WeightPublisher) -> None:
    held = []
    for step in (1, 2):
        publisher.publish(weights(step), step=step)
        resolved = source.resolve(None, deadline_ns=soon())
        held.append((resolved.manifest, source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())))
    with pytest.raises(DeadlineExceededError, match=rf"on version {publisher.epoch}\.1"):
        publisher.publish(weights(3), step=3, deadline_s=0.05)
    assert source.resolve(None, deadline_ns=soon()).version.step == 2
    for step, (manifest, staged) in zip((1, 2), held, strict=True):
        assert_holds(manifest, staged.segments, weights(step))
    held[0][1].release()
    publisher.publish(weights(3), step=3, deadline_s=0.05)
    assert_holds(held[1][0], held[1][1].segments, weights(2))


def test_a_manifest_that_points_at_another_segment_is_refused_and_leaves_no_lease(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    plan = plan_of(resolved.manifest)
    for changes in ({"locator": "model_weights_status.1"}, {"arena": 16}, {"arena": 2**40}):
        with pytest.raises(ManifestError, match="segment"):
            source.stage(_changed(resolved, **changes), plan, deadline_ns=soon())
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step, deadline_s=0.05)


def test_a_segment_of_another_size_is_refused_and_leaves_no_lease(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    larger = resolved.manifest.segments[0].num_bytes + 4096
    with pytest.raises(ManifestError, match=f"manifest says {larger}"):
        source.stage(_changed(resolved, num_bytes=larger), plan_of(resolved.manifest), deadline_ns=soon())
    for step in (2, 3, 4):
        publisher.publish(weights(step), step=step, deadline_s=0.05)


def test_memory_that_was_removed_from_under_the_channel_is_said_plainly(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    unlink_segment(resolved.manifest.segments[0].locator)
    with pytest.raises(NoPublicationError, match="memory of this version is gone"):
        source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())


def test_a_closed_publisher_takes_nothing_from_those_who_hold_a_lease(source: IpcSource, channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert_holds(resolved.manifest, staged.segments, weights(1))
    with pytest.raises(NoPublicationError, match="nothing is published"):
        source.resolve(None, deadline_ns=soon())
    with WeightPublisher(channel) as publisher:
        for step in (1, 2, 3):
            publisher.publish(weights(step + 10), step=step, deadline_s=0.05)
        assert_holds(resolved.manifest, staged.segments, weights(1))
        staged.release()


def test_mappings_are_kept_for_the_next_version_until_they_are_trimmed(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    mapped = []
    for step in (1, 2, 3):
        publisher.publish(weights(step), step=step)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        mapped += staged.segments
        staged.release()
    assert mapped[2] is mapped[0]
    assert not any(mapping.is_closed for mapping in mapped)
    source.trim()
    assert all(mapping.is_closed for mapping in mapped)
    publisher.publish(weights(4), step=4)
    staged = source.stage(source.resolve(None, deadline_ns=soon()), plan_of(resolved.manifest), deadline_ns=soon())
    assert_holds(source.resolve(None, deadline_ns=soon()).manifest, staged.segments, weights(4))
    staged.release()


def test_memory_of_a_retired_publication_is_not_kept(source: IpcSource, channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        mapping = staged.segments[0]
    assert not mapping.is_closed
    staged.release()
    assert mapping.is_closed


def test_a_channel_made_anew_is_followed_and_the_old_one_let_go(source: IpcSource, channel: Path) -> None:
    held = []
    for step in (1, 2):
        with WeightPublisher(channel) as publisher:
            publisher.publish(weights(step), step=step)
            resolved = source.resolve(None, deadline_ns=soon())
            staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
            held.append((resolved.manifest, staged))
        shutil.rmtree(channel)
    for step, (manifest, staged) in enumerate(held, 1):
        assert_holds(manifest, staged.segments, weights(step))
        staged.release()
    source.trim()
    assert len(source._replaced) == 0


def test_borrowed_memory_that_its_trainer_took_back_is_not_staged(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    memory = publisher.allocate({"w": ("F32", (8,))})
    published = publisher.publish(memory, step=1, borrow=True)
    resolved = source.resolve(None, deadline_ns=soon())
    published.wait_released(1)
    with pytest.raises(NoPublicationError, match="taken back by its trainer"):
        source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    memory["w"][:] = 1
    publisher.publish(memory, step=2, borrow=True)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert_holds(resolved.manifest, staged.segments, dict(memory))
    staged.release()


def test_parameters_may_alias_published_memory_through_dlpack(source: IpcSource, publisher: WeightPublisher) -> None:
    publisher.publish({"w": np.arange(8, dtype=np.float32)}, step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    capsule = staged.segments[0].dlpack(0, [8], "F32")
    assert staged.segments[0].num_exports == 1
    del capsule
    staged.release()


@pytest.mark.parametrize("name", ["ipc_snapshot", "rsync"])
def test_a_planned_strategy_says_that_it_is_not_here_yet(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' is not available in this version; use ipc"):
        registry.create(name, SourceConfig(tmp_path))


def test_an_unknown_strategy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown load strategy 'floppy'; use ipc"):
        registry.create("floppy", SourceConfig(tmp_path))
