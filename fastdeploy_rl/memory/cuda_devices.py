"""Which CUDA devices this process can see, and what they are called: by index, `GPU-` or `MIG-` identifier.

Owns loading the driver and reading device names. Knows nothing of memory. Invariant: a device is known by its UUID;
an index means something inside one process only. Tested on FakeCuda; not run on a GPU.
"""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy_rl import _native, config
from fastdeploy_rl.errors import ConfigurationError, CudaUnavailableError

_INDEX = re.compile(r"[0-9]{1,4}\Z")
_IDENTIFIER = re.compile(r"(GPU|MIG)-([0-9a-f-]{1,36})\Z", re.IGNORECASE)
_OLD_MIG = re.compile(r"MIG-GPU-([0-9a-f-]{36})/([0-9]{1,3})/([0-9]{1,3})\Z", re.IGNORECASE)


@dataclass(frozen=True)
class CudaDevice:
    """One device. `index`: the driver's ordinal in this process; `uuid`: "GPU-..." or, for a MIG instance, "MIG-..."
    with lower-case hexadecimal digits."""

    index: int
    uuid: str
    name: str

    def __str__(self) -> str:
        return f"{self.uuid} (device {self.index}, {self.name})"


class DeviceSelector(NamedTuple):
    """A device as somebody wrote it down: an index, or (the beginning of) an identifier."""

    ordinal: int | None
    prefix: str

    def matches(self, device: CudaDevice) -> bool:
        return device.index == self.ordinal if self.ordinal is not None else device.uuid.startswith(self.prefix)


def open_driver() -> _native.CudaDriver:
    """The CUDA driver, initialised. CudaUnavailableError, with the reason, where there is none or it finds no
    device."""
    path = config.libcuda_path()
    try:
        return _native.CudaDriver(path)
    except _native.CudaDriverError as error:
        raise CudaUnavailableError(_why_unavailable(path, *error.args)) from error


def visible_devices() -> list[CudaDevice]:
    """What the driver lists for this process, in its order, after CUDA_VISIBLE_DEVICES; at least one.

    CudaUnavailableError otherwise: no driver, no device, or a CUDA_VISIBLE_DEVICES that hides them all. Starts the
    driver, but makes no context on any device.
    """
    driver = open_driver()
    try:
        devices = [device_of(driver, index) for index in range(driver.num_devices)]
    except _native.CudaDriverError as error:
        raise CudaUnavailableError(_why_unavailable(config.libcuda_path(), *error.args)) from error
    if not devices:
        raise CudaUnavailableError(f"the CUDA driver lists no device{_what_hides()}")
    return devices


def device_of(driver: _native.CudaDriver, index: int) -> CudaDevice:
    """The device with that ordinal."""
    kind = "MIG" if driver.is_mig(index) else "GPU"
    return CudaDevice(index, f"{kind}-{uuid.UUID(bytes=driver.device_uuid(index))}", driver.device_name(index))


def parse_selector(text: str) -> DeviceSelector:
    """An index ("0"), "GPU-" or "MIG-" and (the beginning of) a UUID. ConfigurationError for anything else; the old
    "MIG-GPU-.../gi/ci" names no UUID that the driver would give, and is refused with a word about that."""
    if _INDEX.match(text):
        return DeviceSelector(int(text), "")
    if _OLD_MIG.match(text):
        raise ConfigurationError(
            f"device {text!r:.120} is the old form of a MIG name: use the one that `nvidia-smi -L` prints"
        )
    found = _IDENTIFIER.match(text)
    if found is None:
        raise ConfigurationError(f"no CUDA device is called {text!r:.80}: use an index, GPU-UUID or MIG-UUID")
    return DeviceSelector(None, f"{found[1].upper()}-{found[2].lower()}")


def find_device(text: str, devices: Sequence[CudaDevice]) -> CudaDevice:
    """The one device that `text` names. ConfigurationError when it is none or several, naming those there are."""
    selector = parse_selector(text)
    found = [device for device in devices if selector.matches(device)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(str, devices)) or "none"
    what = "several CUDA devices are" if found else "no CUDA device is"
    raise ConfigurationError(f"{what} called {text!r:.80}; this process sees {listed}")


class Selection(NamedTuple):
    """One entry of CUDA_VISIBLE_DEVICES: its text and the device that it made visible, or why it made none."""

    text: str
    device: CudaDevice | None
    reason: str


def explain_selection(value: str, devices: Sequence[CudaDevice]) -> list[Selection]:
    """What each entry of CUDA_VISIBLE_DEVICES=`value` came to, given the driver's list under it.

    The driver takes entries in order and stops at the first that names no device (CUDA C Programming Guide, "CUDA
    Environment Variables"), so that entry k is device k or the list ended before it.
    """
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    return [_explain(position, entry, devices) for position, entry in enumerate(entries)]


def _explain(position: int, text: str, devices: Sequence[CudaDevice]) -> Selection:
    if position < len(devices):
        return Selection(text, devices[position], "")
    if position > len(devices):
        return Selection(text, None, "not looked at: an entry before it names no device")
    try:
        parse_selector(text)
    except ConfigurationError as error:
        return Selection(text, None, str(error))
    return Selection(text, None, "names no device of this machine, or one that an entry before it names already")


def _why_unavailable(path: str, call: str, code: int, name: str, text: str) -> str:
    if call in {"dlopen", "dlsym"}:
        return f"no CUDA driver: {text} (FASTDEPLOY_RL_LIBCUDA names another library)"
    return f"the CUDA driver {path} gives no devices: {call}: {name} {code}, {text}{_what_hides()}"


def _what_hides() -> str:
    value = config.cuda_visible_devices()
    return "" if value is None else f"; CUDA_VISIBLE_DEVICES={value!r:.200} may hide them"
