"""Cases of `test_real_stock.py`, in FastDeploy's process: its DynamicWeightManager reads what this package wrote."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
from fastdeploy.rl.dynamic_weight_manager import DynamicWeightManager

from tests.engines.fastdeploy.real_engine import config_of, patched


class _Model(paddle.nn.Layer):
    """Parameters of these shapes, without memory yet, as FastDeploy makes them under LazyGuard."""

    def __init__(self, tensors: dict[str, tuple[str, list[int]]]) -> None:
        super().__init__()
        for name, (dtype, shape) in tensors.items():
            made = self.create_parameter(shape, dtype=dtype, default_initializer=paddle.nn.initializer.Constant(0))
            self.add_parameter(name.replace(".", "_"), made)

    def state_dict(self, *arguments: Any, **more: Any) -> dict[str, Any]:
        return {name.replace("_", ".", 1): tensor for name, tensor in super().state_dict().items()}


def load(path: str, tensors: dict[str, tuple[str, list[int]]], rank: int = 0, shared: str = "") -> dict[str, str]:
    """What stock's constructor makes of a model directory, as the bytes of each parameter in hex. `shared`: a directory
    in the place of /shared_ipc_meta."""
    return _bytes_of(_manager(path, tensors, rank, shared))


def read_version(path: str) -> str | None:
    return DynamicWeightManager.read_model_version_from_file(
        SimpleNamespace(fd_config=SimpleNamespace(model_config=SimpleNamespace(model=path)))
    )


def read_metas(path: str) -> dict[str, list[Any]]:
    """The arguments with which stock opens each tensor of an `ipc_metas_` file; the handle in hex."""
    opened: list[tuple[Any, ...]] = []
    memory = paddle.zeros([1])

    def open_row(row: tuple[Any, ...]) -> Any:
        opened.append(row)
        return memory.value().get_tensor()

    with patched(paddle.base.core, LoDTensor=SimpleNamespace(_new_shared_cuda=open_row)):
        names = DynamicWeightManager._convert_ipc_meta_to_tensor(paddle.load(path))
    rows = [[row[0].hex(), *row[1:]] for row in opened]
    return dict(zip(names, rows, strict=True))


def _manager(path: str, tensors: dict[str, tuple[str, list[int]]], rank: int, shared: str) -> Any:
    with paddle.LazyGuard():
        model = _Model(tensors)
    with ExitStack() as stack:
        stack.enter_context(patched(paddle.distributed, get_rank=lambda: rank))
        if shared:
            stack.enter_context(_elsewhere(shared))
        return DynamicWeightManager(config_of(Path(path), 1, SimpleNamespace(), kind="stock"), model, rank)


def _elsewhere(shared: str) -> Any:
    """FastDeploy has the directory in its code."""
    import fastdeploy.rl.dynamic_weight_manager as module

    load, exists = paddle.load, module.os.path.exists
    stack = ExitStack()
    moved = lambda file: str(file).replace("/shared_ipc_meta", shared)  # noqa: E731
    stack.enter_context(patched(paddle, load=lambda file, **more: load(moved(file), **more)))
    stack.enter_context(patched(module.os.path, exists=lambda file: exists(moved(file))))
    return stack


def _bytes_of(manager: Any) -> dict[str, str]:
    found = {}
    for name, tensor in manager.state_dict.items():
        array = tensor.view("uint16") if tensor.dtype == paddle.bfloat16 else tensor
        found[name] = array.numpy().tobytes().hex()
    return found
