"""This process's CUDA memory as others may use it: one export for each allocation, and nothing freed that they hold.

Owns allocations and exports. A handle of the driver names an allocation, not a tensor, so the allocation around an
address is exported once and records carry the offset. The driver tells nobody who has opened what, and freeing opened
memory is undefined; so importers claim a row of the exporter's table before they open and until they have closed.
Invariant: memory that a live importer claims is not freed here. Tested on testing.fake_cuda; not run on a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fastdeploy_rl import _native
from fastdeploy_rl.errors import ConfigurationError, CudaError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.cuda_devices import CudaDevice
from fastdeploy_rl.memory.cuda_record import CudaRecord, driver_errors, open_device, this_process
from fastdeploy_rl.memory.cuda_tensor import borrow_cuda
from fastdeploy_rl.memory.export_table import ExportTable, exporter_lock, new_token, remove_leftovers
from fastdeploy_rl.memory.private_directory import open_private_directory

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BLOCK_BYTES = 2 << 20
"""The driver cuts smaller allocations out of blocks of this size, and a handle then gives away the whole block (CUDA C
Programming Guide, "Interprocess Communication")."""

_logger = logging.getLogger(__name__)


@dataclass
class _Export:
    """One exported allocation. `keepers`: what keeps somebody else's memory alive, by place."""

    row: int
    nonce: int
    base: int
    num_bytes: int
    handle: bytes
    keepers: dict[tuple[int, int], object] = field(default_factory=dict)


class CudaAllocation:
    """Device memory of our own. Belongs to the exporter that made it: only `free`, or closing the exporter, frees it,
    and neither does while importers or tensors of this process stand on it. Places outside it are ValueErrors."""

    def __init__(self, exporter: "CudaExporter", memory: _native.CudaMemory) -> None:
        self.num_bytes = memory.num_bytes
        self._exporter = exporter
        self._memory = memory

    @property
    def address(self) -> int:
        """In this process. StaleMemoryError when freed."""
        return self._live_memory.address

    @property
    def is_freed(self) -> bool:
        return self._memory.is_closed

    @property
    def num_tensors(self) -> int:
        """Tensors of this process that lie in it now."""
        return self._memory.num_exports

    def record(self, offset: int = 0, num_bytes: int | None = None) -> CudaRecord:
        """What another process needs to reach these bytes (to the end, where `num_bytes` is not given). The allocation
        is exported at the first call only."""
        return self._exporter.export(self.address + offset, self.num_bytes - offset if num_bytes is None else num_bytes)

    def write(self, source: "Buffer", offset: int = 0) -> None:
        """Host memory into the device's; done when it returns, also for other processes."""
        with driver_errors("copy to the device"):
            self._live_memory.write(offset, source)
        # From pageable memory the driver returns when it has staged the bytes (CUDA Driver API, "API synchronization
        # behavior"), and only what uses the same stream waits for them by itself.
        self._exporter.synchronize()

    def read(self, target: "Buffer", offset: int = 0) -> None:
        """Device memory into the host's; done when it returns."""
        with driver_errors("copy from the device"):
            self._live_memory.read(offset, target)

    def dlpack(self, shape: Sequence[int], dtype: str, offset: int = 0) -> object:
        """A DLPack capsule over the bytes, for `from_dlpack` of Paddle or torch; no copy. `dtype` is a safetensors
        name. The allocation cannot be freed while the tensor lives."""
        return self._live_memory.dlpack(offset, shape, dtype)

    def free(self) -> None:
        """Returns the memory to the device now; a second call does nothing. SegmentError, naming them, while importers
        hold it, or tensors of this process lie in it: everything then stays as it was."""
        if self._memory.is_closed:
            return
        if self._memory.num_exports:
            raise SegmentError(
                f"device memory at {self.address:#x} is still in use: {self.num_tensors} tensors lie in it"
            )
        self._exporter.withdraw_at(self.address)
        with driver_errors(f"freeing device memory at {self.address:#x}"):
            self._memory.close()

    @property
    def _live_memory(self) -> _native.CudaMemory:
        if self._memory.is_closed:
            raise StaleMemoryError(f"this allocation of {self.num_bytes} bytes was freed")
        return self._memory


class CudaExporter:
    """This process as one that lets others at its device memory. One device, one thread; use as a context manager.

    `directory` is where exporters and importers meet: one for all of them, private to the user, on any local file
    system. Close the exporter after its importers are gone: `close` raises while they are not.
    """

    def __init__(self, directory: Path, device: str = "0") -> None:
        """`device`: an index, or "GPU-..." / "MIG-..." with (the beginning of) its UUID. Nothing is opened yet."""
        self._directory = directory
        self._device_text = device
        self._token = new_token()
        self._process = this_process()
        self._table = ExportTable(directory, self._token)
        self._resources = ExitStack()
        self._opened: tuple[CudaDevice, _native.CudaContext] | None = None
        self._allocations: list[CudaAllocation] = []
        self._exports: dict[int, _Export] = {}

    def start(self) -> None:
        """CudaUnavailableError without a driver or device, ConfigurationError for a device that is not there."""
        with ExitStack() as undo:
            opened = open_device(self._device_text)
            open_private_directory(self._directory)
            remove_leftovers(self._directory)
            undo.enter_context(exporter_lock(self._directory, self._token))
            undo.callback(self._table.unlink)
            self._table.create()
            undo.callback(self._table.close)
            self._resources = undo.pop_all()
            self._opened = opened

    @property
    def device(self) -> CudaDevice:
        return self._started()[0]

    @property
    def _context(self) -> _native.CudaContext:
        return self._started()[1]

    def _started(self) -> tuple[CudaDevice, _native.CudaContext]:
        if self._opened is None:
            raise CudaError("the exporter of device memory is not started, or closed")
        return self._opened

    def allocate(self, num_bytes: int) -> CudaAllocation:
        """New device memory of `num_bytes` or more, contents arbitrary: whole blocks of 2 MiB, so that exporting it
        gives nothing else away. CudaError when the device has no room."""
        whole = -(-max(num_bytes, 1) // _BLOCK_BYTES) * _BLOCK_BYTES
        with driver_errors(f"{whole} bytes on {self.device}"):
            memory = self._context.allocate(whole)
        allocation = CudaAllocation(self, memory)
        self._allocations = [known for known in self._allocations if not known.is_freed] + [allocation]
        return allocation

    def export(self, address: int, num_bytes: int, keeper: object = None) -> CudaRecord:
        """A record of any device memory of this process, ours or a framework's. The allocation around it is exported
        once; `keeper` is held until it is withdrawn, and must keep foreign memory alive.

        ConfigurationError for memory of another device, CudaError for addresses that are none of the device's or that
        the driver cannot export, SegmentError for bytes beyond the allocation.
        """
        base, allocation_bytes = self._range_around(address)
        offset = address - base
        _check_inside(offset, num_bytes, allocation_bytes)
        export = self._export_of(base, allocation_bytes)
        if keeper is not None:
            export.keepers[offset, num_bytes] = keeper
        return self._record(export, offset, num_bytes)

    def export_tensor(self, tensor: Any, name: str = "tensor") -> CudaRecord:
        """A record of a Paddle or torch tensor's own memory, which is kept alive until it is withdrawn. TrainerError,
        naming the tensor, for one that is not contiguous CUDA memory. Call `synchronize` before anybody reads it."""
        borrowed = borrow_cuda(tensor, name)
        return self.export(borrowed.address, borrowed.num_bytes, keeper=borrowed)

    def synchronize(self) -> None:
        """Waits for all work of the device's context: bytes written before are there for every process."""
        with driver_errors("waiting for the device"):
            self._context.synchronize()

    def withdraw(self, record: CudaRecord) -> None:
        """Ends the export of the record's whole allocation and drops its keepers. SegmentError, naming them, while
        importers hold it: it then stays. Nothing to do where it was withdrawn already."""
        for buffer_id, export in self._exports.items():
            if export.nonce == record.nonce:
                self._withdraw(buffer_id)
                return

    def withdraw_at(self, address: int) -> None:
        """As `withdraw`, for the allocation that `address` lies in."""
        self._withdraw(self._buffer_id(address))

    def find_freed(self) -> list[CudaRecord]:
        """Looks whether foreign memory was freed under its export, takes such exports away (importers meet a
        StaleMemoryError when they look next) and answers a record of each. A bug of whoever owned that memory."""
        freed = [(buffer_id, export) for buffer_id, export in self._exports.items() if not self._is_live(buffer_id)]
        return [self._revoke(buffer_id, export) for buffer_id, export in freed]

    def close(self) -> None:
        """Frees every allocation and withdraws every export. SegmentError while importers hold some: those stay, and
        a later call closes. A second close does nothing."""
        if self._opened is None:
            return
        # Exports first: tensors that were kept for them may lie in our own allocations.
        releases: list[Callable[[], None]] = [partial(self._withdraw, known) for known in self._exports]
        releases += [allocation.free for allocation in self._allocations]
        errors = [error for error in map(_try, releases) if error]
        if errors:
            raise errors[0]
        self._resources.close()
        self._opened = None

    def _withdraw(self, buffer_id: int) -> None:
        export = self._exports.get(buffer_id)
        if export is not None:
            self._table.withdraw(export.row, export.nonce)
            del self._exports[buffer_id]

    def _range_around(self, address: int) -> tuple[int, int]:
        """Base and size of the allocation, which is on this device."""
        with driver_errors(f"address {address:#x} is no memory of {self.device}"):
            base, num_bytes = self._context.address_range(address)
            ordinal = self._context.ordinal_of(address)
        if ordinal != self.device.index:
            raise ConfigurationError(
                f"address {address:#x} lies on device {ordinal}, this exporter is for {self.device}"
            )
        return base, num_bytes

    def _export_of(self, base: int, num_bytes: int) -> _Export:
        buffer_id = self._buffer_id(base)
        if buffer_id not in self._exports:
            self.find_freed()  # new memory is the moment to see that old is gone
            self._exports[buffer_id] = self._new_export(base, num_bytes)
        return self._exports[buffer_id]

    def _new_export(self, base: int, num_bytes: int) -> _Export:
        with driver_errors(f"the allocation at {base:#x} cannot be exported"):
            if not self._context.is_exportable(base):
                raise CudaError(not_exportable(base))
            handle = self._context.export_handle(base)
        nonce = new_token()
        row = self._table.add(nonce)
        _logger.debug("cuda_export base=%#x bytes=%d row=%d", base, num_bytes, row)
        return _Export(row, nonce, base, num_bytes, handle)

    def _buffer_id(self, address: int) -> int:
        with driver_errors(f"address {address:#x} is no memory of {self.device}"):
            return self._context.buffer_id(address)

    def _is_live(self, buffer_id: int) -> bool:
        # The address may be another allocation's by now; the driver gives no id twice.
        try:
            return self._buffer_id(self._exports[buffer_id].base) == buffer_id
        except CudaError:
            return False

    def _revoke(self, buffer_id: int, export: _Export) -> CudaRecord:
        importers = self._table.importers(export.row)
        self._table.revoke(export.row)
        del self._exports[buffer_id]
        _logger.error("cuda_memory_freed_under_export base=%#x importers=%s", export.base, importers)
        return self._record(export, 0, export.num_bytes)

    def _record(self, export: _Export, offset: int, num_bytes: int) -> CudaRecord:
        return CudaRecord(
            device=self.device.uuid,
            exporter=f"{self._token:016x}",
            process=self._process,
            row=export.row,
            nonce=export.nonce,
            handle=export.handle,
            base_address=export.base,
            base_bytes=export.num_bytes,
            offset=offset,
            num_bytes=num_bytes,
        )

    def __enter__(self) -> "CudaExporter":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _try(release: Callable[[], None]) -> SegmentError | None:
    try:
        release()
    except SegmentError as error:
        return error
    return None


def _check_inside(offset: int, num_bytes: int, allocation_bytes: int) -> None:
    if num_bytes < 0 or offset + num_bytes > allocation_bytes:
        raise SegmentError(f"{num_bytes} bytes at {offset} are not inside an allocation of {allocation_bytes}")


def not_exportable(base: int) -> str:
    """Why the driver gives no handle of the allocation there, and how to get another allocator."""
    return (
        f"the driver exports no memory like that at {base:#x}: it is another process's, or a virtual-memory or "
        "stream-ordered allocator's. For torch set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, for Paddle "
        "FLAGS_use_virtual_memory_auto_growth=0 and FLAGS_use_cuda_malloc_async_allocator=0"
    )
