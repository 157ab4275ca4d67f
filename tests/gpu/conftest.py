"""What the tests of this folder need, or why they are skipped. Not run on a GPU so far."""

from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy_rl.errors import CudaUnavailableError
from fastdeploy_rl.memory.cuda_ipc import CudaDevice, visible_devices
from fastdeploy_rl.memory.cuda_record import open_device


class RealMachine:
    """The first devices that this process sees; nobody counts driver calls there."""

    device = "0"
    devices = ("0", "1")

    def __init__(self) -> None:
        self.environ: dict[str, str] = {}

    def check(self, **counters: int) -> None:
        """The driver does not count."""


@pytest.fixture(scope="session")
def found_devices() -> Iterator[list[CudaDevice] | str]:
    """Each with its context for the whole run, so that what a driver opens at its first use is no test's leak; or why
    there is none."""
    try:
        found = visible_devices()
    except CudaUnavailableError as error:
        yield f"needs a CUDA device: {error!s:.60}"
        return
    contexts = [open_device(device.uuid) for device in found]
    yield [device for device, _ in contexts]


@pytest.fixture
def devices(found_devices: list[CudaDevice] | str) -> list[CudaDevice]:
    """One or more."""
    if isinstance(found_devices, str):
        pytest.skip(found_devices)
    return found_devices


@pytest.fixture
def two_devices(devices: list[CudaDevice]) -> list[CudaDevice]:
    if len(devices) < 2:
        pytest.skip(f"needs two CUDA devices, this process sees {devices[0]} alone")
    return devices


@pytest.fixture
def machine(devices: list[CudaDevice]) -> RealMachine:
    return RealMachine()


@pytest.fixture(scope="session")
def warm_paddle(found_devices: list[CudaDevice] | str) -> Any:
    """Paddle, having computed once on every device, or why it cannot: libraries open what they need at their first
    use."""
    if isinstance(found_devices, str):
        return found_devices
    import paddle

    if not paddle.device.is_compiled_with_cuda():
        return f"needs Paddle for CUDA: paddle {paddle.__version__} is for the CPU (pip install paddlepaddle-gpu)"
    for device in found_devices:
        paddle.device.set_device(f"gpu:{device.index}")
        ones = paddle.ones([8, 8])
        paddle.matmul(ones, ones).numpy()
    paddle.device.set_device("gpu:0")
    return paddle


@pytest.fixture
def paddle(devices: list[CudaDevice], warm_paddle: Any) -> Iterator[Any]:
    """The module, device 0 set; after the test its cached memory is given back."""
    if isinstance(warm_paddle, str):
        pytest.skip(warm_paddle)
    yield warm_paddle
    warm_paddle.device.set_device("gpu:0")
    warm_paddle.device.cuda.empty_cache()
