"""How a parameter of a FastDeploy layer is cut over the ranks, read off the marks that the layer left on it.

Owns the rule. Pure: refuses to know tensors, memory and names. Invariant: an axis is named only where the whole tensor,
cut evenly along it, gives each rank what it holds; in doubt a parameter is each rank's own, so that a tensor which is
cut otherwise is refused for its shape, and never taken apart in a wrong way.

What the marks are worth (FastDeploy 2.6): `output_dim` (True: the last axis, False: the first one, None: not cut)
follows the layout that the weight has, [out, in] included. `split_axis` does not: on weights of row-parallel layers it
is 0 in either layout, and stays where a layer under sequence parallelism is not cut at all; on biases of column-parallel
layers it is 1. Both are there whether or not anything is cut: the layer knows over how many ranks. Weights that are
transposed or quantized when a layer is done are new parameters, which have lost their marks.
"""

from enum import Enum
from typing import Any, NamedTuple


class OutputDim(Enum):
    """The mark `output_dim`."""

    ABSENT = "absent"
    NOT_CUT = None
    LAST = True
    FIRST = False


class Marks(NamedTuple):
    """`layer_classes`: names of the classes of the layer that holds it. `num_cuts`: over how many ranks that layer is
    cut. `split_axis`: None where the parameter is not marked as distributed. `is_whole`: the layer says that it is not
    cut, whatever stands on its parameters."""

    layer_classes: frozenset[str]
    num_cuts: int
    output_dim: OutputDim = OutputDim.ABSENT
    split_axis: int | None = None
    is_whole: bool = False


class Cut(NamedTuple):
    """The whole tensor's shape, and the axis along which it is cut evenly; None: each rank has all of it."""

    shape: tuple[int, ...]
    axis: int | None


EXPERTS = frozenset({"FusedMoE"})
"""Cut by expert, or by columns of gate and up inside each expert."""
FUSED = frozenset({"QKVParallelLinear", "QKVGateParallelLinear", "MergedColumnParallelLinear"})
"""Rank r holds [q_r | k_r | v_r]: the whole [q | k | v], cut evenly, would give it something else."""
CUT_LAYERS = frozenset({"ColumnParallelLinear", "RowParallelLinear", "KVBatchLinear", "Attention"})
"""An unmarked parameter of theirs has lost its marks, is a scale of what is cut, or a bias of which each rank adds a
share."""


_OF_THE_ROUTER = "gate_correction_bias"
"""The one parameter of a layer of experts that is not theirs."""


def marks_of(parameter: Any, layer: Any, attribute: str, num_ranks: int) -> Marks:
    """What FastDeploy wrote on a parameter and on the layer that holds it as `attribute`. `num_ranks`: for layers that
    do not say over how many they are cut."""
    num_cuts = next((n for n in (getattr(layer, "tp_size", None), getattr(layer, "world_size", None)) if n), num_ranks)
    given = getattr(parameter, "output_dim", OutputDim.ABSENT)
    is_distributed = bool(getattr(parameter, "is_distributed", False))
    return Marks(
        layer_classes=frozenset(cls.__name__ for cls in type(layer).__mro__),
        num_cuts=int(num_cuts),
        output_dim=given if isinstance(given, OutputDim) else OutputDim(None if given is None else bool(given)),
        split_axis=getattr(parameter, "split_axis", None) if is_distributed else None,
        is_whole=bool(getattr(layer, "split_token", False)) or attribute == _OF_THE_ROUTER,
    )


def rank_local(shape: tuple[int, ...], num_ranks: int) -> Cut:
    """Each rank's own: the whole is one rank's after the other's."""
    return Cut((num_ranks * shape[0], *shape[1:]) if shape else (num_ranks,), 0)


def cut(shape: tuple[int, ...], marks: Marks, num_ranks: int) -> Cut:
    """Of a parameter with that shape on each rank."""
    if num_ranks == 1:
        return Cut(shape, None)
    if marks.is_whole:
        return Cut(shape, None)
    if marks.layer_classes & EXPERTS:
        return rank_local(shape, num_ranks)
    if marks.num_cuts == 1:
        return Cut(shape, None)
    axis = _marked_axis(len(shape), marks)
    is_cut = axis is not None or (marks.output_dim is OutputDim.ABSENT and bool(marks.layer_classes & CUT_LAYERS))
    if not is_cut:
        return Cut(shape, None)
    if axis is None or marks.num_cuts != num_ranks or marks.layer_classes & FUSED:
        return rank_local(shape, num_ranks)
    return Cut(tuple(n * num_ranks if at == axis else n for at, n in enumerate(shape)), axis)


def _marked_axis(num_axes: int, marks: Marks) -> int | None:
    if not num_axes or marks.output_dim is OutputDim.NOT_CUT:
        return None
    if marks.output_dim is not OutputDim.ABSENT:
        return num_axes - 1 if marks.output_dim is OutputDim.LAST else 0
    return None if marks.split_axis is None else min(marks.split_axis, num_axes - 1)
