"""What CUDA memory must do where processes work on two devices of one machine, on a fake driver and on a real one:
inherit `TwoDevicesSuite` and give it a `machine`."""

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from fastdeploy_rl.errors import ConfigurationError, PeerLostError
from fastdeploy_rl.memory.cuda_ipc import CudaExporter, CudaImports, CudaRecord
from tests.process.cuda_ipc_suite import BLOCK, cut, fill
from tests.process.cuda_peer import CudaPeer

NUM_TENSORS = 50


class TwoDevices(Protocol):
    """`environ`: what processes need to use them, set in this one already."""

    environ: dict[str, str]
    devices: tuple[str, str]


class TwoDevicesSuite:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path / "cuda"

    @pytest.fixture
    def exporters(self, machine: TwoDevices, directory: Path) -> Iterator[list[CudaExporter]]:
        with ExitStack() as stack:
            yield [stack.enter_context(CudaExporter(directory, device)) for device in machine.devices]

    @pytest.fixture
    def peers(
        self, machine: TwoDevices, directory: Path, exporters: list[CudaExporter]
    ) -> Iterator[tuple[CudaPeer, CudaPeer]]:
        """One on each device; they end before the exporters close."""
        first, second = machine.devices
        start = partial(CudaPeer, directory, environ=machine.environ)
        with start(first) as on_first, start(second) as on_second:
            yield on_first, on_second

    def test_tensors_are_opened_once_for_each_allocation_on_each_device(
        self, exporters: list[CudaExporter], peers: tuple[CudaPeer, CudaPeer]
    ) -> None:
        for seed, (exporter, peer) in enumerate(zip(exporters, peers, strict=True)):
            allocation = exporter.allocate(BLOCK)
            data = fill(allocation, seed)
            places = cut(allocation.num_bytes, NUM_TENSORS, seed)
            records = [allocation.record(*place).to_json().decode() for place in places]
            numbers = peer.ask("open_all", records)
            found = [base64.b64decode(text) for text in peer.ask("read_all", numbers)]
            assert found == [data[offset : offset + num_bytes] for offset, num_bytes in places]
            assert peer.ask("num_open") == 1

    def test_memory_of_the_other_device_is_refused_and_both_are_named(
        self, exporters: list[CudaExporter], peers: tuple[CudaPeer, CudaPeer]
    ) -> None:
        for exporter, other, stranger in zip(exporters, reversed(exporters), reversed(peers), strict=True):
            record = exporter.allocate(BLOCK).record()
            with pytest.raises(ConfigurationError, match=exporter.device.uuid) as refused:
                stranger.open(record)
            assert other.device.uuid in str(refused.value)
            assert stranger.ask("num_open") == 0

    def test_one_process_has_both_and_loses_only_what_died(
        self, machine: TwoDevices, directory: Path, peers: tuple[CudaPeer, CudaPeer]
    ) -> None:
        with ExitStack() as stack:
            imports = [stack.enter_context(CudaImports(directory, device)) for device in machine.devices]
            records = [CudaRecord.from_json(peer.ask("allocate", f"at {peer.pid}").encode()) for peer in peers]
            imported = [mine.open(record) for mine, record in zip(imports, records, strict=True)]
            peers[1].kill()
            with pytest.raises(PeerLostError, match=f"pid {peers[1].pid}"):
                imported[1].check()
            imported[0].check()
            found = bytearray(records[0].num_bytes)
            imported[0].read(found)
            assert found.decode() == f"at {peers[0].pid}"
