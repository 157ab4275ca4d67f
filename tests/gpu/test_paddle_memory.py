"""Paddle's tensors on devices: exported where they lie, with one open for each allocation of Paddle's.

Not run on a GPU so far."""

import base64
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.errors import SegmentError
from fastdeploy_rl.memory.cuda_ipc import CudaDevice, CudaExporter
from fastdeploy_rl.memory.device_checksum import DeviceChecksum
from tests.process.cuda_peer import CudaPeer

pytestmark = pytest.mark.gpu

NUM_TENSORS = 60


def tensors_on(paddle: Any, index: int) -> list[Any]:
    """Small ones, which Paddle's allocator cuts out of larger blocks; of odd sizes and two dtypes."""
    paddle.device.set_device(f"gpu:{index}")
    dtypes = ("float32", "bfloat16")
    return [paddle.rand([3, 5 + k]).astype(dtypes[k % 2]) for k in range(NUM_TENSORS)]


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())


def check_exports(paddle: Any, directory: Path, index: int) -> None:
    tensors = tensors_on(paddle, index)
    with CudaExporter(directory, str(index)) as exporter, CudaPeer(directory, str(index), {}) as peer:
        records = [exporter.export_tensor(tensor, f"weight {k}") for k, tensor in enumerate(tensors)]
        exporter.synchronize()
        bases = {record.base_address for record in records}
        assert len(bases) < NUM_TENSORS, "Paddle gave each tensor an allocation of its own: nothing was deduplicated"
        numbers = peer.ask("open_all", [record.to_json().decode() for record in records])
        assert [base64.b64decode(text) for text in peer.ask("read_all", numbers)] == list(map(bytes_of, tensors))
        assert peer.ask("num_open") == len(bases)
        with pytest.raises(SegmentError, match=f"pid {peer.pid}"):
            exporter.withdraw(records[0])
        peer.ask("release_all", numbers)
        for record in records:
            exporter.withdraw(record)


def test_tensors_of_paddle_are_opened_once_for_each_of_its_allocations(paddle: Any, tmp_path: Path) -> None:
    check_exports(paddle, tmp_path / "cuda", 0)


def test_tensors_of_every_device_are_exported_from_where_they_lie(
    two_devices: list[CudaDevice], paddle: Any, tmp_path: Path
) -> None:
    for device in two_devices:
        check_exports(paddle, tmp_path / "cuda", device.index)


@pytest.mark.parametrize("num_bytes", [5, (4 << 20) - 1, (12 << 20) + 6])
def test_a_tensor_on_a_device_has_the_checksum_of_its_bytes(paddle: Any, num_bytes: int) -> None:
    tensor = paddle.randint(0, 256, [num_bytes], dtype="int32").astype("uint8")
    assert DeviceChecksum(paddle).of_bytes(tensor) == of_bytes(tensor.numpy())
