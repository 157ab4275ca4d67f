"""Somebody else's CUDA tensor as a run of device memory, whichever framework made it.

Owns the way in for Paddle and torch tensors, by DLPack and without importing either; `host_tensor` is its twin for CPU
memory. Copies nothing. Invariant: what comes out is contiguous device memory with a dtype we can name. Tested on
FakeCuda; not run on a GPU.
"""

from dataclasses import dataclass
from typing import Any

from fastdeploy_rl import _native
from fastdeploy_rl.errors import TrainerError
from fastdeploy_rl.memory.dlpack_export import detached, export

_DLPACK_CUDA = 2


@dataclass(frozen=True, eq=False)
class CudaTensor:
    """Borrowed, C-contiguous; `buffer` keeps the tensor's memory alive until dropped. `device_index`: the driver's
    ordinal in this process."""

    buffer: _native.BorrowedTensor
    dtype: str
    shape: tuple[int, ...]
    address: int
    num_bytes: int
    device_index: int


def borrow_cuda(tensor: Any, name: str = "tensor") -> CudaTensor:
    """The memory of a CUDA tensor that speaks DLPack, never a copy. Frameworks make their current stream wait where
    they export, but only the device's own synchronisation makes the bytes complete for other processes.

    TrainerError, naming the tensor, when it is not in CUDA memory, not dense and contiguous, empty, of a dtype without
    a safetensors name, or no tensor at all.
    """
    if not hasattr(tensor, "__dlpack__"):
        raise TrainerError(f"{name!r} is no tensor: got {type(tensor).__name__}; pass paddle or torch tensors")
    borrowed = export(detached(tensor), name, "CUDA")
    kind, index = borrowed.device
    if kind != _DLPACK_CUDA:
        raise TrainerError(f"{name!r} is not in CUDA memory (DLPack device type {kind})")
    if not borrowed.is_contiguous:
        raise TrainerError(f"{name!r} is not contiguous (shape {borrowed.shape}): pass tensor.contiguous()")
    if borrowed.num_bytes == 0:
        raise TrainerError(f"{name!r} is empty (shape {borrowed.shape}): it has no memory to export")
    return CudaTensor(borrowed, borrowed.dtype, borrowed.shape, borrowed.address, borrowed.num_bytes, index)
