"""One connected socket whose every operation has a deadline: frames, and raw bytes beside them.

Owns the socket. Refuses to know what is asked and answered. Errors: PeerLostError for what is no frame of ours,
TimeoutError and ConnectionError (both OSError) for the rest. Invariant: after `close` nothing is read or written, and
`cut` ends whatever another thread is doing here just now.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from fastdeploy_rl.transport import wire

_TIMEVAL = struct.Struct("ll")
_MAX_BUFFERS = 1024
"""IOV_MAX: of one system call."""


class Link:
    """`sock`: from here on the link's."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # the kernel keeps the time: one call moves megabytes, and wakes nobody in between
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._lock = threading.Lock()

    def connect(self, place: Any, deadline_ns: int) -> None:
        """`place`: as `socket.getaddrinfo` gives it."""
        self._allow(socket.SO_SNDTIMEO, deadline_ns)
        try:
            self._socket.connect(place)
        except BlockingIOError as error:
            raise TimeoutError("nobody answers") from error
        if self._socket.getsockname() == self._socket.getpeername():
            # Nobody listens there, and the system chose that very port as our own end: TCP calls it a connection.
            raise ConnectionRefusedError("nobody listens")

    def send(self, message: wire.Message, deadline_ns: int, stall_ns: int | None = None) -> None:
        """As `send_buffers`."""
        self.send_buffers([memoryview(wire.encode(message))], deadline_ns, stall_ns)

    def receive(self, max_bytes: int, deadline_ns: int, stall_ns: int | None = None) -> wire.Message:
        """The next message. ConnectionError when the other end has gone; TimeoutError where nothing comes for
        `stall_ns`, or not all by the deadline."""
        header = self._exactly(wire.HEADER_BYTES, deadline_ns, stall_ns)
        num_bytes, kind = wire.payload_bytes(header, max_bytes)
        return wire.decode(kind, self._exactly(num_bytes, deadline_ns, stall_ns))

    def receive_into(self, target: memoryview, deadline_ns: int) -> int:
        """At least one byte, all of `target` where they come in time; returns how many."""
        self._allow(socket.SO_RCVTIMEO, deadline_ns)
        try:
            num_bytes = self._socket.recv_into(target, len(target), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("nothing came in time") from error
        if not num_bytes:
            raise ConnectionResetError("the other end closed the connection")
        return num_bytes

    def send_buffers(self, buffers: Sequence[memoryview], deadline_ns: int, stall_ns: int | None = None) -> None:
        """All bytes of all of them, in order. TimeoutError where the other end takes none for `stall_ns`, or not all by
        the deadline."""
        index = skip = 0
        while index < len(buffers):
            batch = list(buffers[index : index + _MAX_BUFFERS])
            with batch[0][skip:] as first:
                batch[0] = first
                num_sent = self._send_some(batch, sooner(deadline_ns, stall_ns))
            num_sent += skip
            while index < len(buffers) and num_sent >= len(buffers[index]):
                num_sent -= len(buffers[index])
                index += 1
            skip = num_sent

    def _send_some(self, buffers: Sequence[memoryview], deadline_ns: int) -> int:
        self._allow(socket.SO_SNDTIMEO, deadline_ns)
        try:
            return self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise TimeoutError("the other end takes nothing") from error

    def _exactly(self, num_bytes: int, deadline_ns: int, stall_ns: int | None) -> bytearray:
        data = bytearray(num_bytes)
        with memoryview(data) as view:
            done = 0
            while done < num_bytes:
                with view[done:] as rest:
                    done += self.receive_into(rest, sooner(deadline_ns, stall_ns))
        return data

    def _allow(self, option: int, deadline_ns: int) -> None:
        left_us = (deadline_ns - time.monotonic_ns()) // 1000
        if left_us <= 0:
            raise TimeoutError("no time left")
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))

    def cut(self) -> None:
        """From any thread: whoever waits here gets ConnectionError, or what had arrived before."""
        with self._lock, contextlib.suppress(OSError):  # not connected any more, or closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:  # nobody cuts a descriptor that is another's by now
            self._socket.close()


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


def sooner(deadline_ns: int, from_now_ns: int | None) -> int:
    """The deadline, or so long from now where that is earlier."""
    return deadline_ns if from_now_ns is None else min(deadline_ns, time.monotonic_ns() + from_now_ns)
