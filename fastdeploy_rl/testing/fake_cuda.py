"""A CUDA driver without a GPU: several devices with UUIDs, memory shared between real processes, counters.

Owns the shared state of one fake machine and the environment that makes processes use it. The driver itself is a small
library built from csrc/fake_cuda, whose first lines say which of CUDA's rules it keeps. Invariant: after `close`
nothing of the fake machine is left.

    with FakeCuda() as cuda:
        subprocess.run(command, env=config.child_environ(cuda.environ))
        assert cuda.counters().opens == 1
"""

import ctypes
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fastdeploy_rl.errors import ConfigurationError, SegmentError

LIBRARY = Path(__file__).with_name(f"_fake_cuda{EXTENSION_SUFFIXES[0]}")
"""The library that stands in for libcuda.so.1."""

_TMPFS = "/dev/shm"
_MAX_DEVICES = 16
_NAME_BYTES = 96


@dataclass(frozen=True)
class FakeDevice:
    """`gpu_uuid` of a GPU, and `mig_uuid` where the device is a MIG instance on it; without "GPU-" and "MIG-"."""

    name: str
    gpu_uuid: str
    mig_uuid: str | None = None
    num_bytes: int = 1 << 30

    @property
    def uuid(self) -> str:
        """As the driver is asked for it: "GPU-..." or "MIG-..."."""
        return f"MIG-{self.mig_uuid}" if self.mig_uuid else f"GPU-{self.gpu_uuid}"


DEVICES = (
    FakeDevice("Fake A100", "11111111-aaaa-4aaa-8aaa-000000000001"),
    FakeDevice("Fake A100", "11111111-bbbb-4bbb-8bbb-000000000002"),
    FakeDevice(
        "Fake A100 MIG 1g.5gb", "22222222-cccc-4ccc-8ccc-000000000003", mig_uuid="33333333-dddd-4ddd-8ddd-000000000004"
    ),
)
"""Two GPUs and a MIG instance on a third."""


class FakeCudaCounters(NamedTuple):
    """Calls since the start, by all processes: `frees_while_open` are those that would be undefined behaviour on a
    GPU. `live_*`: what processes that live have now."""

    allocations: int
    frees: int
    exports: int
    opens: int
    closes: int
    frees_while_open: int
    live_allocations: int
    live_openings: int


class _Device(ctypes.Structure):
    _fields_ = (
        ("gpu_uuid", ctypes.c_ubyte * 16),
        ("uuid", ctypes.c_ubyte * 16),
        ("num_bytes", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
    )


class FakeCuda:
    """One machine with fake devices. `close` (or leaving the `with`) takes its memory away, also from processes that
    were killed; those that still run lose the names of it only."""

    def __init__(self, devices: Sequence[FakeDevice] = DEVICES) -> None:
        """ConfigurationError for more than 16 devices."""
        if len(devices) > _MAX_DEVICES:
            raise ConfigurationError(f"FakeCuda has at most {_MAX_DEVICES} devices, got {len(devices)}")
        self.devices = tuple(devices)
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise SegmentError("this FakeCuda was not started, or is closed")
        return self._directory

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to see this machine."""
        return {"FASTDEPLOY_RL_LIBCUDA": str(LIBRARY), "FASTDEPLOY_RL_FAKE_CUDA": str(self.directory)}

    def start(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="fastdeploy_rl_fake_cuda-", dir=_TMPFS))
        rows = (_Device * _MAX_DEVICES)(*map(_row, self.devices))
        error = _library().fake_cuda_create(os.fsencode(directory), rows, len(self.devices))
        if error:
            shutil.rmtree(directory)
            raise SegmentError(f"no fake CUDA machine can be made in {directory}: {os.strerror(error)}")
        self._directory = directory

    def close(self) -> None:
        """A second close does nothing."""
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def counters(self) -> FakeCudaCounters:
        """As of now; what dead processes had is swept out first."""
        values = (ctypes.c_uint64 * len(FakeCudaCounters._fields))()
        error = _library().fake_cuda_read(os.fsencode(self.directory), values)
        if error:
            raise SegmentError(f"{self.directory} is no fake CUDA machine: {os.strerror(error)}")
        return FakeCudaCounters(*values)

    def __enter__(self) -> "FakeCuda":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ConfigurationError(f"{LIBRARY} was not built: install the package again")
    return ctypes.CDLL(str(LIBRARY))


def _row(device: FakeDevice) -> _Device:
    gpu = uuid.UUID(device.gpu_uuid).bytes
    own = uuid.UUID(device.mig_uuid).bytes if device.mig_uuid else gpu
    bytes16 = ctypes.c_ubyte * 16
    return _Device(bytes16(*gpu), bytes16(*own), device.num_bytes, device.name.encode()[: _NAME_BYTES - 1])
