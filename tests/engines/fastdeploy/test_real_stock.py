"""FastDeploy's own DynamicWeightManager reads what this package writes for it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.memory.ipc_metas import IpcMeta, write_ipc_metas
from fastdeploy_rl.publish.fastdeploy_compat import FastDeployFiles
from fastdeploy_rl.publish.fastdeploy_files import write_model_state, write_saved_model_state, write_version
from tests.engines.fastdeploy.real_tree import RealPeer, skip_without_real_tree

skip_without_real_tree()

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b.weight": np.arange(64, dtype=np.uint16).reshape(8, 8),
    "c.scale": np.float32([1.5]),
    "d.ids": np.arange(6, dtype=np.int64),
}
MODEL = {
    "a.weight": ("float32", [4, 3]),
    "b.weight": ("bfloat16", [8, 8]),
    "c.scale": ("float32", [1]),
    "d.ids": ("int64", [6]),
}
EXPECTED = {name: tensor.tobytes().hex() for name, tensor in TENSORS.items()}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    with RealPeer(tmp_path_factory.mktemp("fastdeploy")) as peer:
        yield peer


@pytest.mark.parametrize("num_parts", [1, 3])
def test_stock_loads_the_files_of_a_rank(peer: RealPeer, tmp_path: Path, num_parts: int) -> None:
    write_model_state(tmp_path, TENSORS, rank=1, gpu=0, num_parts=num_parts)
    assert peer.call("real_stock.load", path=str(tmp_path), tensors=MODEL, rank=1) == EXPECTED


def test_stock_loads_the_pickle_of_the_shared_directory(peer: RealPeer, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    write_saved_model_state(tmp_path / "shared", TENSORS, rank=0, gpu=0)
    found = peer.call("real_stock.load", path=str(tmp_path), tensors=MODEL, shared=str(tmp_path / "shared"))
    assert found == EXPECTED


def test_stock_loads_what_is_published_with_compat(peer: RealPeer, tmp_path: Path) -> None:
    files = FastDeployFiles(tmp_path, gpus=[0], num_parts=2)
    with WeightPublisher(tmp_path / "channel") as publisher:
        for step in (1, 2):
            changed = {name: tensor + tensor.dtype.type(step) for name, tensor in TENSORS.items()}
            publisher.publish(changed, step=step, compat="fastdeploy", fastdeploy=files)
            assert peer.call("real_stock.read_version", path=str(tmp_path)) == str(step)
            found = peer.call("real_stock.load", path=str(tmp_path), tensors=MODEL)
            assert found == {name: tensor.tobytes().hex() for name, tensor in changed.items()}


def test_stock_reads_the_step_that_we_wrote(peer: RealPeer, tmp_path: Path) -> None:
    write_version(tmp_path, 1200)
    assert peer.call("real_stock.read_version", path=str(tmp_path)) == "1200"


def test_stock_opens_the_memory_that_our_metadata_names(peer: RealPeer, tmp_path: Path) -> None:
    handle = bytes(range(192, 256))
    metas = {
        "a.weight": IpcMeta(handle, 512, 24, "F32", (2, 3), 1),
        "b.weight": IpcMeta(bytes(64), 1 << 40, 4, "BF16", (2,), 0),
    }
    (tmp_path / "ipc_metas_0").write_bytes(b"".join(write_ipc_metas(metas)))
    assert peer.call("real_stock.read_metas", path=str(tmp_path / "ipc_metas_0")) == {
        "a.weight": [handle.hex(), 512, 24, 10, [2, 3], [], 0],
        "b.weight": [bytes(64).hex(), 1 << 40, 4, 16, [2], [], 0],
    }
