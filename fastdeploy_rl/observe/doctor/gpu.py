"""GPUs as this process would see them: the driver, its devices, and what CUDA_VISIBLE_DEVICES makes of them.

Starts the driver but makes no context. A machine without a GPU is no problem. Not run on a GPU: judged on FakeCuda.
"""

from collections.abc import Sequence

from fastdeploy_rl.config import cuda_visible_devices
from fastdeploy_rl.errors import CudaUnavailableError
from fastdeploy_rl.memory.cuda_devices import CudaDevice, explain_selection, open_driver, visible_devices
from fastdeploy_rl.observe.doctor.check import Check, ok, warn
from fastdeploy_rl.observe.doctor.kernel import Kernel

_NODE = "/dev/nvidiactl"
_MODULE = "/proc/driver/nvidia/version"


def check_gpus(kernel: Kernel) -> list[Check]:
    value = cuda_visible_devices()
    try:
        devices = visible_devices()
    except CudaUnavailableError as error:
        return [judge_absence(str(error), kernel, value)]
    version = open_driver().version
    return [
        ok("driver", f"CUDA {version // 1000}.{version % 1000 // 10}"),
        ok("devices", "; ".join(map(str, devices))),
        judge_selection(value, devices),
    ]


def judge_absence(reason: str, kernel: Kernel, visible: str | None) -> Check:
    """`visible`: CUDA_VISIBLE_DEVICES, None where it is not set."""
    has_module, has_node = kernel.exists(_MODULE), kernel.exists(_NODE)
    if visible is not None and not visible.strip():
        return ok("devices", "all hidden: CUDA_VISIBLE_DEVICES is empty; CPU only")
    if not has_module and not has_node and visible is None:
        return ok("devices", "none: CPU only")
    if has_module and not has_node:
        mend = "docker: --gpus all; kubernetes: resources.limits nvidia.com/gpu: 1"
        return warn("devices", f"the machine has NVIDIA's driver, this container no device: {reason}", mend)
    if has_module:
        mend = "install libcuda.so.1 beside the kernel module (docker: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return warn("devices", f"devices are here, but {reason}", mend)
    return warn("devices", reason, "unset CUDA_VISIBLE_DEVICES to run on the CPU, or use a machine with a driver")


def judge_selection(value: str | None, devices: Sequence[CudaDevice]) -> Check:
    """What each entry of CUDA_VISIBLE_DEVICES came to; None where it is not set."""
    if value is None:
        return ok("CUDA_VISIBLE_DEVICES", "not set: all devices are visible")
    selections = explain_selection(value, devices)
    found = "; ".join(f"{each.text or 'empty'}: {each.device or each.reason}" for each in selections)
    if any(each.device is None for each in selections):
        return warn(
            "CUDA_VISIBLE_DEVICES", found, "name devices as `nvidia-smi -L` does: an index, GPU-UUID or MIG-UUID"
        )
    return ok("CUDA_VISIBLE_DEVICES", found)
