"""The client's end of one connection of the tcp transport: greeted, and then question and answer.

Owns its socket. Knows one server; which of several to ask, and when to try again, is for whoever uses it.
Invariant: nothing is asked before both ends have proved the secret, where one is configured.
"""

import socket
import threading
from collections.abc import Callable, Sequence

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import AuthenticationError, ManifestError, PeerLostError
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport import wire
from fastdeploy_rl.transport.address import Address, parse_address
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.link import Link, ns, sooner
from fastdeploy_rl.version import WeightVersion

Server = str | Callable[[], str]
"""`host:port`, or who says it: asked before each connection, since a server that is started again has another port."""


class Connection:
    """Made without doing anything; `open` connects. One thread uses it, any thread may `cut` it. Every call: OSError
    when the server is not there (any more), PeerLostError for one that is none of ours, else the error that it tells;
    but for NoPublicationError and the like, the connection is of no use afterwards."""

    def __init__(self, server: Server, secret: bytes | None, deadlines: Deadlines) -> None:
        self._server = server
        self._secret = secret
        self._deadlines = deadlines
        self._address: Address | None = None
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._is_cut = False
        self.num_ranks = 1

    def open(self, deadline_ns: int) -> None:
        """AuthenticationError where the server, or this client, cannot prove the secret that the other one has. The one
        wait that no deadline ends is the resolver's, where the server has a name: resolv.conf bounds it."""
        self._address = self._found()
        self._connect(self._address, sooner(deadline_ns, ns(self._deadlines.connect_s)))
        self._greet(sooner(deadline_ns, ns(self._deadlines.greet_s)))

    def __str__(self) -> str:
        """Where it leads, for messages."""
        if self._address is not None:
            return str(self._address)
        return self._server if isinstance(self._server, str) else "the weight server"

    def _found(self) -> Address:
        if isinstance(self._server, str):
            return parse_address(self._server)
        try:
            return parse_address(self._server())
        except PeerLostError as error:
            raise ConnectionRefusedError(str(error)) from error  # there is none now: there may be one later

    def _connect(self, address: Address, deadline_ns: int) -> None:
        reason: OSError = ConnectionError(f"{address} has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            link = self._taken(Link(socket.socket(family, kind, protocol)))
            try:
                link.connect(place, deadline_ns)
                return
            except OSError as error:
                link.close()
                reason = error
        raise reason

    def _taken(self, link: Link) -> Link:
        with self._lock:
            self._link = link
            if self._is_cut:
                link.close()
                raise ConnectionAbortedError("ended here")
        return link

    def _greet(self, deadline_ns: int) -> None:
        hello = wire.expected(self._answer(wire.MAX_HELLO_BYTES, deadline_ns), wire.ServerHello)
        if hello.protocol != wire.PROTOCOL:
            raise PeerLostError(
                f"the server speaks protocol {hello.protocol}, this client {wire.PROTOCOL}: install the same version"
            )
        if hello.needs_secret != (self._secret is not None):
            raise AuthenticationError(
                "the server wants a secret: name its file (secret_file)"
                if hello.needs_secret
                else "this client has a secret, and the server has none: it may be anybody's"
            )
        nonce, secret = wire.new_nonce(), self._secret
        proof = b"" if secret is None else wire.client_proof(secret, hello.nonce, nonce)
        self._open_link.send(wire.ClientHello(nonce, proof), deadline_ns)
        welcome = wire.expected(self._answer(wire.MAX_HELLO_BYTES, deadline_ns), wire.Welcome)
        if secret is not None and not wire.is_proof(welcome.proof, wire.server_proof(secret, hello.nonce, nonce)):
            raise AuthenticationError("the server does not know the secret")
        self.num_ranks = hello.num_ranks

    # --- questions ---------------------------------------------------------------------------------

    def offer(self, version: WeightVersion | None, deadline_ns: int) -> Offer:
        """That version or the newest. NoPublicationError when it is not there; ManifestError for what is no manifest,
        or another version's."""
        self._open_link.send(wire.Ask("" if version is None else str(version)), deadline_ns)
        data = wire.expected(self._answer(wire.MAX_MANIFEST_FRAME_BYTES, deadline_ns), wire.Offered).manifest
        manifest = manifests.decode(data)
        if version is not None and manifest.weight_version != version:
            raise ManifestError(f"asked for version {version}, the server gives {manifest.version}")
        return Offer(manifest.weight_version, manifest, manifests.file_digest(data))

    def hold(self, file_digest: str, deadline_ns: int) -> None:
        """The server keeps the version for this connection until it ends; also again, to see that it still does.
        NoPublicationError when it is not there."""
        self._open_link.send(wire.Hold(file_digest), deadline_ns)
        wire.expected(self._answer(wire.MAX_FRAME_BYTES, deadline_ns), wire.Held)

    def places(self, deadline_ns: int) -> wire.Places:
        """Where the held version lies for another kind of transport. NoPublicationError where the server has none."""
        self._open_link.send(wire.Locate(), deadline_ns)
        return wire.expected(self._answer(wire.MAX_FRAME_BYTES, deadline_ns), wire.Places)

    def holdings(self, deadline_ns: int) -> Sequence[ByteRange]:
        """Which bytes of the held version the server has."""
        self._open_link.send(wire.List(), deadline_ns)
        return wire.expected(self._answer(wire.MAX_HOLDINGS_FRAME_BYTES, deadline_ns), wire.Holdings).ranges

    def read(self, ranges: Sequence[ByteRange], deadline_ns: int) -> None:
        """Of the held version; all their bytes are what comes next, by `receive_into`. NoPublicationError where the
        server lacks some: then none come."""
        request = wire.Read(tuple(ranges))
        self._open_link.send(request, deadline_ns)
        answer = wire.expected(self._answer(wire.MAX_FRAME_BYTES, deadline_ns), wire.Data)
        if answer.num_bytes != request.num_bytes:
            raise PeerLostError(f"asked for {request.num_bytes} bytes, the server gives {answer.num_bytes}")

    def receive_into(self, target: memoryview, deadline_ns: int) -> int:
        """At least one byte of what `read` asked for; returns how many."""
        return self._open_link.receive_into(target, sooner(deadline_ns, ns(self._deadlines.stall_s)))

    def _answer(self, max_bytes: int, deadline_ns: int) -> wire.Message:
        return self._open_link.receive(max_bytes, deadline_ns, ns(self._deadlines.stall_s))

    @property
    def _open_link(self) -> Link:
        if self._link is None:
            raise ConnectionAbortedError("not connected")
        return self._link

    # --- its end -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """From any thread: what goes on here ends with an error, soon, and nothing begins any more."""
        with self._lock:
            self._is_cut = True
            if self._link is not None:
                self._link.cut()

    def close(self) -> None:
        with self._lock:
            self._is_cut = True
            if self._link is not None:
                self._link.close()
