"""What every weight source must do, whichever way the bytes come: inherit `SourceSuite`, give it two fixtures."""

import time
from typing import Any, Protocol

import numpy as np
import pytest

from fastdeploy_rl import checksum
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError, SegmentError
from fastdeploy_rl.manifest import Manifest, Part, Tensor
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.sources.base import ResolvedPublication, StagedSource, WeightSource
from fastdeploy_rl.version import WeightVersion


class Publisher(Protocol):
    """The other end of the source under test."""

    def publish(self, state_dict: dict[str, Any], *, step: int, layout: str = "full") -> Any: ...


def weights(seed: int) -> dict[str, np.ndarray]:
    """A small model with every awkward kind of tensor; equal shapes for every seed."""
    rng = np.random.default_rng(seed)
    return {
        "model.layers.0.self_attn.q_proj.weight": rng.standard_normal((8, 12)).astype(np.float32),
        "model.layers.0.self_attn.o_proj.weight": rng.integers(0, 2**16, (12, 8), np.uint16),
        "model.norm.weight": rng.standard_normal(7).astype(np.float16),
        "scale": np.array(seed, np.float64),
        "empty": np.zeros((0, 3), np.int32),
        "mask": rng.integers(0, 2, 5).astype(np.bool_),
    }


def soon() -> int:
    return time.monotonic_ns() + 10_000_000_000


def plan_of(manifest: Manifest) -> Plan:
    specs = [ParameterSpec(tensor.name, tensor.dtype, tensor.shape, None) for tensor in manifest.tensors]
    return make_plan(manifest, specs, 0, 1)


def arrived(staged: StagedSource) -> StagedSource:
    """The same, all of it within reach."""
    for _ in staged.arrivals(deadline_ns=soon()):
        pass
    return staged


def read(manifest: Manifest, segments: tuple[Mapping, ...]) -> dict[str, np.ndarray]:
    """Every tensor as it lies in the segments, put together from its parts; a copy."""
    return {tensor.name: _whole(tensor, segments) for tensor in manifest.tensors}


def _whole(tensor: Tensor, segments: tuple[Mapping, ...]) -> np.ndarray:
    parts = [_part(tensor, part, segments) for part in tensor.parts]
    return parts[0].copy() if tensor.shard_axis is None else np.concatenate(parts, tensor.shard_axis)


def _part(tensor: Tensor, part: Part, segments: tuple[Mapping, ...]) -> np.ndarray:
    shape = list(tensor.shape)
    if tensor.shard_axis is not None:
        shape[tensor.shard_axis] = part.stop - part.start
    return TensorView(segments[part.segment], part.offset, tensor.dtype, tuple(shape)).numpy()


def assert_holds(manifest: Manifest, segments: tuple[Mapping, ...], expected: dict[str, np.ndarray]) -> None:
    found = read(manifest, segments)
    assert set(found) == set(expected) - set(manifest.aliases)
    for tensor in manifest.tensors:
        array = found[tensor.name]
        assert array.tobytes() == expected[tensor.name].tobytes()
        assert checksum.of_bytes(array.tobytes()).hex() == tensor.checksum


def planned_bytes(staged: StagedSource) -> dict[str, bytes]:
    """What the plan makes of what lies there now, parameter by parameter; the plan of `plan_of` changes nothing."""
    found = {}
    for parameter in staged.plan.parameters:
        target = bytearray(parameter.num_bytes)
        for region in parameter.regions:
            with memoryview(staged.segments[region.segment]) as memory:
                for row in range(region.rows):
                    begin = region.source_offset + row * region.source_stride
                    place = region.target_offset + row * region.target_stride
                    target[place : place + region.row_bytes] = memory[begin : begin + region.row_bytes]
        found[parameter.name] = bytes(target)
    return found


def assert_staged(manifest: Manifest, staged: StagedSource, expected: dict[str, np.ndarray]) -> None:
    found = planned_bytes(staged)
    assert set(found) == set(expected) - set(manifest.aliases)
    for tensor in manifest.tensors:
        assert found[tensor.name] == expected[tensor.name].tobytes()
        assert checksum.of_bytes(found[tensor.name]).hex() == tensor.checksum


class SourceSuite:
    """Fixtures to provide: `publisher` (started) and `source` (looking where that publisher publishes)."""

    OWNS_MEMORY = False
    """Versions are staged into memory of the engine's own; else they lie in somebody's that must not be written."""

    def _stage(self, source: WeightSource, resolved: ResolvedPublication) -> StagedSource:
        return arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))

    @pytest.mark.parametrize("layout", ["full", "tp:2"])
    def test_everything_arrives_once_and_not_before_it_is_there(
        self, source: WeightSource, publisher: Publisher, layout: str
    ) -> None:
        publisher.publish(weights(1), step=1, layout=layout)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
        names = []
        for batch in staged.arrivals(deadline_ns=soon()):
            now = planned_bytes(staged)
            assert all(now[parameter.name] == weights(1)[parameter.name].tobytes() for parameter in batch)
            names += [parameter.name for parameter in batch]
        assert sorted(names) == sorted(weights(1))
        staged.release()

    def test_what_is_released_before_it_arrived_leaves_nothing(
        self, source: WeightSource, publisher: Publisher
    ) -> None:
        for step in range(5):
            publisher.publish(weights(step), step=step)
            resolved = source.resolve(None, deadline_ns=soon())
            source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()).release()
        staged = self._stage(source, resolved)
        assert_staged(resolved.manifest, staged, weights(4))
        staged.release()

    def test_what_was_discredited_can_still_be_had_by_name(self, source: WeightSource, publisher: Publisher) -> None:
        published = publisher.publish(weights(1), step=1)
        source.discredit(source.resolve(None, deadline_ns=soon()))
        assert source.resolve(published.version, deadline_ns=soon()).version == published.version
        newer = publisher.publish(weights(2), step=2)
        assert source.resolve(None, deadline_ns=soon()).version == newer.version

    def test_nothing_published_is_said_plainly(self, source: WeightSource, publisher: Publisher) -> None:
        with pytest.raises(NoPublicationError, match="nothing is published"):
            source.resolve(None, deadline_ns=soon())

    @pytest.mark.parametrize("layout", ["full", "tp:1", "tp:2"])
    def test_staged_bytes_are_those_that_were_published(
        self, source: WeightSource, publisher: Publisher, layout: str
    ) -> None:
        published = publisher.publish(weights(1), step=1, layout=layout)
        resolved = source.resolve(None, deadline_ns=soon())
        assert resolved == (published.version, published.manifest)
        staged = self._stage(source, resolved)
        assert_staged(resolved.manifest, staged, weights(1))
        staged.release()

    def test_a_version_can_be_asked_for_by_name(self, source: WeightSource, publisher: Publisher) -> None:
        published = publisher.publish(weights(1), step=1)
        assert source.resolve(published.version, deadline_ns=soon()).manifest == published.manifest

    def test_a_bare_step_is_one_of_the_epoch_of_what_is_published(
        self, source: WeightSource, publisher: Publisher
    ) -> None:
        published = publisher.publish(weights(1), step=1)
        assert source.current_epoch(deadline_ns=soon()) == published.version.epoch

    def test_a_version_that_is_not_there_is_refused_and_the_one_that_is_is_named(
        self, source: WeightSource, publisher: Publisher
    ) -> None:
        published = publisher.publish(weights(1), step=5)
        missing = WeightVersion(published.version.epoch, 4)
        with pytest.raises(NoPublicationError, match=rf"{missing}.*{published.version}"):
            source.resolve(missing, deadline_ns=soon())

    def test_a_former_version_is_the_whole_one_or_is_refused(self, source: WeightSource, publisher: Publisher) -> None:
        """A source keeps as many as it likes; those that it does keep can be had like the latest."""
        versions = [publisher.publish(weights(step), step=step).version for step in range(6)]
        for step, version in enumerate(versions[:-1]):
            try:
                resolved = source.resolve(version, deadline_ns=soon())
            except NoPublicationError:
                continue
            staged = self._stage(source, resolved)
            assert resolved.version == version
            assert_staged(resolved.manifest, staged, weights(step))
            staged.release()
        assert source.resolve(None, deadline_ns=soon()).version == versions[-1]

    def test_a_version_beyond_the_latest_is_refused(self, source: WeightSource, publisher: Publisher) -> None:
        published = publisher.publish(weights(1), step=5)
        with pytest.raises(NoPublicationError):
            source.resolve(WeightVersion(published.version.epoch, 6), deadline_ns=soon())

    def test_what_is_staged_while_its_publisher_lives_is_vouched_for(
        self, source: WeightSource, publisher: Publisher
    ) -> None:
        publisher.publish(weights(1), step=1)
        staged = self._stage(source, source.resolve(None, deadline_ns=soon()))
        assert staged.is_vouched()
        staged.release()
        assert staged.is_vouched()

    def test_what_was_superseded_before_it_was_staged_is_refused(
        self, source: WeightSource, publisher: Publisher
    ) -> None:
        publisher.publish(weights(1), step=1)
        old = source.resolve(None, deadline_ns=soon())
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step)
        with pytest.raises(NoPublicationError):
            self._stage(source, old)
        staged = self._stage(source, source.resolve(None, deadline_ns=soon()))
        assert_staged(source.resolve(None, deadline_ns=soon()).manifest, staged, weights(4))
        staged.release()

    def test_a_deadline_in_the_past_stages_nothing(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        with pytest.raises(DeadlineExceededError):
            source.stage(resolved, plan_of(resolved.manifest), deadline_ns=time.monotonic_ns())
        publisher.publish(weights(2), step=2)
        publisher.publish(weights(3), step=3)

    def test_staged_memory_cannot_be_written(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        staged = self._stage(source, source.resolve(None, deadline_ns=soon()))
        assert any(segment.is_writable for segment in staged.segments) == self.OWNS_MEMORY
        staged.release()

    def test_immutable_memory_outlasts_later_versions(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = self._stage(source, resolved)
        publisher.publish(weights(2), step=2)
        if staged.is_immutable:
            assert_staged(resolved.manifest, staged, weights(1))
        staged.release()

    def test_two_versions_can_be_staged_at_once(self, source: WeightSource, publisher: Publisher) -> None:
        staged = {}
        for step in (1, 2):
            publisher.publish(weights(step), step=step)
            resolved = source.resolve(None, deadline_ns=soon())
            staged[step] = resolved.manifest, self._stage(source, resolved)
        for step, (manifest, version) in staged.items():
            assert_staged(manifest, version, weights(step))
            version.release()

    def test_releasing_twice_is_harmless(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        first, second = self._stage(source, resolved), self._stage(source, resolved)
        first.release()
        first.release()
        assert_staged(resolved.manifest, second, weights(1))
        second.release()

    def test_memory_that_is_still_looked_at_is_not_released(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        resolved = source.resolve(None, deadline_ns=soon())
        staged = self._stage(source, resolved)
        view = np.frombuffer(staged.segments[0], np.uint8)
        with pytest.raises(SegmentError, match="still in use"):
            staged.release()
        assert_staged(resolved.manifest, staged, weights(1))
        del view
        staged.release()

    def test_closing_releases_what_is_staged(self, source: WeightSource, publisher: Publisher) -> None:
        publisher.publish(weights(1), step=1)
        segments = self._stage(source, source.resolve(None, deadline_ns=soon())).segments
        source.close()
        source.close()
        assert all(segment.is_closed for segment in segments)
