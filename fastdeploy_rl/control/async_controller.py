"""AsyncEngineController: EngineController for an event loop.

Owns the choice between the two ways to an engine, as its twin does. Refuses to know either way's details, and to say
again what a method means: EngineController does. Invariant: no call blocks the loop, and a cancelled one leaves nothing
behind at the engine that it would have to wait for."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.async_board import AsyncBoardEngine
from fastdeploy_rl.control.controller import http_clients
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.client_commands import AwaitedCommands, ClientCommand
from fastdeploy_rl.update.history import DEFAULT_LIMIT


class AsyncEngineWay(Protocol):
    """One way to an engine; an async context manager."""

    async def __aenter__(self) -> "AsyncEngineWay": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def carry_out(self, command: ClientCommand) -> UpdateReport: ...

    async def status(self) -> EngineStatus: ...

    async def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt: ...

    async def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]: ...


class AsyncEngineController(AwaitedCommands):
    """Steers the engine at `address`: its engine worker queue port, or the URL of its HTTP server. Use it in an
    `async with`; the methods are EngineController's, several may run at once, and all raise the same errors.

    Cancelling a call (`task.cancel()`, `asyncio.wait_for`) gives its place at the engine back. A command that the
    engine had not begun is withdrawn (over the board; over HTTP it may still be carried out); one that it had goes on:
    `status` and `history` tell how it ended."""

    def __init__(self, address: int | str, *, api_key: str | None = None) -> None:
        self.address = address
        self._api_key = api_key
        self._stack = AsyncExitStack()
        self._open_way: AsyncEngineWay | None = None

    async def __aenter__(self) -> "AsyncEngineController":
        self._open_way = await self._stack.enter_async_context(_way_to(self.address, self._api_key))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_way = None
        await self._stack.aclose()

    async def carry_out(self, command: ClientCommand) -> UpdateReport:
        return await self._way.carry_out(command)

    async def status(self) -> EngineStatus:
        return await self._way.status()

    async def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        return await self._way.receipt(recompute=recompute, deadline_s=deadline_s)

    async def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        return await self._way.history(limit)

    @property
    def _way(self) -> AsyncEngineWay:
        if self._open_way is None:
            raise ConfigurationError("the controller is not open; use it in an async with statement")
        return self._open_way


def _way_to(address: int | str, api_key: str | None) -> AsyncEngineWay:
    if isinstance(address, int):
        return AsyncBoardEngine(address)
    way: AsyncEngineWay = http_clients(address).AsyncHttpEngine(address, api_key=api_key)
    return way
