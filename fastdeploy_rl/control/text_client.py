"""An engine that is asked for text over HTTP: whole answers, and streams of OpenAI's chunks.

Owns the way of one answer. Refuses to know what is asked: bodies and answers are OpenAI's JSON. Invariant: an error of
the engine arrives as the same class with the same text, before or in the middle of a stream; closing a stream early
tells the engine to stop.
"""

import time
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

import httpx
import msgspec

from fastdeploy_rl.control.client import EngineUrl, HttpCall, ask, key_headers, take_piece
from fastdeploy_rl.control.openai_format import Json
from fastdeploy_rl.errors import DeadlineExceededError, EngineError, FastDeployRLError, from_wire

_DATA = b"data: "
_DONE = b"[DONE]"


class TextClient:
    """Blocks; one answer at a time. A context manager; `close` gives the connection back."""

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """ConfigurationError for what is no http URL or no key. Connects to nothing yet. `deadline_s` is for each
        answer, from the question to its end. `api_key` and `transport` are HttpEngine's."""
        self._engine = EngineUrl.parse(url)
        self._deadline_s = deadline_s
        self._http = httpx.Client(base_url=self._engine.url, headers=key_headers(api_key), transport=transport)

    def model(self) -> Json:
        """The served model as /v1/models has it: `id`, `weight_version` and more."""
        call = HttpCall("GET", "/v1/models", Json)
        cards = ask(self._http, self._engine, call).get("data")
        if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict):
            raise EngineError(f"{self._engine.url}{call.path} names no model")
        card: Json = cards[0]
        return card

    def ask(self, path: str, body: Json) -> Json:
        """The whole answer."""
        return ask(self._http, self._engine, self._call(path, body))

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """The chunks as they come. Close it (`contextlib.closing`) where it is not read to its end."""
        call = self._call(path, body | {"stream": True})
        begun = time.monotonic()
        with (
            self._engine.failures(call),
            self._http.stream(call.method, call.path, timeout=call.timeout, **call.content) as answer,
        ):
            pieces = self._in_time(answer.iter_bytes(), begun)
            if answer.is_error:
                content = bytearray()
                for piece in pieces:
                    take_piece(piece, content, call)
                self._engine.result(call, answer.status_code, bytes(content))
            yield from _events(_lines(pieces))

    def _in_time(self, pieces: Iterator[bytes], begun: float) -> Iterator[bytes]:
        for piece in pieces:
            if time.monotonic() > begun + self._deadline_s:
                raise DeadlineExceededError.waiting_for(f"end of the answer of {self._engine.url}", since_s=begun)
            yield piece

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "TextClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, path: str, body: Json) -> HttpCall[Json]:
        return HttpCall("POST", path, Json, self._deadline_s, {"json": body})


def first_choice(answer: Json) -> Json:
    """The one choice of an answer or a chunk to a question for one. EngineError where there is none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise EngineError("the engine's answer has no choice: is it an OpenAI server?")
    choice: Json = choices[0]
    return choice


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """They end at line feeds alone. httpx's own end at U+2028 and its like too, which stand in JSON as they are."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole)
    yield rest


def _events(lines: Iterator[bytes]) -> Iterator[Json]:
    """Raises what an event says went wrong; EngineError where the stream ends without its end."""
    for line in lines:
        if line == _DATA + _DONE:
            return
        if line.startswith(_DATA):
            yield _event(line.removeprefix(_DATA))
    raise EngineError("the engine's answer broke off")


def _event(data: bytes) -> Json:
    try:
        event: Json = msgspec.json.decode(data, type=Json)
    except msgspec.DecodeError as error:
        raise EngineError(f"the engine's answer is no stream of chunks: {error}") from error
    fault: Any = event.get("error")
    if fault is not None:
        raise _fault(fault)
    return event


def _fault(fault: Any) -> FastDeployRLError:
    if not isinstance(fault, dict):
        return EngineError("the engine ended the answer without a reason")
    return from_wire(str(fault.get("type")), str(fault.get("message")))
