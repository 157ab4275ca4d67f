"""Plain CUDA IPC handles of a framework's tensors, for readers who know no leases: what stock FastDeploy opens.

Owns which tensors are kept for such readers, and one handle for each of their allocations. Refuses to know files. The
other way, with leases that its readers take, is `cuda_exports`; here nobody can say who has opened what. Invariant: a
tensor whose handle was given stays alive until it is let go. Tested on testing.fake_cuda; not run on a GPU.
"""

from collections.abc import Mapping
from typing import Any

from fastdeploy_rl import _native
from fastdeploy_rl.errors import CudaError
from fastdeploy_rl.memory.cuda_exports import not_exportable
from fastdeploy_rl.memory.cuda_record import driver_errors, open_device
from fastdeploy_rl.memory.cuda_tensor import CudaTensor, borrow_cuda
from fastdeploy_rl.memory.ipc_metas import IpcMeta


class CudaHandles:
    """Tensors of this process, borrowed for others until `release`. From one thread."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """TrainerError, naming the tensor, for one that is not contiguous CUDA memory. No device is opened yet."""
        self._tensors = {name: borrow_cuda(tensor, name) for name, tensor in tensors.items()}
        self._contexts: dict[int, _native.CudaContext] = {}

    def metas(self) -> dict[str, IpcMeta]:
        """Where each lies, all work on it done. CudaError where the driver gives no handle, with what to change."""
        handles: dict[tuple[int, int], bytes] = {}
        found = {}
        for name, tensor in self._tensors.items():
            context, what = self._context(tensor), f"{name!r:.600} at {tensor.address:#x}"
            with driver_errors(f"{what} is no memory of the device"):
                base, _ = context.address_range(tensor.address)
            key = tensor.device_index, base
            if key not in handles:
                handles[key] = _handle(context, base, what)
            place = tensor.address - base
            found[name] = IpcMeta(
                handles[key], place, tensor.num_bytes, tensor.dtype, tensor.shape, tensor.device_index
            )
        for context in self._contexts.values():
            with driver_errors("waiting for the device"):
                context.synchronize()
        return found

    def read(self, name: str) -> bytearray:
        """A copy of a tensor's bytes in host memory."""
        tensor = self._tensors[name]
        copy = bytearray(tensor.num_bytes)
        with driver_errors(f"copy of {name!r:.600} from the device"):
            context = self._context(tensor)
            context.synchronize()
            context.borrow(tensor.address, tensor.num_bytes).read(0, copy)
        return copy

    def tensor(self, name: str) -> CudaTensor:
        return self._tensors[name]

    def release(self) -> None:
        """Lets the tensors go. Handles that were given may name other memory from now on."""
        self._tensors.clear()
        self._contexts.clear()

    def _context(self, tensor: CudaTensor) -> _native.CudaContext:
        if tensor.device_index not in self._contexts:
            self._contexts[tensor.device_index] = open_device(str(tensor.device_index))[1]
        return self._contexts[tensor.device_index]


def _handle(context: _native.CudaContext, base: int, what: str) -> bytes:
    with driver_errors(f"{what} cannot be exported"):
        if not context.is_exportable(base):
            raise CudaError(not_exportable(base))
        return context.export_handle(base)
