"""The `ipc` source: the common suite, and what only shared memory has."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from source_suite import SourceSuite, assert_holds, plan_of, soon, weights

from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, ManifestError, NoPublicationError
from fastdeploy_rl.memory import shared_segment
from fastdeploy_rl.memory.shared_segment import SharedSegment, unlink_segment
from fastdeploy_rl.publish import arena_shelf, copying, publication
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.version import WeightVersion


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


# --- former versions -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_arenas", [2, 3, 5])
def test_the_version_before_the_latest_stays_where_there_are_three_arenas(
    source: IpcSource, channel: Path, max_arenas: int
) -> None:
    with WeightPublisher(channel, max_arenas=max_arenas) as publisher:
        versions = [publisher.publish(weights(step), step=step).version for step in range(2 * max_arenas)]
        for step in (-2, -1):
            resolved = source.resolve(versions[step], deadline_ns=soon())
            staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
            assert_holds(resolved.manifest, staged.segments, weights(2 * max_arenas + step))
            staged.release()
        with pytest.raises(NoPublicationError, match=rf"version {versions[0]} is not to be had: .* has {versions[-1]}"):
            source.resolve(versions[0], deadline_ns=soon())
        assert len(publisher.channel.manifest_files()) == min(max_arenas, 3)


def test_a_rejected_version_keeps_the_one_before_it_from_nobody(source: IpcSource, channel: Path) -> None:
    """An engine stays on version 1, which it leases; others that go back from 3 to 2 still can."""
    with WeightPublisher(channel, max_arenas=4) as publisher:
        first = publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        held = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        for step in range(2, 8):
            publisher.publish(weights(step), step=step)
            for former in (first.version, WeightVersion(first.version.epoch, step - 1)):
                assert source.resolve(former, deadline_ns=soon()).version == former
        assert_holds(resolved.manifest, held.segments, weights(1))
        held.release()


def test_a_former_version_is_withdrawn_before_a_byte_of_its_arena_is_written(
    source: IpcSource, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publisher.publish(weights(1), step=1)
    publisher.publish(weights(2), step=2)
    manifest = source.resolve(first.version, deadline_ns=soon()).manifest
    seen = []

    def look(arrangement: Any, target: Any, on_progress: Any) -> Any:
        with SharedSegment.attach(manifest.segments[0].locator) as segment:
            assert_holds(manifest, (segment.mapping,), weights(1))
        seen.append([name for name in publisher.channel.manifest_files() if f"-{first.version}-" in name])
        with pytest.raises(NoPublicationError, match="is not to be had"):
            source.resolve(first.version, deadline_ns=soon())
        return copying.copy_out(arrangement, target, on_progress)

    monkeypatch.setattr(publication, "copy_out", look)
    publisher.publish(weights(3), step=3)
    assert seen == [[]]


def test_an_arena_that_is_needed_but_leased_keeps_its_version(source: IpcSource, publisher: WeightPublisher) -> None:
    first = publisher.publish(weights(1), step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    publisher.publish(weights(2), step=2)
    with pytest.raises(DeadlineExceededError):
        publisher.publish(weights(3), step=3, deadline_s=0.05)
    assert source.resolve(first.version, deadline_ns=soon()).manifest == resolved.manifest
    staged.release()


def test_where_memory_is_short_the_former_versions_arena_is_used(
    source: IpcSource, channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightPublisher(channel) as publisher:
        first = publisher.publish(weights(1), step=1)
        publisher.publish(weights(2), step=2)
        for module in (shared_segment, arena_shelf):
            monkeypatch.setattr(module, "free_bytes", lambda: 100)
        publisher.publish(weights(3), step=3)
        with pytest.raises(NoPublicationError):
            source.resolve(first.version, deadline_ns=soon())
        assert source.resolve(WeightVersion(first.version.epoch, 2), deadline_ns=soon()).version.step == 2


def test_the_next_publisher_finds_the_former_versions_and_spares_the_newest(source: IpcSource, channel: Path) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    for step in (1, 2, 3):
        publisher.publish(weights(step), step=step)
    publisher._started()._lock.release()  # as a process that died holds it no more
    with WeightPublisher(channel) as second:
        for step in (1, 2, 3):
            assert source.resolve(WeightVersion(1, step), deadline_ns=soon()).version.step == step
        second.publish(weights(4), step=4)
        with pytest.raises(NoPublicationError):
            source.resolve(WeightVersion(1, 1), deadline_ns=soon())
        for step in (2, 3):
            resolved = source.resolve(WeightVersion(1, step), deadline_ns=soon())
            staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
            assert_holds(resolved.manifest, staged.segments, weights(step))
            staged.release()
    publisher.close()
    assert list(channel.glob("manifest-*")) == []


def test_a_kept_publication_is_the_latest_alone(source: IpcSource, channel: Path) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    for step in (1, 2):
        publisher.publish(weights(step), step=step)
    publisher.close(keep=True)
    assert len(list(channel.glob("manifest-*"))) == 1
    assert source.resolve(WeightVersion(1, 2), deadline_ns=soon()).version.step == 2
    with pytest.raises(NoPublicationError):
        source.resolve(WeightVersion(1, 1), deadline_ns=soon())
    assert retire(channel).version == "1.2"
    assert list(channel.glob("manifest-*")) == []


def test_a_borrowed_version_is_found_until_its_trainer_takes_it_back(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    memories = [publisher.allocate({"w": ("F32", (8,))}) for _ in range(2)]
    published = []
    for step, memory in enumerate(memories, 1):
        memory["w"][:] = step
        published.append(publisher.publish(memory, step=step, borrow=True))
    for step, each in enumerate(published, 1):
        resolved = source.resolve(each.version, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        assert_holds(resolved.manifest, staged.segments, {"w": np.full(8, step, np.float32)})
        staged.release()
    for each in published:
        each.wait_released(1)
        with pytest.raises(NoPublicationError, match=f"version {each.version} is not to be had"):
            source.resolve(each.version, deadline_ns=soon())
        assert [name.split("-")[1] for name in publisher.channel.manifest_files()] == ["1.2"]  # what LATEST names
    publisher.publish(memories[0], step=3, borrow=True)
    assert [name.split("-")[1] for name in publisher.channel.manifest_files()] == ["1.3"]


def test_a_version_of_several_parts_goes_when_one_of_them_writes(source: IpcSource, channel: Path) -> None:
    """Part 0 has an arena to spare, part 1 does not."""
    with WeightPublisher(channel, part=(0, 2)) as first, WeightPublisher(channel, part=(1, 2), max_arenas=2) as second:
        for step in (1, 2, 3):
            with ThreadPoolExecutor(1) as other:
                pending = other.submit(second.publish, {"b": np.full(4, step, np.float32)}, step=step)
                first.publish({"a": np.full(4, step, np.float32)}, step=step)
            pending.result()
        resolved = source.resolve(WeightVersion(1, 2), deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        assert_holds(resolved.manifest, staged.segments, {name: np.full(4, 2, np.float32) for name in "ab"})
        staged.release()
        with pytest.raises(NoPublicationError):
            source.resolve(WeightVersion(1, 1), deadline_ns=soon())
        assert len(first.channel.manifest_files()) == 2


def test_a_manifest_that_was_never_the_latest_is_not_found(
    source: IpcSource, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its publisher dies between the manifest and LATEST; nobody said that it may be taken."""
    publisher.publish(weights(1), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "write_latest", _break_off)
        patch.setattr(Channel, "remove_file", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights(2), step=2)
    assert len(publisher.channel.manifest_files()) == 2
    with pytest.raises(NoPublicationError, match=r"1\.2 is not to be had: .* has 1\.1"):
        source.resolve(WeightVersion(1, 2), deadline_ns=soon())
    publisher.publish(weights(3), step=3)
    assert sorted(name.split("-")[1] for name in publisher.channel.manifest_files()) == ["1.1", "1.3"]


def _break_off(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_former_manifest_whose_bytes_changed_is_refused(source: IpcSource, publisher: WeightPublisher) -> None:
    first = publisher.publish(weights(1), step=1)
    publisher.publish(weights(2), step=2)
    file = next(name for name in publisher.channel.manifest_files() if f"-{first.version}-" in name)
    (publisher.channel.path / file).write_text("{}")
    with pytest.raises(ManifestError, match="is not what was published"):
        source.resolve(first.version, deadline_ns=soon())
    assert source.resolve(None, deadline_ns=soon()).version.step == 2


def test_a_directory_full_of_manifests_is_an_error_or_a_refusal_and_quick(
    source: IpcSource, publisher: WeightPublisher
) -> None:
    published = publisher.publish(weights(1), step=9)
    for number in range(20_000):
        (publisher.channel.path / f"manifest-1.{number % 9}-{number:016x}.json").touch()
    began = time.monotonic()
    with pytest.raises((NoPublicationError, ManifestError)):
        source.resolve(WeightVersion(1, 3), deadline_ns=soon())
    assert source.resolve(published.version, deadline_ns=soon()).version == published.version
    assert time.monotonic() - began < 10  # a bound against hanging, not a figure
    for step in (10, 11, 12, 13):
        publisher.publish(weights(step), step=step)
    assert len(publisher.channel.manifest_files()) == 2


# --- who vouches for memory that is staged ---------------------------------------------------------


def test_a_copy_is_vouched_for_also_after_its_publisher_went(source: IpcSource, channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert staged.is_vouched()
    assert staged.is_immutable
    assert_holds(resolved.manifest, staged.segments, weights(1))
    staged.release()


def test_borrowed_memory_is_not_vouched_for_when_its_trainer_is_gone_and_another_in_its_place(
    source: IpcSource, channel: Path
) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    memory = publisher.allocate({"w": ("F32", (8,))})
    memory["w"][:] = 7
    publisher.publish(memory, step=1, borrow=True)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert staged.is_vouched()
    assert staged.is_immutable
    publisher.close(keep=True)
    assert not staged.is_vouched()
    with WeightPublisher(channel):
        assert not staged.is_vouched()
    assert_holds(resolved.manifest, staged.segments, dict(memory))
    staged.release()
    assert staged.is_vouched()


def test_borrowed_memory_of_a_trainer_that_went_before_is_to_be_copied(source: IpcSource, channel: Path) -> None:
    publisher = WeightPublisher(channel)
    publisher.start()
    memory = publisher.allocate({"w": ("F32", (8,))})
    publisher.publish(memory, step=1, borrow=True)
    publisher.close(keep=True)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert not staged.is_vouched()
    assert not staged.is_immutable
    assert_holds(resolved.manifest, staged.segments, dict(memory))
    staged.release()
    retire(channel)


def test_parameters_may_alias_published_memory_through_dlpack(source: IpcSource, publisher: WeightPublisher) -> None:
    publisher.publish({"w": np.arange(8, dtype=np.float32)}, step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    capsule = staged.segments[0].dlpack(0, [8], "F32")
    assert staged.segments[0].num_exports == 1
    del capsule
    staged.release()


def test_an_unknown_strategy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown load strategy 'floppy'; use ipc"):
        registry.create("floppy", SourceConfig(tmp_path))
