"""What this rank fetched, for others to fetch from it: a shelf of versions whose bytes lie in this process's arenas.

Owns which bytes of which version are here, and who reads them. Refuses to know sockets and plans, and checks no bytes
(whoever reads them does, against the manifest). Invariant: bytes are given only between `hold` and `withdraw` of their
mapping, and when `withdraw` has returned nobody reads them.
"""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.manifest import encode
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Offer, Run
from fastdeploy_rl.transport.held_bytes import HeldBytes
from fastdeploy_rl.version import WeightVersion


class _Version:
    """A version in one mapping, and its readers. What only they need is made when the first of them comes."""

    def __init__(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        self.offer = offer
        self.mapping = mapping
        self.ranges = ranges
        self.readers: list[HeldReader] = []
        self.is_withdrawn = False

    @cached_property
    def manifest_bytes(self) -> bytes:
        return encode(self.offer.manifest)

    @cached_property
    def held(self) -> HeldBytes:
        return HeldBytes(self.ranges, self.offer.manifest.segments)


class HeldReader:
    """A version while a server's thread sends from it."""

    def __init__(self, shelf: "HeldVersions", version: _Version, on_withdraw: Callable[[], None]) -> None:
        self._shelf = shelf
        self._version = version
        self.on_withdraw = on_withdraw

    def runs(self, ranges: Sequence[ByteRange]) -> Sequence[Run]:
        places = self._version.held.places(ranges)
        return [Run(self._version.mapping, *place) for place in places]

    def holdings(self) -> Sequence[ByteRange]:
        return self._version.ranges

    def close(self) -> None:
        self._shelf._let_go(self._version, self)


class HeldVersions:
    """A Shelf of what was fetched by this rank; versions come and go with `hold` and `withdraw`. Thread-safe."""

    def __init__(self) -> None:
        self._versions: list[_Version] = []
        self._lock = threading.Lock()

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        """From now on the version can be had here: `mapping` has the bytes of `ranges` at their target offsets, and
        keeps them until `withdraw`."""
        with self._lock:
            self._versions.append(_Version(offer, ranges, mapping))

    def withdraw(self, mapping: Mapping) -> None:
        """Ends every reader of it; nobody comes to it any more. Nothing happens for a mapping that is not held. Where a
        reader goes on, its SegmentError comes out: the memory must not be used for something else then, and a later
        call tries again."""
        with self._lock:
            leaving = [version for version in self._versions if version.mapping is mapping]
            for version in leaving:
                version.is_withdrawn = True
            readers = [reader for version in leaving for reader in version.readers]
        for reader in readers:
            reader.on_withdraw()  # without the lock: the reader that it waits for may want to close
            reader.close()
        with self._lock:
            self._versions = [version for version in self._versions if version not in leaving]

    def offer(self, version: WeightVersion | None) -> bytes:
        with self._lock:
            here = {each.offer.version: each for each in self._versions if not each.is_withdrawn}
        if not here:
            raise NoPublicationError("nothing is published here: this rank holds no version that it could give")
        wanted = max(here) if version is None else version
        if wanted not in here:
            raise NoPublicationError(f"version {wanted} is not to be had: this rank has {max(here)}")
        return here[wanted].manifest_bytes

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> HeldReader:
        with self._lock:
            here = [v for v in self._versions if v.offer.file_digest == file_digest and not v.is_withdrawn]
            if not here:
                raise NoPublicationError(f"manifest {file_digest[:16]} is not held here (any more)")
            reader = HeldReader(self, here[-1], on_withdraw)
            here[-1].readers.append(reader)
            return reader

    def _let_go(self, version: _Version, reader: HeldReader) -> None:
        with self._lock:
            if reader in version.readers:
                version.readers.remove(reader)
