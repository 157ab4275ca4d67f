"""Other processes' CUDA memory in this one: one open for each allocation, closed when its last user lets go.

Owns this process's claims on exported memory and its mappings of it. A claim is taken before the handle is opened and
given back after it is closed, and the exporter is looked at before and after opening. Invariant: while an import
lives, its exporter does not free the memory - or is dead, which `check` tells. Tested on testing.fake_cuda; not run on
a GPU.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_rl import _native
from fastdeploy_rl.errors import ConfigurationError, CudaError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.cuda_devices import CudaDevice
from fastdeploy_rl.memory.cuda_record import CudaRecord, driver_errors, open_device, this_process
from fastdeploy_rl.memory.export_table import ExportTable, importer_lock, new_token, remove_leftovers
from fastdeploy_rl.memory.private_directory import open_private_directory

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _Key(NamedTuple):
    """Names an allocation for as long as it is exported."""

    exporter: str
    nonce: int


@dataclass
class _Exporter:
    """The table of an exporter, mapped while something of it is open."""

    table: ExportTable
    num_open: int = 0


@dataclass
class _Opened:
    """One opened allocation and the claim on it. `resources` closes it and gives the claim back."""

    memory: _native.CudaMemory
    table: ExportTable
    row: int
    nonce: int
    resources: ExitStack
    num_users: int = 0


class CudaImport:
    """Bytes of another process's memory, at `address` in this one. The memory stays until `release`, and is not freed
    before by its exporter; that it is overwritten is for others to prevent."""

    def __init__(self, imports: "CudaImports", key: _Key, opened: _Opened, offset: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._imports = imports
        self._key = key
        self._opened = opened
        self._offset = offset
        self._is_released = False

    @property
    def address(self) -> int:
        """In this process. StaleMemoryError when released."""
        return self._memory.address + self._offset

    def check(self) -> None:
        """PeerLostError when the exporter is dead, StaleMemoryError when the memory was freed under us all the same
        (by a framework that owned it): do not touch it then, only `release` it."""
        self._opened.table.check(self._opened.row, self._opened.nonce)

    def read(self, target: "Buffer", offset: int = 0) -> None:
        """Device memory into the host's; done when it returns. ValueError outside the allocation."""
        with driver_errors("copy from the device"):
            self._memory.read(self._offset + offset, target)

    def dlpack(self, shape: Sequence[int], dtype: str, offset: int = 0) -> object:
        """A DLPack capsule over the bytes, for `from_dlpack` of Paddle or torch; no copy. `dtype` is a safetensors
        name. The allocation stays open while the tensor lives."""
        return self._memory.dlpack(self._offset + offset, shape, dtype)

    def release(self) -> None:
        """Lets go; the last user's release closes the allocation. SegmentError while tensors would lose their memory by
        that: nothing happens then. A second call does nothing, nor does one after `CudaImports.close`."""
        if not self._is_released and not self._opened.memory.is_closed:
            self._imports.let_go(self._key)
        self._is_released = True

    @property
    def _memory(self) -> _native.CudaMemory:
        if self._is_released or self._opened.memory.is_closed:
            raise StaleMemoryError("this import of device memory was released")
        return self._opened.memory

    def __enter__(self) -> "CudaImport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class CudaImports:
    """This process as an importer of device memory. One device, one thread; use as a context manager.

    `directory` is that of the exporters. A handle may be opened by one context of a process only, so have one of these
    for a device."""

    def __init__(self, directory: Path, device: str = "0") -> None:
        """`device`: an index, or "GPU-..." / "MIG-..." with (the beginning of) its UUID. Nothing is opened yet."""
        self._directory = directory
        self._device_text = device
        self._token = new_token()
        self._process = this_process()
        self._resources = ExitStack()
        self._device: tuple[CudaDevice, _native.CudaContext] | None = None
        self._exporters: dict[str, _Exporter] = {}
        self._opened: dict[_Key, _Opened] = {}

    def start(self) -> None:
        """CudaUnavailableError without a driver or device, ConfigurationError for a device that is not there."""
        with ExitStack() as undo:
            device = open_device(self._device_text)
            open_private_directory(self._directory)
            remove_leftovers(self._directory)
            undo.enter_context(importer_lock(self._directory, self._token))
            self._resources = undo.pop_all()
            self._device = device

    @property
    def device(self) -> CudaDevice:
        return self._started()[0]

    @property
    def num_open(self) -> int:
        """Allocations that are open now."""
        return len(self._opened)

    def _started(self) -> tuple[CudaDevice, _native.CudaContext]:
        if self._device is None:
            raise CudaError("the importer of device memory is not started, or closed")
        return self._device

    def open(self, record: CudaRecord) -> CudaImport:
        """The bytes of a record; its allocation is opened unless it is already. In the process that exported it, its
        own memory.

        ConfigurationError, naming both, for a record of another device; StaleMemoryError when the memory was freed;
        PeerLostError when its exporter is dead; CudaError where the driver refuses. Then nothing is held.
        """
        self._check_device(record)
        key = _Key(record.exporter, record.nonce)
        opened = self._opened.get(key)
        if opened is None:
            opened = self._opened[key] = self._open(record)
        else:
            _check_same(opened, record)
            opened.table.check(opened.row, opened.nonce)
        opened.num_users += 1
        return CudaImport(self, key, opened, record.offset, record.num_bytes)

    def let_go(self, key: _Key) -> None:
        """As `CudaImport.release`."""
        opened = self._opened[key]
        if opened.num_users == 1:
            self._close(key, opened)
        else:
            opened.num_users -= 1

    def close(self) -> None:
        """Closes all that is open, whoever still uses it. SegmentError while tensors lie in some: that stays, and a
        later call closes it. A second close does nothing."""
        errors = [error for key, opened in list(self._opened.items()) if (error := self._try_close(key, opened))]
        if errors:
            raise errors[0]
        self._resources.close()
        self._device = None

    def _close(self, key: _Key, opened: _Opened) -> None:
        if opened.memory.num_exports:
            raise SegmentError(f"imported device memory is still in use: {opened.memory.num_exports} tensors lie in it")
        del self._opened[key]
        with driver_errors("closing imported device memory"):
            opened.resources.close()

    def _try_close(self, key: _Key, opened: _Opened) -> SegmentError | None:
        try:
            self._close(key, opened)
        except SegmentError as error:
            return error
        return None

    def _check_device(self, record: CudaRecord) -> None:
        if record.device != self.device.uuid:
            raise ConfigurationError(
                f"the record is of memory on device {record.device}, this process works on {self.device}: "
                "start both on one device, or publish by another way"
            )

    def _open(self, record: CudaRecord) -> _Opened:
        with ExitStack() as undo:
            table = self._use_exporter(record.exporter, undo)
            slot = table.take(record.row, record.nonce, self._token)
            undo.callback(table.give_back, slot, self._token)
            memory = self._map(record, table)
            undo.callback(memory.close)
            self._check_size(memory, record)
            # The memory that the handle named may have been another's while we opened it.
            table.check(record.row, record.nonce)
            return _Opened(memory, table, record.row, record.nonce, undo.pop_all())

    def _map(self, record: CudaRecord, table: ExportTable) -> _native.CudaMemory:
        _, context = self._started()
        if record.process == self._process:
            return context.borrow(record.base_address, record.base_bytes)
        try:
            with driver_errors(f"memory exported by {record.exporter} cannot be opened"):
                return context.open(record.handle, record.base_bytes)
        except CudaError:
            table.check(record.row, record.nonce)  # says what is wrong where the exporter is
            raise

    def _check_size(self, memory: _native.CudaMemory, record: CudaRecord) -> None:
        _, context = self._started()
        with driver_errors(f"memory exported by {record.exporter} is none"):
            base, num_bytes = context.address_range(memory.address)
        if base + num_bytes < memory.address + record.base_bytes:
            raise StaleMemoryError(
                f"the record says that its allocation has {record.base_bytes} bytes, it has {num_bytes}"
            )

    def _use_exporter(self, token: str, undo: ExitStack) -> ExportTable:
        exporter = self._exporters.get(token)
        if exporter is None:
            exporter = _Exporter(ExportTable(self._directory, int(token, 16)))
            exporter.table.open()
            self._exporters[token] = exporter
        exporter.num_open += 1
        undo.callback(self._leave_exporter, token)
        return exporter.table

    def _leave_exporter(self, token: str) -> None:
        exporter = self._exporters[token]
        exporter.num_open -= 1
        if exporter.num_open == 0:
            self._exporters.pop(token).table.close()

    def __enter__(self) -> "CudaImports":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_same(opened: _Opened, record: CudaRecord) -> None:
    if (opened.row, opened.memory.num_bytes) != (record.row, record.base_bytes):
        raise StaleMemoryError("two records of one export contradict each other; ask the exporter for new ones")
