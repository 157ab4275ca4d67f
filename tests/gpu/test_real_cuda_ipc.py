"""CUDA memory between processes on a real device: the suite of tests/process, with nobody counting driver calls.

Not run on a GPU so far."""

from typing import Any

import pytest

from fastdeploy_rl.errors import CudaUnavailableError
from fastdeploy_rl.memory.cuda_ipc import visible_devices
from tests.process.cuda_ipc_suite import BLOCK, CudaIpcSuite
from tests.process.cuda_peer import CudaPeer

pytestmark = pytest.mark.gpu


class RealMachine:
    """The first device that this process sees."""

    def __init__(self) -> None:
        self.environ: dict[str, str] = {}
        self.device = "0"

    def check(self, **counters: int) -> None:
        """The driver does not count."""


@pytest.fixture
def machine() -> RealMachine:
    try:
        visible_devices()
    except CudaUnavailableError as error:
        pytest.skip(f"needs a CUDA device: {error!s:.60}")
    return RealMachine()


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
