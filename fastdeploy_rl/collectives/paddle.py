"""Paddle's TCPStore as a store on which the ranks of several hosts meet.

Owns one client, and the server where it is asked to serve. Refuses to know what is kept in the store. Invariant: every
request ends within its deadline, and a client that missed one answer is never used again, since the next answer could
be that of the former question.

What Paddle 3.3 does, and what is done about it here: its client waits without a deadline and sends each request in
several small packets, which costs 40 ms between Nagle's algorithm and delayed acknowledgements (deadlines and
TCP_NODELAY are set on its socket); one client must not be used by two threads at a time (a lock); `get` of a key that
is not there waits for it (nobody may ask); serving at a port that is taken ends the process (the port is tried first);
connecting tries for ever (so does nobody before the server answers). The server is a thread of the process that serves,
listens on every IPv4 address, and knows no password: it belongs in a private network."""

import errno
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, PeerLostError

_TRY_AGAIN_S = 0.05
_T = TypeVar("_T")


class PaddleStore:
    """One client of the TCPStore at `host`:`port`, for any number of threads; `close()` or `with`. Made by `serve` or
    `connect`. A process that forks must not use it on both sides."""

    def __init__(self, host: str, port: int, client: Any, store_s: float) -> None:
        self.address = f"{host}:{port}"
        self._client = client
        self._store_s = store_s
        self._asking = threading.Lock()
        self._failure = ""

    @classmethod
    def serve(cls, host: str, port: int, *, store_s: float = Deadlines.store_s) -> "PaddleStore":
        """The server, which lives until `close()` in a thread of this process, and a client of it. `host` is how this
        machine calls itself. Everything in the store goes with it: serve in the process that starts the engine, not in
        a rank.

        ConfigurationError where the port is taken."""
        _refuse_taken_port(port)
        return cls._open(host, port, True, store_s)

    @classmethod
    def connect(
        cls, host: str, port: int, *, within_s: float = Deadlines.attach_s, store_s: float = Deadlines.store_s
    ) -> "PaddleStore":
        """A client. Waits `within_s` for somebody to serve there, then DeadlineExceededError."""
        _await_server(host, port, within_s)
        return cls._open(host, port, False, store_s)

    @classmethod
    def _open(cls, host: str, port: int, is_server: bool, store_s: float) -> "PaddleStore":
        from paddle.base.core import TCPStore  # where Paddle's own Python takes it from; takes seconds

        try:
            client = TCPStore(host, port, is_server, 0, max(1, int(store_s)))
        except (ValueError, RuntimeError, OSError) as error:
            raise PeerLostError(f"the store at {host}:{port} cannot be reached: {_first_line(error)}") from error
        _set_deadlines(port, store_s)
        return cls(host, port, client, store_s)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda client: client.add(key, amount)))

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda client: client.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda client: client.get(key)))

    def _ask(self, question: Callable[[Any], _T]) -> _T:
        if not self._asking.acquire(timeout=self._store_s):
            raise self._lost("another thread still waits for an answer")
        try:
            if self._client is None:
                raise self._lost(self._failure)
            return question(self._client)
        except (ValueError, RuntimeError, OSError) as error:  # what Paddle makes of a failed send or receive
            self._client, self._failure = None, _first_line(error)
            raise self._lost(self._failure) from error
        finally:
            self._asking.release()

    def _lost(self, why: str) -> PeerLostError:
        return PeerLostError(
            f"the store at {self.address} did not answer within {self._store_s} s, or is gone: {why}. What the ranks "
            "decided there can be read no more; start the engine again"
        )

    def close(self) -> None:
        """Ends the connection, and the server where it is served here."""
        with self._asking:
            self._client, self._failure = None, "it was closed here"

    def __enter__(self) -> "PaddleStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_taken_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise ConfigurationError(f"port {port} cannot be served: {error.strerror}; choose another one") from error


def _await_server(host: str, port: int, within_s: float) -> None:
    begun = time.monotonic()
    while (remaining_s := begun + within_s - time.monotonic()) > 0:
        with suppress(OSError), socket.socket() as probe:  # IPv4, as Paddle's
            probe.settimeout(remaining_s)
            probe.connect((host, port))
            return
        time.sleep(min(_TRY_AGAIN_S, remaining_s))
    raise DeadlineExceededError.waiting_for(
        f"store at {host}:{port}", since_s=begun, hint="start the process that serves it, or check both"
    )


def _set_deadlines(port: int, store_s: float) -> None:
    """On the sockets of this process that lead to that port."""
    wait = struct.pack("@ll", int(store_s), int(store_s % 1 * 1e6))
    found = False
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), _second_handle(int(fd)) as handle:  # no socket, not connected, or closed since
            if handle.getpeername()[1:] == (port,):
                handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
                found = True
    if not found:
        raise ConfigurationError("this Paddle keeps no connection to its TCPStore that deadlines could be set on")


def _second_handle(fd: int) -> socket.socket:
    """Of a socket; what is set on one holds for both."""
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):  # Python would leave the second descriptor open where it is none
        raise OSError(errno.ENOTSOCK, "no socket")
    return socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM)


def _first_line(error: Exception) -> str:
    """Of Paddle's errors, which are a stack trace and then "(Kind) what happened", the line that begins so."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line.startswith("(")), str(error)[:200])
