"""Serves what a shelf has over tcp: a thread for each connection, and a deadline for everything on it.

Owns the listening socket and its connections. Refuses to know where the bytes come from. Invariant: bytes are read from
a version only between `Shelf.open` and the end of `on_withdraw` or `ShelvedVersion.close`; a client that is slow or
dead holds one thread and one version, for no longer than the deadlines say. One that goes on asking holds them for as
long, and is named in the log.

Sent with sendmsg, not sendfile: that would send pages that are overwritten by the time they arrive, and was no faster
on loopback (1 GiB, 1.2 to 2.5 GB/s against 1.5 to 2.0).
"""

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, runtime_checkable

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    LifecycleError,
    ManifestError,
    NoPublicationError,
    OverloadedError,
    PeerLostError,
    SegmentError,
    VersionFormatError,
)
from fastdeploy_rl.transport import wire
from fastdeploy_rl.transport.address import Address
from fastdeploy_rl.transport.base import Run, Shelf, ShelvedVersion
from fastdeploy_rl.transport.link import Link, ns
from fastdeploy_rl.transport.outgoing import Outgoing
from fastdeploy_rl.transport.secret import checked_secret
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
_BACKLOG = 128
_LOOK_AGAIN_S = 0.1


@runtime_checkable
class LocatedVersion(ShelvedVersion, Protocol):
    """One whose segments another kind of transport reaches."""

    def places(self) -> wire.Places:
        """Where they lie for it, until the version is closed."""
        ...


class TcpServer:
    """Use it in a `with`, or between `start` and `close`. `port` 0: any. `secret`: what clients must prove, 16 bytes at
    least; None: whoever reaches the port may read. `num_ranks`: of the engine that this is one of, told
    to clients, who look for the rank that has what they need."""

    def __init__(
        self,
        shelf: Shelf,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: bytes | None = None,
        num_ranks: int = 1,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.shelf = shelf
        self.secret = None if secret is None else checked_secret(secret)
        self.num_ranks = num_ranks
        self.deadlines = deadlines or Deadlines()
        self._place = (host, port)
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._is_ending = threading.Event()
        self._num_payload_bytes = 0

    @property
    def address(self) -> str:
        """`host:port` that it listens on."""
        if self._listener is None:
            raise LifecycleError("the weight server is not started")
        return str(Address(*self._listener.getsockname()[:2]))

    def start(self) -> None:
        """ConfigurationError where the address cannot be listened on."""
        if self._listener is not None:
            raise LifecycleError(f"the weight server at {self.address} is already started")
        self._listener = _listening(*self._place)
        self._is_ending.clear()
        if self.secret is None and not ipaddress.ip_address(self._listener.getsockname()[0]).is_loopback:
            _log.warning("event=open_weights address=%s reason='no secret: all who reach it may read'", self.address)
        self._acceptor = threading.Thread(target=self._accept, name="fastdeploy_rl_accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Ends every connection; nobody reads from the shelf any more when it returns. DeadlineExceededError where one
        goes on for `let_go_s`. A second close does nothing."""
        listener, acceptor = self._listener, self._acceptor
        if listener is None or acceptor is None:
            return
        begun = time.monotonic()
        self._is_ending.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        acceptor.join(self.deadlines.let_go_s)
        listener.close()
        self._listener = self._acceptor = None
        left = self._end_connections(begun + self.deadlines.let_go_s)
        if left or acceptor.is_alive():
            raise DeadlineExceededError.waiting_for(f"end of {left} connections of a weight server", since_s=begun)

    def _end_connections(self, deadline_s: float) -> int:
        """How many are still there."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.cut()
        for connection in connections:
            connection.thread.join(max(0.0, deadline_s - time.monotonic()))
        return sum(connection.thread.is_alive() for connection in connections)

    def __enter__(self) -> "TcpServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and not self._is_ending.is_set():
            try:
                sock, client = listener.accept()
            except OSError as error:
                if not self._is_ending.wait(_LOOK_AGAIN_S):  # no descriptors left, most likely
                    _log.warning("event=not_accepted reason=%s", error)
                continue
            self._begin(sock, str(Address(*client[:2])))

    def _begin(self, sock: socket.socket, client: str) -> None:
        connection = _Connection(self, Link(sock), client)
        with self._lock:
            is_welcome = len(self._connections) < MAX_CONNECTIONS
            if is_welcome:
                self._connections.add(connection)
        if not is_welcome:
            connection.refuse()
            return
        try:
            connection.thread.start()
        except RuntimeError as error:  # no more threads
            _log.warning("event=not_served reason=%s", error)
            self.forget(connection)
            connection.refuse()

    def forget(self, connection: "_Connection") -> None:
        with self._lock:
            self._connections.discard(connection)

    @property
    def num_payload_bytes(self) -> int:
        """Bytes of tensors in all answers since it was made, also in those that were cut short."""
        return self._num_payload_bytes

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self._num_payload_bytes += num_bytes


class _Connection:
    """One client, and the version that it holds."""

    def __init__(self, server: TcpServer, link: Link, client: str) -> None:
        self.thread = threading.Thread(target=self._run, name="fastdeploy_rl_serve", daemon=True)
        self._server = server
        self._deadlines = server.deadlines
        self._link = link
        self._client = client
        self._held: tuple[str, ShelvedVersion] | None = None
        self._told_ns = 0
        self._outgoing = Outgoing()
        self._reading = threading.Lock()
        self._is_withdrawn = False

    def cut(self) -> None:
        self._link.cut()

    def refuse(self) -> None:
        """Instead of a thread's life: one small message, which a new socket always has room for."""
        error = OverloadedError(f"this weight server has {MAX_CONNECTIONS} clients already; come back later")
        with contextlib.suppress(OSError):
            self._link.send(wire.failed(error), _in(_LOOK_AGAIN_S))
        self._link.close()

    def _run(self) -> None:
        try:
            self._greet()
            while True:
                self._answer(self._link.receive(wire.MAX_FRAME_BYTES, _in(self._deadlines.idle_s)))
                self._tell_of_long_hold()
        except (OSError, FastDeployRLError) as error:
            _log.debug("event=connection_ended reason=%s", error)
        finally:
            self._let_go()
            self._link.close()
            self._server.forget(self)

    def _greet(self) -> None:
        deadline_ns = _in(self._deadlines.greet_s)
        server, secret, nonce = self._server, self._server.secret, wire.new_nonce()
        hello = wire.ServerHello("fastdeploy_rl", wire.PROTOCOL, nonce, secret is not None, server.num_ranks)
        self._link.send(hello, deadline_ns)
        client = wire.expected(self._link.receive(wire.MAX_HELLO_BYTES, deadline_ns), wire.ClientHello)
        if secret is None:
            self._link.send(wire.Welcome(b""), deadline_ns)
            return
        if not wire.is_proof(client.proof, wire.client_proof(secret, nonce, client.nonce)):
            error = AuthenticationError("the weight server has another secret than this client")
            _log.warning("event=wrong_secret client=%s", self._client)
            self._link.send(wire.failed(error), deadline_ns)
            raise error
        self._link.send(wire.Welcome(wire.server_proof(secret, nonce, client.nonce)), deadline_ns)

    # --- answers -----------------------------------------------------------------------------------

    def _answer(self, request: wire.Message) -> None:
        try:
            if isinstance(request, wire.Ask):
                self._reply(wire.Offered(self._offered(request.version)))
            elif isinstance(request, wire.Hold):
                self._hold(request.file_digest)
                self._reply(wire.Held())
            elif isinstance(request, wire.Locate):
                self._reply(self._places())
            elif isinstance(request, wire.List):
                self._reply(self._holdings())
            else:
                self._send(self._runs(wire.expected(request, wire.Read)))
        except PeerLostError:
            raise
        except FastDeployRLError as error:
            self._reply(wire.failed(error))

    def _reply(self, message: wire.Message) -> None:
        self._link.send(message, _in(self._deadlines.reply_s), ns(self._deadlines.stall_s))

    def _offered(self, text: str) -> bytes:
        try:
            version = WeightVersion.parse(text) if text else None
        except VersionFormatError as error:
            raise PeerLostError(f"the client asks for {text!r}") from error
        return self._server.shelf.offer(version)

    def _hold(self, file_digest: str) -> None:
        if self._held is not None and self._held[0] == file_digest and not self._is_withdrawn:
            return
        self._let_go()
        self._held = (file_digest, self._server.shelf.open(file_digest, self._withdraw))
        self._told_ns = time.monotonic_ns()

    def _tell_of_long_hold(self) -> None:
        """A trainer that wants the memory back sees only that this server has a lease on it."""
        if self._held is None or time.monotonic_ns() - self._told_ns < ns(self._deadlines.idle_s):
            return
        self._told_ns = time.monotonic_ns()
        _log.warning("event=still_held client=%s digest=%s", self._client, self._held[0][:16])

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[1].close()

    def _places(self) -> wire.Places:
        version = self._holding()
        if not isinstance(version, LocatedVersion):
            raise NoPublicationError("this weight server serves over tcp alone")
        return version.places()

    def _holdings(self) -> wire.Holdings:
        ranges = self._holding().holdings()
        if len(ranges) > wire.MAX_HELD_RANGES:
            raise NoPublicationError(f"{len(ranges)} ranges are held here, more than can be listed")
        return wire.Holdings(tuple(ranges))

    def _runs(self, request: wire.Read) -> Sequence[Run]:
        try:
            wire.check_read(request.ranges)
            runs = self._holding().runs(request.ranges)
        except ValueError as error:
            raise ManifestError(f"the version has no such bytes: {error}") from error
        if _num_bytes(runs) != request.num_bytes:
            raise SegmentError("the shelf gives other bytes than it was asked for")
        return runs

    def _holding(self) -> ShelvedVersion:
        if self._held is None:
            raise LifecycleError("no version is held: hold one first")
        return self._held[1]

    def _send(self, runs: Sequence[Run]) -> None:
        num_bytes = _num_bytes(runs)
        deadline_ns, stall_ns = _in(self._deadlines.reply_s), ns(self._deadlines.stall_s)
        with self._reading:
            if self._is_withdrawn:
                raise ConnectionAbortedError("the version was withdrawn")
            self._server.count(num_bytes)  # before its client can have them
            self._link.send(wire.Data(num_bytes), deadline_ns, stall_ns)
            with contextlib.closing(self._outgoing.batches(runs)) as batches:
                for buffers in batches:
                    self._link.send_buffers(buffers, deadline_ns, stall_ns)

    def _withdraw(self) -> None:
        """The shelf needs the memory: nothing is read from it any more when this returns."""
        self._is_withdrawn = True
        self._link.cut()
        if not self._reading.acquire(timeout=self._deadlines.let_go_s):
            raise SegmentError(f"a client still reads after {self._deadlines.let_go_s} s, though it was cut off")
        self._reading.release()


def _num_bytes(runs: Sequence[Run]) -> int:
    return sum(run.rows * run.num_bytes for run in runs)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigurationError(
            f"cannot listen on {host:.200}:{port}: {error}; name another address or port"
        ) from error


def _in(seconds: float) -> int:
    return time.monotonic_ns() + ns(seconds)
