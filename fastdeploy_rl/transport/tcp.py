"""Transport `tcp`: versions that servers offer, and their byte ranges over plain sockets.

Owns who is asked for what: offers of the publisher and of peers, and fetches from peers before the publisher. How one
fetch goes is transport/tcp_fetch.py's. Keeps no connection open between two questions, or two fetches.
"""

import threading
import time
from collections.abc import Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    PeerLostError,
)
from fastdeploy_rl.transport.base import ByteRange, Offer
from fastdeploy_rl.transport.connection import Connection, Server
from fastdeploy_rl.transport.secret import checked_secret
from fastdeploy_rl.transport.tcp_fetch import Desk, TcpFetch, delay_s
from fastdeploy_rl.version import WeightVersion

MAX_STREAMS = 64
MAX_BUCKET_BYTES = 1 << 30
DEFAULT_STREAMS = 2
DEFAULT_BUCKET_BYTES = 8 << 20
_NUM_ASKS = 3
"""Of one server for an offer, where the connection is lost on the way."""


class TcpTransport:
    """`publisher`: who has every version; None where only peers are asked. `peers`: who may have what is wanted, and is
    asked for bytes before the publisher, in this order; one that is lost is not asked again in that fetch. `secret`:
    what both ends must prove, None: none does. `bucket_bytes`: how much one request asks for; the result does not
    depend on it."""

    def __init__(
        self,
        publisher: Server | None,
        *,
        peers: Sequence[Server] = (),
        secret: bytes | None = None,
        num_streams: int = DEFAULT_STREAMS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadlines: Deadlines | None = None,
    ) -> None:
        if not 1 <= num_streams <= MAX_STREAMS:
            raise ConfigurationError(f"num_streams must be 1 to {MAX_STREAMS}, got {num_streams!r}")
        if not 1 <= bucket_bytes <= MAX_BUCKET_BYTES:
            raise ConfigurationError(f"bucket_bytes must be 1 to {MAX_BUCKET_BYTES}, got {bucket_bytes!r}")
        if publisher is None and not peers:
            raise ConfigurationError("nobody to fetch from: name the publisher's address, or peers")
        self._publisher = publisher
        self._peers = tuple(peers)
        self._secret = None if secret is None else checked_secret(secret)
        self._num_streams = num_streams
        self._bucket_bytes = bucket_bytes
        self._deadlines = deadlines or Deadlines()
        self._fetches: list[TcpFetch] = []
        self._is_closed = threading.Event()

    # --- offers ------------------------------------------------------------------------------------

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """As `Transport.offer`: the publisher's; of the peers where it does not answer, or has not that version."""
        begun = time.monotonic()
        found, errors = self._offers(version, deadline_ns)
        if found:
            return max(found, key=lambda offer: offer.version)
        for error in errors:
            if isinstance(error, FastDeployRLError):
                raise error
        reasons = "; ".join(map(str, errors))
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError.waiting_for("offer of weights", since_s=begun, hint=reasons)
        raise PeerLostError(f"nobody offers weights: {reasons}; start the trainer's WeightServer, or name its address")

    def _offers(
        self, version: WeightVersion | None, deadline_ns: int
    ) -> tuple[list[Offer], list[OSError | FastDeployRLError]]:
        """Those to choose from, and what was wrong elsewhere. AuthenticationError at once: it is nobody's absence."""
        offers: list[Offer] = []
        errors: list[OSError | FastDeployRLError] = []
        publisher = () if self._publisher is None else (self._publisher,)
        for servers in (publisher, self._peers):
            for server in servers:
                try:
                    offers.append(self._ask(server, version, deadline_ns))
                except AuthenticationError:
                    raise
                except (OSError, FastDeployRLError) as error:
                    errors.append(error)
            if offers:
                break
        return offers, errors

    def _ask(self, server: Server, version: WeightVersion | None, deadline_ns: int) -> Offer:
        attempt = 1
        while True:
            try:
                return self._ask_once(server, version, deadline_ns)
            except ConnectionRefusedError:
                raise  # nobody listens there
            except OSError:
                if attempt == _NUM_ASKS or self._is_closed.wait(delay_s(attempt)):
                    raise
            attempt += 1

    def _ask_once(self, server: Server, version: WeightVersion | None, deadline_ns: int) -> Offer:
        connection = Connection(server, self._secret, self._deadlines)
        try:
            connection.open(deadline_ns)
            return connection.offer(version, deadline_ns)
        except OSError as error:
            kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else ConnectionError
            raise kind(f"{connection}: {error.strerror or error}") from error
        finally:
            connection.close()

    # --- fetches -----------------------------------------------------------------------------------

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "TcpFetch":
        """As `Transport.fetch`. ValueError for ranges that leave the target."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to fetch version {offer.version}")
        if any(each.target_offset < 0 or each.target_offset + each.num_bytes > target.num_bytes for each in ranges):
            raise ValueError(f"ranges leave their target of {target.num_bytes} bytes")
        desk = Desk(offer, ranges, self._bucket_bytes, self._peers, self._publisher, deadline_ns)
        fetch = TcpFetch(desk, target, self._num_streams, self._secret, self._deadlines)
        fetch.start()
        self._fetches = [earlier for earlier in self._fetches if not earlier.is_closed] + [fetch]
        return fetch

    def trim(self) -> None:
        """Nothing is open between fetches."""

    def close(self) -> None:
        self._is_closed.set()
        for fetch in self._fetches:
            fetch.close()
        self._fetches = []
