"""An engine behind an HTTP URL: what EngineController calls when its address is one.

Owns the way of a command over HTTP. Refuses to know boards. Invariant: an error of the engine arrives as the same
class with the same text; whatever else comes back is an EngineError that says so. Every call has a deadline.
"""

from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from fastdeploy_rl.config import HTTP_GRACE_S, checked_deadline
from fastdeploy_rl.control.openai_format import Json
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    EngineNotFoundError,
    from_wire,
)
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import EngineStatus, UpdateReport
from fastdeploy_rl.version import WeightVersion

CONNECT_S = 5.0
STATUS_S = 10.0

_ResultT = TypeVar("_ResultT")


class HttpEngine:
    """Same methods as the board's client; blocks. A context manager; `close` gives the connection back."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        """ConfigurationError for what is no http URL. Connects to nothing yet. `transport` replaces the network."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"not an engine's URL: {url[:200]!r}; expected something like http://127.0.0.1:8180"
            )
        self._url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self._url, timeout=httpx.Timeout(STATUS_S, connect=CONNECT_S), transport=transport
        )

    def update(
        self, version: WeightVersion | str | None = None, *, deadline_s: float = 30.0, force: bool = False
    ) -> UpdateReport:
        """Takes the version (the newest for None) over, on all ranks or none; raises what the engine raised."""
        body = {"deadline_s": deadline_s, "force": force} | ({} if version is None else {"version": str(version)})
        return self._call("POST", "/v1/weights/update", UpdateReport, deadline_s, json=body)

    def clear(self, *, deadline_s: float = 30.0) -> UpdateReport:
        """Frees weights and KV cache on all ranks."""
        return self._call("POST", "/v1/weights/clear", UpdateReport, deadline_s, json={"deadline_s": deadline_s})

    def status(self) -> EngineStatus:
        return self._call("GET", "/v1/weights", EngineStatus, STATUS_S)

    def receipt(self, *, recompute: bool = False, deadline_s: float = 30.0) -> Receipt:
        """The proof of the last commit; with `recompute` checked
        against live memory, ChecksumMismatchError where it differs."""
        query = {"recompute": "true" if recompute else "false", "deadline_s": deadline_s}
        return self._call("GET", "/v1/weights/receipt", Receipt, deadline_s, params=query)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "HttpEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, kind: type[_ResultT], deadline_s: float, **content: Any) -> _ResultT:
        timeout = httpx.Timeout(checked_deadline(deadline_s) + HTTP_GRACE_S, connect=CONNECT_S)
        try:
            answer = self._http.request(method, path, timeout=timeout, **content)
        except httpx.ConnectError as error:
            raise EngineNotFoundError(
                f"no engine at {self._url}: {error}; start one with `fastdeploy-rl serve`"
            ) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceededError(
                f"{self._url}{path} did not answer within {deadline_s + HTTP_GRACE_S:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(f"{self._url}{path}: {error or type(error).__name__}") from error
        if answer.is_error:
            raise self._error(path, answer)
        result: _ResultT = self._decode(path, answer, kind)
        return result

    def _error(self, path: str, answer: httpx.Response) -> Exception:
        body = self._decode(path, answer, Json)
        error = body.get("error")
        if not isinstance(error, dict):
            return EngineError(f"{self._url}{path} answered {answer.status_code} without a reason")
        return from_wire(str(error.get("type")), str(error.get("message")))

    def _decode(self, path: str, answer: httpx.Response, kind: Any) -> Any:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(
                f"{self._url}{path} answered {answer.status_code} with no answer of an engine of this version: {error}"
            ) from error
