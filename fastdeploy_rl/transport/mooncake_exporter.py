"""Published memory within reach of Mooncake's readers, for as long as somebody holds it.

Owns one engine of the library and which memory it knows of. Refuses to know leases and connections: whoever holds a
version keeps its memory. Invariant: memory is registered only from the first question where it lies until the last who
asked has let the version go.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Run, Shelf, ShelvedVersion
from fastdeploy_rl.transport.mooncake_engine import Library, MooncakeEngine, MooncakeSettings, load_library
from fastdeploy_rl.transport.wire import Places
from fastdeploy_rl.version import WeightVersion

_PATIENCE_S = 32
"""It only answers: no transfer of its own ever waits."""


@dataclass
class _Registered:
    """`own`: our mapping of the memory, where the one that we were given would not do."""

    address: int
    own: SharedSegment | None
    num_holders: int = 1


class _Serving:
    """One engine, and what it knows of. Used under the exporter's lock."""

    def __init__(self, engine: MooncakeEngine, needs_writable: bool) -> None:
        self.engine = engine
        self._needs_writable = needs_writable
        self._registered: dict[int, _Registered] = {}

    def register(self, mapping: Mapping, name: str) -> int:
        """The address for readers."""
        known = self._registered.get(mapping.address)
        if known is not None:
            known.num_holders += 1
            return known.address
        own = None
        if self._needs_writable and not mapping.is_writable:
            # The library registers with an HCA for reading and writing, which the kernel refuses for such a mapping.
            own = SharedSegment.attach(name, writable=True)
        try:
            registered = _Registered(mapping.address if own is None else own.mapping.address, own)
            self.engine.register(registered.address, mapping.num_bytes)
        except BaseException:
            _unmap(own)
            raise
        self._registered[mapping.address] = registered
        return registered.address

    def unregister(self, mapping: Mapping) -> None:
        """Nothing happens after `close`, which took all back."""
        registered = self._registered.get(mapping.address)
        if registered is None:
            return
        registered.num_holders -= 1
        if not registered.num_holders:
            del self._registered[mapping.address]
            self.engine.unregister(registered.address)
            _unmap(registered.own)

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            while self._registered:
                _unmap(self._registered.popitem()[1].own)


def _unmap(segment: SharedSegment | None) -> None:
    if segment is not None:
        segment.close()


class Export:
    """Mappings that can be read at `session` from `addresses` on, one for each."""

    def __init__(self, session: str, addresses: tuple[int, ...], lock: threading.Lock, registered: ExitStack) -> None:
        self.session = session
        self.addresses = addresses
        self._lock = lock
        self._registered = registered

    def release(self) -> None:
        """The reader has all that it wanted: new transfers are refused, those under way go on. A second release does
        nothing."""
        with self._lock:
            self._registered.close()


class MooncakeExporter:
    """Made by `open`; used from any thread."""

    def __init__(self, settings: MooncakeSettings, library: Library) -> None:
        self._settings = settings
        self._library = library
        self._lock = threading.Lock()
        self._serving: _Serving | None = None

    @classmethod
    def open(cls, settings: MooncakeSettings | None = None, *, library: Library | None = None) -> "MooncakeExporter":
        """ConfigurationError for what cannot work here. Listens only from the first export on."""
        settings = settings or MooncakeSettings()
        settings.check()
        return cls(settings, library or load_library())

    def export(self, segments: Sequence[Mapping], names: Sequence[str]) -> Export:
        """Registers shared-memory segments, which must not overlap, until the export's `release`; the caller keeps them
        mapped. What the library refuses is raised as what its code means; then none of them is registered for it."""
        with self._lock, ExitStack() as registered:
            serving = self._serving = self._serving or self._serve()
            addresses = []
            for mapping, name in zip(segments, names, strict=True):
                addresses.append(serving.register(mapping, name))
                registered.callback(serving.unregister, mapping)
            return Export(serving.engine.session, tuple(addresses), self._lock, registered.pop_all())

    def close(self) -> None:
        """Ends every export. A second close does nothing."""
        with self._lock:
            serving, self._serving = self._serving, None
            if serving is not None:
                serving.close()

    def _serve(self) -> _Serving:
        engine = MooncakeEngine.open(self._settings, self._library, patience_s=_PATIENCE_S)
        return _Serving(engine, needs_writable=self._settings.protocol == "rdma")


@runtime_checkable
class WholeVersion(ShelvedVersion, Protocol):
    """A version of which every segment lies here, from its first byte to its last."""

    @property
    def segments(self) -> Sequence[Mapping]:
        """As the manifest counts them."""
        ...

    @property
    def locators(self) -> Sequence[str]:
        """Their names in shared memory."""
        ...


class ExportingShelf:
    """A shelf whose versions Mooncake can read while they are held, for a `TcpServer`; close the exporter after it.
    `shelf`: one that withdraws nothing that is held, as a channel's: a read of the library cannot be stopped."""

    def __init__(self, shelf: Shelf, exporter: MooncakeExporter) -> None:
        self._shelf = shelf
        self._exporter = exporter

    def offer(self, version: WeightVersion | None) -> bytes:
        return self._shelf.offer(version)

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> "ExportedVersion":
        return ExportedVersion(self._shelf.open(file_digest, on_withdraw), self._exporter)


class ExportedVersion:
    """A `LocatedVersion`: a held version, and from `places` on its export. One server thread's."""

    def __init__(self, version: ShelvedVersion, exporter: MooncakeExporter) -> None:
        self._version = version
        self._exporter = exporter
        self._export: Export | None = None

    def runs(self, ranges: Sequence[ByteRange]) -> Sequence[Run]:
        return self._version.runs(ranges)

    def holdings(self) -> Sequence[ByteRange]:
        return self._version.holdings()

    def places(self) -> Places:
        """Registers its segments. NoPublicationError where it does not lie here whole."""
        if not isinstance(self._version, WholeVersion):
            raise NoPublicationError("the version does not lie here as it was published: mooncake cannot read it")
        self._export = self._export or self._exporter.export(self._version.segments, self._version.locators)
        return Places(self._export.session, self._export.addresses)

    def close(self) -> None:
        with ExitStack() as closing:
            closing.callback(self._version.close)
            if self._export is not None:
                closing.callback(self._export.release)
