"""EngineController: what a trainer or an operator holds to steer an engine, wherever it is.

Owns the choice between the two ways to an engine: its board (a port number, same machine) or its HTTP server (a URL).
Refuses to know either way's details. Both raise the same errors."""

from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import Protocol

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.client_commands import BlockingCommands, ClientCommand
from fastdeploy_rl.update.history import DEFAULT_LIMIT


class EngineWay(Protocol):
    """One way to an engine; a context manager. Every method
    blocks, `deadline_s` at most (and a little, for the answer)."""

    def __enter__(self) -> "EngineWay": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def carry_out(self, command: ClientCommand) -> UpdateReport: ...

    def status(self) -> EngineStatus: ...

    def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt: ...

    def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]: ...


class EngineController(BlockingCommands):
    """Steers the engine at `address`: its engine worker queue port, or the URL of its HTTP server. Use it in a `with`.

    Not for several threads at once: make one each. EngineNotFoundError where no engine is alive at the address.
    `api_key` opens an engine behind a URL that wants one; None takes the environment's ($FASTDEPLOY_RL_API_KEY).
    """

    def __init__(self, address: int | str, *, api_key: str | None = None) -> None:
        self.address = address
        self._api_key = api_key
        self._stack = ExitStack()
        self._open_way: EngineWay | None = None

    def __enter__(self) -> "EngineController":
        self._open_way = self._stack.enter_context(_way_to(self.address, self._api_key))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_way = None
        self._stack.close()

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        return self._way.carry_out(command)

    def status(self) -> EngineStatus:
        return self._way.status()

    def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        """The proof of what is live. `recompute`: every rank reads its live memory again; ChecksumMismatchError names
        each tensor and rank that is no longer what the receipt says."""
        return self._way.receipt(recompute=recompute, deadline_s=deadline_s)

    def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        """How the last `limit` commands ended, whoever gave them; the newest is last. RequestError for an impossible
        limit. What an engine's history file holds is in update/history.py."""
        return self._way.history(limit)

    @property
    def _way(self) -> EngineWay:
        if self._open_way is None:
            raise ConfigurationError("the controller is not open; use it in a with statement")
        return self._open_way


def _way_to(address: int | str, api_key: str | None) -> EngineWay:
    if isinstance(address, int):
        return BoardClient(address)
    way: EngineWay = http_clients(address).HttpEngine(address, api_key=api_key)
    return way


def http_clients(address: str) -> ModuleType:
    """The module of the clients for URLs, which needs more than the rest of the package."""
    try:
        from fastdeploy_rl.control import client
    except ImportError as error:
        raise ConfigurationError(
            f"an engine at a URL ({address}) needs httpx: pip install httpx; "
            "on the engine's machine its port number needs nothing"
        ) from error
    return client
