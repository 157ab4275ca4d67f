"""State dicts and IPC metadata between Paddle and us, both ways, bit for bit."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy_rl import FastDeployFiles, WeightPublisher
from fastdeploy_rl.errors import CheckpointError
from fastdeploy_rl.memory.ipc_metas import IpcMeta, read_ipc_metas_file, write_ipc_metas
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


def test_ipc_metadata_that_paddle_saves_is_read_and_what_is_written_paddle_loads(tmp_path: Path) -> None:
    """Rows as `_share_cuda` gives them (which a build without CUDA lacks), the dtype's index as Paddle itself says it:
    `_share_filename` gives the same number."""
    path, handle = tmp_path / "ipc_metas_0", bytes(range(192, 256))
    metas: dict[str, IpcMeta] = {}
    rows: dict[str, list[object]] = {}
    for dtype, name in (
        ("bfloat16", "BF16"),
        ("float32", "F32"),
        ("int64", "I64"),
        ("bool", "BOOL"),
        ("float16", "F16"),
        ("float8_e4m3fn", "F8_E4M3"),
    ):
        tensor = paddle.zeros([4, 3]).astype(dtype)
        _, _, num_bytes, index, dims, lod, _ = tensor.value().get_tensor()._share_filename(False)
        metas[name] = IpcMeta(handle, 512 * len(metas), num_bytes, name, tuple(dims), 3)
        rows[name] = [handle.decode("latin-1"), metas[name].offset, num_bytes, index, dims, lod, 3]
    for protocol in (2, 3, 4):
        paddle.save(rows, str(path), protocol=protocol)
        assert read_ipc_metas_file(path) == metas
    path.write_bytes(b"".join(write_ipc_metas(metas)))
    assert paddle.load(str(path)) == rows


def test_files_for_stock_fastdeploy_are_loaded_by_paddle_as_it_loads_them(tmp_path: Path) -> None:
    state = {"q": paddle.rand([4, 6]).astype("bfloat16"), "norm": paddle.rand([6])}
    with WeightPublisher(tmp_path / "channel") as publisher:
        files = FastDeployFiles(tmp_path, [3])
        publisher.publish(state, step=1, layout="tp:1", compat="fastdeploy", fastdeploy=files)
    loaded = paddle.load(str(tmp_path / "model_state.tp0.3.pdparams"), safetensors=True)
    assert list(loaded) == list(state)
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert np.asarray(tensor).tobytes() == np.asarray(state[name]).tobytes()
