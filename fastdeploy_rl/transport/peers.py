"""Peer fan-out: a version's bytes out of other engines that hold it, and from the publisher what none of them has.

Owns whom a rank asks, in which order, and who is not asked again. Refuses to know the wire. Invariant: a peer that
refused or failed is asked for nothing more in that fetch, and what it had not sent is asked of the next one. However
slow a peer is, half of the time that it was asked with is left when it is given up.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Protocol

from fastdeploy_rl._native import Mapping, Region, transfer
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    LifecycleError,
    NoPublicationError,
    PeerLostError,
    TrainerError,
    WorldError,
)
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Fetch, Offer, Transport
from fastdeploy_rl.transport.held_bytes import HeldBytes, Piece
from fastdeploy_rl.version import WeightVersion

_logger = logging.getLogger(__name__)
_PATIENCE_S = 3.0
"""For an answer, while somebody else can be asked; a quarter of the time that is left where that is less."""
_MAX_RANKS = 1024
"""Of one engine, however many it says it has."""
_SCRATCH_BYTES = 64 << 20
_PEERS, _PUBLISHER = "peers", "publisher"
_FAILURES = (WorldError, TrainerError, AuthenticationError, ConfigurationError)
"""ConfigurationError: of a rank that an engine cannot have, behind the last port."""


class PeerRank(Transport, Protocol):
    """One rank of another engine."""

    def num_ranks(self, *, deadline_ns: int) -> int:
        """Of its engine. Errors as `offer`."""
        ...

    def holdings(self, offer: Offer, *, deadline_ns: int) -> Sequence[ByteRange]:
        """Which bytes of the version it has; target offsets mean nothing. NoPublicationError where it has none; errors
        as `offer`."""
        ...


class PeerEngine:
    """Another engine, as one rank of ours meets it: the rank of the same number first."""

    def __init__(self, name: str, connect: Callable[[int], PeerRank], own_rank: int) -> None:
        """`connect(rank)` opens nothing yet."""
        self.name = name
        self._connect = connect
        self._own_rank = own_rank
        self._lock = threading.Lock()
        self._ranks: dict[int, PeerRank] = {}

    def rank(self, number: int) -> PeerRank:
        with self._lock:
            if number not in self._ranks:
                self._ranks[number] = self._connect(number)
            return self._ranks[number]

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """What the rank of our number has; where there is none of that number, rank 0."""
        try:
            return self.rank(self._own_rank).offer(version, deadline_ns=deadline_ns)
        except PeerLostError:
            if self._own_rank == 0:
                raise
            return self.rank(0).offer(version, deadline_ns=deadline_ns)

    def other_ranks(self, *, deadline_ns: int) -> list[int]:
        """All but the one of our number."""
        try:
            num_ranks = self.rank(self._own_rank).num_ranks(deadline_ns=deadline_ns)
        except PeerLostError:
            num_ranks = self.rank(0).num_ranks(deadline_ns=deadline_ns)
        return [number for number in range(min(num_ranks, _MAX_RANKS)) if number != self._own_rank]

    def open_ranks(self) -> list[PeerRank]:
        with self._lock:
            return list(self._ranks.values())


class PeerTransport:
    """A Transport that asks peers before it asks the publisher, which need not be there."""

    def __init__(self, publisher: Transport, engines: Sequence[PeerEngine], own_rank: int) -> None:
        self._publisher = publisher
        self._engines = engines
        self._own_rank = own_rank
        self._last_digest = ""

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """The publisher's where it has one and answers; else the newest of the peers'."""
        try:
            return self._publisher.offer(version, deadline_ns=_soon(deadline_ns))
        except AuthenticationError:
            raise  # it is there, and a wrong secret is nothing that peers should hide
        except _FAILURES as error:
            _log_left_out("publisher", version, error)
        offers = []
        for engine in self._engines:
            try:
                offers.append(engine.offer(version, deadline_ns=_soon(deadline_ns)))
            except _FAILURES as error:
                _log_left_out(engine.name, version, error)
        if offers:
            return max(offers, key=lambda offer: offer.version)
        return self._publisher.offer(version, deadline_ns=deadline_ns)

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "PeerFetch":
        """What is fetched a second time in a row comes from the publisher, where it still has it: a peer may have been
        why the first time was not enough."""
        is_again = offer.file_digest == self._last_digest and self._is_published(offer, deadline_ns)
        self._last_digest = offer.file_digest
        engines = () if is_again else self._engines
        return PeerFetch(self._publisher, engines, self._own_rank, offer, ranges, target, deadline_ns)

    def _is_published(self, offer: Offer, deadline_ns: int) -> bool:
        try:
            found = self._publisher.offer(offer.version, deadline_ns=_soon(deadline_ns))
        except _FAILURES:
            return False
        return found.file_digest == offer.file_digest

    def trim(self) -> None:
        for transport in self._all():
            transport.trim()

    def close(self) -> None:
        with ExitStack() as closing:
            for transport in self._all():
                closing.callback(transport.close)

    def _all(self) -> list[Transport]:
        return [*(rank for engine in self._engines for rank in engine.open_ranks()), self._publisher]


class PeerFetch:
    """Ranges on their way, from one after the other."""

    def __init__(
        self,
        publisher: Transport,
        engines: Sequence[PeerEngine],
        own_rank: int,
        offer: Offer,
        ranges: Sequence[ByteRange],
        target: Mapping,
        deadline_ns: int,
    ) -> None:
        self._publisher = publisher
        self._engines = engines
        self._own_rank = own_rank
        self._offer = offer
        self._target = target
        self._deadline_ns = deadline_ns
        self._missing = [Piece.whole(number, each) for number, each in enumerate(ranges) if each.num_bytes]
        self._num_missing = [each.num_bytes for each in ranges]
        self._refusing: set[PeerEngine] = set()
        self._current: Fetch | None = None
        self._origin, self._until_ns = _PEERS, deadline_ns
        self._num_bytes = {_PEERS: 0, _PUBLISHER: 0}
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        current = self._current.num_bytes if self._current is not None else 0
        return sum(self._num_bytes.values()) + current

    def arrivals(self) -> Iterator[Sequence[int]]:
        if empty := [number for number, num_bytes in enumerate(self._num_missing) if not num_bytes]:
            yield empty
        for engine, number in self._peers():
            yield from self._from_peer(engine, number)
        yield from self._from_publisher()
        _logger.info(
            "event=origins version=%s bytes_from_peers=%d bytes_from_publisher=%d",
            self._offer.version,
            self._num_bytes[_PEERS],
            self._num_bytes[_PUBLISHER],
        )

    def _peers(self) -> Iterator[tuple[PeerEngine, int]]:
        """While bytes are missing: of each engine the rank of our number, which has just our bytes where both engines
        are cut alike; then the other ranks, but of those engines that have not the version."""
        for engine in self._engines:
            if self._missing:
                yield engine, self._own_rank
        for engine in self._engines:
            for number in self._other_ranks(engine) if self._missing else ():
                if self._missing and engine not in self._refusing:
                    yield engine, number

    def _other_ranks(self, engine: PeerEngine) -> list[int]:
        if engine in self._refusing:
            return []
        try:
            return engine.other_ranks(deadline_ns=_soon(self._deadline_ns))
        except _FAILURES as error:
            _log_left_out(engine.name, self._offer.version, error)
            return []

    def _from_peer(self, engine: PeerEngine, number: int) -> Iterator[Sequence[int]]:
        name, peer = f"{engine.name} rank {number}", engine.rank(number)
        try:
            holdings = self._holdings(engine, peer)
            cut = HeldBytes(holdings, self._offer.manifest.segments).cut(self._missing)
            if cut.held:
                self._missing = cut.missing
                self._until_ns = _share(self._deadline_ns, 2)
                yield from self._bring(peer, cut.held)
        except (*_FAILURES, ValueError) as error:
            _log_left_out(name, self._offer.version, error)
        finally:
            self._close_current()  # if it could not be before: nobody else is asked while it may still write

    def _holdings(self, engine: PeerEngine, peer: PeerRank) -> Sequence[ByteRange]:
        try:
            return peer.holdings(self._offer, deadline_ns=_soon(self._deadline_ns))
        except NoPublicationError:
            self._refusing.add(engine)
            raise

    def _from_publisher(self) -> Iterator[Sequence[int]]:
        if not self._missing:
            return
        self._origin, self._until_ns = _PUBLISHER, self._deadline_ns
        pieces, self._missing = self._missing, []
        yield from self._bring(self._publisher, pieces)

    def _bring(self, transport: Transport, pieces: Sequence[Piece]) -> Iterator[Sequence[int]]:
        """What does not come is missing again."""
        parts = [part for piece in pieces for part in ((piece,) if piece.is_packed else piece.by_rows(_SCRATCH_BYTES))]
        packed = [part for part in parts if part.is_packed]
        strided = [part for part in parts if not part.is_packed]
        arriving = [*packed, *strided]
        is_here = [False] * len(arriving)
        try:
            for batch in chain(self._land(transport, packed), self._scatter(transport, strided, len(packed))):
                for index in batch:
                    is_here[index] = True
                if complete := self._complete([arriving[index] for index in batch]):
                    yield complete
        finally:
            self._missing += [piece for piece, here in zip(arriving, is_here, strict=True) if not here]

    def _land(self, transport: Transport, pieces: Sequence[Piece]) -> Iterator[Sequence[int]]:
        """Straight to where they are wanted."""
        if pieces:
            yield from self._fetch(transport, [piece.range for piece in pieces], self._target)

    def _scatter(self, transport: Transport, pieces: Sequence[Piece], first: int) -> Iterator[Sequence[int]]:
        """By way of memory where they lie packed: thousands of rows one by one would cost a system call each. Indices
        count from `first` on."""
        if not pieces:
            return
        scratch = Mapping.private(min(_SCRATCH_BYTES, sum(piece.range.num_bytes for piece in pieces)))
        for start, stop in _rounds(pieces):
            ranges, place = [], 0
            for piece in pieces[start:stop]:
                ranges.append(piece.range._replace(target_offset=place))
                place += piece.range.num_bytes
            for _ in self._fetch(transport, ranges, scratch):
                pass
            landing = zip(ranges, pieces[start:stop], strict=True)
            transfer([_scattering(scratch, packed, self._target, piece) for packed, piece in landing], 1)
            yield range(first + start, first + stop)

    def _fetch(self, transport: Transport, ranges: Sequence[ByteRange], target: Mapping) -> Iterator[Sequence[int]]:
        if self._is_closed:
            raise LifecycleError(f"the fetch of version {self._offer.version} was closed")
        self._current = transport.fetch(self._offer, ranges, target, deadline_ns=self._until_ns)
        try:
            yield from self._current.arrivals()
        finally:
            self._close_current()

    def _complete(self, pieces: Sequence[Piece]) -> list[int]:
        """Counts them off; ranges of which nothing is missing any more."""
        complete = []
        for piece in pieces:
            self._num_missing[piece.number] -= piece.range.num_bytes
            if not self._num_missing[piece.number]:
                complete.append(piece.number)
        return complete

    def _close_current(self) -> None:
        """Nobody writes into the target any more. What cannot be closed stays for a later call."""
        if self._current is not None:
            self._current.close()
            self._num_bytes[self._origin] += self._current.num_bytes
            self._current = None

    def close(self) -> None:
        self._is_closed = True
        self._close_current()


def _log_left_out(name: str, version: WeightVersion | None, error: Exception) -> None:
    # Peers that have not got that far are no news: all of a fleet may go to a new version at once.
    _logger.log(
        logging.INFO if isinstance(error, NoPublicationError) else logging.WARNING,
        "event=left_out peer=%s version=%s reason=%r",
        name,
        version or "newest",
        f"{type(error).__name__}: {error}",
    )


def _rounds(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Of as many pieces as there is room for, one at least: first, and behind the last."""
    start = num_bytes = 0
    for index, piece in enumerate(pieces):
        if num_bytes + piece.range.num_bytes > _SCRATCH_BYTES:
            yield start, index
            start, num_bytes = index, 0
        num_bytes += piece.range.num_bytes
    yield start, len(pieces)


def _scattering(scratch: Mapping, packed: ByteRange, target: Mapping, piece: Piece) -> Region:
    return Region(
        source=scratch,
        source_offset=packed.target_offset,
        source_stride=packed.row_bytes,
        rows=packed.rows,
        row_bytes=packed.row_bytes,
        target=target,
        target_offset=piece.range.target_offset,
        target_stride=piece.target_stride,
    )


def _soon(deadline_ns: int) -> int:
    return min(_share(deadline_ns, 4), time.monotonic_ns() + int(_PATIENCE_S * 1e9))


def _share(deadline_ns: int, parts: int) -> int:
    """The end of a part of the time that is left: whoever stands still in it leaves the others the rest."""
    now_ns = time.monotonic_ns()
    return now_ns + (deadline_ns - now_ns) // parts
