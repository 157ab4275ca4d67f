"""The device's checksum on Paddle's tensors: on the CPU here, whose operations have the names of the device's."""

import numpy as np
import paddle
import pytest

from fastdeploy_rl.checksum import ROW_WORDS, of_bytes
from fastdeploy_rl.memory.device_checksum import DeviceChecksum


@pytest.mark.parametrize("num_bytes", [3, 4, 4 * ROW_WORDS + 1, 3 * 4 * ROW_WORDS + 10])
def test_a_tensor_of_paddle_has_the_checksum_of_its_bytes(num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    assert DeviceChecksum(paddle, batch_rows=2).of_bytes(paddle.to_tensor(data)) == of_bytes(data)
