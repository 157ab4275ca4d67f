"""fletcher4 as a device computes it, on numpy's arrays: what the reference and the native core say, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_rl._native import Place, Region, transfer
from fastdeploy_rl.checksum import ROW_WORDS, ZERO, Fletcher4, of_bytes
from fastdeploy_rl.memory.device_checksum import DeviceChecksum

ROW_BYTES = 4 * ROW_WORDS
ON_NUMPY = DeviceChecksum(np, batch_rows=2)


def native(data: np.ndarray) -> Fletcher4:
    place = Place(0, 0, data.size)
    row = {"source_offset": 0, "source_stride": data.size, "rows": 1, "row_bytes": data.size}
    ((sums, _),) = transfer([Region(source=data, read_place=place, **row)], 1)
    assert sums is not None
    return Fletcher4(*sums)


@given(st.binary(max_size=200))
def test_a_few_bytes_have_their_checksum(data: bytes) -> None:
    assert ON_NUMPY.of_bytes(np.frombuffer(data, np.uint8)) == of_bytes(data)


@pytest.mark.parametrize("num_bytes", [ROW_BYTES - 1, ROW_BYTES, 2 * ROW_BYTES + 3, 5 * ROW_BYTES + 6])
def test_rows_summed_together_and_the_rest_give_what_the_native_core_says(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    assert ON_NUMPY.of_bytes(data) == native(data) == of_bytes(data)


@pytest.mark.parametrize("batch_rows", [1, 2, 16])
def test_words_of_all_ones_are_unsigned_and_wrap_alike_however_many_rows_go_together(batch_rows: int) -> None:
    data = np.full(3 * ROW_BYTES + 5, 0xFF, np.uint8)
    assert DeviceChecksum(np, batch_rows).of_bytes(data) == native(data)


def test_nothing_has_the_checksum_zero_and_takes_no_tables() -> None:
    assert DeviceChecksum(np).of_bytes(np.empty(0, np.uint8)) == ZERO


def test_no_rows_at_a_time_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        DeviceChecksum(np, batch_rows=0)


def test_a_tensor_of_torch_has_the_checksum_of_its_bytes() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    for num_bytes in (3, 4, 3 * ROW_BYTES + 10):
        data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
        assert DeviceChecksum(torch, batch_rows=2).of_bytes(torch.from_numpy(data)) == of_bytes(data)
