"""A small model whose parameters carry the marks that FastDeploy's layers set, and FastDeploy's way to get one.

Parameters have no memory yet, as FastDeploy leaves them where weights come later. `MODEL` and `DRAFT` say what is
split over ranks, for tests that have whole tensors."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import paddle
from paddle import nn


class Parameter(NamedTuple):
    """`shape`: of the whole tensor; `axis`: the one that is split over ranks, None for a replica on each."""

    shape: tuple[int, ...]
    axis: int | None


MODEL: Mapping[str, Parameter] = MappingProxyType(
    {
        "embed_tokens.weight": Parameter((32, 8), 0),
        "layers.0.up_proj.weight": Parameter((8, 24), 1),
        "layers.0.down_proj.weight": Parameter((24, 8), 0),
        "layers.0.norm.weight": Parameter((8,), None),
        "lm_head.weight": Parameter((8, 32), 1),
    }
)
DRAFT: Mapping[str, Parameter] = MappingProxyType(
    {"embed_tokens.weight": Parameter((32, 8), 0), "eh_proj.weight": Parameter((16, 8), None)}
)


class _Holder(nn.Layer):
    """A layer that is nothing but its parameters, under dotted names."""


class StandinModel(nn.Layer):
    def __init__(self, parameters: Mapping[str, Parameter], num_ranks: int) -> None:
        super().__init__()
        self.graphs: dict[int, Any] = {}
        with paddle.LazyGuard():
            for name, parameter in parameters.items():
                self._add(name, parameter, num_ranks)

    def clear_graph_opt_backend(self):
        self.graphs.clear()

    def _add(self, name: str, parameter: Parameter, num_ranks: int) -> None:
        *path, last = name.split(".")
        layer: nn.Layer = self
        for part in path:
            if part not in layer._sub_layers:
                layer.add_sublayer(part, _Holder())
            layer = layer._sub_layers[part]
        layer.add_parameter(last, layer.create_parameter(_share(parameter, num_ranks), dtype="float32"))
        if parameter.axis is not None and num_ranks > 1:
            held = layer._parameters[last]
            held.is_distributed = True
            held.split_axis = parameter.axis
            held.output_dim = parameter.axis == 1


def _share(parameter: Parameter, num_ranks: int) -> list[int]:
    shape = list(parameter.shape)
    if parameter.axis is not None:
        shape[parameter.axis] //= num_ranks
    return shape


class _Loader:
    def load_model(self, fd_config: Any) -> StandinModel:
        return StandinModel(MODEL, fd_config.parallel_config.tensor_parallel_size)


def get_model_loader(load_config: Any) -> _Loader:
    return _Loader()
