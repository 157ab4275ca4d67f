"""Mooncake's TransferEngine behind a small door: opened for one protocol and no other, with time limits, and with
return codes that mean something.

Owns which protocol is really in use, what the library may touch, and the words for its codes. Refuses to know versions
and byte ranges. Invariant: after `close` has returned the library neither reads nor writes memory of ours. Before that
nothing of the kind holds: a read that failed has been seen to go on writing after it returned.

The library is driven through its environment variables as much as through its calls; those that matter are set here:
MC_FORCE_TCP or MC_FORCE_HCA, since it takes `protocol` for no more than a hint and falls back to TCP without a word
where it finds no HCA; MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TRANSFER_TIMEOUT, its own ends to a transfer.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from fastdeploy_rl.config import changed_environ, mooncake_forces_tcp
from fastdeploy_rl.errors import ConfigurationError, FastDeployRLError, NoSpaceError, PeerLostError, SegmentError
from fastdeploy_rl.transport.address import Address

_logger = logging.getLogger(__name__)

MAX_SLICES = 1024
"""Of one call: as many as the library lets wait for one peer."""
_MIN_TRANSFER_S = 5
"""Less than this the library does not take for MC_TRANSFER_TIMEOUT."""
_MAX_PROGRESS_S = 30
"""Without a byte a read is given up after so long, however far its deadline is: then the publisher is asked again."""
_ENVIRONMENT = threading.Lock()
"""One engine is opened at a time: each finds the variables that are meant for it."""
_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Shared libraries that the wheel needs of the system, and what they come with in Debian and Ubuntu."""
_INSTALL = "pip install 'fastdeploy_rl[rdma]'"


class Slice(NamedTuple):
    """Bytes to read: local address, the peer's address, how many."""

    target: int
    source: int
    num_bytes: int


class TransferEngine(Protocol):
    """What we use of `mooncake.engine.TransferEngine`; 0 is success for all that answer a code. Dropping the last
    reference ends its threads."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, buffer_addr: int, capacity: int) -> int: ...
    def unregister_memory(self, buffer_addr: int, /) -> int: ...
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int: ...


Library = Callable[[], TransferEngine]


def load_library() -> Library:
    """The class of the installed package. ConfigurationError that names the package where it, or a shared library of
    the system that it needs, is missing."""
    try:
        from mooncake.engine import TransferEngine as engine  # noqa: N813
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mooncake"):
            raise
        raise ConfigurationError(
            f"transport mooncake needs the package mooncake-transfer-engine-non-cuda: {_INSTALL}"
        ) from error
    except ImportError as error:
        raise ConfigurationError(_missing_library(str(error))) from error
    library: Library = engine
    return library


def _missing_library(text: str) -> str:
    """The dynamic linker's message begins with the name of what it does not find."""
    name = text.partition(":")[0]
    if name in _PACKAGES:
        package = _PACKAGES[name]
        return f"transport mooncake needs {name} of the package {package} (Debian, Ubuntu: apt-get install {package})"
    if name.startswith(("libcudart.so", "libcuda.so")):
        return (
            f"transport mooncake: the installed mooncake-transfer-engine is built for CUDA and finds no {name}; "
            "weights travel between host memory, so mooncake-transfer-engine-non-cuda does in its place"
        )
    return f"transport mooncake: its library cannot be loaded: {text:.300}"


@dataclass(frozen=True)
class MooncakeSettings:
    """`protocol`: "tcp" or "rdma". `device_name`: HCAs for rdma, separated by commas, empty for all. `local_hostname`:
    this machine's address, as peers reach it; IPv6 without brackets. `infiniband_dir`: where the kernel tells its HCAs.
    """

    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str = "127.0.0.1"
    infiniband_dir: Path = Path("/sys/class/infiniband")

    def check(self) -> None:
        """ConfigurationError for what cannot work on this machine; asks the kernel, starts nothing."""
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigurationError(f"mooncake: protocol must be tcp or rdma, got {self.protocol!r:.40}")
        if not self.local_hostname:
            raise ConfigurationError("mooncake: local_hostname is empty; name this machine as its peers reach it")
        if self.protocol == "rdma":
            _check_devices(self.device_name, self.infiniband_dir)
        elif self.device_name:
            raise ConfigurationError(f"mooncake: device_name {self.device_name!r:.80} is for protocol rdma only")


def _check_devices(device_name: str, infiniband_dir: Path) -> None:
    present = sorted(path.name for path in infiniband_dir.iterdir()) if infiniband_dir.is_dir() else []
    hint = "Mooncake would fall back to TCP without a word; ask for protocol tcp if that is meant"
    if not present:
        raise ConfigurationError(f"mooncake: protocol rdma, and no HCA here: nothing in {infiniband_dir}; {hint}")
    if mooncake_forces_tcp():
        raise ConfigurationError("mooncake: protocol rdma, and MC_FORCE_TCP is set, which overrides it; unset it")
    wanted = [name.strip() for name in device_name.split(",")] if device_name else present
    if absent := [name for name in wanted if name not in present]:
        raise ConfigurationError(
            f"mooncake: device_name names {', '.join(map(repr, absent))!s:.200}, which is not here; HCAs of this "
            f"machine: {', '.join(present)}"
        )
    if not any(_is_active(infiniband_dir / name) for name in wanted):
        raise ConfigurationError(
            f"mooncake: protocol rdma, and no port of {', '.join(wanted)} is active (see {infiniband_dir}/*/ports/"
            f"*/state); {hint}"
        )


def _is_active(device: Path) -> bool:
    return any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))


class _Meaning(NamedTuple):
    error: type[FastDeployRLError]
    text: str


_MEANINGS = {
    -1: _Meaning(PeerLostError, "it failed, or an argument is invalid"),
    -2: _Meaning(PeerLostError, "too many requests at a time"),
    -3: _Meaning(SegmentError, "memory that is not registered"),
    -4: _Meaning(PeerLostError, "an earlier batch is still under way"),
    -6: _Meaning(ConfigurationError, "no such device"),
    -7: _Meaning(SegmentError, "memory that overlaps what is registered already"),
    -101: _Meaning(ConfigurationError, "a host name that does not resolve"),
    -102: _Meaning(PeerLostError, "a socket failed"),
    -103: _Meaning(PeerLostError, "a peer answered what is no description of memory"),
    -104: _Meaning(PeerLostError, "a peer refused the connection"),
    -200: _Meaning(PeerLostError, "a peer's description is not to be had"),
    -201: _Meaning(PeerLostError, "an RDMA connection failed"),
    -202: _Meaning(ConfigurationError, "an HCA cannot be used, or memory cannot be registered with it"),
    -300: _Meaning(ConfigurationError, "the NUMA nodes cannot be read"),
    -301: _Meaning(ConfigurationError, "no clock"),
    -302: _Meaning(NoSpaceError, "no memory, or more than may be locked (ulimit -l)"),
    -303: _Meaning(ConfigurationError, "this build of it cannot do that"),
}
"""Of mooncake-transfer-engine/include/error.h, version 0.3.13. Its Python functions say -1 for most failures."""


def raise_code(code: int, what: str) -> NoReturn:
    """The error that a return code stands for; `what` failed."""
    meaning = _MEANINGS.get(code, _Meaning(PeerLostError, "a code that we do not know"))
    raise meaning.error(f"mooncake: {what}: return code {code} ({meaning.text})")


def patience_s(seconds: float) -> int:
    """How long the library may go on by itself when `seconds` are left: the next power of two, so that an engine
    serves many fetches whose time differs a little."""
    whole = max(_MIN_TRANSFER_S, int(seconds) + 1)
    return int(1 << (whole - 1).bit_length())


def _quiet() -> None:
    """Its log goes to standard error, and tells each engine's ports at level INFO. Whoever set a level keeps it."""
    former = changed_environ({"MC_LOG_LEVEL": "ERROR"})
    if former["MC_LOG_LEVEL"] is not None:
        changed_environ(former)


class MooncakeEngine:
    """One TransferEngine. Used by one thread at a time; made by `open`."""

    def __init__(self, raw: TransferEngine, settings: MooncakeSettings, patience_s: int) -> None:
        self._raw: TransferEngine | None = raw
        self._settings = settings
        self._registered: set[int] = set()
        self.patience_s = patience_s

    @classmethod
    def open(cls, settings: MooncakeSettings, library: Library, *, patience_s: int) -> "MooncakeEngine":
        """Listens from now on: with protocol tcp on every interface. A read ends by itself, failed, after `patience_s`
        and a second for each GB."""
        forced = {"MC_FORCE_TCP": "1", "MC_FORCE_HCA": None}
        if settings.protocol == "rdma":
            forced = {"MC_FORCE_TCP": None, "MC_FORCE_HCA": "1"}
        limit = {"MC_TRANSFER_TIMEOUT": str(max(_MIN_TRANSFER_S, patience_s))}
        with _ENVIRONMENT:
            _quiet()
            former = changed_environ(forced | limit)
            try:
                raw = library()
                code = raw.initialize(settings.local_hostname, "P2PHANDSHAKE", settings.protocol, settings.device_name)
            finally:
                changed_environ(former)
        if code:
            raise_code(code, f"initialize for {settings.protocol} on {settings.local_hostname}")
        engine = cls(raw, settings, patience_s)
        if settings.protocol == "tcp":
            _logger.warning(
                "event=open_weights session=%s reason='mooncake listens on every interface, without authentication: "
                "whoever reaches it can read what is registered; keep it in a network of your own'",
                engine.session,
            )
        return engine

    @property
    def session(self) -> str:
        """By which peers find it: "host:port"."""
        return str(Address(self._settings.local_hostname, self._open.get_rpc_port()))

    @property
    def _open(self) -> TransferEngine:
        if self._raw is None:
            raise SegmentError("mooncake: the engine is closed")
        return self._raw

    def limit_stalls(self, seconds: float) -> None:
        """Over tcp a read ends, failed, when no byte came for so long; 30 s at most. Of every engine of this process:
        the library asks for the variable each time."""
        whole = min(_MAX_PROGRESS_S, max(1, math.ceil(seconds)))
        changed_environ({"MC_TCP_PROGRESS_TIMEOUT_SEC": str(whole)})

    def register(self, address: int, num_bytes: int) -> None:
        """Whoever reaches the engine can read this memory from now on, and write to it where it is mapped writable."""
        if code := self._open.register_memory(address, num_bytes):
            raise_code(code, f"register_memory of {num_bytes} bytes at {address:#x}")
        self._registered.add(address)

    def unregister(self, address: int) -> None:
        """New transfers of it are refused from now on; those under way go on. Not registered (any more): no error."""
        if address not in self._registered:
            return
        self._registered.discard(address)
        if code := self._open.unregister_memory(address):
            raise_code(code, f"unregister_memory at {address:#x}")

    def read(self, session: str, slices: Sequence[Slice]) -> None:
        """Brings the bytes here; blocks until they are there. After an error, which is a PeerLostError whatever was
        wrong, the library may go on writing until `close`."""
        code = self._open.batch_transfer_sync_read(
            session,
            [each.target for each in slices],
            [each.source for each in slices],
            [each.num_bytes for each in slices],
        )
        if code:
            num_bytes = sum(each.num_bytes for each in slices)
            what = f"batch_transfer_sync_read of {num_bytes} bytes in {len(slices)} slices from {session}"
            raise_code(code, what)

    def close(self) -> None:
        """Unregisters what is registered and ends the library's threads, which may take a second. A second close does
        nothing."""
        if self._raw is None:
            return
        try:
            for address in sorted(self._registered):
                self.unregister(address)
        finally:
            self._registered.clear()
            self._raw = None
