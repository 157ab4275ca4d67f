"""Where a run of CUDA memory lies, as one process tells it to another.

Owns the record and its bounds, how a process is told apart from all others, and what a failed driver call becomes.
Invariant: a record that could be read lies inside its allocation. Tested on testing.fake_cuda; not run on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec

from fastdeploy_rl import _native
from fastdeploy_rl.errors import CudaError, ManifestError
from fastdeploy_rl.memory.cuda_devices import CudaDevice, device_of, find_device, open_driver
from fastdeploy_rl.memory.export_table import NUM_ROWS

MAX_RECORD_BYTES = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class CudaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run of device memory lies, for another process: bytes [offset, offset + num_bytes) of one allocation.

    `device`: UUID of its GPU or MIG instance; `exporter`, `row`, `nonce`: the entry in the exporter's table that stands
    for as long as the allocation does; `process`: who exported, since the driver opens no handle in the process it came
    from; `base_address` is valid there only.
    """

    device: Annotated[str, msgspec.Meta(max_length=64)]
    exporter: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    process: Annotated[str, msgspec.Meta(max_length=128)]
    row: Annotated[int, msgspec.Meta(ge=0, lt=NUM_ROWS)]
    nonce: _Positive
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    base_address: _Positive
    base_bytes: _Positive
    offset: _Count
    num_bytes: _Count
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        if self.offset + self.num_bytes > self.base_bytes:
            raise ValueError(
                f"{self.num_bytes} bytes at {self.offset} are not inside an allocation of {self.base_bytes}"
            )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> "CudaRecord":
        """ManifestError for anything that is no record; nothing is opened."""
        if len(data) > MAX_RECORD_BYTES:
            raise ManifestError(f"a record of device memory has at most {MAX_RECORD_BYTES} bytes, got {len(data)}")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ManifestError(f"malformed record of device memory: {error}") from error


@contextmanager
def driver_errors(what: str) -> Iterator[None]:
    """A failed driver call in here becomes a CudaError that says what was being done."""
    try:
        yield
    except _native.CudaDriverError as error:
        call, code, name, text = error.args
        raise CudaError(f"{what}: {call}: {name} ({code}), {text}") from error


def open_device(text: str) -> tuple[CudaDevice, _native.CudaContext]:
    """The device that `text` names, and a reference to its primary context. CudaUnavailableError without a driver,
    ConfigurationError when there is no such device."""
    driver = open_driver()
    with driver_errors(f"device {text!r:.80} cannot be used"):
        device = find_device(text, [device_of(driver, index) for index in range(driver.num_devices)])
        return device, _native.CudaContext(driver, device.index)


def this_process() -> str:
    """Names this process among all of the machine: a process id is that of a namespace, and is given again."""
    with open("/proc/self/stat", "rb") as file:
        start_ticks = file.read().rpartition(b")")[2].split()[19].decode()
    return f"{os.stat('/proc/self/ns/pid').st_ino}:{os.getpid()}:{start_ticks}"
