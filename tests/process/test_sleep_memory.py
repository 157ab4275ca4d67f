"""Memory really returns while weights sleep: measured on the rank's own process, by what the kernel counts for it."""

from pathlib import Path

import pytest

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import publish

MIB = 1 << 20
LARGE = NumpyModel((ParameterSpec("up", "F32", (3 * MIB, 4), None),))
WEIGHT_BYTES = 48 * MIB


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def mapped_bytes(pid: int) -> int:
    """Of published memory and of host copies, touched or not."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "fastdeploy_rl" in line and (size := size_of(line)) >= WEIGHT_BYTES:
            total += size
    return total


def size_of(line: str) -> int:
    first, end = line.split()[0].split("-")
    return int(end, 16) - int(first, 16)


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_the_weights_leave_the_process_at_either_level_and_come_back_whole(tmp_path: Path, apply_mode: str) -> None:
    with (
        NumpyEngine(LARGE, channel=tmp_path / "channel", num_ranks=1, apply_mode=apply_mode, update_s=30.0) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        pid = engine.workers[0].pid
        publish(publisher, random_weights(LARGE, 1), 1)
        client.update()
        for level in (1, 2):
            assert engine.holds(random_weights(LARGE, 1))
            awake = resident_bytes(pid)
            client.sleep(["weight"], level=level)
            assert awake - resident_bytes(pid) > 0.9 * WEIGHT_BYTES
            assert mapped_bytes(pid) == 0
            client.wake()
        assert engine.holds(random_weights(LARGE, 1))
