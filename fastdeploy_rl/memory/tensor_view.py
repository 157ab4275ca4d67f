"""A tensor as a place in a mapping.

Owns the arithmetic between (mapping, offset, dtype, shape) and a numpy array. Refuses to know who wrote the bytes or
how long they stay. Invariant: a view lies inside its mapping.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.dtypes import itemsize, numpy_dtype
from fastdeploy_rl.errors import ConfigurationError, SegmentError


def check_unused(mapping: Mapping, what: str) -> None:
    """SegmentError, naming `what`, while arrays or tensors lie in the mapping."""
    if mapping.num_exports:
        raise SegmentError(
            f"{what} is still in use: {mapping.num_exports} arrays or tensors lie in it; drop them and release it again"
        )


@dataclass(frozen=True, eq=False)
class TensorView:
    """C-contiguous tensor at `offset` bytes into `mapping`; dtype
    is a safetensors name. Keeps the mapping alive, not open."""

    mapping: Mapping
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.offset < 0 or any(size < 0 for size in self.shape):
            raise ConfigurationError(f"no tensor has shape {self.shape} at offset {self.offset}")
        if self.offset + self.num_bytes > self.mapping.num_bytes:
            raise ConfigurationError(
                f"tensor of {self.num_bytes} bytes at offset {self.offset} ends outside its mapping "
                f"of {self.mapping.num_bytes} bytes"
            )

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def numpy(self) -> npt.NDArray[Any]:
        """The bytes themselves, never a copy; BF16 as uint16; read-only when the mapping is. The mapping cannot be
        closed while the array lives."""
        # Through frombuffer: it holds a buffer export, which `np.ndarray(buffer=)` gives back at once, so that a later
        # `close()` of the mapping would pull the memory from under the array.
        flat: npt.NDArray[np.uint8] = np.frombuffer(memoryview(self.mapping), dtype=np.uint8)
        return flat[self.offset : self.offset + self.num_bytes].view(numpy_dtype(self.dtype)).reshape(self.shape)

    def same_place(self, other: "TensorView") -> bool:
        """True when both are the same tensor in the same memory."""
        mine = (self.mapping.address + self.offset, self.dtype, self.shape)
        return mine == (other.mapping.address + other.offset, other.dtype, other.shape)
