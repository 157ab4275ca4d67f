"""What a trainer on Paddle writes into `ipc_metas_{gpu}` today is found, opened and read by another process.

Not run on a GPU so far."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl import config
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.memory.cuda_ipc import CudaDevice
from fastdeploy_rl.memory.ipc_metas import IpcMeta, read_ipc_metas_file
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport import device_memory
from fastdeploy_rl.transport.device_memory import DeviceAllocation, DeviceReader, DeviceRun, DeviceSegment

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DEADLINE_NS = 60_000_000_000


@contextmanager
def trainer(device: str, file: Path) -> Iterator[dict[str, str]]:
    """The digests of what it holds."""
    command = [sys.executable, "-m", "tests.gpu.paddle_trainer", device, str(file)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=ROOT, env=config.child_environ({}), **pipes) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def read_all(metas: dict[str, IpcMeta], device: str) -> dict[str, bytes]:
    """Every tensor's bytes, each out of the allocation that its handle names."""
    ends: dict[bytes, int] = {}
    for meta in metas.values():
        ends[meta.handle] = max(ends.get(meta.handle, 0), meta.offset + meta.num_bytes)
    allocations = {handle: DeviceAllocation(device, "a trainer", handle, end) for handle, end in ends.items()}
    sizes = [meta.num_bytes for meta in metas.values()]
    runs = tuple(
        DeviceRun(start, meta.num_bytes, allocations[meta.handle], meta.offset)
        for start, meta in zip(accumulate(sizes, initial=0), metas.values(), strict=False)
    )
    target = Mapping.private(sum(sizes))
    wanted = [ByteRange(0, run.start, run.num_bytes, 1, run.num_bytes, run.start) for run in runs]
    reader = DeviceReader([DeviceSegment(runs)], lambda: None)
    fetch = reader.open_only_fetch(wanted, target, time.monotonic_ns() + DEADLINE_NS)
    list(fetch.arrivals())
    fetch.close()
    held = bytes(target)
    return {name: held[run.start : run.stop] for name, run in zip(metas, runs, strict=True)}


def check_file(
    metas: dict[str, IpcMeta], device: str, digests: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bytes] = []
    really_open = device_memory._OpenedMemory._open

    def counting(self: Any, allocation: DeviceAllocation) -> Any:
        opened.append(allocation.handle)
        return really_open(self, allocation)

    monkeypatch.setattr(device_memory._OpenedMemory, "_open", counting)
    found = read_all(metas, device)
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == digests
    assert len(opened) == len(set(opened)) == len({meta.handle for meta in metas.values()}) < len(metas)


def test_tensors_of_a_trainer_are_read_from_where_its_file_says_they_lie(
    devices: list[CudaDevice], paddle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in devices:
        file = tmp_path / f"ipc_metas_{device.index}"
        with trainer(str(device.index), file) as digests:
            metas = read_ipc_metas_file(file)
            assert {meta.dtype for meta in metas.values()} == {"F32", "BF16", "F16", "I64"}
            assert metas["layer.3.weight"].shape == (3, 8)
            check_file(metas, device.uuid, digests, monkeypatch)
