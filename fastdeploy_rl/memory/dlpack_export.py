"""Any framework's tensor through DLPack: the one place that knows how frameworks say no.

Owns the export and its refusals. Refuses to know which memory is wanted: `host_tensor` and `cuda_tensor` look at what
came out. Copies nothing.
"""

from typing import Any

from fastdeploy_rl import _native
from fastdeploy_rl.dtypes import DTYPES
from fastdeploy_rl.errors import TrainerError


def export(tensor: Any, name: str, wanted: str) -> _native.BorrowedTensor:
    """The tensor's memory, alive until dropped. `wanted`: "CPU" or "CUDA", for the message. TrainerError, naming the
    tensor, where it has no plain memory or a dtype without a safetensors name."""
    try:
        return _native.borrow_dlpack(tensor.__dlpack__())
    except (ValueError, TypeError) as error:
        raise unsupported_dtype(name, str(getattr(tensor, "dtype", "unknown"))) from error
    except (BufferError, RuntimeError, NotImplementedError, AttributeError) as error:
        # What frameworks say of sparse, quantized, conjugated and meta tensors, each in its own way.
        raise TrainerError(
            f"{name!r} has no plain memory that could be exported ({error!s:.200}): pass a dense {wanted} tensor"
        ) from error


def detached(tensor: Any) -> Any:
    """Frameworks refuse to export a tensor that wants gradients; the detached one is the same memory."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def unsupported_dtype(name: str, dtype: str) -> TrainerError:
    return TrainerError(
        f"{name!r} has dtype {dtype}, which cannot be published: cast it to one of {' '.join(DTYPES)}, little-endian"
    )
