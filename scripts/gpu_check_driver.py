"""Driver calls that only scripts/gpu_check makes, by ctypes: the plain copy that others are measured against, and
pinned host memory. Signatures are those of cuda.h."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_check_process import CheckFailedError, SkippedError

from fastdeploy_rl import config

_Pointer = ctypes.c_uint64


class PlainDriver:
    """The calls, with the device's primary context current on this thread from `start` to `close`."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._library = ctypes.CDLL(config.libcuda_path())
        self._device = ctypes.c_int()

    def start(self) -> None:
        context = ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(self._ordinal))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxPushCurrent_v2", context)

    def close(self) -> None:
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Device to device; may return before it is done."""
        self._call("cuMemcpyDtoD_v2", _Pointer(target), _Pointer(source), ctypes.c_size_t(num_bytes))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def num_free_bytes(self) -> int:
        """Of the whole device, which other processes use too. SkippedError where the driver has no such call."""
        self._need("cuMemGetInfo_v2")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def pinned(self, num_bytes: int) -> Iterator[Any]:
        """A buffer of page-locked host memory. SkippedError where the driver has no such call."""
        self._need("cuMemHostAlloc")
        memory = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(num_bytes), ctypes.c_uint(0))
        try:
            yield (ctypes.c_uint8 * num_bytes).from_address(memory.value or 0)
        finally:
            self._call("cuMemFreeHost", memory)

    def _need(self, name: str) -> None:
        if not hasattr(self._library, name):
            raise SkippedError(f"this driver has no {name}")

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            raise CheckFailedError(f"{name} gave {code}")

    def __enter__(self) -> "PlainDriver":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
