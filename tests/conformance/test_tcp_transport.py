"""The `tcp` transport: real sockets, a real publisher, a wire that is cut wherever it hurts, and hostile ends of it."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from transport_suite import EDGE, Connect, TransportSuite, assert_landed, fetched, soon, target_for, weights, whole

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    OverloadedError,
    PeerLostError,
)
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.weight_server import ChannelShelf, WeightServer, read_server_address
from fastdeploy_rl.transport import tcp_fetch, tcp_server, wire
from fastdeploy_rl.transport.base import Offer, Run, Shelf, ShelvedVersion
from fastdeploy_rl.transport.connection import Connection
from fastdeploy_rl.transport.tcp import TcpTransport
from fastdeploy_rl.transport.tcp_fetch import Desk
from fastdeploy_rl.transport.tcp_server import TcpServer
from fastdeploy_rl.version import WeightVersion

SECRET = b"sixteen bytes, or more"
OTHER = b"another one, as long.."
HASTY = Deadlines(greet_s=0.2, stall_s=0.2, idle_s=0.2)
"""For ends that misbehave: what waits for them gives up soon."""


@pytest.fixture
def server(channel: Path, publisher: WeightPublisher) -> Iterator[WeightServer]:
    with WeightServer(channel) as server:
        yield server


class TestTcpTransport(TransportSuite):
    @pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
    def connect(self, channel: Path, publisher: WeightPublisher, request: pytest.FixtureRequest) -> Iterator[Connect]:
        with ExitStack() as stack:
            stack.enter_context(WeightServer(channel, secret=request.param))

            def connect(bucket_bytes: int) -> TcpTransport:
                transport = TcpTransport(
                    partial(read_server_address, channel), secret=request.param, bucket_bytes=bucket_bytes
                )
                stack.callback(transport.close)
                return transport

            yield connect


# --- a wire that breaks ----------------------------------------------------------------------------


class Wire:
    """Between a client and a server: connection number i is cut, or stalls, once `limits[i]` bytes have come from the
    server; the last limit holds for all that follow. None: as far as it goes."""

    def __init__(self, server: str, limits: Sequence[int | None], *, stalls: bool = False) -> None:
        host, port = server.split(":")
        self._server = (host, int(port))
        self.limits = list(limits)
        self._stalls = stalls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, target: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=target, args=given)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                limit = self.limits[min(self.num_connections, len(self.limits) - 1)]
                self.num_connections += 1
                upstream = socket.create_connection(self._server, timeout=10)
                upstream.settimeout(None)
                self._sockets += [client, upstream]
                self._begin(self._pump, client, upstream, None)
                self._begin(self._pump, upstream, client, limit)

    def _pump(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        with suppress(OSError):
            while (left is None or left) and (data := source.recv(65536 if left is None else min(left, 65536))):
                target.sendall(data)
                left = None if left is None else left - len(data)
        if left is None or left or not self._stalls:
            for each in (source, target):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        for each in list(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(20)
        for each in self._sockets:
            each.close()


class Scene(NamedTuple):
    """A fetch that is to be made."""

    transport: TcpTransport
    offer: Offer
    ranges: list[ByteRange]
    target: Mapping


@contextmanager
def fetching(server: WeightServer, via: str, **settings: object) -> Iterator[Scene]:
    """The offer comes straight from the server, all else `via` another address."""
    direct = TcpTransport(server.address)
    offer = direct.offer(None, deadline_ns=soon())
    transport = TcpTransport(via, **settings)  # type: ignore[arg-type]
    try:
        yield Scene(transport, offer, whole(offer), target_for(whole(offer)))
    finally:
        transport.close()
        direct.close()


@pytest.mark.parametrize("position", [0, 1, 4, 5, 100, 160, 170, 200, 300, 5_000, 65_536, 150_000, 290_000])
def test_a_lost_connection_goes_on_where_it_stopped(
    server: WeightServer, publisher: WeightPublisher, position: int
) -> None:
    """In greetings, in headers, in bytes, between two answers."""
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [position] * 3 + [None]) as cut,
        fetching(server, cut.address, bucket_bytes=1 << 16, num_streams=1) as (transport, offer, ranges, target),
    ):
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        assert sorted(fetched(fetch)) == list(range(len(ranges)))
        assert_landed(target, weights(1), offer, ranges)
        total = sum(each.num_bytes for each in ranges)
        assert fetch.num_bytes == total
        assert total <= server.num_payload_bytes <= total + 3 * (1 << 16)
        assert cut.num_connections == 4 or position * 3 > total


def test_a_wire_that_never_holds_for_long_still_brings_everything(
    server: WeightServer, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [20_000]) as cut,
        fetching(server, cut.address, bucket_bytes=1 << 30, num_streams=2) as (transport, offer, ranges, target),
    ):
        fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))
        assert_landed(target, weights(1), offer, ranges)
        assert cut.num_connections > 10


@pytest.mark.parametrize("position", [0, 3, 100, 200])
def test_an_offer_is_asked_for_again_when_the_connection_is_lost(
    server: WeightServer, publisher: WeightPublisher, position: int
) -> None:
    version = publisher.publish(weights(1), step=1).version
    with Wire(server.address, [position, position, None]) as cut:
        assert TcpTransport(cut.address).offer(None, deadline_ns=soon()).version == version
        assert cut.num_connections == 3


class BusyForAWhile(Shelf):
    def __init__(self, shelf: Shelf, num_refusals: int) -> None:
        self._shelf = shelf
        self._num_refusals = num_refusals
        self.num_asks = 0

    def offer(self, version: WeightVersion | None) -> bytes:
        self.num_asks += 1
        if self.num_asks <= self._num_refusals:
            raise OverloadedError("as many clients as it takes")
        return self._shelf.offer(version)

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> ShelvedVersion:
        return self._shelf.open(file_digest, on_withdraw)


def test_a_server_that_has_too_many_clients_is_waited_for_until_the_deadline(
    channel: Path, publisher: WeightPublisher
) -> None:
    """More ranks may come at once than it takes. Somebody else has what a peer has."""
    version = publisher.publish(weights(1), step=1).version
    with closing(ChannelShelf(publisher.channel, Deadlines())) as shelf:
        busy = BusyForAWhile(shelf, 5)
        with TcpServer(busy) as server:
            assert TcpTransport(server.address).offer(None, deadline_ns=soon()).version == version
            assert busy.num_asks == 6
        busy = BusyForAWhile(shelf, 1_000_000)
        with TcpServer(busy) as server:
            with pytest.raises(DeadlineExceededError, match="as many clients as it takes"):
                TcpTransport(server.address).offer(None, deadline_ns=time.monotonic_ns() + 300_000_000)
            busy.num_asks = 0
            with pytest.raises(PeerLostError, match="as many clients as it takes"):
                TcpTransport(server.address, is_peer=True).offer(None, deadline_ns=soon())
            assert busy.num_asks == 3


def test_a_server_that_stalls_is_given_up_at_the_deadline(server: WeightServer, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [100_000, 0], stalls=True) as stalled,
        fetching(server, stalled.address, deadlines=HASTY) as (transport, offer, ranges, target),
    ):
        with pytest.raises(DeadlineExceededError, match=rf"version {offer.version}"):
            fetched(transport.fetch(offer, ranges, target, deadline_ns=time.monotonic_ns() + 500_000_000))
        target.close()
        for step in (2, 3, 4):
            publisher.publish(weights(step), step=step)


def test_a_deadline_is_missed_for_the_reason_before_it(server: WeightServer, publisher: WeightPublisher) -> None:
    """Not for want of time, which is what every stream fails of at the deadline."""
    publisher.publish(weights(1), step=1)
    offer = TcpTransport(server.address).offer(None, deadline_ns=soon())
    desk = Desk(offer, whole(offer), 1 << 20, soon(), is_patient=True)
    desk.put_off(PeerLostError("10.0.0.7:1: nothing came in time"), 0.0)
    desk.deadline_ns = time.monotonic_ns()
    desk.put_off(PeerLostError("10.0.0.7:1: no time left"), 0.0)
    with pytest.raises(DeadlineExceededError, match=rf"version {offer.version} .*last: 10\.0\.0\.7:1: nothing came"):
        desk.await_turn()


def test_a_pause_is_capped_however_long_the_server_stalled_before(
    publisher: WeightPublisher, server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(weights(1), step=1)
    offer = TcpTransport(server.address).offer(None, deadline_ns=soon())
    desk = Desk(offer, whole(offer), 1 << 20, soon(), is_patient=True)
    desk.put_off(PeerLostError("nothing came in time"), 10.0)
    later_ns = time.monotonic_ns() + 4_000_000_000
    desk.deadline_ns = later_ns + 1
    clock = chain([later_ns], repeat(desk.deadline_ns))
    monkeypatch.setattr(tcp_fetch.time, "monotonic_ns", lambda: next(clock))
    desk.await_turn()  # at the first look, or it is too late


def test_a_server_that_stalls_once_is_left_for_a_new_connection(
    server: WeightServer, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [100_000, None], stalls=True) as stalled,
        fetching(server, stalled.address, deadlines=HASTY, num_streams=1) as (transport, offer, ranges, target),
    ):
        fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))
        assert_landed(target, weights(1), offer, ranges)


def test_nobody_there_is_said_with_the_address(server: WeightServer, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with fetching(server, address) as (transport, offer, ranges, target):
        with pytest.raises(PeerLostError, match=rf"nobody offers weights: {address}.*refused"):
            transport.offer(None, deadline_ns=soon())
        with pytest.raises(DeadlineExceededError, match=f"{address}.*refused"):
            transport.fetch(offer, ranges, target, deadline_ns=time.monotonic_ns() + 200_000_000)
        target.close()


def test_a_server_that_comes_back_at_another_port_is_found(channel: Path, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    transport = TcpTransport(partial(read_server_address, channel), bucket_bytes=1000)
    with WeightServer(channel):
        offer = transport.offer(None, deadline_ns=soon())
        ranges = whole(offer)
        target = target_for(ranges)
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
    with WeightServer(channel):
        fetched(fetch)
    assert_landed(target, weights(1), offer, ranges)


def test_a_version_that_goes_while_the_wire_is_down_ends_the_fetch(
    server: WeightServer, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [100_000, 0]) as cut,
        fetching(server, cut.address, num_streams=1) as (transport, offer, ranges, target),
    ):
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        for step in (2, 3, 4):  # waits for the server to see that its client is gone
            publisher.publish(weights(step), step=step)
        cut.limits[-1] = None
        with pytest.raises(NoPublicationError):
            fetched(fetch)
        assert 0 < fetch.num_bytes < sum(each.num_bytes for each in ranges)
        target.close()


def test_a_peer_that_is_lost_is_not_waited_for(server: WeightServer, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    with (
        Wire(server.address, [100_000]) as cut,
        fetching(server, cut.address, is_peer=True) as (transport, offer, ranges, target),
    ):
        fetch = transport.fetch(offer, ranges, target, deadline_ns=soon())
        with pytest.raises(PeerLostError, match=cut.address):
            fetched(fetch)
        assert 0 < fetch.num_bytes < sum(each.num_bytes for each in ranges)
        target.close()


# --- secrets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_server", "of_client", "reason"),
    [
        (SECRET, None, "wants a secret"),
        (None, SECRET, "the server has none"),
        (SECRET, OTHER, "another secret"),
    ],
)
def test_ends_that_do_not_share_a_secret_do_not_speak(
    channel: Path, publisher: WeightPublisher, of_server: bytes | None, of_client: bytes | None, reason: str
) -> None:
    publisher.publish(weights(1), step=1)
    with WeightServer(channel, secret=of_server) as server:
        offer = TcpTransport(server.address, secret=of_server).offer(None, deadline_ns=soon())
        stranger = TcpTransport(server.address, secret=of_client)
        target = target_for(whole(offer))
        with pytest.raises(AuthenticationError, match=reason) as refusal:
            stranger.offer(None, deadline_ns=soon())
        with pytest.raises(AuthenticationError, match=reason):
            stranger.fetch(offer, whole(offer), target, deadline_ns=soon())
        assert SECRET.decode() not in str(refusal.value)
        assert_landed(target, weights(1), offer, [])
        assert server.num_payload_bytes == 0


def test_whoever_skips_the_greeting_is_told_nothing(channel: Path, publisher: WeightPublisher) -> None:
    publisher.publish(weights(1), step=1)
    with WeightServer(channel, secret=SECRET, deadlines=HASTY) as server:
        for first in (wire.Ask(""), wire.ClientHello(bytes(32), bytes(32)), wire.ClientHello(bytes(32), b"")):
            answer = said_to(server.address, wire.encode(first) + wire.encode(wire.Ask("")))
            assert b"manifest" not in answer
            assert b"matrix" not in answer


@contextmanager
def impostor(answer: Callable[[wire.ClientHello], bytes], *, needs_secret: bool) -> Iterator[str]:
    """A server that says what it likes to whoever greets it."""
    hello = wire.ServerHello("fastdeploy_rl", wire.PROTOCOL, bytes(32), needs_secret, 1)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as client:
                    client.settimeout(10)
                    client.sendall(wire.encode(hello))
                    data = client.recv(4096)
                    client.sendall(answer(msgspec.msgpack.decode(data[wire.HEADER_BYTES :], type=wire.ClientHello)))
                    client.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


@pytest.mark.parametrize(
    "answer",
    [
        lambda hello: wire.encode(wire.Welcome(b"")),
        lambda hello: wire.encode(wire.Welcome(bytes(32))),
        lambda hello: wire.encode(wire.Welcome(hello.proof)),
    ],
    ids=["none", "guess", "the client's own"],
)
def test_a_server_that_cannot_prove_the_secret_is_refused(answer: Callable[[wire.ClientHello], bytes]) -> None:
    with (
        impostor(answer, needs_secret=True) as address,
        pytest.raises(AuthenticationError, match="does not know the secret"),
    ):
        TcpTransport(address, secret=SECRET).offer(None, deadline_ns=soon())


# --- hostile ends ----------------------------------------------------------------------------------


def frame(length: int, kind: int, payload: bytes = b"") -> bytes:
    return length.to_bytes(4, "big") + bytes([kind]) + payload


GREETING = wire.encode(wire.ClientHello(bytes(32), b""))
KNOWN = GREETING[4]
HUGE = 2**63 - 1
INSANE = wire.encode(wire.Read((ByteRange(0, 0, 0, HUGE, HUGE, 0),)))


def said_to(address: str, data: bytes) -> bytes:
    """All that the server says to somebody who sends this, and then nothing, until it hangs up."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(data)
        answer = bytearray()
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                answer += part
        return bytes(answer)


def offered_in_haste(address: str) -> Offer:
    """However often we are too slow for a hasty server, on a machine that is busy."""
    deadline_ns = soon()
    while True:
        try:
            return TcpTransport(address).offer(None, deadline_ns=deadline_ns)
        except PeerLostError:
            if time.monotonic_ns() >= deadline_ns:
                raise


HOSTILE = {
    "silence": b"",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "ones": b"\xff" * 4096,
    "a huge greeting": frame(2**32 - 1, KNOWN),
    "a greeting that is too large": frame(1 << 20, KNOWN),
    "an unknown kind": frame(3, 99, b"abc"),
    "half a greeting": GREETING[:-1],
    "garbage": frame(10, KNOWN, b"\xc1" * 10),
    "a huge question": GREETING + frame(2**32 - 1, KNOWN + 2),
    "half a question": GREETING + frame(1 << 20, 8) + b"\x91" * 1000,
    "nested too deep": GREETING + frame(200_000, 8, b"\x91" * 200_000),
    "two greetings": GREETING + GREETING,
    "ranges without a version": GREETING + INSANE,
    "a version that is not there": GREETING + wire.encode(wire.Hold("0" * 64)) + INSANE,
    "no version's text": GREETING + wire.encode(wire.Ask("no version")),
    "all but the last byte": GREETING + wire.encode(wire.Ask("1.1"))[:-1],
    "negative": GREETING + wire.encode(wire.Read((ByteRange(0, -1, 1, 1, 1, 0),))),
    "another transport's question": GREETING + wire.encode(wire.Locate()),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_client_costs_little_and_the_server_goes_on(
    channel: Path, publisher: WeightPublisher, data: bytes
) -> None:
    version = publisher.publish(weights(1), step=1).version
    with WeightServer(channel, deadlines=HASTY) as server:
        tracemalloc.start()
        try:
            answer = said_to(server.address, data)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        assert len(answer) < 4096
        assert offered_in_haste(server.address).version == version
        assert server.num_payload_bytes == 0


@pytest.mark.parametrize("wrong", ["rows", "bytes", "end", "segment", "overlap"])
def test_ranges_that_are_none_are_refused_and_the_connection_stays(
    server: WeightServer, publisher: WeightPublisher, wrong: str
) -> None:
    publisher.publish(weights(1), step=1)
    offer = TcpTransport(server.address).offer(None, deadline_ns=soon())
    end = offer.manifest.segments[0].num_bytes
    ranges = {
        "rows": [ByteRange(0, 0, 3, wire.MAX_ROWS + 1, 1, 0)],
        "bytes": [ByteRange(0, 0, 0, wire.MAX_READ_BYTES + 1, 1, 0)],
        "end": [ByteRange(0, end - 10, 11, 1, 11, 0)],
        "segment": [ByteRange(1, 0, 1, 1, 1, 0)],
        "overlap": [ByteRange(0, 0, 7, 2, 8, 0)],
    }[wrong]
    connection = Connection(server.address, None, Deadlines())
    connection.open(soon())
    connection.hold(offer.file_digest, soon())
    with pytest.raises(FastDeployRLError):
        connection.read(ranges, soon())
    connection.read(whole(offer)[:1], soon())
    connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        frame(2**32 - 1, KNOWN),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        wire.encode(wire.Welcome(b"")) + frame(wire.MAX_MANIFEST_FRAME_BYTES + 1, 5),
        wire.encode(wire.Welcome(b"")) + wire.encode(wire.Held()),
        wire.encode(wire.Welcome(b"")) + wire.encode(wire.Failed("no such error", "boo")),
        wire.encode(wire.Welcome(b"")) + wire.encode(wire.Offered(b"{}")),
    ],
)
def test_a_hostile_server_is_an_error_of_ours(answer: bytes) -> None:
    with impostor(lambda hello: answer, needs_secret=False) as address, pytest.raises(FastDeployRLError):
        TcpTransport(address, deadlines=HASTY).offer(None, deadline_ns=soon())


def test_a_server_that_gives_other_bytes_than_were_asked_for_is_left(
    server: WeightServer, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    answer = b"".join(map(wire.encode, (wire.Welcome(b""), wire.Held(), wire.Data(5))))
    with (
        impostor(lambda hello: answer + b"abcde", needs_secret=False) as address,
        fetching(server, address) as (transport, offer, ranges, target),
    ):
        with pytest.raises(PeerLostError, match="the server gives 5"):
            fetched(transport.fetch(offer, ranges, target, deadline_ns=soon()))
        assert_landed(target, weights(1), offer, [])
        target.close()


# --- what a server holds ---------------------------------------------------------------------------


class OneVersion:
    """A shelf of one version of zeros. `withdraw` is what the server wants to be told by."""

    num_bytes = 64 << 20

    def __init__(self) -> None:
        self.mapping = Mapping.private(self.num_bytes)
        self.withdraw: Callable[[], None] | None = None
        self.is_let_go = threading.Event()

    def offer(self, version: WeightVersion | None) -> bytes:
        raise NoPublicationError("offers nothing")

    def open(self, file_digest: str, on_withdraw: Callable[[], None]) -> "OneVersion":
        self.withdraw = on_withdraw
        return self

    def runs(self, ranges: Sequence[ByteRange]) -> list[Run]:
        return [Run(self.mapping, each.offset, each.num_bytes) for each in ranges]

    def holdings(self) -> list[ByteRange]:
        return [ByteRange(0, 0, self.num_bytes, 1, self.num_bytes, 0)]

    def close(self) -> None:
        self.is_let_go.set()


@pytest.fixture
def shelf() -> OneVersion:
    return OneVersion()


@contextmanager
def holding(server: TcpServer) -> Iterator[Connection]:
    connection = Connection(server.address, None, Deadlines())
    try:
        connection.open(soon())
        connection.hold("0" * 64, soon())
        yield connection
    finally:
        connection.close()


def take_all(connection: Connection) -> None:
    """Until the other end hangs up."""
    with memoryview(bytearray(1 << 20)) as sink:
        while True:
            connection.receive_into(sink, soon())


def test_when_a_version_was_withdrawn_nobody_reads_it_any_more(shelf: OneVersion) -> None:
    """From a client that has asked for all of it, and takes nothing."""
    with TcpServer(shelf) as server, holding(server) as connection:
        connection.read(shelf.holdings(), soon())
        assert shelf.withdraw is not None
        shelf.withdraw()
        shelf.mapping.close()  # would raise while somebody reads
        assert shelf.is_let_go.wait(10)
        with pytest.raises(OSError, match=r"closed|reset"):
            take_all(connection)


@pytest.mark.parametrize(
    ("deadlines", "asks"), [(Deadlines(idle_s=0.5), False), (Deadlines(stall_s=0.2), True)], ids=["idle", "slow"]
)
def test_a_client_that_does_nothing_is_let_go_with_the_version_it_held(
    shelf: OneVersion, deadlines: Deadlines, asks: bool
) -> None:
    with TcpServer(shelf, deadlines=deadlines) as server, holding(server) as connection:
        if asks:
            connection.read(shelf.holdings(), soon())
        assert shelf.is_let_go.wait(20)
        shelf.mapping.close()


def test_a_client_that_keeps_a_version_by_asking_is_named(shelf: OneVersion, caplog: pytest.LogCaptureFixture) -> None:
    with TcpServer(shelf, deadlines=Deadlines(idle_s=0.2)) as server, holding(server) as connection:
        until = time.monotonic() + 10.0
        while "event=still_held client=127.0.0.1:" not in caplog.text and time.monotonic() < until:
            connection.hold("0" * 64, soon())
        assert "event=still_held client=127.0.0.1:" in caplog.text
        assert not shelf.is_let_go.is_set()


def test_closing_the_server_ends_its_clients(shelf: OneVersion) -> None:
    server = TcpServer(shelf)
    server.start()
    with holding(server) as connection:
        connection.read(shelf.holdings(), soon())
        server.close()
        assert shelf.is_let_go.is_set()
        shelf.mapping.close()
        server.close()


def test_more_clients_than_a_server_takes_are_sent_away_and_come_back(
    shelf: OneVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 1)
    with TcpServer(shelf) as server:
        with holding(server), pytest.raises(OverloadedError, match="come back later"), holding(server):
            pass
        assert shelf.is_let_go.wait(10)
        with ExitStack() as stack:
            for _ in range(1000):  # the thread of the one that left may still be ending
                with suppress(OverloadedError):
                    stack.enter_context(holding(server))
                    break
            else:
                pytest.fail("nobody is taken any more")


def test_a_port_that_is_taken_is_a_configuration_error(shelf: OneVersion) -> None:
    with TcpServer(shelf) as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port}"):
            TcpServer(shelf, port=port).start()


def test_a_server_open_to_all_says_so(shelf: OneVersion, caplog: pytest.LogCaptureFixture) -> None:
    with TcpServer(shelf, "0.0.0.0"), TcpServer(shelf, "0.0.0.0", secret=SECRET), TcpServer(shelf):
        pass
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["event=open_weights"]


@pytest.mark.parametrize(
    "wrong", [{"num_streams": 0}, {"num_streams": 65}, {"bucket_bytes": 0}, {"bucket_bytes": (1 << 30) + 1}]
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        TcpTransport("127.0.0.1:1", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="16"):
        TcpTransport("127.0.0.1:1", secret=b"short")


def test_ranges_beyond_the_target_are_refused_before_anything_is_fetched(
    server: WeightServer, publisher: WeightPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    with fetching(server, server.address) as (transport, offer, ranges, _):
        small = Mapping.private(EDGE)
        with pytest.raises(ValueError, match="target"):
            transport.fetch(offer, ranges, small, deadline_ns=soon())
        assert not np.frombuffer(small, np.uint8).any()
        assert server.num_payload_bytes == 0
