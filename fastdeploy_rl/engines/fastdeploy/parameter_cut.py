"""How a parameter of a FastDeploy layer is cut over the ranks, read off the marks that the layer left on it.

Owns the rule. Pure: refuses to know tensors and memory. Invariant: what comes out says truly what each rank has of the
whole tensor; where that is not known, the whole goes by a name that no trainer publishes, so that it can only come from
what each rank was given as its own.

What the marks are worth (FastDeploy 2.6): `output_dim` (True: the last axis, False: the first one, None: not cut)
follows the layout that the weight has, [out, in] included. `split_axis` does not: on weights of row-parallel layers it
is 0 in either layout, and stays where a layer under sequence parallelism is not cut at all; on biases of layers that
are column-parallel it is 1. Both are there whether or not anything is cut: the layer knows over how many ranks. Weights
that are transposed or quantized when a layer is done are new parameters, which have lost their marks; those that are
not quantized are [in, out] then. And no mark says that a layer holds several tensors, each of them cut: rank r has
[q_r | k_r | v_r].
"""

from enum import Enum
from typing import Any, NamedTuple

from fastdeploy_rl.coverage import FusedPart, ParameterSpec


class OutputDim(Enum):
    """The mark `output_dim`."""

    ABSENT = "absent"
    NOT_CUT = None
    LAST = True
    FIRST = False


class Piece(NamedTuple):
    """One of the tensors that a layer holds as one: its name in FastDeploy, and how much each rank has of it, in any
    unit that is the same for all."""

    name: str
    share: int


class Marks(NamedTuple):
    """`layer_classes`: names of the classes of the layer that holds it. `num_cuts`: over how many ranks that layer is
    cut. `split_axis`: None where the parameter is not marked as distributed. `is_whole`: the layer says that it is not
    cut, whatever stands on its parameters. `pieces`: in order, along the axis that is cut."""

    layer_classes: frozenset[str]
    num_cuts: int
    output_dim: OutputDim = OutputDim.ABSENT
    split_axis: int | None = None
    is_whole: bool = False
    pieces: tuple[Piece, ...] = ()


_EXPERTS = "FusedMoE"
"""Cut by expert, or by columns of gate and up inside each expert."""
_OF_THE_ROUTER = "gate_correction_bias"
"""The one parameter of a layer of experts that is not theirs."""
_CUT_LAYERS = frozenset({"ColumnParallelLinear", "RowParallelLinear", "KVBatchLinear", "Attention"})
"""An unmarked parameter of theirs has lost its marks, is a scale of what is cut, or a bias of which each rank adds a
share."""
_FUSED_NAMES = ("qkvg_proj", "qkv_proj", "up_gate_proj")
_LOOKS_FUSED = ("qkv", "up_gate", "gate_up")
EACH_RANK = ".each_rank"
"""Ends the name of what has no whole that could be published."""


def marks_of(parameter: Any, layer: Any, attribute: str, num_ranks: int) -> Marks:
    """What FastDeploy wrote on a parameter and on the layer that holds it as `attribute`. `num_ranks`: of the
    tensor-parallel group, for layers that do not say over how many they are cut."""
    num_cuts = getattr(layer, "tp_size", None) or getattr(layer, "world_size", None) or num_ranks
    classes = frozenset(cls.__name__ for cls in type(layer).__mro__)
    given = getattr(parameter, "output_dim", OutputDim.ABSENT)
    if given is OutputDim.ABSENT and attribute == "weight":
        given = _of_a_turned_weight(layer, classes)
    return Marks(
        layer_classes=classes,
        num_cuts=int(num_cuts),
        output_dim=given if isinstance(given, OutputDim) else OutputDim(None if given is None else bool(given)),
        split_axis=getattr(parameter, "split_axis", None) if getattr(parameter, "is_distributed", False) else None,
        is_whole=bool(getattr(layer, "split_token", False)) or attribute == _OF_THE_ROUTER,
        pieces=_pieces(layer, classes),
    )


def _of_a_turned_weight(layer: Any, classes: frozenset[str]) -> OutputDim:
    """The mark that a weight had which was transposed to [in, out]."""
    if type(getattr(layer, "quant_method", None)).__name__ != "UnquantizedLinearMethod":
        return OutputDim.ABSENT
    if "RowParallelLinear" in classes:
        return OutputDim.FIRST
    return OutputDim.LAST if "ColumnParallelLinear" in classes else OutputDim.ABSENT


def _pieces(layer: Any, classes: frozenset[str]) -> tuple[Piece, ...]:
    if "MergedColumnParallelLinear" in classes:
        return Piece("gate_proj", 1), Piece("up_proj", 1)
    if not classes & {"QKVParallelLinear", "QKVGateParallelLinear"}:
        return ()
    heads, kv_heads = int(layer.num_heads_per_rank), int(layer.kv_num_heads_per_rank)
    pieces = Piece("q_proj", heads), Piece("k_proj", kv_heads), Piece("v_proj", kv_heads)
    return (*pieces, Piece("gate", heads)) if "QKVGateParallelLinear" in classes else pieces


def cut(name: str, dtype: str, shape: tuple[int, ...], marks: Marks, num_ranks: int) -> ParameterSpec:
    """Of a parameter with that shape on each rank."""
    if num_ranks == 1 or marks.is_whole:
        return ParameterSpec(name, dtype, shape, None)
    if _EXPERTS in marks.layer_classes:
        return rank_local(name, dtype, shape, num_ranks)
    axis = _marked_axis(len(shape), marks)
    lost_its_marks = marks.output_dim is OutputDim.ABSENT and axis is None and bool(marks.layer_classes & _CUT_LAYERS)
    if marks.num_cuts == 1 or (axis is None and not lost_its_marks):
        return ParameterSpec(name, dtype, shape, None)
    if axis is None or marks.num_cuts != num_ranks:
        return _of_each_rank(name, dtype, shape, num_ranks)
    return _evenly_cut(name, dtype, shape, axis, marks.pieces, num_ranks)


def rank_local(name: str, dtype: str, shape: tuple[int, ...], num_ranks: int) -> ParameterSpec:
    """Each rank's own: the whole, which can be published, is one rank's after the other's."""
    return ParameterSpec(name, dtype, (num_ranks * shape[0], *shape[1:]) if shape else (num_ranks,), 0)


def _of_each_rank(name: str, dtype: str, shape: tuple[int, ...], num_ranks: int) -> ParameterSpec:
    spec = rank_local(name, dtype, shape, num_ranks)
    part = FusedPart(name + EACH_RANK, spec.shape[0])
    return ParameterSpec(name, dtype, spec.shape, 0, fused=(part,))


def _evenly_cut(
    name: str, dtype: str, shape: tuple[int, ...], axis: int, pieces: tuple[Piece, ...], num_ranks: int
) -> ParameterSpec:
    length, shares = shape[axis], sum(piece.share for piece in pieces)
    if (pieces and length % shares) or (not pieces and any(word in name for word in _LOOKS_FUSED)):
        return _of_each_rank(name, dtype, shape, num_ranks)
    whole = tuple(n * num_ranks if at == axis else n for at, n in enumerate(shape))
    parts = (FusedPart(_piece_name(name, p.name), p.share * (length // shares) * num_ranks) for p in pieces)
    return ParameterSpec(name, dtype, whole, axis, fused=tuple(parts), fused_axis=axis if pieces else 0)


def _piece_name(name: str, piece: str) -> str:
    for fused in _FUSED_NAMES:
        if fused in name:
            return name.replace(fused, piece)
    return f"{name}.{piece}"


def _marked_axis(num_axes: int, marks: Marks) -> int | None:
    if not num_axes or marks.output_dim is OutputDim.NOT_CUT:
        return None
    if marks.output_dim is not OutputDim.ABSENT:
        return num_axes - 1 if marks.output_dim is OutputDim.LAST else 0
    return None if marks.split_axis is None else min(marks.split_axis, num_axes - 1) % num_axes
