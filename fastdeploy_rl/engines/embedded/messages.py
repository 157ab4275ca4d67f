"""What supervisor and workers say to each other: typed records
as MessagePack, each after its length, over a Unix socket pair.

Owns the records and the framing. Refuses to know what they lead to. Invariant: a frame is at most MAX_MESSAGE_BYTES,
and bytes that are not one of the known records are an error, never executed and never guessed at.
"""

import select
import socket
import struct
import time
from typing import Any

import msgspec

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError

MAX_MESSAGE_BYTES = 16 << 20
SLOT_BYTES = 1 << 20
"""Of the collectives' segment: supervisor and workers must mean the same."""
_HEADER = struct.Struct("<I")
_READ_BYTES = 1 << 16


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All a worker needs to know; JSON on its standard input."""

    rank: int
    num_ranks: int
    model_dir: str
    board_port: int
    load_strategy: str
    rsync_config: str
    has_checksums: bool
    channel: str
    apply_mode: str
    rollback: str
    kv_policy: str
    has_prefix_cache: bool
    max_num_seqs: int
    max_model_len: int
    collectives_segment: str
    num_copy_threads: int
    parent_pid: int
    socket_fd: int
    is_restarted_on_death: bool
    deadlines: Deadlines


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Supervisor to rank 0: generate for this request."""

    request_id: str
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Supervisor to rank 0: nobody reads this request any more."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Supervisor to rank 0: end the loop on every rank, orderly."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Worker to supervisor: it has its seat at the board and among the ranks. `weight_bytes` are this rank's; 0 where
    it took the seat of one that died, and its weights still come from the channel."""

    rank: int
    weight_bytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Worker to supervisor: this rank ends because of an error; `kind` is the name of its class."""

    rank: int
    kind: str
    message: str


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Rank 0 to supervisor: what one step produced, as (request id, token), and how busy the engine is after it."""

    tokens: list[tuple[str, GeneratedToken]]
    load: EngineLoad


ToWorker = Start | Cancel | Stop
FromWorker = Ready | Failed | Tokens


def encode(message: Any) -> bytes:
    """One frame. PeerLostError is for the other side; too large a record is a defect here and raises ValueError."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return _HEADER.pack(len(body)) + body


class FrameDecoder:
    """Bytes in, records of one direction out. PeerLostError for a frame that cannot be one."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        messages = []
        while (body := self._take_frame()) is not None:
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise PeerLostError(f"a message between supervisor and worker is malformed: {error}") from error
        return messages

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise PeerLostError(
                f"a message between supervisor and worker claims {length} bytes, over {MAX_MESSAGE_BYTES}"
            )
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return body


class WorkerSocket:
    """The worker's end: reads without waiting, writes with a deadline. Owns the socket; `close` it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = FrameDecoder(ToWorker)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[ToWorker]:
        """Everything that has arrived; empty when nothing did. PeerLostError when the supervisor is gone."""
        messages: list[ToWorker] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return messages
            except ConnectionError as error:
                raise PeerLostError("the supervisor is gone") from error
            if not data:
                raise PeerLostError("the supervisor is gone")
            messages += self._decoder.feed(data)

    def send(self, message: FromWorker, *, timeout_s: float) -> None:
        """DeadlineExceededError when the supervisor does not read; PeerLostError when it is gone."""
        left = memoryview(encode(message))
        begun = time.monotonic()
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait_writable(begun, timeout_s)
            except ConnectionError as error:
                raise PeerLostError("the supervisor is gone") from error

    def _wait_writable(self, begun: float, timeout_s: float) -> None:
        remaining = begun + timeout_s - time.monotonic()
        if remaining <= 0 or not select.select([], [self._socket], [], remaining)[1]:
            raise DeadlineExceededError.waiting_for(
                "room for a message to the supervisor", since_s=begun, hint="it does not read"
            )

    def close(self) -> None:
        self._socket.close()
