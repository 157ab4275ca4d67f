"""Published memory within reach of Mooncake's readers, for as long as somebody holds it.

Owns one engine of the library and which memory it knows of. Refuses to know leases and connections: whoever holds a
version keeps its memory. Invariant: memory is registered only from the first question where it lies until the last who
asked has let the version go; after `cut` has returned nobody reads it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import LifecycleError, NoPublicationError
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.transport.base import ByteRange, Run, Shelf, ShelvedVersion
from fastdeploy_rl.transport.mooncake_engine import Library, MooncakeEngine, MooncakeSettings, load_library
from fastdeploy_rl.transport.wire import Places
from fastdeploy_rl.version import WeightVersion

_logger = logging.getLogger(__name__)
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
        registered = self._registered[mapping.address]
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

    def __init__(self, exporter: "MooncakeExporter", serving: _Serving) -> None:
        self.session = serving.engine.session
        self.addresses: tuple[int, ...] = ()
        self._exporter = exporter
        self._serving = serving
        self._mappings: list[Mapping] = []

    def add(self, mapping: Mapping, name: str) -> None:
        self.addresses += (self._serving.register(mapping, name),)
        self._mappings.append(mapping)

    def take_back(self, serving: _Serving | None) -> bool:
        """Forgets its mappings; False where it has none (any more) in the engine that serves now."""
        is_served = bool(self._mappings) and self._serving is serving
        while self._mappings:
            mapping = self._mappings.pop()
            if is_served:
                self._serving.unregister(mapping)
        return is_served

    def release(self) -> None:
        """The reader has all that it wanted. A second release does nothing."""
        self._exporter.release(self)

    def cut(self) -> None:
        """Nobody knows what the reader is doing, or the memory is needed for something else: when this returns nobody
        reads it, nor anything else that was exported, whose readers have to ask again. Takes up to a second."""
        self._exporter.cut(self)


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
        """Registers shared-memory segments, which must not overlap, until the export's `release` or `cut`; the caller
        keeps them mapped. What the library refuses is raised as what its code means; then none of them is registered
        for it."""
        with self._lock:
            serving = self._serving = self._serving or self._serve()
            export = Export(self, serving)
            try:
                for mapping, name in zip(segments, names, strict=True):
                    export.add(mapping, name)
            except BaseException:
                export.take_back(serving)
                raise
            return export

    def release(self, export: Export) -> None:
        with self._lock:
            export.take_back(self._serving)

    def cut(self, export: Export) -> None:
        # The library checks an address when a transfer begins, and never again: only its end ends what is under way.
        with self._lock:
            if export.take_back(self._serving):
                _logger.info("event=cut_off session=%s", export.session)
                self._end()

    def close(self) -> None:
        """Ends every export. A second close does nothing."""
        with self._lock:
            self._end()

    def _serve(self) -> _Serving:
        engine = MooncakeEngine.open(self._settings, self._library, patience_s=_PATIENCE_S)
        return _Serving(engine, needs_writable=self._settings.protocol == "rdma")

    def _end(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()


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
    """A shelf whose versions Mooncake can read while they are held. Give a `TcpServer` this as its shelf, and `locate`
    as its `locate`; close the exporter after the server."""

    def __init__(self, shelf: Shelf, exporter: MooncakeExporter) -> None:
        self._shelf = shelf
        self._exporter = exporter

    def offer(self, version: WeightVersion | None) -> bytes:
        return self._shelf.offer(version)

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> "ExportedVersion":
        return ExportedVersion.open(self._shelf, self._exporter, file_digest, on_withdraw)

    def locate(self, file_digest: str, version: ShelvedVersion) -> Places:
        """Registers its segments, which stay so until it is closed. NoPublicationError where it does not lie here
        whole."""
        if not isinstance(version, ExportedVersion):
            raise LifecycleError("the server has another shelf than this one")
        return version.places()


class ExportedVersion:
    """A held version, and from `places` on its export."""

    def __init__(self, exporter: MooncakeExporter) -> None:
        self._exporter = exporter
        self._lock = threading.Lock()
        self._version: ShelvedVersion | None = None
        self._export: Export | None = None
        self._is_over = False

    @classmethod
    def open(
        cls, shelf: Shelf, exporter: MooncakeExporter, file_digest: str, on_withdraw: Callable[[], None]
    ) -> "ExportedVersion":
        exported = cls(exporter)

        def withdraw() -> None:
            on_withdraw()
            exported._withdraw()

        exported._version = shelf.open(file_digest, withdraw)
        return exported

    def runs(self, ranges: Sequence[ByteRange]) -> Sequence[Run]:
        return self._held.runs(ranges)

    def holdings(self) -> Sequence[ByteRange]:
        return self._held.holdings()

    def places(self) -> Places:
        version = self._held
        if not isinstance(version, WholeVersion):
            raise NoPublicationError("the version does not lie here as it was published: mooncake cannot read it")
        with self._lock:
            if self._is_over:
                raise NoPublicationError("the version was withdrawn")
            self._export = self._export or self._exporter.export(version.segments, version.locators)
            return Places(self._export.session, self._export.addresses)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            export, self._export = self._export, None
        if export is not None:
            export.release()
        self._held.close()

    def _withdraw(self) -> None:
        """Whoever reads it by the library is cut off: it would go on, whatever becomes of the memory."""
        with self._lock:
            self._is_over = True
            export, self._export = self._export, None
        if export is not None:
            export.cut()

    @property
    def _held(self) -> ShelvedVersion:
        if self._version is None:
            raise LifecycleError("the version is not open")
        return self._version
