"""State dicts between Paddle and us, both ways, bit for bit."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory.saved_state import SavedArray, read_saved_file, write_saved_state


def test_what_paddle_saves_is_read_and_what_is_written_paddle_loads(tmp_path: Path) -> None:
    layer = paddle.nn.Linear(3, 5)
    state = {
        **layer.state_dict(),
        "half": paddle.to_tensor([1.5, -2.0], dtype="bfloat16"),
        "scalar": paddle.to_tensor(3, dtype="int64"),
        "empty": paddle.zeros([0, 2]),
        "mask": paddle.to_tensor([True, False]),
    }
    path = tmp_path / "model.pdparams"
    for protocol in (3, 4):
        paddle.save(state, str(path), protocol=protocol)
        saved, data = read_saved_file(path).tensors, path.read_bytes()
        assert list(saved) == list(state)
        arrays = {n: SavedArray(t.dtype, t.shape, data[t.offset : t.offset + t.num_bytes]) for n, t in saved.items()}
        for name, array in arrays.items():
            assert array.data == np.asarray(state[name]).tobytes(), name
        path.with_suffix(".ours").write_bytes(b"".join(write_saved_state(arrays)))
        loaded = paddle.load(str(path.with_suffix(".ours")))
        assert list(loaded) == list(state)
        for name, tensor in loaded.items():
            assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape), name
            assert np.asarray(tensor).tobytes() == np.asarray(state[name]).tobytes(), name
    paddle.save(state, str(path), protocol=2)
    with pytest.raises(CheckpointError, match="protocol=4"):
        read_saved_file(path)
