"""A library in the place of Mooncake's: engines of one process that copy each other's registered memory, and that fail
or stall when they are told to.

Keeps the rules that the real one does not enforce, or only with an HCA: an rdma engine writes nowhere but into
registered memory, registers only what is mapped writable, and a call has 1024 slices at most. Owns no memory and looks
at no environment.
"""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FAILED = -1
OVERLAPS = -7
NOT_REGISTERED = -3
NOT_TO_BE_PINNED = -202
MAX_SLICES = 1024
FIRST_PORT = 15000
_GONE = 0xEE
"""What comes of memory that was registered when the read began, and is not any more."""


class Memory:
    """What an engine was told of: address -> bytes. Outlives the engine that it is of."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def has(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self.registered.items())


class FakeMooncake:
    """The library, called for a new engine, and the network between its engines. `codes`: what the next reads answer,
    at once; but for 0 they do nothing else. `calls`: the slices of each read so far. `live`: engines that were not
    dropped yet."""

    def __init__(self, *, initialize_code: int = 0, register_code: int = 0) -> None:
        self.initialize_code = initialize_code
        self.register_code = register_code
        self.codes: deque[int] = deque()
        self.writes_after_failure = False
        self.calls: list[list[tuple[int, int, int]]] = []
        self.initialized: list[tuple[str, str, str, str]] = []
        self.memories: dict[str, Memory] = {}
        self.lock = threading.Lock()
        self._passes = threading.Event()
        self._passes.set()
        self._is_stalled = threading.Event()
        self._stalled_code = FAILED
        self._num_opened = 0

    def __call__(self) -> "FakeTransferEngine":
        return FakeTransferEngine(self)

    @property
    def live(self) -> list[str]:
        with self.lock:
            return sorted(self.memories)

    @property
    def registered(self) -> list[tuple[int, int]]:
        """Address and size of all that some live engine is told of."""
        with self.lock:
            return sorted(item for memory in self.memories.values() for item in memory.registered.items())

    @contextmanager
    def stalled(self, code: int = FAILED) -> Iterator[threading.Event]:
        """Reads do not return meanwhile, or until `lift`; the event is set when one has begun. Then they write, and
        answer `code`."""
        self._stalled_code = code
        self._passes.clear()
        try:
            yield self._is_stalled
        finally:
            self.lift()

    def lift(self) -> None:
        self._is_stalled.clear()
        self._passes.set()

    def open(self, host: str) -> tuple[str, Memory]:
        with self.lock:
            self._num_opened += 1
            session = f"[{host}]" if ":" in host else host
            session = f"{session}:{FIRST_PORT + self._num_opened}"
            self.memories[session] = Memory()
            return session, self.memories[session]

    def drop(self, session: str) -> None:
        with self.lock:
            self.memories.pop(session, None)

    def wait(self) -> int:
        """What the call is to answer."""
        if self._passes.is_set():
            return 0
        self._is_stalled.set()
        self._passes.wait()
        return self._stalled_code


class FakeTransferEngine:
    """`mooncake.engine.TransferEngine`, as far as we use it."""

    def __init__(self, network: FakeMooncake) -> None:
        self._network = network
        self._memory = Memory()
        self._session = ""
        self._protocol = ""
        self._late = _LateWriter()

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int:
        self._network.initialized.append((local_hostname, metadata_server, protocol, device_name))
        if self._network.initialize_code:
            return self._network.initialize_code
        self._session, self._memory = self._network.open(local_hostname)
        self._protocol = protocol
        weakref.finalize(self, _end, self._network, self._session, self._late)
        return 0

    def get_rpc_port(self) -> int:
        return int(self._session.rpartition(":")[2])

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        if self._network.register_code:
            return self._network.register_code
        for start, size in self._memory.registered.items():
            if buffer_addr < start + size and start < buffer_addr + capacity:
                return OVERLAPS
        if self._protocol == "rdma" and not _is_writable(buffer_addr):
            return NOT_TO_BE_PINNED
        self._memory.registered[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr: int, /) -> int:
        with self._network.lock:
            return NOT_REGISTERED if self._memory.registered.pop(buffer_addr, None) is None else 0

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        network, slices = self._network, list(zip(buffers, peer_buffer_addresses, lengths, strict=True))
        network.calls.append(slices)
        code = network.codes.popleft() if network.codes else None
        if code:
            if network.writes_after_failure:
                self._late.begin(slices[0][0])
            return code
        peer = network.memories.get(target_hostname)
        if peer is None or not self._may(peer, slices):
            return FAILED
        code = network.wait() if code is None else code
        with network.lock:  # nobody unregisters, and unmaps, what is just being read
            for target, source, num_bytes in slices:
                if peer.has(source, num_bytes):
                    ctypes.memmove(target, source, num_bytes)
                else:
                    ctypes.memset(target, _GONE, num_bytes)
        return code

    def _may(self, peer: Memory, slices: Sequence[tuple[int, int, int]]) -> bool:
        if not 0 < len(slices) <= MAX_SLICES:
            return False
        is_known = all(peer.has(source, num_bytes) for _, source, num_bytes in slices)
        if self._protocol == "rdma":
            is_known &= all(self._memory.has(target, num_bytes) for target, _, num_bytes in slices)
        return is_known


class _LateWriter:
    """Goes on writing one byte, as a transfer does that was reported as failed, until the engine is dropped."""

    def __init__(self) -> None:
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, address: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, args=(address,), name="late writer", daemon=True)
            self._thread.start()

    def _write(self, address: int) -> None:
        value = 0
        while not self._is_ending.wait(0.001):
            value = (value + 1) % 256
            ctypes.memset(address, value, 1)

    def end(self) -> None:
        self._is_ending.set()
        if self._thread is not None:
            self._thread.join()


def fake_hcas(root: Path) -> Path:
    """Below `root`, what stands in /sys/class/infiniband of a machine with two HCAs, of which the first has an active
    port."""
    directory = root / "infiniband"
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (directory / name / "ports/1").mkdir(parents=True)
        (directory / name / "ports/1/state").write_text(state)
    return directory


def _is_writable(address: int) -> bool:
    """As the kernel has mapped it for this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, permissions = line.split()[:2]
        start, stop = (int(place, 16) for place in places.split("-"))
        if start <= address < stop:
            return "w" in permissions
    return False


def _end(network: FakeMooncake, session: str, late: _LateWriter) -> None:
    late.end()
    network.drop(session)
