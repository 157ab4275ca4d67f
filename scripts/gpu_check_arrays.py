"""Device memory as arrays of torch or cupy for scripts/gpu_check; of numpy where FakeCuda's memory is the host's.

Owns finding the libraries and the views over our allocations. Copies nothing."""

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gpu_check_process import SkippedError

from fastdeploy_rl import config
from fastdeploy_rl.memory.cuda_ipc import CudaAllocation
from fastdeploy_rl.testing import fake_cuda


class Arrays(NamedTuple):
    """`view`: the first bytes of an allocation as a flat array of uint8. `address`: where an array lies."""

    name: str
    library: Any
    view: Callable[[CudaAllocation, int], Any]
    address: Callable[[Any], int]


class _Exported:
    """What `from_dlpack` asks for; frameworks wait for their own stream, and our copies are done when they return."""

    def __init__(self, allocation: CudaAllocation, num_bytes: int, ordinal: int) -> None:
        self._allocation = allocation
        self._num_bytes = num_bytes
        self._ordinal = ordinal

    def __dlpack__(self, **_: object) -> object:
        return self._allocation.dlpack([self._num_bytes], "U8")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._ordinal  # kDLCUDA


def arrays_called(name: str, ordinal: int) -> Arrays:
    """Of the device with that ordinal. SkippedError, with the reason, where the library cannot be used."""
    return {"torch": _torch, "cupy": _cupy, "numpy": _numpy}[name](ordinal)


def _torch(ordinal: int) -> Arrays:
    torch = _import("torch")
    if not torch.cuda.is_available():
        raise SkippedError(f"torch {torch.__version__} sees no CUDA device")
    torch.cuda.set_device(ordinal)
    return Arrays("torch", torch, _by_dlpack(torch, ordinal), lambda tensor: int(tensor.data_ptr()))


def _cupy(ordinal: int) -> Arrays:
    cupy = _import("cupy")
    if not cupy.is_available():
        raise SkippedError(f"cupy {cupy.__version__} sees no CUDA device")
    cupy.cuda.Device(ordinal).use()
    return Arrays("cupy", cupy, _by_dlpack(cupy, ordinal), lambda array: int(array.data.ptr))


def _by_dlpack(library: Any, ordinal: int) -> Callable[[CudaAllocation, int], Any]:
    return lambda allocation, num_bytes: library.from_dlpack(_Exported(allocation, num_bytes, ordinal))


def _numpy(ordinal: int) -> Arrays:
    if config.libcuda_path() != str(fake_cuda.LIBRARY):
        raise SkippedError("numpy reads no device memory; it stands in for a device on FakeCuda only")

    def view(allocation: CudaAllocation, num_bytes: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(allocation.address))

    return Arrays("numpy", np, view, lambda array: int(array.ctypes.data))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SkippedError(f"{name} cannot be imported: {error}") from error
