"""What each rank has of a model, joined to whole tensors, and planned for the same ranks: each gets its own back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.checksum import ZERO, add, of_bytes
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.errors import ConfigurationError, CoverageError
from fastdeploy_rl.manifest import Manifest, Part, Segment, build_manifest
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.plan.proofs import check_plan, check_reads
from fastdeploy_rl.sources.rank_slices import JoinedTensors, Slice, flat_names, join_slices
from fastdeploy_rl.update.planned_transfer import transfer_planned

Array = NDArray[Any]
ROOM = 1 << 16


@st.composite
def parameters(draw: st.DrawFn, num_ranks: int) -> ParameterSpec:
    """A parameter of any kind that so many ranks can hold."""
    unit = num_ranks * draw(st.integers(1, 3))
    shape = (unit, num_ranks * draw(st.integers(1, 3)))
    axis = draw(st.sampled_from((None, 0, 1)))
    is_transposed = draw(st.booleans())
    kind = draw(st.sampled_from(("plain", "fused", "vocabulary")))
    if kind == "fused":
        fused_axis = draw(st.integers(0, 1))
        sizes = [num_ranks * draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 3)))]
        shape = (sum(sizes), shape[1]) if fused_axis == 0 else (shape[0], sum(sizes))
        fused = tuple(FusedPart(f"part{index}", size) for index, size in enumerate(sizes))
        return ParameterSpec("w", "F32", shape, axis, is_transposed=is_transposed, fused=fused, fused_axis=fused_axis)
    rows = draw(st.integers(0, shape[1 if is_transposed else 0])) if kind == "vocabulary" else None
    return ParameterSpec("w", "F32", shape, axis, is_transposed=is_transposed, vocab_rows=rows)


def numbers(shape: tuple[int, ...], first: int) -> Array:
    return (np.arange(first, first + int(np.prod(shape))) + 1).astype(np.float32).reshape(shape)


def slices_of(spec: ParameterSpec, num_ranks: int) -> list[Array]:
    """What each rank has; all the same where the parameter is not cut. Rows that pad a vocabulary are zero."""
    shape = spec.local_shape(num_ranks)
    step = int(np.prod(shape)) if spec.shard_axis is not None else 0
    slices = [numbers(shape, rank * step) for rank in range(num_ranks)]
    if spec.vocab_rows is not None:
        vocab_axis = 1 if spec.is_transposed else 0
        for rank, values in enumerate(slices):
            first = rank * shape[vocab_axis] if spec.shard_axis == vocab_axis else 0
            padding = np.arange(first, first + shape[vocab_axis]) >= spec.vocab_rows
            values[padding if vocab_axis == 0 else (slice(None), padding)] = 0
    return slices


def described(joined: JoinedTensors, segments: list[Mapping]) -> Manifest:
    listed = [Segment("file", f"rank{index}", segment.num_bytes, 0, 0) for index, segment in enumerate(segments)]
    return build_manifest("1.1", joined.layout, listed, joined.tensors, joined.aliases)


@settings(max_examples=150)
@given(st.data())
def test_each_rank_gets_back_what_it_has_from_its_own_segment(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 3))
    spec = data.draw(parameters(num_ranks))
    held = slices_of(spec, num_ranks)
    segments = [Mapping.private(ROOM) for _ in held]
    for segment, values in zip(segments, held, strict=True):
        TensorView(segment, 64, "F32", values.shape).numpy()[...] = values
    manifest = described(
        join_slices([spec], [{"w": Slice("F32", values.shape, rank, 64)} for rank, values in enumerate(held)]), segments
    )
    plans = [make_plan(manifest, [spec], rank, num_ranks) for rank in range(num_ranks)]
    check_reads(manifest, plans)
    for rank, plan in enumerate(plans):
        check_plan(plan)
        target = Mapping.private(ROOM)
        view = TensorView(target, 0, "F32", plan.parameters[0].local_shape)
        transfer_planned(plan.parameters, manifest, segments, {"w": view}, num_threads=1)
        np.testing.assert_array_equal(view.numpy(), held[rank])
        used = {region.segment for region in plan.parameters[0].regions if region.kind.value == "copy"}
        assert used <= ({rank} if spec.shard_axis is not None else {0})


def test_what_is_not_cut_lies_on_every_rank() -> None:
    spec = ParameterSpec("n", "F32", (4,), None)
    joined = join_slices([spec], [{"n": Slice("BF16", (4,), rank, 8 * rank)} for rank in range(3)])
    (tensor,) = joined.tensors
    assert (joined.layout, tensor.dtype, tensor.parts) == ("tp:3", "BF16", (Part(0, 0, 0, 0),))
    assert joined.twins == (("n", Part(1, 8, 0, 0)), ("n", Part(2, 16, 0, 0)))


def test_padding_of_a_vocabulary_is_not_published() -> None:
    spec = ParameterSpec("e", "F32", (8, 2), 0, vocab_rows=5)
    joined = join_slices([spec], [{"e": Slice("F32", (4, 2), rank, 0)} for rank in range(2)])
    assert joined.tensors[0].shape == (5, 2)
    assert [(part.start, part.stop) for part in joined.tensors[0].parts] == [(0, 4), (4, 5)]


def test_parameters_that_nobody_has_are_left_out() -> None:
    specs = [ParameterSpec(name, "F32", (4,), None) for name in ("a", "b")]
    joined = join_slices(specs, [{"b": Slice("F32", (4,), 0, 0)}])
    assert [tensor.name for tensor in joined.tensors] == ["b"]


def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    specs = [
        ParameterSpec("cut", "F32", (4, 6), 1, Coverage.UPDATED),
        ParameterSpec("odd", "F32", (4,), None),
        ParameterSpec("typed", "F32", (4,), None),
    ]
    ranks = [
        {"cut": Slice("F32", (4, 6), 0, 0), "odd": Slice("F32", (4,), 0, 0), "typed": Slice("F32", (4,), 0, 0)},
        {"cut": Slice("F32", (4, 3), 1, 0), "typed": Slice("F16", (4,), 1, 0), "new": Slice("F32", (1,), 1, 0)},
    ]
    with pytest.raises(CoverageError) as caught:
        join_slices(specs, ranks)
    assert str(caught.value).splitlines() == [
        "4 problems with what the ranks have:",
        "cut: rank 0 of 2 has shape [4, 6], which is the whole of it; this engine's ranks have [4, 3]",
        "odd: rank 1 of 2 has none",
        "typed: the ranks have it as F16, F32",
        "new: not a tensor of this model",
    ]


def test_a_model_that_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not divide over 3 ranks"):
        join_slices([ParameterSpec("w", "F32", (4,), 0)], [{}, {}, {}])


# --- names of several models in one dictionary -----------------------------------------------------------


def test_flat_names_reach_the_model_that_has_them() -> None:
    """FastDeploy's one dictionary: what the MTP model alone has is its own, and what both have is the main model's and
    feeds both, under the names that an engine of ours gives them."""
    own = ParameterSpec("mtp/eh_proj", "F32", (4,), None)
    frozen = ParameterSpec("mtp/norm", "F32", (4,), None, Coverage.FROZEN)
    specs = [ParameterSpec(name, "F32", (4,), None) for name in ("embed", "norm", "mtp/embed")] + [own, frozen]
    files = {name: Slice("F32", (4,), 0, 16 * place) for place, name in enumerate(("embed", "norm", "eh_proj"))}
    joined = join_slices(specs, [files])
    assert [tensor.name for tensor in joined.tensors] == ["embed", "norm", "mtp/eh_proj"]
    assert joined.aliases == {"mtp/embed": "embed"}
    plan = make_plan(described(joined, [Mapping.private(ROOM)]), specs, 0, 1)
    places = {p.name: [region.source_offset for region in p.regions] for p in plan.parameters}
    assert places["mtp/embed"] == places["embed"] == [0]
    assert places["mtp/eh_proj"] == [32]


def test_a_full_name_is_taken_for_what_it_says() -> None:
    specs = [ParameterSpec(name, "F32", (4,), None) for name in ("embed", "mtp/embed")]
    assert flat_names(specs, ["embed", "mtp/embed"]) == ({}, {})


def test_tied_names_follow_the_tensor_whose_names_they_are() -> None:
    """`head` is another name of `embed` in the files; the MTP model has both, the main one only `embed`."""
    specs = [ParameterSpec(name, "F32", (4,), None) for name in ("embed", "mtp/embed", "mtp/head")]
    joined = join_slices(specs, [{"embed": Slice("F32", (4,), 0, 0)}], {"head": "embed"})
    assert joined.aliases == {"mtp/head": "embed", "mtp/embed": "embed"}


def test_a_name_that_two_models_beside_the_main_one_have_needs_its_model() -> None:
    specs = [ParameterSpec(name, "F32", (4,), None) for name in ("mtp/proj", "draft/proj")]
    with pytest.raises(ConfigurationError, match="proj may be mtp/proj or draft/proj"):
        flat_names(specs, ["proj"])


def test_sums_of_slices_make_the_sum_of_the_whole() -> None:
    """The law by which a manifest of per-rank parts gets its checksums."""
    whole = numbers((4, 6), 0)
    joined = join_slices(
        [ParameterSpec("w", "F32", (4, 6), 0)], [{"w": Slice("F32", (2, 6), rank, 0)} for rank in range(2)]
    )
    total = ZERO
    for part in joined.tensors[0].parts:
        alone = np.zeros_like(whole)
        alone[part.start : part.stop] = whole[part.start : part.stop]
        total = add(total, of_bytes(alone))
    assert total == of_bytes(whole)
