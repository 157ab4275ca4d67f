"""Requests of the supervisor to rank 0: each ends exactly once, and one that nobody reads is cancelled."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from fastdeploy_rl.control.generation import GeneratedToken, GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded import engine_client
from fastdeploy_rl.engines.embedded.engine_client import EngineClient, WorkerLink
from fastdeploy_rl.engines.embedded.messages import Cancel, FromWorker, Start, Tokens, WorkerSocket, encode
from fastdeploy_rl.errors import NotServingError

REQUEST = GenerationRequest([1, 2], 3, SamplingOptions())
DEADLINE_S = 20.0


class Rank0:
    """The worker's end of the socket, in the same process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._worker = WorkerSocket(connection)

    async def receive(self) -> list[object]:
        """What has arrived, once something has."""
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._connection, ready.set)
        await asyncio.wait_for(ready.wait(), DEADLINE_S)
        asyncio.get_running_loop().remove_reader(self._connection)
        return list(self._worker.receive())

    async def say(self, *tokens: tuple[str, GeneratedToken]) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, encode(Tokens(list(tokens))))


def with_client(scene: Callable[[EngineClient, Rank0], Awaitable[None]]) -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        link, rank0 = WorkerLink(ours), Rank0(theirs)
        client = EngineClient(link, max_model_len=16, vocab_size=8)

        def deliver(message: FromWorker) -> None:
            assert isinstance(message, Tokens)
            client.deliver(message)

        listening = asyncio.create_task(link.receive(deliver))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(scene(client, rank0), DEADLINE_S)
        finally:
            theirs.close()
            await asyncio.wait_for(listening, DEADLINE_S)
            link.close()
            await asyncio.sleep(0)

    asyncio.run(play())


def token(token_id: int, finish_reason: str = "") -> GeneratedToken:
    return GeneratedToken(token_id, "1.1", -1.0, finish_reason)


def test_tokens_go_to_their_own_request() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        async def read() -> list[int]:
            return [made.token_id async for made in client.generate(REQUEST)]

        readers = [asyncio.create_task(read()) for _ in range(2)]
        started = await rank0.receive()
        assert started == [Start("1", REQUEST), Start("2", REQUEST)]
        await rank0.say(("2", token(5)), ("1", token(6)))
        await rank0.say(("1", token(7, "stop")), ("2", token(4, "length")))
        assert await asyncio.gather(*readers) == [[6, 7], [5, 4]]

    with_client(scene)


def test_a_reader_that_goes_away_cancels_its_request_and_late_tokens_are_dropped() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        tokens = client.generate(REQUEST)
        reading = asyncio.create_task(anext(tokens))
        assert await rank0.receive() == [Start("1", REQUEST)]
        await rank0.say(("1", token(5)))
        assert (await reading).token_id == 5
        await tokens.aclose()
        assert await rank0.receive() == [Cancel("1")]
        await rank0.say(("1", token(6, "stop")))

    with_client(scene)


def test_a_stopping_engine_ends_every_request_with_its_reason_and_takes_no_more() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        tokens = client.generate(REQUEST)
        reading = asyncio.create_task(anext(tokens))
        await rank0.receive()
        client.fail_all("the engine is stopping")
        last = await reading
        assert (last.finish_reason, last.error) == ("abort", "the engine is stopping")
        with pytest.raises(StopAsyncIteration):
            await anext(tokens)
        with pytest.raises(NotServingError, match="stopping"):
            await anext(client.generate(REQUEST))

    with_client(scene)


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MAX_REQUESTS", 1)

    async def scene(client: EngineClient, rank0: Rank0) -> None:
        tokens = client.generate(REQUEST)
        reading = asyncio.create_task(anext(tokens))
        await rank0.receive()
        with pytest.raises(NotServingError, match="1 requests"):
            await anext(client.generate(REQUEST))
        await rank0.say(("1", token(5, "stop")))
        assert (await reading).token_id == 5
        await tokens.aclose()

    with_client(scene)
