"""Ranks of other engines over tcp: rank r of an engine listens on its rank 0's port + r.

Owns their addresses, and what is asked of a peer beside its bytes. Refuses to know whom to ask first. A peer is not
waited for: one that is not there, or lost, is given up at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fastdeploy_rl.errors import DeadlineExceededError, OverloadedError, PeerLostError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.address import Address, parse_address
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.connection import Connection
from fastdeploy_rl.transport.peers import PeerEngine
from fastdeploy_rl.transport.tcp import DEFAULT_BUCKET_BYTES, DEFAULT_STREAMS, TcpTransport


class TcpPeer(TcpTransport):
    """One rank of another engine: a `PeerRank`. Keeps nothing open between questions."""

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None = None,
        num_streams: int = DEFAULT_STREAMS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        super().__init__(address, secret=secret, num_streams=num_streams, bucket_bytes=bucket_bytes, is_peer=True)
        self.address = address
        self._num_ranks: int | None = None

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
        connection = Connection(self.address, self._secret, self._deadlines)
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


def peer_engine(address: str, own_rank: int, connect: Callable[[str], TcpPeer]) -> PeerEngine:
    """The engine whose rank 0 listens at `address`. `connect` makes the client of one address."""
    host, port = parse_address(address)
    return PeerEngine(address, lambda rank: connect(str(Address(host, port + rank))), own_rank)
