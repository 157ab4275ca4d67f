"""Contract of the native core (csrc/): only what Python cannot do well.

Offsets, strides and sizes are in bytes; deadlines are absolute CLOCK_MONOTONIC
nanoseconds (`time.monotonic_ns()`). Every call that copies, waits or sleeps releases
the GIL. Bounds and alignment are checked: ValueError, and nothing was touched."""

from collections.abc import Sequence
from typing import Final, Literal, final

from typing_extensions import Buffer

CPU_LEVEL: Final[str]
"""The best kernels of this machine: "avx512", "avx2" or "scalar"."""

def use_kernels(level: Literal["avx512", "avx2", "scalar"]) -> None:
    """Takes other kernels from now on, so that each can be tested on one machine; not while a `transfer` runs.
    ValueError where this machine lacks them."""

@final
class Mapping(Buffer):
    """One mmap'ed run of bytes; a buffer. Unmapped when closed or
    when the last reference (buffer view, DLPack tensor) dies."""

    @staticmethod
    def map_fd(fd: int, num_bytes: int, writable: bool) -> Mapping:
        """MAP_SHARED of a file or shared-memory descriptor; the
        descriptor may be closed afterwards. OSError as mmap gives it."""

    @staticmethod
    def private(num_bytes: int) -> Mapping:
        """Fresh anonymous private memory, zeroed, page-aligned. MemoryError where the system refuses."""

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def num_exports(self) -> int:
        """Who needs the memory now: live buffer views, DLPack capsules and
        tensors, Regions, running watchers and waits, CollectiveGroups."""

    def prefault(self, num_threads: int) -> None:
        """Touches every page, so that later copies run at the speed of warm memory. Contents stay."""

    def bring_in(self, offset: int, num_bytes: int) -> None:
        """The pages of these bytes, for reading. OSError where the file cannot give them (it was cut, or its disk does
        not read), and not the signal that reading them would end this process with. Kernels before 5.14 do nothing."""

    def close(self) -> None:
        """Unmaps now. BufferError while exports are alive (nothing happens then); a second close does nothing."""

    def dlpack(self, offset: int, shape: Sequence[int], dtype: str) -> object:
        """A DLPack capsule ("dltensor", CPU) over bytes of this mapping; keeps the mapping alive. `dtype` is a
        safetensors name (F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL). C-contiguous. A mapping without write permission is
        exported too: the consumer must not write (a store would be a segmentation fault, never a silent change)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class BorrowedTensor(Buffer):
    """Somebody else's tensor, taken through DLPack; in CPU memory a flat byte buffer when contiguous. Alive until
    dropped."""

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def dtype(self) -> str:
        """safetensors name; ValueError is raised by `borrow_dlpack` for one that has none."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_contiguous(self) -> bool: ...
    @property
    def is_cpu(self) -> bool: ...
    @property
    def device(self) -> tuple[int, int]:
        """DLPack's (device type, device id)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def borrow_dlpack(capsule: object) -> BorrowedTensor:
    """Consumes a DLPack capsule (as `tensor.__dlpack__()` gives it; Paddle, torch, numpy)."""

# --- words: atomics with sequential consistency on a shared mapping --------------------------------

def load_u64(mapping: Mapping, offset: int) -> int: ...
def store_u64(mapping: Mapping, offset: int, value: int) -> None: ...
def compare_exchange_u64(mapping: Mapping, offset: int, expected: int, desired: int) -> int:
    """Returns what was there; the exchange happened iff that equals `expected`."""

def add_u64(mapping: Mapping, offset: int, delta: int) -> int:
    """Returns the new value (mod 2^64)."""

def load_i32(mapping: Mapping, offset: int) -> int: ...
def store_i32(mapping: Mapping, offset: int, value: int) -> None: ...
def compare_exchange_i32(mapping: Mapping, offset: int, expected: int, desired: int) -> int: ...
def futex_wait_i32(mapping: Mapping, offset: int, expected: int, deadline_ns: int) -> bool:
    """Blocks while the word equals `expected`. True: it differs now; False: the deadline passed first. Works across
    processes. Signals are served in between (KeyboardInterrupt comes through)."""

def futex_wake_i32(mapping: Mapping, offset: int) -> int:
    """Wakes every waiter of this word, in every process; returns how many."""

def ring_bell(mapping: Mapping, offset: int) -> None:
    """Adds one to the int32 at `offset` (wrapping) and wakes its waiters: the usual way to say "look again"."""

@final
class WordWatcher:
    """A native thread that watches an int32 which foreign processes store into without waking anyone.

    Whenever the word differs from what the watcher saw last, the bell is rung. Our own
    writers wake the word itself, which the watcher notices at once; a plain foreign
    store is noticed within `period_us` (+ scheduling). Holds both mappings."""

    def __init__(self, word: Mapping, word_offset: int, bell: Mapping, bell_offset: int, period_us: int) -> None: ...
    def stop(self) -> None:
        """Ends and joins the thread and lets go of both mappings; a
        second stop does nothing. Also done when collected."""

# --- copy, cast, checksum --------------------------------------------------------------------------

@final
class Place:
    """Where the rows of a region lie inside a tensor, for its checksum: row i starts at `offset + i * row_stride` of
    `total_bytes` bytes. fletcher4 contribution of the region = checksum of the tensor with every other byte zero."""

    def __init__(self, offset: int, row_stride: int, total_bytes: int) -> None: ...

@final
class Region:
    """One strided 2-D job: `rows` rows of `row_bytes` (counted in
    the source), from `source` to `target`, with an optional cast.

    `source` / `target` are C-contiguous buffers, held until the Region dies. `target=None` writes nothing: both
    checksums are computed as if it did. `cast`: "none", or one of F32_BF16 BF16_F32 F16_F32 F32_F16 F16_BF16 BF16_F16
    (round to nearest even, overflow to infinity, subnormals exact, NaN stays NaN and is made quiet). `target` rows have
    row_bytes, half or double. `read_place` places the source bytes, `live_place` the bytes as written to the target
    (after the cast); None: not computed. The ranges from the first to the last byte of source and target must not
    overlap. `source_stride` 0 without a `read_place` takes the same row again and again.

    `transpose_item`: 0, or the bytes of one source element (1, 2, 4, 8; those of the type that is cast). Then the
    source is a matrix of `rows` x (row_bytes / transpose_item) elements, and the target its transpose: row_bytes /
    transpose_item rows of `rows` elements, `target_stride` apart. `read_place` places rows of the source, `live_place`
    rows of the target."""

    def __init__(
        self,
        *,
        source: Buffer,
        source_offset: int,
        source_stride: int,
        rows: int,
        row_bytes: int,
        target: Buffer | None = None,
        target_offset: int = 0,
        target_stride: int = 0,
        cast: str = "none",
        read_place: Place | None = None,
        live_place: Place | None = None,
        transpose_item: int = 0,
    ) -> None: ...

Sums = tuple[int, int, int, int]
"""fletcher4 sums A, B, C, D mod 2^64 (fastdeploy_rl/checksum.py has the law)."""

def transfer(regions: Sequence[Region], num_threads: int) -> list[tuple[Sums | None, Sums | None]]:
    """Runs all regions, bytes shared evenly among the threads (large regions are split); returns (read, live) per
    region. Checksums are computed in the pass that copies. Interrupted by no signal; returns when all is done."""

# --- tensor-parallel collectives over shared memory ------------------------------------------------

class MissingRanksError(Exception):
    """A deadline passed; `args == (what, missing_ranks: tuple[int, ...], generation:
    int)`. The group is unusable afterwards: every later call on it, on every rank,
    raises this too, until all ranks made a group of a higher generation."""

@final
class CollectiveGroup:
    """`num_ranks` processes that meet in one shared mapping. Calls must come in the same order on every rank.

    The mapping starts zeroed, has `required_bytes(...)` bytes; payloads larger than `slot_bytes` go in pieces. Waits
    spin briefly, then sleep on a futex (more ranks than cores must not burn each other's time)."""

    def __init__(self, mapping: Mapping, rank: int, num_ranks: int, slot_bytes: int, generation: int) -> None: ...
    @staticmethod
    def required_bytes(num_ranks: int, slot_bytes: int) -> int: ...
    @staticmethod
    def advance(mapping: Mapping, num_ranks: int, slot_bytes: int, generation: int) -> None:
        """From outside the group: every call of an older generation ends with MissingRanksError, also those that wait
        now. A generation that is reached already changes nothing."""

    def all_reduce_f32(self, values: Buffer, deadline_ns: int) -> None:
        """Sum over ranks, in place; added in rank order on every rank, so the result is bitwise equal everywhere."""

    def all_gather(self, own: Buffer, gathered: Buffer, deadline_ns: int) -> None:
        """`gathered` = the ranks' `own` bytes one after another; every rank passes the same size."""

    def broadcast(self, values: Buffer, root: int, deadline_ns: int) -> None:
        """In place; every rank passes the same size."""

    def barrier(self, deadline_ns: int) -> None: ...

# --- CUDA: the driver API by dlopen, no CUDA at build time -----------------------------------------
# Not run on a GPU so far: tested on testing/FakeCuda, which keeps the driver's rules.

class CudaDriverError(Exception):
    """A driver call failed; `args == (call, code, name, text)`: CUresult, "CUDA_ERROR_..." and the driver's own words.
    Code -1: the library itself could not be loaded or lacks a call."""

@final
class CudaDriver:
    """libcuda, loaded and initialised; stays loaded until the process ends. CudaDriverError where that fails."""

    def __init__(self, path: str) -> None: ...
    @property
    def version(self) -> int:
        """CUDA version that the driver supports: 1000 major + 10 minor."""

    @property
    def num_devices(self) -> int:
        """Those that CUDA_VISIBLE_DEVICES leaves; `ordinal` counts among them."""

    def device_name(self, ordinal: int) -> str: ...
    def device_uuid(self, ordinal: int) -> bytes:
        """16 bytes; of the MIG instance where the device is one."""

    def is_mig(self, ordinal: int) -> bool: ...

@final
class CudaContext:
    """A reference to a device's primary context (the one Paddle and torch use too), released when dropped. Calls make
    it current for as long as they take. Memory holds its context."""

    def __init__(self, driver: CudaDriver, ordinal: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    def allocate(self, num_bytes: int) -> CudaMemory:
        """cuMemAlloc: contents are arbitrary; freed by `close` only. Dropped without it, it stays until the process
        ends: nobody can tell whether another process has it open."""

    def open(self, handle: bytes, num_bytes: int) -> CudaMemory:
        """cuIpcOpenMemHandle of another process's allocation of `num_bytes`; closed when closed or dropped."""

    def borrow(self, address: int, num_bytes: int) -> CudaMemory:
        """Memory of somebody else in this process, who keeps it while the result lives. Nothing is freed."""

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that `address` lies in."""

    def buffer_id(self, address: int) -> int:
        """Names the allocation: never used again in this process, also when the address is."""

    def ordinal_of(self, address: int) -> int:
        """Which device the memory is on."""

    def is_exportable(self, address: int) -> bool:
        """False for memory of a virtual-memory or stream-ordered allocator."""

    def export_handle(self, address: int) -> bytes:
        """cuIpcGetMemHandle of the allocation that starts at `address`; 64 bytes."""

    def synchronize(self) -> None:
        """Waits for all work of the context."""

@final
class CudaMemory:
    """One block of device memory: allocated, opened or borrowed."""

    @property
    def address(self) -> int:
        """0 when closed."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def num_exports(self) -> int:
        """Live DLPack capsules and tensors."""

    def close(self) -> None:
        """BufferError while exports are alive (nothing happens then); a second close does nothing."""

    def write(self, offset: int, source: Buffer) -> None:
        """Host to device; returns when done."""

    def read(self, offset: int, target: Buffer) -> None:
        """Device to host; returns when done."""

    def copy_from(self, offset: int, source: CudaMemory, source_offset: int, num_bytes: int) -> None:
        """Device to device; may return before it is done (`CudaContext.synchronize`)."""

    def dlpack(self, offset: int, shape: Sequence[int], dtype: str) -> object:
        """A DLPack capsule ("dltensor", kDLCUDA) over bytes of the block, which it keeps. C-contiguous."""
