"""What this rank fetched, served to other engines for as long as its memory is not needed for something else.

Owns when the server listens: from the first version that is held on, until the source is closed. Refuses to know which
bytes are where.
"""

from collections.abc import Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.sources.held_versions import HeldVersions
from fastdeploy_rl.transport.address import parse_address
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.tcp_server import TcpServer


class ServedVersions:
    """The Holder of a source whose engine is a peer for others: rank `rank` of `num_ranks` of the engine whose rank 0
    listens at `address` (`host:port`)."""

    def __init__(self, address: str, rank: int, num_ranks: int, secret: bytes | None) -> None:
        host, port = parse_address(address)
        self._shelf = HeldVersions()
        self._server = TcpServer(self._shelf, host, port + rank, secret=secret, num_ranks=num_ranks)
        self._is_listening = False

    def hold(self, offer: Offer, ranges: Sequence[ByteRange], mapping: Mapping) -> None:
        """ConfigurationError where the address cannot be listened on: an engine that others were told to ask is not to
        be silent."""
        self._listen()
        self._shelf.hold(offer, ranges, mapping)

    def _listen(self) -> None:
        if self._is_listening:
            return
        try:
            self._server.start()
        except ConfigurationError as error:
            raise ConfigurationError(f"--rsync-config: serve: {error}") from error
        self._is_listening = True

    def withdraw(self, mapping: Mapping) -> None:
        self._shelf.withdraw(mapping)

    def close(self) -> None:
        """Ends every connection."""
        self._server.close()
        self._is_listening = False
