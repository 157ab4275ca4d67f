"""WeightServer: what is published on a channel, for engines on other machines to fetch.

A reader of the channel like an engine on this machine: it leases what it serves, so that a trainer publishes as ever.
Owns the channel's `SERVER` file, by which engines here find it, and `SERVER.LOCK`, the flock of the one live server.
Refuses to know sockets. Invariant: a version is served only while its segments are leased, once for all clients.
"""

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from fastdeploy_rl import config
from fastdeploy_rl import manifest as manifests
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ChannelBusyError,
    ConfigurationError,
    ManifestError,
    NoPublicationError,
    PeerLostError,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.channel_reader import ChannelReader, LeasedSegments
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.transport.address import Address, parse_address
from fastdeploy_rl.transport.base import Run
from fastdeploy_rl.transport.mooncake_engine import MooncakeSettings
from fastdeploy_rl.transport.mooncake_exporter import ExportingShelf, MooncakeExporter
from fastdeploy_rl.transport.tcp_server import TcpServer
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_SERVER = "SERVER"
_LOCK = "SERVER.LOCK"
_MAX_SERVER_BYTES = 1024
_DIGEST_IN_NAME = 16


class _Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `SERVER` says."""

    address: str


class WeightServer:
    """Serves a channel; use it in a `with`, before or after its publisher starts. `channel`: None for the default one.
    `host` other than a loopback address: give a `secret` (16 bytes at least), or whoever reaches the port may read.
    `mooncake`: lets engines pull by Mooncake's TransferEngine too; None: over tcp alone. ConfigurationError where that
    cannot work here."""

    def __init__(
        self,
        channel: str | Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | None = None,
        mooncake: MooncakeSettings | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.channel = Channel(config.default_channel() if channel is None else channel)
        self._shelf = ChannelShelf(self.channel, deadlines or Deadlines())
        self._exporter = None if mooncake is None else MooncakeExporter.open(mooncake)
        shelf = self._shelf if self._exporter is None else ExportingShelf(self._shelf, self._exporter)
        self._server = TcpServer(shelf, host, port, secret=secret, deadlines=deadlines)
        self._lock: OwnerLock | None = None
        self._resources = ExitStack()

    @property
    def address(self) -> str:
        """`host:port` that it listens on."""
        return self._server.address

    @property
    def num_payload_bytes(self) -> int:
        """Bytes of tensors that were sent since it was made: what engines took from this trainer."""
        return self._server.num_payload_bytes

    def start(self) -> None:
        """Makes the channel's directory where there is none. ChannelBusyError where another server of it is alive,
        ConfigurationError where the address cannot be listened on."""
        self.channel.open()
        with ExitStack() as stack:
            self._lock = _locked(self.channel)
            stack.callback(self._lock.release)
            stack.callback(self._shelf.close)
            if self._exporter is not None:
                stack.callback(self._exporter.close)
            stack.enter_context(self._server)
            notice = _Notice(_reachable(self.address))
            self.channel.replace(_SERVER, msgspec.json.encode(notice))
            stack.callback(self.channel.remove_file, _SERVER)
            self._resources = stack.pop_all()
        _log.info("channel=%s address=%s event=serving", self.channel.path, self.address)

    def close(self) -> None:
        """Ends every transfer and gives all leases back. A second close does nothing, nor does one in a child that this
        process forked: they are not the child's."""
        if self._lock is not None and self._lock.is_held:
            self._resources.close()

    def __enter__(self) -> "WeightServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_server_address(channel: Path) -> str:
    """Where the live WeightServer of a channel of this machine listens. PeerLostError where there is none;
    ConfigurationError for a directory that others can write to."""
    files = Channel(channel)
    try:
        files.check()
        if is_alive(channel / _LOCK):
            return _noticed_address(files)
    except NoPublicationError as error:
        raise PeerLostError(str(error)) from error
    except FileNotFoundError as error:
        raise PeerLostError(f"the weight server on {channel} is just starting, or ending") from error
    raise PeerLostError(
        f"no weight server on {channel}: start one (WeightServer in the trainer, or fastdeploy-rl serve-weights), or "
        "name its address"
    )


def _noticed_address(channel: Channel) -> str:
    try:
        notice = msgspec.json.decode(channel.read(_SERVER, _MAX_SERVER_BYTES), type=_Notice)
        return str(parse_address(notice.address))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ManifestError, ConfigurationError) as error:
        path = channel.path / _SERVER
        raise PeerLostError(f"{path} does not say where a weight server listens: {error!s:.200}") from error


def _locked(channel: Channel) -> OwnerLock:
    lock = OwnerLock(channel.path / _LOCK)
    if not lock.try_acquire():
        raise ChannelBusyError(
            f"channel {channel.path} already has a live weight server ({owner_of(lock.path) or 'unknown'})"
        )
    return lock


def _reachable(address: str) -> str:
    """As this machine reaches it: all interfaces become the loopback one."""
    host, port = parse_address(address)
    if not ipaddress.ip_address(host).is_unspecified:
        return address
    return str(Address("::1" if ":" in host else "127.0.0.1", port))


class ChannelShelf:
    """A `Shelf` of a channel's latest version, and of former ones that still stand. Thread-safe."""

    def __init__(self, channel: Channel, deadlines: Deadlines) -> None:
        self._channel = channel
        self._deadlines = deadlines
        self._source = IpcSource(SourceConfig(channel.path))
        self._lock = threading.Lock()
        self._readers: list[ChannelReader] = []
        self._open: dict[str, _OpenVersion] = {}

    def offer(self, version: WeightVersion | None) -> bytes:
        deadline_ns = time.monotonic_ns() + int(self._deadlines.resolve_s * 1e9)
        return manifests.encode(self._source.resolve(version, deadline_ns=deadline_ns).manifest)

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> "ShelvedLease":
        """`on_withdraw` is never called: a lease keeps the memory for as long as it is held."""
        with self._lock:
            version = self._open.get(file_digest)
            if version is None:
                version = self._open[file_digest] = self._leased(file_digest)
            version.num_clients += 1
        return ShelvedLease(self, file_digest, version)

    def let_go(self, file_digest: str) -> None:
        with self._lock:
            version = self._open[file_digest]
            version.num_clients -= 1
            if not version.num_clients:
                del self._open[file_digest]
                version.leased.release()
                self._close_replaced()

    def close(self) -> None:
        """When nobody is served any more."""
        with self._lock:
            while self._readers:
                self._readers.pop().close()
        self._source.close()

    def _leased(self, file_digest: str) -> "_OpenVersion":
        manifest = self._manifest(file_digest)
        return _OpenVersion(manifest, self._reader().lease(manifest))

    def _manifest(self, file_digest: str) -> Manifest:
        for file in self._channel.manifest_files():
            if file_digest[:_DIGEST_IN_NAME] in file:
                try:
                    manifest = self._channel.read_manifest_file(file)
                except FileNotFoundError:
                    break
                if manifests.file_digest(manifests.encode(manifest)) == file_digest:
                    return manifest
        raise NoPublicationError(
            f"the version with digest {file_digest[:_DIGEST_IN_NAME]} is not on {self._channel.path} (any more); "
            "ask for the latest one"
        )

    def _reader(self) -> ChannelReader:
        """Of the channel as it is now; what is leased of one that was made anew since stays so until it is released."""
        self._channel.check()
        self._close_replaced()
        if not self._readers or not self._readers[-1].is_current:
            self._readers.append(ChannelReader.open(self._channel))
        return self._readers[-1]

    def _close_replaced(self) -> None:
        for reader in [each for each in self._readers if each.is_idle and not each.is_current]:
            self._readers.remove(reader)
            reader.close()


class _OpenVersion:
    """A leased version, and how many are served from it."""

    def __init__(self, manifest: Manifest, leased: LeasedSegments) -> None:
        self.leased = leased
        self.num_clients = 0
        self.sizes = [segment.num_bytes for segment in manifest.segments]
        self.locators = tuple(segment.locator for segment in manifest.segments)
        self.mappings = leased.segments


class ShelvedLease:
    """A `ShelvedVersion` for one client."""

    def __init__(self, shelf: ChannelShelf, file_digest: str, version: _OpenVersion) -> None:
        self._shelf = shelf
        self._file_digest = file_digest
        self._version = version
        self._is_closed = False

    @property
    def segments(self) -> tuple[Mapping, ...]:
        """As the manifest counts them."""
        return self._version.mappings

    @property
    def locators(self) -> tuple[str, ...]:
        """Their names in shared memory."""
        return self._version.locators

    def runs(self, ranges: Sequence[ByteRange]) -> list[Run]:
        return [self._run(wanted.joined()) for wanted in ranges if wanted.num_bytes]

    def _run(self, wanted: ByteRange) -> Run:
        sizes = self._version.sizes
        if wanted.segment >= len(sizes):
            raise ValueError(f"segment {wanted.segment} of {len(sizes)}")
        if wanted.stop > sizes[wanted.segment]:
            raise ValueError(f"bytes up to {wanted.stop} of a segment of {sizes[wanted.segment]}")
        mapping = self._version.mappings[wanted.segment]
        return Run(mapping, wanted.offset, wanted.row_bytes, wanted.stride, wanted.rows)

    def holdings(self) -> list[ByteRange]:
        """Everything."""
        return [ByteRange(number, 0, size, 1, size, 0) for number, size in enumerate(self._version.sizes)]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._shelf.let_go(self._file_digest)
