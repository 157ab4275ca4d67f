"""Peers over tcp: the common suite, whether they have everything, nothing, or are not there; what they alone have."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from transport_suite import EDGE, Connect, TransportSuite, assert_landed, fetched, soon, target_for, weights, whole

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import AuthenticationError, ConfigurationError, NoPublicationError, OverloadedError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.weight_server import ChannelShelf, WeightServer, read_server_address
from fastdeploy_rl.sources.held_versions import HeldReader, HeldVersions
from fastdeploy_rl.transport.base import Offer, Shelf
from fastdeploy_rl.transport.connection import Connection
from fastdeploy_rl.transport.peers import PeerEngine, PeerTransport
from fastdeploy_rl.transport.tcp import TcpTransport
from fastdeploy_rl.transport.tcp_peers import TcpPeer, peer_engine
from fastdeploy_rl.transport.tcp_server import TcpServer

SECRET = b"sixteen bytes, or more"


def peers_at(
    *addresses: str, rank: int = 0, bucket_bytes: int = 1 << 20, secret: bytes | None = None
) -> list[PeerEngine]:
    """Engines of these addresses, as rank `rank` of ours sees them."""
    connect = partial(TcpPeer, bucket_bytes=bucket_bytes, secret=secret)
    return [peer_engine(address, rank, connect) for address in addresses]


class TestPeerTransport(TransportSuite):
    @pytest.fixture(params=["all", "nothing", "nobody"])
    def peer(self, channel: Path, publisher: WeightPublisher, request: pytest.FixtureRequest) -> Iterator[str]:
        """Its address: it serves what the publisher does, nothing, or is not there."""
        with ExitStack() as stack:
            if request.param == "nobody":
                yield f"127.0.0.1:{unused_port()}"
                return
            shelf: Shelf = HeldVersions()
            if request.param == "all":
                whole_channel = ChannelShelf(publisher.channel, Deadlines())
                stack.callback(whole_channel.close)
                shelf = whole_channel
            yield stack.enter_context(TcpServer(shelf)).address

    @pytest.fixture
    def connect(self, channel: Path, publisher: WeightPublisher, peer: str) -> Iterator[Connect]:
        with ExitStack() as stack:
            stack.enter_context(WeightServer(channel))

            def connect(bucket_bytes: int) -> PeerTransport:
                publisher = TcpTransport(partial(read_server_address, channel), bucket_bytes=bucket_bytes)
                transport = PeerTransport(publisher, peers_at(peer, bucket_bytes=bucket_bytes), 0)
                stack.callback(transport.close)
                return transport

            yield connect


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# --- what ranks have fetched -----------------------------------------------------------------------


class Scene(NamedTuple):
    offer: Offer
    server: WeightServer


@pytest.fixture
def scene(channel: Path, publisher: WeightPublisher) -> Iterator[Scene]:
    with WeightServer(channel) as server:
        publisher.publish(weights(1), step=1)
        transport = TcpTransport(server.address)
        yield Scene(transport.offer(None, deadline_ns=soon()), server)
        transport.close()


def held(scene: Scene, ranges: list[ByteRange]) -> tuple[HeldVersions, Mapping]:
    """A shelf of what one rank fetched of the publisher."""
    arena = target_for(ranges)
    transport = TcpTransport(scene.server.address)
    fetched(transport.fetch(scene.offer, ranges, arena, deadline_ns=soon()))
    transport.close()
    shelf = HeldVersions()
    shelf.hold(scene.offer, ranges, arena)
    return shelf, arena


def matrix_columns(scene: Scene, start: int, row_bytes: int, place: int = EDGE) -> ByteRange:
    part = next(tensor for tensor in scene.offer.manifest.tensors if tensor.name == "matrix").parts[0]
    return ByteRange(part.segment, part.offset + start, 1024, 256, row_bytes, place)


def ranks_in_a_row(stack: ExitStack, shelves: list[HeldVersions]) -> str:
    """Serves each on the port behind the one before; the address of the first."""
    for _ in range(100):
        first = unused_port()
        with ExitStack() as trying, suppress(ConfigurationError):
            for rank, shelf in enumerate(shelves):
                server = TcpServer(shelf, port=first + rank, num_ranks=len(shelves))
                trying.enter_context(server)
            stack.enter_context(trying.pop_all())
            return f"127.0.0.1:{first}"
    raise RuntimeError("no ports in a row are free")


def test_columns_come_from_the_ranks_that_are_cut_otherwise(scene: Scene) -> None:
    """Three ranks have a third of each row, and this one needs half of it; the other tensors they have not."""
    widths = [(0, 340), (340, 340), (680, 344)]
    shelves = [held(scene, [matrix_columns(scene, start, size)])[0] for start, size in widths]
    wanted = [matrix_columns(scene, 512, 512)]
    num_sent = scene.server.num_payload_bytes
    with ExitStack() as stack:
        address = ranks_in_a_row(stack, shelves)
        everything = whole(scene.offer)
        others = sum(each.num_bytes for each in everything) - 256 * 1024
        for ranges, num_from_publisher in ((wanted, 0), (everything, others)):
            transport = PeerTransport(TcpTransport(scene.server.address), peers_at(address, rank=1), 1)
            stack.callback(transport.close)
            target = target_for(ranges)
            fetched(transport.fetch(scene.offer, ranges, target, deadline_ns=soon()))
            assert_landed(target, weights(1), scene.offer, ranges)
            assert scene.server.num_payload_bytes - num_sent == num_from_publisher


def test_memory_that_is_wanted_back_is_nobodys_when_withdraw_returns(scene: Scene) -> None:
    """From a client that asked for all of it and takes nothing. The next one is told that it is not here."""
    ranges = whole(scene.offer)
    shelf, arena = held(scene, ranges)
    with TcpServer(shelf) as server, closing(Connection(server.address, None, Deadlines())) as connection:
        connection.open(soon())
        connection.hold(scene.offer.file_digest, soon())
        connection.read([each._replace(target_offset=0) for each in ranges] * 40, soon())
        shelf.withdraw(arena)
        arena.close()  # would raise while anybody has a view of it
        peer = peers_at(server.address)[0].rank(0)
        with pytest.raises(NoPublicationError, match="not held here"):
            peer.holdings(scene.offer, deadline_ns=soon())


class Busy(HeldVersions):
    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> HeldReader:
        raise OverloadedError("come back later")


def test_a_peer_that_has_as_many_clients_as_it_takes_is_left_out(scene: Scene) -> None:
    ranges = whole(scene.offer)
    target = target_for(ranges)
    with TcpServer(Busy()) as busy:
        transport = PeerTransport(TcpTransport(scene.server.address), peers_at(busy.address), 0)
        fetched(transport.fetch(scene.offer, ranges, target, deadline_ns=soon()))
        transport.close()
    assert_landed(target, weights(1), scene.offer, ranges)


def test_a_peer_with_another_secret_is_left_out(scene: Scene) -> None:
    ranges = whole(scene.offer)
    shelf, _ = held(scene, ranges)
    num_sent = scene.server.num_payload_bytes
    with TcpServer(shelf, secret=SECRET) as server:
        transport = PeerTransport(TcpTransport(scene.server.address), peers_at(server.address), 0)
        target = target_for(ranges)
        fetched(transport.fetch(scene.offer, ranges, target, deadline_ns=soon()))
        transport.close()
        assert_landed(target, weights(1), scene.offer, ranges)
        assert scene.server.num_payload_bytes == 2 * num_sent
        with pytest.raises(AuthenticationError, match="wants a secret"):
            peers_at(server.address)[0].offer(None, deadline_ns=soon())
