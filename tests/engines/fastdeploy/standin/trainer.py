"""What a trainer has of the stand-in's models: whole tensors, and what each rank must hold of them."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fastdeploy_rl.plan.conventions import TensorRule
from tests.engines.fastdeploy.standin.model_loader import DRAFT, MODEL, Parameter

Weights = dict[str, npt.NDArray[np.float32]]

_BOTH: Mapping[str, Parameter] = {**MODEL, **{f"mtp/{name}": parameter for name, parameter in DRAFT.items()}}


def random_weights(seed: int, *, mtp: bool = False) -> Weights:
    """Whole tensors of the main model and, as "mtp/NAME", of the draft model."""
    random = np.random.default_rng(seed)
    whole = {name: random.normal(0, 0.3, parameter.shape).astype(np.float32) for name, parameter in _BOTH.items()}
    return whole if mtp else {name: value for name, value in whole.items() if name in MODEL}


def slices(weights: Weights, rank: int, num_ranks: int) -> Weights:
    """A rank's share of each, contiguous."""
    held = {}
    for name, value in weights.items():
        axis = _BOTH[name].axis
        held[name] = np.ascontiguousarray(value if axis is None else np.split(value, num_ranks, axis)[rank])
    return held


def held_bytes(weights: Weights, num_ranks: int) -> list[dict[str, bytes]]:
    """What each rank's parameters must read, byte by byte."""
    return [
        {name: value.tobytes() for name, value in slices(weights, rank, num_ranks).items()} for rank in range(num_ranks)
    ]


def as_the_engine(name: str, shape: tuple[int, ...]) -> TensorRule:
    """The trainer has every tensor as the engine does."""
    return TensorRule(name, _BOTH[name].axis)
