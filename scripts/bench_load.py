"""Requests that run at an engine without a pause, and when each of their tokens came.

All stand in one streamed completion, read by one thread: eight connections would take from two cores what is to be
measured. Times are those of time.monotonic, which all processes of a machine share."""

import json
import threading
import time
from types import TracebackType
from typing import NamedTuple

import httpx
from demo_parts import Engine

AT_ONCE = 8
MAX_TOKENS = 900
PROMPT = "Once upon a time, in a village by the sea, there lived"
WAIT_S = 120.0


class Token(NamedTuple):
    """`at`: when it was read here; `request`: which of those that run, from 0; `version`: whose weights made it."""

    at: float
    request: int
    version: str


class Load:
    """`num_requests` requests while its with statement lasts; they are cancelled at the end."""

    def __init__(self, engine: Engine, num_requests: int = AT_ONCE) -> None:
        self._url = f"http://127.0.0.1:{engine.port}/v1/completions"
        self._num_requests = num_requests
        self._tokens: list[Token] = []
        self._failure: Exception | None = None
        self._is_over = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> "Load":
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        self._reader.join(WAIT_S)

    def tokens(self) -> list[Token]:
        with self._news:
            return list(self._tokens)

    def await_tokens(self, each: int) -> list[Token]:
        """Until each request has so many more than now; all that came so far."""
        wanted = [count + each for count in self._counts()]
        with self._news:
            has_come = self._news.wait_for(lambda: self._failure or self._has(wanted), WAIT_S)
            if self._failure is not None:
                raise self._failure
            if not has_come:
                raise RuntimeError(f"no {each} more tokens of each request within {WAIT_S:g} s")
            return list(self._tokens)

    def _counts(self) -> list[int]:
        tokens = self.tokens()
        return [sum(token.request == request for token in tokens) for request in range(self._num_requests)]

    def _has(self, wanted: list[int]) -> bool:
        counts = [0] * self._num_requests
        for token in self._tokens:
            counts[token.request] += 1
        return all(count >= least for count, least in zip(counts, wanted, strict=True))

    def _read(self) -> None:
        try:
            self._stream()
        except (httpx.HTTPError, RuntimeError) as error:
            with self._news:
                self._failure = error
                self._news.notify_all()

    def _stream(self) -> None:
        prompts = [f"{PROMPT} {index}" for index in range(self._num_requests)]
        body = {"prompt": prompts, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=WAIT_S) as http, http.stream("POST", self._url, json=body) as response:
            if response.is_error:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if self._is_over:
                    return
                self._take(line)
        raise RuntimeError("the requests have ended, though they were to run on")

    def _take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            if "weight_version" in choice:
                with self._news:
                    self._tokens.append(Token(time.monotonic(), choice["index"], choice["weight_version"]))
                    self._news.notify_all()
