"""Device memory in one process: the native calls, DLPack both ways, and the rules that FakeCuda keeps."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl.errors import (
    ConfigurationError,
    CudaError,
    CudaUnavailableError,
    SegmentError,
    StaleMemoryError,
    TrainerError,
)
from fastdeploy_rl.memory.cuda_devices import open_driver
from fastdeploy_rl.memory.cuda_ipc import CudaExporter, CudaImports
from fastdeploy_rl.memory.cuda_tensor import borrow_cuda
from fastdeploy_rl.testing.fake_cuda import LIBRARY, FakeCuda

BLOCK = 2 << 20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield cuda


@pytest.fixture
def context(cuda: FakeCuda) -> _native.CudaContext:
    return _native.CudaContext(open_driver(), 1)


@pytest.fixture
def exporter(cuda: FakeCuda, tmp_path: Path) -> Iterator[CudaExporter]:
    with CudaExporter(tmp_path / "cuda", "1") as exporter:
        yield exporter


class Tensor:
    """Speaks DLPack as a framework's tensor does."""

    def __init__(self, memory: Any, offset: int = 0, shape: tuple[int, ...] = (4, 3), dtype: str = "BF16") -> None:
        self._args = (offset, shape, dtype)
        self._memory = memory

    def __dlpack__(self) -> Any:
        return self._memory.dlpack(*self._args)


# --- without CUDA


def test_the_package_works_without_cuda_and_says_so_where_cuda_is_needed(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from fastdeploy_rl.errors import CudaUnavailableError
        from fastdeploy_rl.memory.cuda_ipc import CudaExporter, CudaImports
        for kind in (CudaExporter, CudaImports):
            try:
                kind(Path(sys.argv[1]), "0").start()
            except CudaUnavailableError as error:
                print(error)
    """
    command = [sys.executable, "-c", code, str(tmp_path / "cuda")]
    environ = {"FASTDEPLOY_RL_LIBCUDA": "/nowhere/libcuda.so.1", "PATH": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["no CUDA driver"] * 2
    assert not (tmp_path / "cuda").exists()


@pytest.mark.parametrize("kind", [CudaExporter, CudaImports])
def test_nothing_is_left_where_the_device_is_not_there(
    cuda: FakeCuda, tmp_path: Path, kind: type[CudaExporter] | type[CudaImports]
) -> None:
    with pytest.raises(ConfigurationError, match="no CUDA device is called '7'"):
        kind(tmp_path / "cuda", "7").start()
    assert not (tmp_path / "cuda").exists()


def test_an_exporter_that_is_not_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(CudaError, match="not started"):
        CudaExporter(tmp_path).allocate(1)


# --- native memory


def test_bytes_go_in_and_out_and_across(context: _native.CudaContext) -> None:
    first, second = context.allocate(BLOCK), context.allocate(BLOCK)
    data = np.random.default_rng(0).bytes(BLOCK)
    first.write(0, data)
    second.copy_from(5, first, 3, 1000)
    context.synchronize()
    out = bytearray(1000)
    second.read(5, out)
    assert out == data[3:1003]
    first.close()
    second.close()


def test_an_address_leads_to_its_allocation(context: _native.CudaContext) -> None:
    memory = context.allocate(BLOCK)
    for address in (memory.address, memory.address + BLOCK - 1):
        assert context.address_range(address) == (memory.address, BLOCK)
        assert context.ordinal_of(address) == 1
    with pytest.raises(_native.CudaDriverError, match="CUDA_ERROR_INVALID_VALUE"):
        context.address_range(memory.address + BLOCK)
    memory.close()


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (BLOCK, 1), (BLOCK - 1, 2), (BLOCK + 1, 0)])
def test_places_outside_the_memory_are_refused(context: _native.CudaContext, offset: int, num_bytes: int) -> None:
    memory = context.allocate(BLOCK)
    with pytest.raises(ValueError, match="not inside device memory"):
        memory.write(offset, bytes(num_bytes))
    with pytest.raises(ValueError, match="not inside device memory"):
        memory.dlpack(offset, [num_bytes], "U8")
    memory.close()


def test_memory_that_was_closed_is_gone(context: _native.CudaContext, cuda: FakeCuda) -> None:
    memory = context.allocate(BLOCK)
    memory.close()
    memory.close()
    assert (memory.address, memory.is_closed) == (0, True)
    with pytest.raises(ValueError, match="closed"):
        memory.write(0, b"1")
    assert cuda.counters().frees == 1


def test_allocated_memory_that_is_only_dropped_stays(context: _native.CudaContext, cuda: FakeCuda) -> None:
    context.allocate(BLOCK)
    del context
    assert (cuda.counters().frees, cuda.counters().live_allocations) == (0, 1)


# --- DLPack


def test_a_tensor_lies_in_the_memory_and_keeps_it(exporter: CudaExporter) -> None:
    allocation = exporter.allocate(BLOCK)
    tensor = borrow_cuda(Tensor(allocation_memory(allocation), 512))
    assert (tensor.address, tensor.num_bytes) == (allocation.address + 512, 24)
    assert (tensor.dtype, tensor.shape, tensor.device_index) == ("BF16", (4, 3), 1)
    with pytest.raises(SegmentError, match="1 tensors lie in it"):
        allocation.free()
    assert not allocation.is_freed
    del tensor
    allocation.free()
    with pytest.raises(StaleMemoryError, match="was freed"):
        allocation.write(b"1")


def allocation_memory(allocation: Any) -> Any:
    class Memory:
        @staticmethod
        def dlpack(offset: int, shape: tuple[int, ...], dtype: str) -> object:
            return allocation.dlpack(shape, dtype, offset)

    return Memory


def test_a_tensor_may_die_on_another_thread(context: _native.CudaContext) -> None:
    memory = context.allocate(BLOCK)
    tensors = [_native.borrow_dlpack(memory.dlpack(0, [8], "F32"))]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert memory.num_exports == 0
    memory.close()


def test_a_capsule_that_nobody_takes_lets_the_memory_go(context: _native.CudaContext) -> None:
    memory = context.allocate(BLOCK)
    capsule = memory.dlpack(0, [8], "F32")
    with pytest.raises(BufferError, match="1 tensors lie in it"):
        memory.close()
    del capsule
    memory.close()


class Sparse:
    """As a framework's tensor without memory of its own."""

    def __dlpack__(self) -> object:
        raise BufferError("can't export a sparse tensor")


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (Sparse(), "has no plain memory that could be exported"),
        (np.zeros(3, np.float32), "is not in CUDA memory"),
        (np.zeros(3, np.complex64), "has dtype complex64"),
        ([1.0], "is no tensor: got list"),
    ],
)
def test_what_is_no_cuda_tensor_is_refused_by_name(tensor: object, reason: str) -> None:
    with pytest.raises(TrainerError, match=f"'lm_head' {reason}"):
        borrow_cuda(tensor, "lm_head")


def test_an_empty_tensor_has_no_memory_to_export(exporter: CudaExporter, context: _native.CudaContext) -> None:
    memory = context.allocate(BLOCK)
    with pytest.raises(TrainerError, match="'bias' is empty"):
        exporter.export_tensor(Tensor(memory, shape=(0, 3)), "bias")
    memory.close()


def test_a_tensor_of_another_device_is_not_exported(exporter: CudaExporter, cuda: FakeCuda) -> None:
    memory = _native.CudaContext(open_driver(), 0).allocate(BLOCK)
    with pytest.raises(ConfigurationError, match="lies on device 0, this exporter is for GPU-11111111-bbbb"):
        exporter.export_tensor(Tensor(memory))
    assert cuda.counters().exports == 0
    memory.close()


# --- the rules of the fake driver, called as C


def device_at(ordinal: int) -> int:
    device = ctypes.c_int()
    assert ctypes.CDLL(str(LIBRARY)).cuDeviceGet(ctypes.byref(device), ordinal) == 0
    return device.value


def test_the_fake_wants_a_current_context(cuda: FakeCuda) -> None:
    open_driver()
    library, pointer = ctypes.CDLL(str(LIBRARY)), ctypes.c_uint64()
    assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1)) == 201
    assert library.cuCtxSynchronize() == 201
    assert cuda.counters().allocations == 0


def test_the_fake_takes_the_memory_of_a_context_that_nobody_keeps(cuda: FakeCuda) -> None:
    open_driver()
    library, context, pointer = ctypes.CDLL(str(LIBRARY)), ctypes.c_void_p(), ctypes.c_uint64()
    device = device_at(0)
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert library.cuCtxPushCurrent_v2(context) == 0
    assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(BLOCK)) == 0
    assert cuda.counters().live_allocations == 1
    assert library.cuDevicePrimaryCtxRelease_v2(device) == 0
    assert cuda.counters().live_allocations == 0
    assert library.cuMemFree_v2(pointer) == 201
    assert library.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


def test_the_fake_frees_what_it_gave_and_only_that(context: _native.CudaContext, cuda: FakeCuda) -> None:
    memory = context.allocate(BLOCK)
    library, popped = ctypes.CDLL(str(LIBRARY)), ctypes.c_void_p()
    primary = ctypes.c_void_p()
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(primary), device_at(1)) == 0
    assert library.cuCtxPushCurrent_v2(primary) == 0
    assert library.cuMemFree_v2(ctypes.c_uint64(memory.address + 1)) == 1
    assert library.cuIpcCloseMemHandle(ctypes.c_uint64(memory.address)) == 1
    assert cuda.counters().live_allocations == 1
    assert library.cuCtxPopCurrent_v2(ctypes.byref(popped)) == 0
    assert library.cuDevicePrimaryCtxRelease_v2(device_at(1)) == 0
    memory.close()


def test_the_fake_refuses_a_handle_in_the_process_it_came_from(context: _native.CudaContext, cuda: FakeCuda) -> None:
    memory = context.allocate(BLOCK)
    handle = context.export_handle(memory.address)
    assert handle == context.export_handle(memory.address)
    with pytest.raises(_native.CudaDriverError, match="CUDA_ERROR_INVALID_VALUE"):
        context.export_handle(memory.address + 1)
    with pytest.raises(_native.CudaDriverError) as refused:
        context.open(handle, BLOCK)
    assert refused.value.args == ("cuIpcOpenMemHandle", 201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context")
    with pytest.raises(_native.CudaDriverError, match="CUDA_ERROR_INVALID_VALUE"):
        context.open(bytes(64), BLOCK)
    assert (cuda.counters().exports, cuda.counters().opens) == (2, 0)
    memory.close()


def test_a_fake_machine_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda() as cuda:
        directory = cuda.directory
        assert directory.exists()
    assert not directory.exists()
    with pytest.raises(SegmentError, match="closed"):
        cuda.counters()
    for name, value in {"FASTDEPLOY_RL_LIBCUDA": str(LIBRARY), "FASTDEPLOY_RL_FAKE_CUDA": str(directory)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CudaUnavailableError, match="CUDA_ERROR_NO_DEVICE"):
        open_driver()
