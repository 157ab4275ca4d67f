"""What this rank fetched, served to other engines for as long as its memory is not needed for something else.

Owns when the server listens: from the first version that is held on, until the source is closed. Refuses to know which
bytes are where.
"""

from collections.abc import Callable, Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.sources.held_versions import HeldVersions
from fastdeploy_rl.transport.address import parse_address
from fastdeploy_rl.transport.base import ByteRange, Offer, Shelf
from fastdeploy_rl.transport.tcp_server import TcpServer


class ServedVersions:
    """The Holder of a source whose engine is a peer for others."""

    def __init__(self, make_server: Callable[[Shelf], TcpServer]) -> None:
        """`make_server`: one that is not started."""
        self._make_server = make_server
        self._shelf = HeldVersions()
        self._server: TcpServer | None = None

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        """ConfigurationError where the address cannot be listened on: an engine that others were told to ask is not to
        be silent."""
        if self._server is None:
            server = self._make_server(self._shelf)
            server.start()
            self._server = server
        self._shelf.hold(offer, ranges, mapping)

    def withdraw(self, mapping: Mapping) -> None:
        self._shelf.withdraw(mapping)

    def close(self) -> None:
        """Ends every connection."""
        if self._server is not None:
            self._server.close()
            self._server = None


def served_at(address: str, rank: int, num_ranks: int, secret: bytes | None) -> ServedVersions:
    """Rank `rank` of `num_ranks` of the engine whose rank 0 listens at `address` (`host:port`)."""
    host, port = parse_address(address)
    return ServedVersions(
        lambda shelf: TcpServer(shelf, host, port + rank, secret=secret, num_ranks=num_ranks)
    )
