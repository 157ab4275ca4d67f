"""What soak and its trainer agree on: the model's tensors, what a seed makes of them, how a trainer's tensors lie.

Small, so that an update costs processes and not bytes; with a tied, an empty and a zero-dimensional tensor."""

import zlib
from collections.abc import Mapping

import numpy as np

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.plan.conventions import TensorRule

Weights = Mapping[str, np.ndarray]


def model(num_ranks: int) -> NumpyModel:
    """One whose sharded axes divide by the number of ranks."""
    wide = 6 * num_ranks
    return NumpyModel(
        (
            ParameterSpec("embed", "F32", (4 * num_ranks, 40), 0),
            ParameterSpec("norm", "F32", (40,), None),
            ParameterSpec("layers.0.up", "F32", (40, wide), 1),
            ParameterSpec("layers.0.down", "F32", (wide, 40), 0),
            ParameterSpec("scale", "F32", (), None),
            ParameterSpec("empty", "F32", (0, 4), None),
            ParameterSpec("head", "F32", (4 * num_ranks, 40), 0, Coverage.TIED, "embed"),
        )
    )


def as_the_engine(parameters: NumpyModel) -> "dict[str, TensorRule]":
    """The trainer has every tensor as the engine does."""
    return {spec.name: TensorRule(spec.name, spec.shard_axis) for spec in parameters.specs}


def reference_tokens(parameters: NumpyModel, weights: Weights, num_ranks: int) -> tuple[int, ...]:
    """What each rank must answer while `weights` are live: worked out from the trainer's arrays alone, by numpy."""
    return tuple(_reference_token(parameters, weights, rank, num_ranks) for rank in range(num_ranks))


def _reference_token(parameters: NumpyModel, weights: Weights, rank: int, num_ranks: int) -> int:
    axes = {spec.name: spec.shard_axis for spec in parameters.specs if spec.coverage is Coverage.UPDATED}
    token = 0
    for name in sorted(axes):
        value, axis = weights[name], axes[name]
        if axis is not None:
            share = value.shape[axis] // num_ranks
            value = value.take(range(rank * share, (rank + 1) * share), axis)
        token = zlib.crc32(value.tobytes(), token)
    return token
