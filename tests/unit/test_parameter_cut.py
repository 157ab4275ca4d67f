"""What FastDeploy's layers leave on their parameters, as seen on the real ones, and what is made of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_rl.coverage import check_coverage
from fastdeploy_rl.engines.fastdeploy.parameter_cut import EACH_RANK, cut, marks_of, rank_local
from fastdeploy_rl.errors import CoverageError
from fastdeploy_rl.manifest import Part, Segment, Tensor, build_manifest
from fastdeploy_rl.sources.rank_slices import Slice, join_slices


class ColumnParallelLinear:
    tp_size = 2
    num_heads_per_rank = 4
    kv_num_heads_per_rank = 1


class UnquantizedLinearMethod:
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear:
    tp_size = 2
    split_token = False


class SequenceParallelRow(RowParallelLinear):
    split_token = True


class QKVGateParallelLinear(ColumnParallelLinear):
    pass


class VocabParallelEmbedding:
    world_size = 2


class FusedMoE:
    tp_size = 1


class RMSNorm:
    tp_size = 2


def _cut(layer: Any, shape: tuple[int, ...], num_ranks: int = 2, attribute: str = "weight", **marks: Any) -> Any:
    parameter = SimpleNamespace(**{"is_distributed": False, **marks})
    return cut("l.weight", "F32", shape, marks_of(parameter, layer, attribute, num_ranks), num_ranks)


@pytest.mark.parametrize(
    ("layer", "shape", "marks", "whole", "axis"),
    [
        pytest.param(ColumnParallelLinear(), (6, 4), {"output_dim": True}, (6, 8), 1, id="columns"),
        pytest.param(ColumnParallelLinear(), (4, 6), {"output_dim": False}, (8, 6), 0, id="columns of [out, in]"),
        pytest.param(
            ColumnParallelLinear(),
            (4,),
            {"output_dim": True, "split_axis": 1, "is_distributed": True},
            (8,),
            0,
            id="bias with an axis that it has not",
        ),
        pytest.param(
            RowParallelLinear(),
            (6, 4),
            {"output_dim": True, "split_axis": 0, "is_distributed": True},
            (6, 8),
            1,
            id="rows of [out, in], where split_axis lies",
        ),
        pytest.param(
            SequenceParallelRow(),
            (6, 4),
            {"output_dim": None, "split_axis": 0, "is_distributed": True},
            (6, 4),
            None,
            id="not cut under sequence parallelism",
        ),
        pytest.param(
            SequenceParallelRow(), (6, 4), {"output_dim": True}, (6, 4), None, id="not cut, though a mark says it is"
        ),
        pytest.param(
            VocabParallelEmbedding(),
            (8, 3),
            {"split_axis": 0, "is_distributed": True},
            (16, 3),
            0,
            id="embedding of Paddle's own",
        ),
        pytest.param(VocabParallelEmbedding(), (8, 3), {"split_axis": 0}, (8, 3), None, id="an axis, not distributed"),
        pytest.param(RMSNorm(), (6,), {}, (6,), None, id="replicated"),
        pytest.param(FusedMoE(), (3, 6, 4), {}, (6, 6, 4), 0, id="experts"),
    ],
)
def test_the_whole_is_what_the_layer_cuts(
    layer: Any, shape: tuple[int, ...], marks: dict[str, Any], whole: tuple[int, ...], axis: int | None
) -> None:
    spec = _cut(layer, shape, **marks)
    assert (spec.shape, spec.shard_axis, spec.fused) == (whole, axis, ())
    assert spec.local_shape(2) == shape
    alone = _cut(layer, shape, num_ranks=1, **marks)
    assert (alone.shape, alone.shard_axis, alone.fused) == (shape, None, ())


def test_a_mark_says_nothing_where_the_layer_is_not_cut() -> None:
    layer = ColumnParallelLinear()
    layer.tp_size = 1
    assert _cut(layer, (6, 4), output_dim=True).shard_axis is None
    assert _cut(FusedMoE(), (1, 6), attribute="gate_correction_bias").shard_axis is None


@pytest.mark.parametrize(("layer", "axis"), [(ColumnParallelLinear(), 1), (RowParallelLinear(), 0)])
def test_a_weight_that_lost_its_mark_by_being_turned_is_in_out(layer: Any, axis: int) -> None:
    layer.quant_method = UnquantizedLinearMethod()
    assert _cut(layer, (6, 4)).shard_axis == axis
    assert _cut(layer, (6, 4)).fused == ()
    assert _cut(layer, (6, 4), attribute="weight_scale").fused[0].name == "l.weight" + EACH_RANK


def test_ranks_that_share_cuts_have_their_own() -> None:
    """Two ranks for each cut: no axis of a whole tensor says that."""
    assert _cut(ColumnParallelLinear(), (6, 4), num_ranks=4, output_dim=True).fused[0].name == "l.weight" + EACH_RANK


@pytest.mark.parametrize(
    ("layer", "name", "parts"),
    [
        (
            QKVParallelLinear(),
            "m.qkv_proj.weight",
            {"m.q_proj.weight": 80, "m.k_proj.weight": 20, "m.v_proj.weight": 20},
        ),
        (
            QKVGateParallelLinear(),
            "m.qkvg_proj.weight",
            {"m.q_proj.weight": 48, "m.k_proj.weight": 12, "m.v_proj.weight": 12, "m.gate.weight": 48},
        ),
        (
            MergedColumnParallelLinear(),
            "m.up_gate_proj.weight",
            {"m.gate_proj.weight": 60, "m.up_proj.weight": 60},
        ),
        (MergedColumnParallelLinear(), "m.other", {"m.other.gate_proj": 60, "m.other.up_proj": 60}),
    ],
)
def test_what_a_layer_holds_as_one_is_cut_piece_by_piece(layer: Any, name: str, parts: dict[str, int]) -> None:
    spec = cut(name, "F32", (6, 60), marks_of(SimpleNamespace(output_dim=True), layer, "weight", 2), 2)
    assert [(part.name, part.size) for part in spec.fused] == list(parts.items())
    assert (spec.shape, spec.shard_axis, spec.fused_axis) == ((6, 120), 1, 1)


@pytest.mark.parametrize(
    ("layer", "name", "marks"),
    [
        pytest.param(QKVParallelLinear(), "qkv_proj.weight_scale", {"output_dim": True}, id="uneven pieces"),
        pytest.param(QKVParallelLinear(), "qkv_proj.weight", {}, id="pieces without a mark"),
        pytest.param(ColumnParallelLinear(), "l.weight", {}, id="lost marks"),
        pytest.param(RowParallelLinear(), "l.bias", {"tp_row_bias": True}, id="each rank adds a share"),
        pytest.param(RMSNorm(), "visual.attn.qkv.weight", {"output_dim": True}, id="looks fused, nobody knows how"),
    ],
)
def test_what_has_no_known_whole_comes_rank_by_rank_alone(layer: Any, name: str, marks: dict[str, Any]) -> None:
    """What each rank has is taken as it is; a whole one is refused, also where it has the shape of all ranks' own."""
    spec = cut(name, "F32", (8, 4), marks_of(SimpleNamespace(**marks), layer, "weight", 2), 2)
    assert spec.local_shape(2) == (8, 4)
    joined = join_slices([spec], [{name: Slice("F32", (8, 4), 0, rank * 512)} for rank in range(2)])
    segments = [Segment("shm", "arena", 1024, 0, 0)]
    check_coverage(build_manifest("1.1", joined.layout, segments, joined.tensors, {}), [spec])
    whole = Tensor(name, "F32", (16, 4), None, (Part(0, 0, 0, 0),), joined.tensors[0].checksum)
    with pytest.raises(CoverageError, match="this engine fuses it from"):
        check_coverage(build_manifest("1.1", "full", segments, [whole], {}), [spec])


def test_what_a_user_calls_rank_local_can_be_published_one_rank_after_the_other() -> None:
    assert rank_local("l", "F32", (3, 4), 2).shape == (6, 4)
    scalar = rank_local("l", "F32", (), 2)
    assert (scalar.shape, scalar.shard_axis, scalar.local_shape(2)) == ((2,), 0, (1,))
