"""Tensors of any framework as flat bytes."""

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fastdeploy_rl.errors import TrainerError
from fastdeploy_rl.memory.host_tensor import borrow


@pytest.fixture(scope="session")
def paddle() -> Any:
    return pytest.importorskip("paddle", reason="paddle is not installed")


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"])
def test_numpy_arrays_are_borrowed_without_a_copy(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    host = borrow(array)
    assert bytes(memoryview(host.buffer)) == array.tobytes()
    assert (host.shape, host.key) == ((2, 3), (array.ctypes.data, array.nbytes))


def test_uint16_and_ml_dtypes_arrays_are_bfloat16() -> None:
    assert borrow(np.zeros(3, np.uint16)).dtype == "BF16"
    assert borrow(np.zeros(3, ml_dtypes.bfloat16)).dtype == "BF16"


def test_arrays_of_eight_bit_floats_have_their_own_names() -> None:
    assert borrow(np.zeros(3, ml_dtypes.float8_e4m3fn)).dtype == "F8_E4M3"
    assert borrow(np.zeros(3, ml_dtypes.float8_e5m2)).dtype == "F8_E5M2"
    assert borrow(np.zeros(3, np.uint8)).dtype == "U8"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 7)])
def test_zero_dimensional_and_empty_arrays_are_tensors_too(shape: tuple[int, ...]) -> None:
    host = borrow(np.ones(shape, np.float32))
    assert host.shape == shape
    assert memoryview(host.buffer).nbytes == host.key.num_bytes == 4 * int(np.prod(shape))


def test_a_read_only_array_is_borrowed() -> None:
    array = np.arange(4, dtype=np.int32)
    array.flags.writeable = False
    assert bytes(memoryview(borrow(array).buffer)) == array.tobytes()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (np.zeros((4, 6), np.float32)[:, ::2], "not contiguous"),
        (np.zeros((4, 6), np.float32).T, "not contiguous"),
        (np.broadcast_to(np.zeros(3, np.float32), (2, 3)), "not contiguous"),
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, ">f4"), ">f4"),
        (np.zeros(2, np.uint64), "uint64"),
        (np.array(["a"], dtype=object), "object"),
        ([1.0, 2.0], "no tensor"),
        (None, "no tensor"),
        (np.float32(1), "no plain memory|no tensor"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), "masked array.*filled"),
        (np.zeros(2, [("a", "f4")]), "cast it to one of"),
    ],
)
def test_what_cannot_be_borrowed_is_refused_by_name(tensor: object, reason: str) -> None:
    with pytest.raises(TrainerError, match=rf"'some\.name'.*{reason}"):
        borrow(tensor, "some.name")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "uint8"])
def test_paddle_tensors_are_borrowed_without_a_copy(paddle: Any, dtype: str) -> None:
    tensor = paddle.ones([2, 3]).astype(dtype)
    host = borrow(tensor)
    assert host.key == (tensor.data_ptr(), tensor.numel().item() * tensor.element_size())
    assert bytes(memoryview(host.buffer)) == tensor.numpy().tobytes()
    assert host.shape == (2, 3)


def test_paddle_parameters_scalars_and_empty_tensors_are_borrowed(paddle: Any) -> None:
    parameter = paddle.create_parameter([4, 2], "float32")
    assert not parameter.stop_gradient
    assert bytes(memoryview(borrow(parameter).buffer)) == parameter.numpy().tobytes()
    assert borrow(paddle.to_tensor(1.5)).shape == ()
    assert borrow(paddle.zeros([0, 3])).key == (0, 0)


def test_a_transposed_paddle_tensor_is_refused_by_name(paddle: Any) -> None:
    strided = paddle.arange(12, dtype="float32").reshape([3, 4]).as_strided([4, 3], [1, 4])
    with pytest.raises(TrainerError, match=r"'w'.*not contiguous.*contiguous\(\)"):
        borrow(strided, "w")


def test_a_paddle_tensor_without_a_safetensors_dtype_is_refused_by_name(paddle: Any) -> None:
    with pytest.raises(TrainerError, match=r"'w'.*complex64"):
        borrow(paddle.zeros([2], "complex64"), "w")


def test_torch_tensors_are_borrowed_without_a_copy() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_()
    host = borrow(tensor)
    assert (host.dtype, host.shape, host.key) == ("BF16", (2, 3), (tensor.data_ptr(), 12))


class _OnAnotherDevice:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self) -> object:
        raise AssertionError("a tensor on a GPU must be refused before it is exported")


def test_a_tensor_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(TrainerError, match="'w' is not in CPU memory"):
        borrow(_OnAnotherDevice(), "w")


class _WithoutPlainMemory:
    """As torch's sparse, quantized and meta tensors answer."""

    def __init__(self, device_error: Exception | None, export_error: Exception) -> None:
        self._device_error, self._export_error = device_error, export_error

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._device_error:
            raise self._device_error
        return (1, 0)

    def __dlpack__(self) -> object:
        raise self._export_error


@pytest.mark.parametrize("error", [BufferError, RuntimeError, NotImplementedError])
def test_a_tensor_without_plain_memory_is_refused_by_name(error: type[Exception]) -> None:
    with pytest.raises(TrainerError, match=r"'w' has no plain memory.*sparse.*dense CPU tensor"):
        borrow(_WithoutPlainMemory(None, error("sparse")), "w")
    with pytest.raises(TrainerError, match=r"'w' is not in CPU memory.*meta"):
        borrow(_WithoutPlainMemory(ValueError("meta"), error("never")), "w")


@pytest.mark.filterwarnings("ignore")
def test_torch_tensors_that_cannot_be_published_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    bad = [torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(1, 3).expand(2, 3), torch.zeros(3, 4).T]
    bad += [torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(3).to(torch.float8_e4m3fn)]
    for tensor in bad:
        with pytest.raises(TrainerError, match="'w'"):
            borrow(tensor, "w")


def test_publishing_imports_no_framework() -> None:
    code = (
        "import sys, fastdeploy_rl.publish.publisher, fastdeploy_rl.sources.ipc;"
        "print(sorted({'paddle', 'torch', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
