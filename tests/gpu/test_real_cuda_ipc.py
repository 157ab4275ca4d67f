"""CUDA memory between processes on real devices: the suites of tests/process, with nobody counting driver calls.

Not run on a GPU so far."""

from typing import Any

import pytest

from tests.gpu.conftest import RealMachine
from tests.process.cuda_ipc_suite import BLOCK, CudaIpcSuite
from tests.process.cuda_peer import CudaPeer
from tests.process.two_devices_suite import TwoDevicesSuite

pytestmark = pytest.mark.gpu


class TestCudaIpc(CudaIpcSuite):
    def test_a_torch_tensor_is_read_by_another_process(self, exporter: Any, peer: CudaPeer) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.arange(BLOCK // 4, dtype=torch.float32, device="cuda:0")
        record = exporter.export_tensor(tensor, "weight")
        exporter.synchronize()
        number = peer.open(record)
        assert peer.read(number) == tensor.cpu().numpy().tobytes()
        peer.ask("release", number)
        exporter.withdraw(record)


@pytest.mark.usefixtures("two_devices")
class TestTwoDevices(TwoDevicesSuite):
    @pytest.fixture
    def machine(self, machine: RealMachine) -> RealMachine:
        return machine
