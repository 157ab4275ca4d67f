"""Paddle tensors over our mappings, and Paddle's tensors as our buffers."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping

paddle = pytest.importorskip("paddle")

PADDLE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def is_mapped(address: int) -> bool:
    ranges = (line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


@pytest.mark.parametrize("name", PADDLE_NAMES)
def test_tensor_of_every_type_shares_the_mapping_both_ways(name: str) -> None:
    mapping = Mapping.private(4096)
    tensor = paddle.utils.dlpack.from_dlpack(mapping.dlpack(512, [2, 4], name))
    assert (str(tensor.dtype), tensor.shape) == (f"paddle.{PADDLE_NAMES[name]}", [2, 4])
    assert tensor.data_ptr() == mapping.address + 512
    borrowed = _native.borrow_dlpack(paddle.utils.dlpack.to_dlpack(tensor))
    assert (borrowed.dtype, borrowed.shape, borrowed.address) == (name, (2, 4), mapping.address + 512)
    assert (borrowed.is_cpu, borrowed.is_contiguous) == (True, True)


def test_bfloat16_values_arrive_as_written() -> None:
    mapping = Mapping.private(4096)
    np.frombuffer(mapping, np.uint16, 3)[:] = [0x3F80, 0xC000, 0x7F80]  # 1, -2, inf
    tensor = paddle.utils.dlpack.from_dlpack(mapping.dlpack(0, [3], "BF16"))
    assert tensor.astype("float32").tolist() == [1.0, -2.0, float("inf")]


def test_read_only_mapping_can_be_read_through_a_tensor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        mapping = Mapping.map_fd(fd, 16, False)
    finally:
        os.close(fd)
    tensor = paddle.utils.dlpack.from_dlpack(mapping.dlpack(0, [4], "F32"))
    assert tensor.data_ptr() == mapping.address
    assert (tensor * 2).tolist() == [0.0, 2.0, 4.0, 6.0]


def test_memory_goes_when_the_last_tensor_dies() -> None:
    mapping = Mapping.private(4 << 20)
    address = mapping.address
    tensor = paddle.utils.dlpack.from_dlpack(mapping.dlpack(0, [1 << 20], "F32"))
    part = tensor[: 1 << 10]
    with pytest.raises(BufferError, match="alive"):
        mapping.close()
    del mapping, tensor
    gc.collect()
    assert is_mapped(address)
    assert float(part.sum()) == 0.0
    del part
    gc.collect()
    assert not is_mapped(address)


def test_paddle_tensor_is_a_source_for_a_transfer() -> None:
    tensor = paddle.arange(1000, dtype="float32")
    borrowed = _native.borrow_dlpack(paddle.utils.dlpack.to_dlpack(tensor))
    target = np.zeros(1000, np.float32)
    region = _native.Region(source=borrowed, source_offset=0, source_stride=0, rows=1, row_bytes=4000, target=target)
    _native.transfer([region], 1)
    np.testing.assert_array_equal(target, np.arange(1000, dtype=np.float32))
