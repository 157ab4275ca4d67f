"""CUDA memory between real processes, on FakeCuda; tests/gpu runs the same on a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.errors import ConfigurationError, CudaError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.cuda_ipc import CudaExporter, CudaImports, CudaRecord
from fastdeploy_rl.memory.cuda_record import open_device
from fastdeploy_rl.testing.fake_cuda import FakeCuda
from tests.process.cuda_ipc_suite import BLOCK, CudaIpcSuite, StartPeer, fill
from tests.process.cuda_peer import CudaPeer
from tests.process.private_shm import private_shm
from tests.process.two_devices_suite import TwoDevicesSuite


class FakeMachine:
    """Device 0 of a FakeCuda, and where two are needed the MIG instance too."""

    device = "0"
    devices = ("0", "MIG-3333")

    def __init__(self, cuda: FakeCuda) -> None:
        self.environ = cuda.environ
        self._cuda = cuda
        self._before = cuda.counters()

    def check(self, **counters: int) -> None:
        now = self._cuda.counters()
        found = {name: getattr(now, name) - self._start_of(name) for name in counters}
        self._before = now
        assert found == counters

    def _start_of(self, name: str) -> int:
        return 0 if name.startswith("live_") else int(getattr(self._before, name))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield FakeMachine(cuda)
        assert cuda.counters().live_openings == 0


def test_a_fake_machine_without_room_says_so_and_leaves_nothing() -> None:
    prefix = private_shm(64 << 10)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a /dev/shm of their own")
    code = (
        "import os; from fastdeploy_rl.errors import SegmentError\n"
        "from fastdeploy_rl.testing.fake_cuda import FakeCuda\n"
        "try: FakeCuda().start()\n"
        "except SegmentError as error: print(error, os.listdir('/dev/shm'))"
    )
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("No space left on device []\n")


class TestFakeCudaIpc(CudaIpcSuite):
    # --- what only a fake survives, or can show

    def test_memory_freed_under_its_export_is_found_and_its_importers_learn_of_it(
        self, machine: FakeMachine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        _, context = open_device("0")
        framework = context.allocate(BLOCK)
        record = exporter.export(framework.address, BLOCK)
        number = peer.open(record)
        assert exporter.find_freed() == []
        framework.close()
        machine.check(frees_while_open=1)
        assert exporter.find_freed() == [record]
        with pytest.raises(StaleMemoryError, match="ask it for a new record"):
            peer.ask("check", number)
        with pytest.raises(StaleMemoryError, match="ask it for a new record"):
            peer.open(record)
        peer.ask("release", number)

    def test_new_memory_in_the_place_of_foreign_memory_that_was_freed_is_another_export(
        self, machine: FakeMachine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        _, context = open_device("0")
        framework = context.allocate(BLOCK)
        old = exporter.export(framework.address, BLOCK)
        framework.close()
        successor = exporter.allocate(BLOCK)
        data = fill(successor, 5)
        new = successor.record()
        assert new.base_address == old.base_address, "the fake's allocator gave another place: nothing was tested"
        assert new.nonce != old.nonce
        with pytest.raises(StaleMemoryError, match="ask it for a new record"):
            peer.open(old)
        assert peer.read(peer.open(new)) == data

    def test_the_driver_opens_a_handle_twice_at_one_address(
        self, machine: FakeMachine, exporter: CudaExporter, peer: CudaPeer
    ) -> None:
        allocation = exporter.allocate(BLOCK)
        assert peer.ask("open_twice_in_driver", allocation.record().to_json().decode())
        machine.check(opens=2, closes=2, live_openings=0)

    def test_each_device_opens_its_own_memory_only(
        self, machine: FakeMachine, directory: Path, start: StartPeer
    ) -> None:
        mig = "MIG-33333333-dddd-4ddd-8ddd-000000000004"
        with CudaExporter(directory, "MIG-3333") as exporter:
            record = exporter.allocate(BLOCK).record()
            assert record.device == mig
            with pytest.raises(ConfigurationError, match=mig):
                start().open(record)
            with CudaPeer(directory, mig.upper(), machine.environ) as peer:
                peer.ask("release", peer.open(record))
            machine.check(opens=1, closes=1)

    def test_imported_memory_is_not_exported_again(
        self, machine: FakeMachine, directory: Path, start: StartPeer, exporter: CudaExporter
    ) -> None:
        peer = start()
        with CudaImports(directory, "0") as imports:
            imported = imports.open(CudaRecord.from_json(peer.ask("allocate", "bytes").encode()))
            with pytest.raises(CudaError, match="expandable_segments"):
                exporter.export(imported.address, 1)
        machine.check(exports=1)

    def test_a_device_without_room_says_so(self, machine: FakeMachine, exporter: CudaExporter) -> None:
        with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            exporter.allocate(1 << 40)
        machine.check(allocations=0, live_allocations=0)

    def test_an_export_of_nowhere_is_refused(self, machine: FakeMachine, exporter: CudaExporter) -> None:
        with pytest.raises(CudaError, match="no memory of GPU-"):
            exporter.export(4096, 1)
        machine.check(exports=0)

    def test_bytes_beyond_an_allocation_are_refused_and_nothing_is_exported(
        self, machine: FakeMachine, exporter: CudaExporter
    ) -> None:
        allocation = exporter.allocate(BLOCK)
        with pytest.raises(SegmentError, match="not inside an allocation"):
            allocation.record(BLOCK - 1, 2)
        machine.check(exports=0)


class TestFakeTwoDevices(TwoDevicesSuite):
    """A GPU, and a MIG instance of another."""
