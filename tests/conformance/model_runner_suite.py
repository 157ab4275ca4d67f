"""What every model runner must do for its weights to be kept live: inherit `ModelRunnerSuite`, give it one fixture."""

import gc
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pytest

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.runner import ModelRunner

ALIGNMENT = 512
Views = dict[str, TensorView]


class Subject(Protocol):
    """A runner under test, and how to see what it computes."""

    runner: ModelRunner

    def answer(self) -> bytes:
        """What the runner computes from what is bound, to the bit;
        depends on every parameter. Raises as the runner does."""
        ...

    def version_of_a_token(self) -> str:
        """The version that a token generated now carries."""
        ...


def shapes(runner: ModelRunner) -> dict[str, tuple[int, ...]]:
    """Of this rank's slices."""
    specs = [spec for spec in runner.parameters() if spec.coverage is Coverage.UPDATED]
    return {spec.name: spec.local_shape(runner.num_ranks) for spec in specs}


def values(runner: ModelRunner, seed: int) -> dict[str, np.ndarray]:
    """This rank's slices of one version of the weights."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(0, 0.3, shape).astype(np.float32) + (len(shape) == 1)
        for name, shape in shapes(runner).items()
    }


def lay_out(mapping: Mapping, runner: ModelRunner) -> Views:
    """Views of every parameter in `mapping`, one behind another; their contents are whatever is there."""
    views: Views = {}
    offset = 0
    for name, shape in shapes(runner).items():
        views[name] = TensorView(mapping, offset, "F32", shape)
        offset += -(-views[name].num_bytes // ALIGNMENT) * ALIGNMENT
    return views


def num_bytes(runner: ModelRunner) -> int:
    return sum(-(-4 * int(np.prod(shape)) // ALIGNMENT) * ALIGNMENT for shape in shapes(runner).values())


def fill(views: Views, tensors: dict[str, np.ndarray]) -> Views:
    for name, value in tensors.items():
        views[name].numpy()[...] = value
    return views


def version(runner: ModelRunner, seed: int) -> Views:
    """One version of the weights in fresh private memory of its own."""
    return fill(lay_out(Mapping.private(num_bytes(runner)), runner), values(runner, seed))


def mapping_of(views: Views) -> Mapping:
    return next(iter(views.values())).mapping


@contextmanager
def published(runner: ModelRunner, seed: int) -> Iterator[Views]:
    """One version as an engine gets it under `alias`: in shared memory that it can only read."""
    segment = SharedSegment.create(f"fastdeploy_rl_test_runner.{uuid.uuid4().hex[:12]}", num_bytes(runner))
    try:
        with segment:
            fill(lay_out(segment.mapping, runner), values(runner, seed))
        with SharedSegment.attach(segment.name) as reader:
            yield lay_out(reader.mapping, runner)
    finally:
        segment.unlink()


def go_live(subject: Subject, views: Views, name: str = "1.1") -> bytes:
    """What the manager does at a decode boundary; returns what the runner computes afterwards."""
    runner = subject.runner
    runner.drain(time.monotonic_ns() + 10_000_000_000)
    runner.bind(views)
    runner.rebuild_kv_cache(name.encode().hex().ljust(64, "0"))
    runner.recapture_graphs()
    runner.set_version(name)
    return subject.answer()


def alternate(subject: Subject, *arenas: Views, rounds: int) -> list[int]:
    """Updates that take turns between arenas, a round after the other; how many graphs each captured."""
    captured = []
    for views in arenas * rounds:
        subject.runner.bind(views)
        subject.runner.rebuild_kv_cache("1" * 64)
        captured.append(subject.runner.recapture_graphs())
    return captured


def clear(subject: Subject) -> None:
    """What the manager does for a clear."""
    subject.runner.abort_requests("the engine was cleared")
    subject.runner.drop_kv_cache()
    subject.runner.unbind()


class ModelRunnerSuite:
    """Fixture to provide: `subject`, with nothing bound and no KV cache. Its updated parameters are F32."""

    def test_parameters_have_global_shapes_that_split(self, subject: Subject) -> None:
        names = [spec.name for spec in subject.runner.parameters()]
        assert len(set(names)) == len(names) > 0
        for spec in subject.runner.parameters():
            assert spec.shard_axis is None or spec.shape[spec.shard_axis] % subject.runner.num_ranks == 0
            assert spec.tied_to is None or spec.tied_to in names

    def test_parameters_are_constant(self, subject: Subject) -> None:
        before = list(subject.runner.parameters())
        go_live(subject, version(subject.runner, 1))
        assert list(subject.runner.parameters()) == before
        clear(subject)
        assert list(subject.runner.parameters()) == before

    def test_nothing_is_bound_before_the_first_bind(self, subject: Subject) -> None:
        assert dict(subject.runner.bound()) == {}
        subject.runner.rebuild_kv_cache("0" * 64)
        with pytest.raises(FastDeployRLError):
            subject.answer()

    def test_bound_is_exactly_what_was_bound_and_leaves_tied_names_out(self, subject: Subject) -> None:
        views = version(subject.runner, 1)
        go_live(subject, views)
        bound = subject.runner.bound()
        assert bound.keys() == views.keys()
        assert all(bound[name].same_place(view) for name, view in views.items())
        tied = [spec.name for spec in subject.runner.parameters() if spec.coverage is Coverage.TIED]
        assert not bound.keys() & set(tied)

    def test_bind_is_a_rebind_every_parameter_is_the_memory_itself(self, subject: Subject) -> None:
        """What is written into the bound memory afterwards counts, parameter by parameter, and back."""
        views = version(subject.runner, 1)
        before = go_live(subject, views)
        unmoved = []
        for name, view in views.items():
            np.negative(view.numpy(), out=view.numpy())
            subject.runner.rebuild_kv_cache("1" * 64)
            if view.num_bytes and subject.answer() == before:
                unmoved.append(name)
            np.negative(view.numpy(), out=view.numpy())
        assert unmoved == []
        subject.runner.rebuild_kv_cache("2" * 64)
        assert subject.answer() == before

    def test_what_was_prepared_is_bound_like_anything_else_and_keeps_memory_until_it_is_let_go(
        self, subject: Subject
    ) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        other = version(subject.runner, 2)
        prepared = subject.runner.prepare(other)
        subject.runner.rebuild_kv_cache("1" * 64)
        assert subject.answer() == expected
        first = go_live(subject, other, "1.2")
        go_live(subject, version(subject.runner, 1), "1.3")
        del prepared
        assert mapping_of(other).num_exports == 0
        assert go_live(subject, other, "1.4") == first

    def test_bind_writes_nothing(self, subject: Subject) -> None:
        views = version(subject.runner, 1)
        before = bytes(mapping_of(views))
        go_live(subject, views)
        go_live(subject, version(subject.runner, 2), "1.2")
        assert bytes(mapping_of(views)) == before

    def test_going_back_gives_the_same_to_the_bit(self, subject: Subject) -> None:
        a, b = version(subject.runner, 1), version(subject.runner, 2)
        first = go_live(subject, a)
        second = go_live(subject, b, "1.2")
        assert first != second
        assert go_live(subject, a, "1.3") == first
        assert go_live(subject, b, "1.4") == second

    def test_where_the_memory_lies_makes_no_difference(self, subject: Subject) -> None:
        """All in one mapping, or each parameter in one of its own at some offset."""
        expected = go_live(subject, version(subject.runner, 1))
        scattered: Views = {}
        for index, (name, value) in enumerate(values(subject.runner, 1).items(), 1):
            mapping = Mapping.private(value.nbytes + ALIGNMENT * index)
            scattered[name] = TensorView(mapping, ALIGNMENT * (index % 3), "F32", value.shape)
        assert go_live(subject, fill(scattered, values(subject.runner, 1)), "1.2") == expected

    def test_memory_that_can_only_be_read_will_do(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        with published(subject.runner, 1) as views:
            assert go_live(subject, views, "1.2") == expected
            subject.runner.unbind()
            del views

    def test_bound_memory_lives_though_nobody_else_refers_to_it(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        gc.collect()
        churn = [Mapping.private(num_bytes(subject.runner)) for _ in range(3)]  # would take its place if it were gone
        subject.runner.rebuild_kv_cache("1" * 64)
        assert subject.answer() == expected
        del churn

    def test_unbind_lets_every_mapping_go(self, subject: Subject) -> None:
        views = version(subject.runner, 1)
        go_live(subject, views)
        mapping = mapping_of(views)
        subject.runner.unbind()
        assert dict(subject.runner.bound()) == {}
        assert mapping.num_exports == 0
        mapping.close()

    def test_a_rebind_lets_the_old_mapping_go(self, subject: Subject) -> None:
        old = version(subject.runner, 1)
        go_live(subject, old)
        after = go_live(subject, version(subject.runner, 2), "1.2")
        assert mapping_of(old).num_exports == 0
        mapping_of(old).close()
        subject.runner.rebuild_kv_cache("1" * 64)
        assert subject.answer() == after

    def test_unbound_it_refuses_to_compute_and_comes_back(self, subject: Subject) -> None:
        views = version(subject.runner, 1)
        expected = go_live(subject, views)
        subject.runner.unbind()
        subject.runner.unbind()
        with pytest.raises(FastDeployRLError):
            subject.answer()
        assert go_live(subject, views, "1.2") == expected

    def test_without_its_cache_it_refuses_to_compute_and_comes_back(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        subject.runner.drop_kv_cache()
        subject.runner.drop_kv_cache()
        with pytest.raises(FastDeployRLError):
            subject.answer()
        subject.runner.rebuild_kv_cache("0" * 64)
        assert subject.answer() == expected

    def test_nothing_of_the_old_weights_stays_in_the_cache(self, subject: Subject) -> None:
        """After a rebuild the answer is that of a runner which never held other weights."""
        fresh = go_live(subject, version(subject.runner, 2))
        clear(subject)
        go_live(subject, version(subject.runner, 1), "1.2")
        assert go_live(subject, version(subject.runner, 2), "1.3") == fresh

    def test_without_requests_a_kept_cache_gives_what_a_rebuilt_one_gives(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 2))
        go_live(subject, version(subject.runner, 1), "1.2")
        subject.runner.bind(version(subject.runner, 2))
        subject.runner.keep_kv_cache("2" * 64)
        subject.runner.recapture_graphs()
        assert subject.answer() == expected

    def test_keeping_a_cache_that_is_dropped_allocates_it(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        subject.runner.drop_kv_cache()
        subject.runner.keep_kv_cache("1" * 64)
        assert subject.answer() == expected

    def test_nothing_is_captured_while_nothing_is_bound(self, subject: Subject) -> None:
        assert subject.runner.recapture_graphs() == 0

    def test_alternating_memory_is_captured_in_the_first_round_alone(self, subject: Subject) -> None:
        a, b = version(subject.runner, 1), version(subject.runner, 2)
        first, second, *later = alternate(subject, a, b, rounds=3)
        assert first == second > 0
        assert later == [0] * 4

    def test_what_is_captured_already_is_not_captured_again(self, subject: Subject) -> None:
        """As after apply mode copy: other weights in the same memory."""
        views = version(subject.runner, 1)
        go_live(subject, views)
        expected = go_live(subject, version(subject.runner, 2), "1.2")
        subject.runner.bind(views)
        subject.runner.recapture_graphs()
        fill(views, values(subject.runner, 2))
        subject.runner.rebuild_kv_cache("2" * 64)
        assert subject.runner.recapture_graphs() == 0
        assert subject.answer() == expected

    def test_answers_are_the_same_with_graphs_and_without(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        subject.runner.drop_graphs()
        subject.runner.drop_graphs()
        assert subject.answer() == expected
        assert subject.runner.recapture_graphs() > 0
        assert subject.answer() == expected

    def test_capturing_costs_nothing_where_it_was_done_before(self, subject: Subject) -> None:
        known, unknown = version(subject.runner, 1), version(subject.runner, 2)
        go_live(subject, known)
        assert subject.runner.recapture_seconds(known) == 0
        assert subject.runner.recapture_seconds(unknown) >= 0
        go_live(subject, unknown, "1.2")
        assert subject.runner.recapture_seconds(known) == subject.runner.recapture_seconds(unknown) == 0

    def test_parked_graphs_keep_no_memory(self, subject: Subject) -> None:
        a, b = version(subject.runner, 1), version(subject.runner, 2)
        alternate(subject, a, b, rounds=2)
        assert mapping_of(a).num_exports == 0
        subject.runner.drop_kv_cache()
        subject.runner.unbind()
        assert mapping_of(b).num_exports == 0

    def test_dropped_graphs_keep_no_memory_though_others_are_bound_since(self, subject: Subject) -> None:
        old = version(subject.runner, 1)
        go_live(subject, old)
        subject.runner.bind(version(subject.runner, 2))
        subject.runner.drop_graphs()
        assert mapping_of(old).num_exports == 0

    def test_three_clears_and_updates_in_a_row(self, subject: Subject) -> None:
        expected = go_live(subject, version(subject.runner, 1))
        for count in itertools.count(2):
            mapping = mapping_of(dict(subject.runner.bound()))
            clear(subject)
            mapping.close()
            assert go_live(subject, version(subject.runner, 1), f"1.{count}") == expected
            if count == 4:
                break

    def test_tokens_carry_the_version_that_was_set_last(self, subject: Subject) -> None:
        go_live(subject, version(subject.runner, 1), "3.7")
        assert subject.version_of_a_token() == "3.7"
        go_live(subject, version(subject.runner, 2), "3.8")
        assert subject.version_of_a_token() == "3.8"

    def test_binding_what_is_bound_already_changes_nothing(self, subject: Subject) -> None:
        views = version(subject.runner, 1)
        expected = go_live(subject, views)
        assert go_live(subject, dict(subject.runner.bound())) == expected
        subject.runner.unbind()
        assert mapping_of(views).num_exports == 0

    def test_parameters_that_share_memory_are_served_and_let_go(self, subject: Subject) -> None:
        """A trainer may publish one memory under several names."""
        views, separate = version(subject.runner, 1), version(subject.runner, 1)
        shape, _ = Counter(view.shape for view in views.values()).most_common(1)[0]
        twins = [name for name, view in views.items() if view.shape == shape]
        assert len(twins) > 1
        for name in twins[1:]:
            np.copyto(separate[name].numpy(), views[twins[0]].numpy())
        expected = go_live(subject, separate)
        shared = views | dict.fromkeys(twins, views[twins[0]])
        assert go_live(subject, shared, "1.2") == expected
        subject.runner.unbind()
        assert mapping_of(views).num_exports == 0
