"""An engine behind an HTTP URL: what EngineController and its async twin call when their address is one.

Owns the routes of commands (`HttpCall`, one for each) and what their answers mean; the two clients only differ in how
they wait. Refuses to know boards. Invariant: an error of the engine arrives as the same class with the same text;
whatever else comes back, or more than MAX_ANSWER_BYTES, is an EngineError that says so. Every call has a deadline.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from fastdeploy_rl import config
from fastdeploy_rl.config import Deadlines, checked_deadline
from fastdeploy_rl.control.openai_format import Json
from fastdeploy_rl.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    EngineNotFoundError,
    from_wire,
)
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.client_commands import AwaitedCommands, BlockingCommands, ClientCommand
from fastdeploy_rl.update.history import DEFAULT_LIMIT

MAX_ANSWER_BYTES = 256 << 20
"""The receipt of a very large model fits."""
_WANTS_KEY = "the API key is missing or unknown there; give one (FASTDEPLOY_RL_API_KEY, --api-key-file, api_key=)"

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class HttpCall(Generic[_ResultT]):
    """One route with its arguments, and the type of its answer. `quiet_s`: after the deadline, for ranks to stop."""

    method: str
    path: str
    kind: type[_ResultT]
    deadline_s: float = Deadlines.status_s
    content: dict[str, Any] = field(default_factory=dict)
    quiet_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """From the question to the end of the answer. ConfigurationError for a deadline that cannot be."""
        return checked_deadline(self.deadline_s) + self.quiet_s + Deadlines.http_s

    @property
    def timeout(self) -> httpx.Timeout:
        """Of each step on the way: httpx knows no limit for the whole."""
        return httpx.Timeout(self.limit_s, connect=Deadlines.connect_s)


_FIELDS = {
    CommandKind.UPDATE: ("version", "force", "kv", "in_flight"),
    CommandKind.CLEAR: (),
    CommandKind.PAUSE: ("mode", "on_timeout"),
    CommandKind.RESUME: (),
    CommandKind.SLEEP: ("tags", "level", "mode", "on_timeout"),
    CommandKind.WAKE: ("tags", "kv"),
}
"""What the body of each command's route may hold, besides its deadline, where it is not what the engine
does anyway; the route is named after the kind."""


def command_call(command: ClientCommand) -> HttpCall[UpdateReport]:
    options = command.options
    said: dict[str, Any] = {
        "version": command.version,
        "force": command.is_forced,
        "kv": options.kv,
        "in_flight": "" if options.in_flight == config.KEEP else options.in_flight,
        "mode": options.in_flight,
        "on_timeout": options.on_timeout,
        "tags": [tag.value for tag in Tag if tag in options.tags] or "",
        "level": options.level,
    }
    if command.kind is CommandKind.UPDATE and options.tags:
        raise ConfigurationError("an update over HTTP wakes the weights alone; wake the other tags by name")
    body = {name: said[name] for name in _FIELDS[command.kind] if said[name] != ""}
    path = f"/v1/weights/{command.kind.name.lower()}"
    content = {"json": {"deadline_s": command.deadline_s} | body}
    return HttpCall("POST", path, UpdateReport, command.deadline_s, content, command.quiet_s)


def status_call() -> HttpCall[EngineStatus]:
    return HttpCall("GET", "/v1/weights", EngineStatus)


def receipt_call(recompute: bool, deadline_s: float) -> HttpCall[Receipt]:
    query = {"recompute": "true" if recompute else "false", "deadline_s": deadline_s}
    return HttpCall("GET", "/v1/weights/receipt", Receipt, deadline_s, {"params": query})


def history_call(limit: int) -> HttpCall[list[HistoryEntry]]:
    return HttpCall("GET", "/v1/weights/history", list[HistoryEntry], content={"params": {"limit": limit}})


@dataclass(frozen=True)
class EngineUrl:
    """Where the engine answers, and what its answers mean."""

    url: str

    @classmethod
    def parse(cls, text: str) -> "EngineUrl":
        """ConfigurationError for what is no http URL."""
        try:
            parts = urlsplit(text)
            httpx.URL(text)
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, httpx.InvalidURL):  # an address or port that none can be
            is_http = False
        if not is_http:
            raise ConfigurationError(
                f"not an engine's URL: {text[:200]!r}; expected something like http://127.0.0.1:8180"
            )
        return cls(text.rstrip("/").removesuffix("/v1"))  # the base URL of OpenAI's clients is meant too

    @contextmanager
    def failures(self, call: HttpCall[Any]) -> Iterator[None]:
        """What goes wrong on the way, as errors of the tree."""
        place = f"{self.url}{call.path}"
        begun = time.monotonic()
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineNotFoundError(
                f"no engine at {self.url}: {error or 'nobody answers'}; start one with `fastdeploy-rl serve`"
            ) from error
        except (httpx.TimeoutException, asyncio.TimeoutError) as error:
            raise DeadlineExceededError.waiting_for(
                f"answer of {place}", since_s=begun, hint="what was asked may still be done: ask for its status"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(f"{place}: {error or type(error).__name__}") from error

    def result(self, call: HttpCall[_ResultT], status: int, content: bytes) -> _ResultT:
        """What the engine answered; raises what it raised."""
        if status == httpx.codes.UNAUTHORIZED:  # of any server: FastDeploy's and vLLM's bodies differ
            raise AuthenticationError(f"{self.url}{call.path}: {_WANTS_KEY}")
        if status >= httpx.codes.BAD_REQUEST:
            raise self._error(call.path, status, content)
        result: _ResultT = self._decode(call.path, status, content, call.kind)
        return result

    def _error(self, path: str, status: int, content: bytes) -> Exception:
        body = self._decode(path, status, content, Json)
        error = body.get("error")
        if not isinstance(error, dict):
            return EngineError(f"{self.url}{path} answered {status} without a reason")
        return from_wire(str(error.get("type")), str(error.get("message")))

    def _decode(self, path: str, status: int, content: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered {status} with no answer of an engine of this version: {error}"
            ) from error


def key_headers(api_key: str | None) -> dict[str, str]:
    """Headers with `api_key`; None takes the first of the environment's, "" gives no header. ConfigurationError for
    what can be no key."""
    if api_key is None:
        api_key = next(iter(config.api_keys()), "")
    return {"Authorization": f"Bearer {config.checked_api_key(api_key, 'api_key')}"} if api_key else {}


def ask(http: httpx.Client, engine: EngineUrl, call: HttpCall[_ResultT]) -> _ResultT:
    """One call and its answer. Blocks for `call.limit_s` at most, also where the answer comes in drops."""
    last = time.monotonic() + call.limit_s
    content = bytearray()
    with (
        engine.failures(call),
        http.stream(call.method, call.path, timeout=call.timeout, **call.content) as answer,
    ):
        for piece in answer.iter_bytes():
            take_piece(piece, content, call)
            if time.monotonic() > last:
                raise httpx.ReadTimeout("the answer does not end")
    return engine.result(call, answer.status_code, bytes(content))


def take_piece(piece: bytes, content: bytearray, call: HttpCall[Any]) -> None:
    """Adds what came next of an answer. EngineError for more than MAX_ANSWER_BYTES."""
    content += piece
    if len(content) > MAX_ANSWER_BYTES:
        raise EngineError(f"the answer to {call.path} is larger than {MAX_ANSWER_BYTES} bytes: is it an engine's?")


class HttpEngine(BlockingCommands):
    """Same methods as the board's client; blocks. A context manager; `close` gives the connection back."""

    def __init__(self, url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        """ConfigurationError for what is no http URL or no key. Connects to nothing yet. `api_key` None takes the
        environment's ($FASTDEPLOY_RL_API_KEY), "" sends none. `transport` replaces the network."""
        self._engine = EngineUrl.parse(url)
        self._http = httpx.Client(base_url=self._engine.url, headers=key_headers(api_key), transport=transport)

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        return self._call(command_call(command))

    def status(self) -> EngineStatus:
        return self._call(status_call())

    def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        """The proof of the last commit; with `recompute` checked
        against live memory, ChecksumMismatchError where it differs."""
        return self._call(receipt_call(recompute, deadline_s))

    def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        """The last `limit` commands, the newest last."""
        return self._call(history_call(limit))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "HttpEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: HttpCall[_ResultT]) -> _ResultT:
        return ask(self._http, self._engine, call)


class AsyncHttpEngine(AwaitedCommands):
    """HttpEngine as coroutines. A call that is cancelled hangs up; a command that the engine began goes on there."""

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """As HttpEngine's."""
        self._engine = EngineUrl.parse(url)
        self._http = httpx.AsyncClient(base_url=self._engine.url, headers=key_headers(api_key), transport=transport)

    async def carry_out(self, command: ClientCommand) -> UpdateReport:
        return await self._call(command_call(command))

    async def status(self) -> EngineStatus:
        return await self._call(status_call())

    async def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        return await self._call(receipt_call(recompute, deadline_s))

    async def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        return await self._call(history_call(limit))

    async def __aenter__(self) -> "AsyncHttpEngine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def _call(self, call: HttpCall[_ResultT]) -> _ResultT:
        limit_s = call.limit_s
        with self._engine.failures(call):
            status, content = await asyncio.wait_for(self._fetch(call), limit_s)
        return self._engine.result(call, status, content)

    async def _fetch(self, call: HttpCall[Any]) -> tuple[int, bytes]:
        content = bytearray()
        async with self._http.stream(call.method, call.path, timeout=call.timeout, **call.content) as answer:
            async for piece in answer.aiter_bytes():
                take_piece(piece, content, call)
        return answer.status_code, bytes(content)
