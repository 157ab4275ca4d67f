"""Somebody else's CPU tensor as a flat run of bytes, whichever framework made it.

Owns the way in for numpy, Paddle and torch tensors, without importing any of them: arrays by their buffer, all others
by DLPack. Copies nothing. Invariant: what comes out is contiguous host memory with a dtype we can name; anything else
is refused with the tensor's name and the way to mend it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_rl import _native
from fastdeploy_rl.dtypes import NAMES
from fastdeploy_rl.errors import TrainerError
from fastdeploy_rl.memory.dlpack_export import detached, export, unsupported_dtype

_DLPACK_CPU = 1
_ML_DTYPES = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""What the package of that name calls them: numpy's own have none."""


class MemoryKey(NamedTuple):
    """Where the bytes are: two tensors with equal keys are the same memory. An empty tensor has address 0."""

    address: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class HostTensor:
    """Borrowed, C-contiguous; `buffer` is flat bytes and keeps the tensor's memory alive until dropped."""

    buffer: _native.BorrowedTensor | memoryview
    dtype: str
    shape: tuple[int, ...]
    key: MemoryKey


def borrow(tensor: Any, name: str = "tensor") -> HostTensor:
    """The bytes of a numpy array or of anything that speaks DLPack (Paddle, torch), never a copy.

    A numpy array of uint16, or of ml_dtypes' bfloat16, is BF16. TrainerError, naming the tensor and the way to mend it,
    when it is not in CPU memory, not contiguous, of a dtype without a safetensors name, or no tensor at all.
    """
    if isinstance(tensor, np.ndarray):
        return _borrow_array(tensor, name)
    if not hasattr(tensor, "__dlpack__"):
        raise TrainerError(
            f"{name!r} is no tensor: got {type(tensor).__name__}; pass numpy, paddle or torch tensors, "
            "and leave what is none out of the state dict"
        )
    return _borrow_dlpack(tensor, name)


def _borrow_array(array: np.ndarray[Any, Any], name: str) -> HostTensor:
    if isinstance(array, np.ma.MaskedArray):
        raise TrainerError(f"{name!r} is a masked array, and a mask cannot be published: pass array.filled(...)")
    dtype = _array_dtype(array.dtype)
    if dtype is None:
        raise unsupported_dtype(name, str(array.dtype))
    if not array.flags.c_contiguous:
        raise TrainerError(
            f"{name!r} is not contiguous (shape {array.shape}, strides {array.strides}): pass np.ascontiguousarray(...)"
        )
    flat = array.reshape(-1).view(np.uint8)
    key = MemoryKey(array.__array_interface__["data"][0] if array.nbytes else 0, array.nbytes)
    return HostTensor(flat.data, dtype, tuple(array.shape), key)


def _array_dtype(dtype: np.dtype[Any]) -> str | None:
    return NAMES.get(dtype) or _ML_DTYPES.get(dtype.name)


def _borrow_dlpack(tensor: Any, name: str) -> HostTensor:
    tensor = detached(tensor)
    _check_device(tensor, name)
    borrowed = export(tensor, name, "CPU")
    if not borrowed.is_cpu:
        raise _not_on_cpu(name, getattr(tensor, "place", None) or getattr(tensor, "device", "another device"))
    if not borrowed.is_contiguous:
        raise TrainerError(f"{name!r} is not contiguous (shape {borrowed.shape}): pass tensor.contiguous()")
    key = MemoryKey(borrowed.address if borrowed.num_bytes else 0, borrowed.num_bytes)
    return HostTensor(borrowed, borrowed.dtype, tuple(borrowed.shape), key)


def _check_device(tensor: Any, name: str) -> None:
    # Asked before the export, which would make a GPU wait for its stream.
    if not hasattr(tensor, "__dlpack_device__"):
        return
    try:
        kind, _ = tensor.__dlpack_device__()
    except (ValueError, BufferError, RuntimeError) as error:
        raise _not_on_cpu(name, error) from error
    if int(kind) != _DLPACK_CPU:
        raise _not_on_cpu(name, kind)


def _not_on_cpu(name: str, place: object) -> TrainerError:
    return TrainerError(f"{name!r} is not in CPU memory ({place}): pass tensor.cpu()")
