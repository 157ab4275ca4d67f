"""Transport `tcp`: versions that a server offers, and their byte ranges over plain sockets.

Owns the settings of one server's client, and its offers; how one fetch goes is transport/tcp_fetch.py's. Keeps no
connection open between two questions, or two fetches.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    OverloadedError,
    PeerLostError,
)
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.connection import Connection, Server
from fastdeploy_rl.transport.secret import checked_secret
from fastdeploy_rl.transport.tcp_fetch import Desk, TcpFetch, delay_s
from fastdeploy_rl.transport.wire import MAX_READ_BYTES
from fastdeploy_rl.version import WeightVersion

MAX_STREAMS = 64
MAX_BUCKET_BYTES = MAX_READ_BYTES
DEFAULT_STREAMS = 4
DEFAULT_BUCKET_BYTES = 16 << 20
_NUM_ASKS = 3
"""For an offer, where the connection is lost on the way."""


class TcpTransport:
    """`server`: whom everything is asked of. `secret`: what both ends must prove, None: none does. `bucket_bytes`: how
    much one request asks for; the result does not depend on it. `is_peer`: the server may go at any time, and somebody
    else has what it has: a fetch ends where it is lost, instead of trying again until the deadline."""

    def __init__(
        self,
        server: Server,
        *,
        secret: bytes | None = None,
        num_streams: int = DEFAULT_STREAMS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        is_peer: bool = False,
        deadlines: Deadlines | None = None,
    ) -> None:
        if not 1 <= num_streams <= MAX_STREAMS:
            raise ConfigurationError(f"num_streams must be 1 to {MAX_STREAMS}, got {num_streams!r}")
        if not 1 <= bucket_bytes <= MAX_BUCKET_BYTES:
            raise ConfigurationError(f"bucket_bytes must be 1 to {MAX_BUCKET_BYTES}, got {bucket_bytes!r}")
        self._server = server
        self._secret = None if secret is None else checked_secret(secret)
        self._num_streams = num_streams
        self._bucket_bytes = bucket_bytes
        self._is_peer = is_peer
        self._deadlines = deadlines or Deadlines()
        self._fetches: list[TcpFetch] = []
        self._is_closed = threading.Event()

    # --- offers ------------------------------------------------------------------------------------

    def offer(self, version: WeightVersion | None, *, deadline_ns: int) -> Offer:
        """As `Transport.offer`. A connection that is lost is tried again, a server that is not there is not; one that
        has too many clients is until the deadline, where it is no peer."""
        begun, attempt, reason = time.monotonic(), 1, ""
        while True:
            connection = Connection(self._server, self._secret, self._deadlines)
            try:
                connection.open(deadline_ns)
                return connection.offer(version, deadline_ns)
            except (OSError, OverloadedError) as error:
                is_late = time.monotonic_ns() >= deadline_ns
                if not is_late or not reason:  # who fails at the deadline fails for want of time
                    reason = f"{connection}: {error}"
                if is_late:
                    raise DeadlineExceededError.waiting_for("offer of weights", since_s=begun, hint=reason) from error
                if self._is_last_ask(error, attempt):
                    raise PeerLostError(f"nobody offers weights: {reason}") from error
            finally:
                connection.close()
            self._is_closed.wait(min(delay_s(attempt), max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)))
            attempt += 1

    def _is_last_ask(self, error: Exception, attempt: int) -> bool:
        if isinstance(error, ConnectionRefusedError) or self._is_closed.is_set():
            return True
        return attempt >= _NUM_ASKS and (self._is_peer or not isinstance(error, OverloadedError))

    # --- fetches -----------------------------------------------------------------------------------

    def fetch(self, offer: Offer, ranges: Sequence[ByteRange], target: Mapping, *, deadline_ns: int) -> "TcpFetch":
        """As `Transport.fetch`. ValueError for ranges that leave the target."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to fetch version {offer.version}")
        if any(each.target_offset < 0 or each.target_offset + each.num_bytes > target.num_bytes for each in ranges):
            raise ValueError(f"ranges leave their target of {target.num_bytes} bytes")
        desk = Desk(offer, ranges, self._bucket_bytes, deadline_ns, is_patient=not self._is_peer)
        connect = partial(Connection, self._server, self._secret, self._deadlines)
        fetch = TcpFetch(desk, target, connect, self._num_streams, self._deadlines.let_go_s)
        fetch.start()
        self._fetches = [earlier for earlier in self._fetches if not earlier.is_closed] + [fetch]
        return fetch

    def trim(self) -> None:
        """Nothing is open between fetches."""

    def close(self) -> None:
        """DeadlineExceededError where a fetch does not end; the others are closed then, and a later call goes on."""
        self._is_closed.set()
        with ExitStack() as closing:
            for fetch in self._fetches:
                closing.callback(fetch.close)
