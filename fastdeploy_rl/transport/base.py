"""The seam between a fetching source and the wire: versions that somebody offers, and byte ranges of them.

A manifest's segments are the address space: a range names bytes of segment number `segment` as the manifest counts
them, whoever serves them. Owns the words only. Refuses to know plans and tensors. Invariant, for every transport: a
range that `Fetch.arrivals` has given lies in `target` as its server had it, and after `Fetch.close` nobody writes
there. Bytes are checked by whoever reads them, against the manifest. Deadlines are absolute CLOCK_MONOTONIC
nanoseconds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.version import WeightVersion


class Offer(NamedTuple):
    """A version that can be had. `file_digest`: sha256 of the manifest's canonical bytes, by which it is asked for."""

    version: WeightVersion
    manifest: Manifest
    file_digest: str


class Fetch(Protocol):
    """Ranges on their way. Threads of the transport write into the target until `close`."""

    @property
    def num_bytes(self) -> int:
        """Received so far, what had to be fetched twice counted twice."""
        ...

    def arrivals(self) -> Iterator[Sequence[int]]:
        """Indices of ranges that are complete, each once, in any order, until all are. A lost connection goes on where
        it stopped. DeadlineExceededError at the fetch's deadline, with what was wrong last; NoPublicationError when
        nobody has the version any more; PeerLostError where trying again is no use; LifecycleError once it is closed
        and not complete."""
        ...

    def close(self) -> None:
        """Ends it, finished or not, and gives the claim on the version back. A second close does nothing."""
        ...


class Transport(Protocol):
    """One engine rank as a client. `offer` may be called from any thread, everything else from one."""

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """That version or the newest. NoPublicationError when it is not to be had, naming the one that is;
        PeerLostError or DeadlineExceededError when nobody answers; AuthenticationError when the secrets differ."""
        ...

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> Fetch:
        """Begins to bring the ranges into `target`, which the caller keeps until `Fetch.close`. NoPublicationError when
        the version is gone."""
        ...

    def trim(self) -> None:
        """Closes idle connections, unregisters memory."""
        ...

    def close(self) -> None:
        """Ends every fetch."""
        ...


class Run(NamedTuple):
    """Bytes in local memory that a server sends: `rows` rows of `num_bytes`, `stride` apart from `offset` on."""

    mapping: Mapping
    offset: int
    num_bytes: int
    stride: int = 0
    rows: int = 1


class ShelvedVersion(Protocol):
    """A version while somebody is being served from it: its memory stays until `close`, or until the shelf's
    `on_withdraw` was called and has returned."""

    def runs(self, ranges: Sequence[ByteRange]) -> Sequence[Run]:
        """The bytes of the ranges, in order, row by row; neighbours joined. NoPublicationError where some are not held
        here; ValueError for ranges outside the manifest's segments."""
        ...

    def holdings(self) -> Sequence[ByteRange]:
        """What `runs` gives; target offsets mean nothing."""
        ...

    def close(self) -> None: ...


class Shelf(Protocol):
    """What a server has to give. Called from the server's threads."""

    def offer(self, version: WeightVersion | None) -> bytes:
        """That version's manifest, or the newest's, in its canonical bytes. NoPublicationError as Transport.offer."""
        ...

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> ShelvedVersion:
        """Claims a version. `on_withdraw` is called, from any thread, when the memory is needed for something else:
        when it returns, nothing is read from it any more. NoPublicationError when it is not here (any more)."""
        ...
