"""The board's client for an event loop: each call is a BoardClient of its own in a thread.

Owns those threads and what cancelling means. Refuses to know requests: that is BoardClient's. Invariant: a call that
ends, by whatever way, leaves no slot of the board claimed: one that was cancelled before the engine began is withdrawn,
one after that belongs to the engine, which frees it when the command ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.client_commands import AwaitedCommands, ClientCommand
from fastdeploy_rl.update.history import DEFAULT_LIMIT

MAX_CALLS = 64
"""More at once wait for a thread; the board has slots for 16 anyway."""

_ResultT = TypeVar("_ResultT")


class AsyncBoardEngine(AwaitedCommands):
    """EngineController's methods as coroutines of one event loop; several calls may run at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="fastdeploy_rl-client")
        self._asking: dict[BoardClient, asyncio.Future[Any]] = {}

    async def carry_out(self, command: ClientCommand) -> UpdateReport:
        return await self._call(lambda client: client.carry_out(command))

    async def status(self) -> EngineStatus:
        return await self._call(BoardClient.status)

    async def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        return await self._call(lambda client: client.receipt(recompute=recompute, deadline_s=deadline_s))

    async def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        return await self._call(lambda client: client.history(limit))

    async def __aenter__(self) -> "AsyncBoardEngine":
        """EngineNotFoundError where no engine is alive at the port."""
        try:
            await self.status()
        except BaseException:
            self._threads.shutdown(wait=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asking = dict(self._asking)
        for client in asking:
            client.abandon()
        if asking:
            await asyncio.wait(asking.values(), timeout=Deadlines.let_go_s)
        self._threads.shutdown(wait=False)

    async def _call(self, ask: Callable[[BoardClient], _ResultT]) -> _ResultT:
        client = BoardClient(self._port)
        answer = asyncio.get_running_loop().run_in_executor(self._threads, _ask, client, ask)
        answer.add_done_callback(_look_at)
        self._asking[client] = answer
        try:
            # Not awaited itself: cancelling it would not stop its thread, and nobody could wait for that any more. The
            # client in the thread keeps to the call's deadline.
            await asyncio.wait([answer])
        except asyncio.CancelledError:
            client.abandon()
            await asyncio.wait([answer], timeout=Deadlines.let_go_s)
            raise
        finally:
            del self._asking[client]
        return answer.result()


def _ask(client: BoardClient, ask: Callable[[BoardClient], _ResultT]) -> _ResultT:
    with client:
        return ask(client)


def _look_at(answer: "asyncio.Future[Any]") -> None:
    """The error of a call that nobody waits for any more is no news to anyone."""
    if not answer.cancelled():
        answer.exception()
