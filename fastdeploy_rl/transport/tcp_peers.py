"""Ranks of other engines over tcp: rank r of an engine listens on its rank 0's port + r.

Owns their addresses, and what is asked of a peer beside its bytes. Refuses to know whom to ask first. A peer is not
waited for: one that is not there, or lost, is given up at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import DeadlineExceededError, OverloadedError, PeerLostError
from fastdeploy_rl.transport.address import Address, parse_address
from fastdeploy_rl.transport.base import ByteRange, Fetch, Offer
from fastdeploy_rl.transport.connection import Connection
from fastdeploy_rl.transport.peers import PeerEngine
from fastdeploy_rl.transport.tcp import TcpTransport
from fastdeploy_rl.version import WeightVersion


class TcpPeer:
    """One rank of another engine: a `PeerRank`. Connects when it is asked, and keeps nothing open between questions."""

    def __init__(self, address: str, transport: TcpTransport, secret: bytes | None) -> None:
        """`transport`: to that address alone, as a peer."""
        self.address = address
        self._transport = transport
        self._secret = secret
        self._num_ranks: int | None = None

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        return self._transport.offer(version, deadline_ns=deadline_ns)

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> Fetch:
        return self._transport.fetch(offer, ranges, target, deadline_ns=deadline_ns)

    def num_ranks(self, *, deadline_ns: int) -> int:
        if self._num_ranks is None:
            with self._connected(deadline_ns):
                pass
        return self._num_ranks or 1

    def holdings(self, offer: Offer, *, deadline_ns: int) -> Sequence[ByteRange]:
        with self._connected(deadline_ns) as connection:
            connection.hold(offer.file_digest, deadline_ns)
            return connection.holdings(deadline_ns)

    @contextmanager
    def _connected(self, deadline_ns: int) -> Iterator[Connection]:
        """OSError as errors of the tree."""
        begun = time.monotonic()
        connection = Connection(self.address, self._secret, Deadlines())
        try:
            connection.open(deadline_ns)
            self._num_ranks = connection.num_ranks
            yield connection
        except TimeoutError as error:
            raise DeadlineExceededError.waiting_for(f"peer {self.address}", since_s=begun, hint=str(error)) from error
        except (OSError, OverloadedError) as error:
            raise PeerLostError(f"peer {self.address}: {error}") from error
        finally:
            connection.close()

    def trim(self) -> None:
        self._transport.trim()

    def close(self) -> None:
        self._transport.close()


def peer_engine(
    address: str, own_rank: int, connect: Callable[[str], TcpTransport], secret: bytes | None
) -> PeerEngine:
    """The engine whose rank 0 listens at `address`. `connect` makes a transport to one peer."""
    host, port = parse_address(address)

    def rank(number: int) -> TcpPeer:
        place = str(Address(host, port + number))
        return TcpPeer(place, connect(place), secret)

    return PeerEngine(address, rank, own_rank)
