"""The supervisor's end of the workers' sockets: messages out and in, and requests as streams of tokens.

Owns request numbers and the tokens that nobody has read yet. Refuses to know how
workers are started and why they die. Invariant: every request that was started
ends exactly once: by its last token, by `fail_all`, or cancelled by its reader.
"""

import asyncio
import itertools
import socket
from collections.abc import AsyncGenerator, Callable

from fastdeploy_rl.control.generation import GeneratedToken, GenerationRequest
from fastdeploy_rl.engines.embedded.messages import (
    Cancel,
    FrameDecoder,
    FromWorker,
    Start,
    Tokens,
    ToWorker,
    encode,
)
from fastdeploy_rl.errors import NotServingError

MAX_REQUESTS = 1024
_READ_BYTES = 1 << 16


class WorkerLink:
    """One worker's socket on the event loop; `receive` hands each message to a callback until the worker is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._writer: asyncio.StreamWriter | None = None

    async def receive(self, deliver: Callable[[FromWorker], None]) -> None:
        """Returns when the worker closed its end. PeerLostError for bytes that are no message."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        decoder = FrameDecoder(FromWorker)
        while data := await _read(reader):
            for message in decoder.feed(data):
                deliver(message)

    def send(self, message: ToWorker) -> None:
        """Queues it; a worker that is gone is told by `receive`, not here."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What has arrived; empty at the end, which a killed worker gives as a reset connection."""
    try:
        return await reader.read(_READ_BYTES)
    except ConnectionError:
        return b""


class EngineClient:
    """Requests to rank 0. The HTTP side's GenerationClient."""

    def __init__(self, link: WorkerLink, *, max_model_len: int, vocab_size: int) -> None:
        self._link = link
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._ids = itertools.count(1)
        self._waiting: dict[str, asyncio.Queue[GeneratedToken]] = {}
        self._refusal = ""

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Tokens as they come; closed early, the request is cancelled.
        NotServingError when too many wait or the engine ends."""
        if self._refusal:
            raise NotServingError(self._refusal)
        if len(self._waiting) >= MAX_REQUESTS:
            raise NotServingError(f"{MAX_REQUESTS} requests are running or waiting; try again later")
        request_id = str(next(self._ids))
        queue: asyncio.Queue[GeneratedToken] = asyncio.Queue()
        self._waiting[request_id] = queue
        self._link.send(Start(request_id, request))
        try:
            while request_id in self._waiting or not queue.empty():
                token = await queue.get()
                yield token
        finally:
            if self._waiting.pop(request_id, None) is not None:
                self._link.send(Cancel(request_id))

    def deliver(self, message: Tokens) -> None:
        """Tokens of one step, from rank 0."""
        for request_id, token in message.tokens:
            self._deliver(request_id, token)

    def fail_all(self, reason: str) -> None:
        """Ends every request with `reason` and refuses new ones: the engine is going away."""
        self._refusal = reason
        for request_id in list(self._waiting):
            self._deliver(request_id, GeneratedToken(-1, "", 0.0, "abort", reason))

    def _deliver(self, request_id: str, token: GeneratedToken) -> None:
        queue = self._waiting.get(request_id)
        if queue is None:
            return  # cancelled while the token was on its way
        queue.put_nowait(token)
        if token.finish_reason:
            del self._waiting[request_id]
