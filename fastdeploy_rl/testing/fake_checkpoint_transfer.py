"""A stand-in for the closed package `checkpoint_transfer`, written to what FastDeploy calls of it.

A directory takes the place of the network: a trainer puts what each rank is sent there (`send`), the package's two
interfaces receive it, with `{"directory": DIR}` as their config. So

    with installed():                              # in this process
        ...
    PYTHONPATH=DIR                                 # in others, after write_package(DIR)

Owns no behaviour beyond that contract: a step that is not there is None of the older interface, a RuntimeError of the
newer one. Not for production: whoever may write to the directory decides what an engine serves.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastdeploy_rl.dtypes import numpy_dtype
from fastdeploy_rl.memory.host_tensor import borrow
from fastdeploy_rl.memory.saved_state import SavedArray, read_saved_state, write_saved_state

_PACKAGE = "checkpoint_transfer"


def send(directory: Path, step: int, parts: list[Mapping[str, Any]]) -> None:
    """What the trainer does: `parts[r]`, by name, is what rank r is sent. Tensors as `publish` takes them; numpy's
    uint16 is bfloat16. A part that is there already is replaced."""
    for rank, part in enumerate(parts):
        borrowed = {name: borrow(tensor, name) for name, tensor in part.items()}
        arrays = {name: SavedArray(host.dtype, host.shape, host.buffer) for name, host in borrowed.items()}
        temporary = directory / f".{step}.{rank}.tmp"
        with open(temporary, "wb") as file:
            file.writelines(write_saved_state(arrays))
        os.replace(temporary, _path(directory, step, rank))


class RDMAWeightsDownloader:
    """`checkpoint_transfer.core.RDMAWeightsDownloader`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._directory = Path(config["directory"])
        self._is_initialized = False

    def initialize(self) -> None:
        self._is_initialized = True

    def get_weights(self, step: int | str, rank: int) -> bytes | None:
        """The bytes of a saved state dict; None: there is no such step."""
        if not self._is_initialized:
            raise RuntimeError("get_weights before initialize")
        with contextlib.suppress(FileNotFoundError):
            return _path(self._directory, step, rank).read_bytes()
        return None


class CheckpointTransfer:
    """`checkpoint_transfer.CheckpointTransfer`."""

    def __init__(self, *, local_rank: int, group_size: int, directory: str) -> None:
        if not 0 <= local_rank < group_size:
            raise ValueError(f"local_rank {local_rank} is none of {group_size}")
        self._directory = Path(directory)
        self._rank = local_rank
        self._is_initialized = False

    def initialize(self) -> None:
        self._is_initialized = True

    def receive_stream(self, *, step_id: int | str, verify_checksum: bool) -> Iterator[tuple[str, NDArray[Any]]]:
        """(name, tensor) pairs, all in the same memory: each is good until the next is asked for. RuntimeError: there
        is no such step."""
        if not self._is_initialized:
            raise RuntimeError("receive_stream before initialize")
        if not _path(self._directory, step_id, self._rank).exists():
            raise RuntimeError(f"no step {step_id}")
        data = _path(self._directory, step_id, self._rank).read_bytes()
        tensors = read_saved_state(data).tensors.values()
        memory = np.zeros(max((tensor.num_bytes for tensor in tensors), default=0), np.uint8)
        for tensor in tensors:
            memory[: tensor.num_bytes] = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.offset)
            yield tensor.name, memory[: tensor.num_bytes].view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
            memory[:] = 0xFF


@contextlib.contextmanager
def installed(api: Literal["both", "downloader", "stream"] = "both") -> Iterator[None]:
    """The package is importable inside, with the interfaces of that kind."""
    package, core = ModuleType(_PACKAGE), ModuleType(f"{_PACKAGE}.core")
    for module in (package, core):
        module.__spec__ = ModuleSpec(module.__name__, None)
    package.__path__ = []
    if api != "stream":
        vars(core)["RDMAWeightsDownloader"] = RDMAWeightsDownloader
    if api != "downloader":
        vars(package)["CheckpointTransfer"] = CheckpointTransfer
    before = {name: sys.modules.get(name) for name in (package.__name__, core.__name__)}
    sys.modules.update({package.__name__: package, core.__name__: core})
    try:
        yield
    finally:
        for name, replaced in before.items():
            del sys.modules[name]
            if replaced is not None:
                sys.modules[name] = replaced


def write_package(directory: Path) -> None:
    """Makes the package importable where `directory` is on PYTHONPATH."""
    package = directory / _PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    origin = "from fastdeploy_rl.testing.fake_checkpoint_transfer import"
    (package / "__init__.py").write_text(f"{origin} CheckpointTransfer as CheckpointTransfer\n")
    (package / "core.py").write_text(f"{origin} RDMAWeightsDownloader as RDMAWeightsDownloader\n")


def _path(directory: Path, step: int | str, rank: int) -> Path:
    return directory / f"{step}.{rank}.pdparams"
