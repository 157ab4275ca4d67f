"""Requests of the supervisor to rank 0: each ends exactly once, and one that nobody reads is cancelled."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from fastdeploy_rl.control.generation import EngineLoad, GeneratedToken, GenerationRequest, NextToken, SamplingOptions
from fastdeploy_rl.engines.embedded.engine_client import EngineClient, WorkerLink
from fastdeploy_rl.engines.embedded.messages import Cancel, FromWorker, Start, Tokens, WorkerSocket, encode
from fastdeploy_rl.errors import NotServingError, OverloadedError

REQUEST = GenerationRequest([1, 2], 3, SamplingOptions())
DEADLINE_S = 20.0
MAX_REQUESTS = 3
LOAD = EngineLoad(1, 0, 6, 8)


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
        await asyncio.get_running_loop().sock_sendall(self._connection, encode(Tokens(list(tokens), LOAD)))


def with_client(scene: Callable[[EngineClient, Rank0], Awaitable[None]]) -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        link, rank0 = WorkerLink(ours), Rank0(theirs)
        client = EngineClient(link, max_model_len=16, vocab_size=8, max_requests=MAX_REQUESTS)

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
            return [item.token.token_id async for item in client.start([REQUEST])]

        readers = [asyncio.create_task(read()) for _ in range(2)]
        started = await rank0.receive()
        assert started == [Start("1", REQUEST), Start("2", REQUEST)]
        await rank0.say(("2", token(5)), ("1", token(6)))
        await rank0.say(("1", token(7, "stop")), ("2", token(4, "length")))
        assert await asyncio.gather(*readers) == [[6, 7], [5, 4]]
        assert client.load == LOAD

    with_client(scene)


def test_requests_that_start_together_come_as_one_stream_and_one_of_them_can_be_cancelled() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        both = client.start([REQUEST, REQUEST])
        await rank0.receive()
        await rank0.say(("2", token(5)), ("1", token(6)), ("2", token(3)))
        assert await anext(both) == NextToken(1, token(5))
        both.cancel(1)
        assert await rank0.receive() == [Cancel("2")]
        await rank0.say(("2", token(4, "stop")), ("1", token(7, "stop")))
        assert [item async for item in both] == [NextToken(0, token(6)), NextToken(0, token(7, "stop"))]
        both.close()
        client.start([REQUEST])
        assert await rank0.receive() == [Start("3", REQUEST)]

    with_client(scene)


def test_closing_cancels_what_has_not_ended_and_wakes_who_waits_for_it() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        both = client.start([REQUEST, REQUEST])
        await rank0.receive()
        await rank0.say(("1", token(5, "stop")))
        assert await anext(both) == NextToken(0, token(5, "stop"))
        waiting = asyncio.create_task(anext(both, None))
        await asyncio.sleep(0)
        both.close()
        assert await waiting is None
        assert await rank0.receive() == [Cancel("2")]
        await rank0.say(("2", token(6, "stop")))
        both.close()

    with_client(scene)


def test_a_stopping_engine_ends_every_request_with_its_reason_and_takes_no_more() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        tokens = client.start([REQUEST])
        await rank0.receive()
        client.fail_all("the engine is stopping")
        (last,) = [item.token async for item in tokens]
        assert (last.finish_reason, last.error) == ("abort", "the engine is stopping")
        with pytest.raises(NotServingError, match="stopping"):
            client.start([REQUEST])

    with_client(scene)


def test_a_dead_rank_0_ends_what_it_had_begun_and_its_successor_gets_the_rest() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        begun, queued, given_up = (client.start([REQUEST]) for _ in range(3))
        await rank0.receive()
        await rank0.say(("1", token(5)))
        assert await anext(begun) == NextToken(0, token(5))
        client.suspend("rank 0 was killed")
        (last,) = [item.token async for item in begun]
        assert (last.finish_reason, last.error) == ("abort", "rank 0 was killed")
        with pytest.raises(NotServingError, match="rank 0 was killed"):
            client.start([REQUEST])
        given_up.close()
        ours, theirs = socket.socketpair()
        with theirs:
            link, successor = WorkerLink(ours), Rank0(theirs)
            listening = asyncio.create_task(link.receive(lambda message: client.deliver(message)))  # type: ignore[arg-type]
            client.resume(link)
            assert await successor.receive() == [Start("2", REQUEST)]
            await successor.say(("2", token(4, "stop")))
            assert [item.token async for item in queued] == [token(4, "stop")]
            client.start([REQUEST])
            client.resume(link)  # by whoever else waited for it: nobody is told twice
            assert await successor.receive() == [Start("4", REQUEST)]
        await listening
        link.close()
        await asyncio.sleep(0)

    with_client(scene)


def test_a_request_that_no_message_can_hold_takes_no_place() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        with pytest.raises(OverflowError):
            client.start([GenerationRequest([1], 1, SamplingOptions(top_k=2**70))])
        client.start([REQUEST] * MAX_REQUESTS)
        assert len(await rank0.receive()) == MAX_REQUESTS

    with_client(scene)


def test_more_requests_than_there_is_room_for_are_refused_together() -> None:
    async def scene(client: EngineClient, rank0: Rank0) -> None:
        first = client.start([REQUEST, REQUEST])
        with pytest.raises(OverloadedError, match="2 requests are running or waiting, and the engine takes 3"):
            client.start([REQUEST, REQUEST])
        assert await rank0.receive() == [Start("1", REQUEST), Start("2", REQUEST)]
        await rank0.say(("1", token(5, "stop")))
        assert await anext(first) == NextToken(0, token(5, "stop"))
        client.start([REQUEST, REQUEST])
        with pytest.raises(OverloadedError):
            client.start([REQUEST])

    with_client(scene)
