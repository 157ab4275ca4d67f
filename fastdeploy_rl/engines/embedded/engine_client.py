"""The supervisor's end of the workers' sockets: messages out and in, and requests as streams of tokens.

Owns request numbers, how many requests there may be at once, and the tokens that nobody has read yet. Refuses to know
how workers are started and why they die. Invariant: every request that was started ends exactly once: by its last
token, with the rank 0 that made tokens of it, by `fail_all`, or cancelled by its reader; a slow reader holds no more
than the tokens it asked for.
"""

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest, NextToken, aborted
from fastdeploy_rl.engines.embedded.messages import (
    Cancel,
    FrameDecoder,
    FromWorker,
    Start,
    Tokens,
    ToWorker,
    encode,
)
from fastdeploy_rl.errors import NotServingError, OverloadedError

_READ_BYTES = 1 << 16


class WorkerLink:
    """One worker's socket on the event loop; `receive` hands each message to a callback until the worker is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []

    async def receive(self, deliver: Callable[[FromWorker], None]) -> None:
        """Returns when the worker closed its end. PeerLostError for bytes that are no message."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._writer.writelines(self._early)
        decoder = FrameDecoder(FromWorker)
        while data := await _read(reader):
            for message in decoder.feed(data):
                deliver(message)

    def send(self, message: ToWorker) -> None:
        """Queues it; a worker that is gone is told by `receive`, not here."""
        if self._writer is None:
            self._early.append(encode(message))
        elif not self._writer.is_closing():
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


class LiveGeneration:
    """Requests that were started together. The HTTP side's Generation."""

    def __init__(self, client: "EngineClient", request_ids: Sequence[str]) -> None:
        self._client = client
        self._live = dict(enumerate(request_ids))
        self._unread: deque[NextToken] = deque()
        self._news = asyncio.Event()

    def __aiter__(self) -> "LiveGeneration":
        return self

    async def __anext__(self) -> NextToken:
        while not self._unread:
            if not self._live:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._unread.popleft()

    def put(self, item: NextToken) -> None:
        """From the engine."""
        if item.token.finish_reason:
            del self._live[item.request]
        self._unread.append(item)
        self._news.set()

    def cancel(self, request: int) -> None:
        request_id = self._live.pop(request, None)
        if request_id is not None:
            self._client.cancel(request_id)
        self._unread = deque(item for item in self._unread if item.request != request)
        self._news.set()

    def close(self) -> None:
        for request in list(self._live):
            self.cancel(request)
        self._unread.clear()
        self._news.set()


@dataclass
class _Reader:
    """Who reads a request: which one of a generation's. `start` until its first token is here: so long it can begin
    again without anybody noticing."""

    generation: LiveGeneration
    number: int
    start: Start | None


class EngineClient:
    """Requests to rank 0. The HTTP side's GenerationClient. Between `suspend` and `resume` there is no rank 0."""

    def __init__(self, link: WorkerLink, *, max_model_len: int, vocab_size: int, max_requests: int) -> None:
        """`max_requests`: that run or wait at once; more are refused."""
        self._link = link
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_requests = max_requests
        self._ids = itertools.count(1)
        self._readers: dict[str, _Reader] = {}
        self._load = EngineLoad()
        self._refusal = ""

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_requests(self) -> int:
        return self._max_requests

    @property
    def load(self) -> EngineLoad:
        return self._load

    def check_admitting(self) -> None:
        if self._refusal:
            raise NotServingError(self._refusal)

    def start(self, requests: Sequence[GenerationRequest]) -> LiveGeneration:
        """All of them or none. OverloadedError when too many are there, NotServingError while there is no rank 0 and
        when the engine ends."""
        self.check_admitting()
        present = len(self._readers)
        if present + len(requests) > self._max_requests:
            raise OverloadedError(
                f"{present} requests are running or waiting, and the engine takes {self._max_requests}: "
                f"no room for {len(requests)} more; try again later"
            )
        request_ids = [str(next(self._ids)) for _ in requests]
        generation = LiveGeneration(self, request_ids)
        for number, (request_id, request) in enumerate(zip(request_ids, requests, strict=True)):
            start = Start(request_id, request)
            self._link.send(start)  # first: one that cannot be told takes nobody's place
            self._readers[request_id] = _Reader(generation, number, start)
        return generation

    def cancel(self, request_id: str) -> None:
        """Nobody reads it any more."""
        if self._readers.pop(request_id, None) is not None:
            self._link.send(Cancel(request_id))

    def deliver(self, message: Tokens) -> None:
        """Tokens of one step, from rank 0."""
        self._load = message.load
        for request_id, token in message.tokens:
            self._deliver(request_id, token)

    def suspend(self, reason: str) -> None:
        """Rank 0 died: requests that it made tokens of end with `reason`, new ones are refused with it. The others wait
        for `resume`."""
        self._refusal = reason
        self._load = EngineLoad()
        for request_id, reader in list(self._readers.items()):
            if reader.start is None:
                self._deliver(request_id, aborted(reason))

    def resume(self, link: WorkerLink) -> None:
        """Another rank 0 is at the end of `link`, and hears of the requests that waited for it, in their order."""
        if not self._refusal:
            return  # somebody resumed it already: what waited must not be told twice
        self._link, self._refusal = link, ""
        for reader in self._readers.values():
            if reader.start is not None:
                link.send(reader.start)

    def fail_all(self, reason: str) -> None:
        """Ends every request with `reason` and refuses new ones: the engine is going away."""
        self._refusal = reason
        for request_id in list(self._readers):
            self._deliver(request_id, aborted(reason))

    def _deliver(self, request_id: str, token: GeneratedToken) -> None:
        reader = self._readers.get(request_id)
        if reader is None:
            return  # cancelled while the token was on its way
        reader.start = None
        if token.finish_reason:
            del self._readers[request_id]
        reader.generation.put(NextToken(reader.number, token))
