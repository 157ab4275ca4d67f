"""Many clients that stream at the same time, by plain sockets in one thread: what each was told."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from served_engine import DEADLINE_S, greedy
from switching_reference import Answer

_PERIOD_S = 0.01
"""A client that was refused asks again after this."""


class StreamingClients:
    """`count` clients that ask for one answer after the other while `running`. Afterwards: `answers`, all of them with
    log-probabilities, and `refusals`, the reasons of those that were not admitted."""

    def __init__(self, port: int, count: int, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self._port, self._count = port, count
        self._prompts, self._lengths = prompts, lengths
        self._is_over = False
        self._num_tokens: Counter[str] = Counter()
        self._progress = threading.Condition()
        self._failure: BaseException | None = None
        self.answers: list[Answer] = []
        self.refusals: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """At the end every client reads its last answer to the end. An error of a client is raised here."""
        thread = threading.Thread(target=self._run, name="streaming_clients")
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            thread.join(2 * DEADLINE_S)
        if self._failure is not None:
            raise self._failure
        if thread.is_alive():
            raise TimeoutError("a client still waits for its answer")

    def await_tokens(self, version: str, count: int) -> None:
        """Until they were told so many of that version."""
        with self._progress:
            if not self._progress.wait_for(
                lambda: self._num_tokens[version] >= count or self._failure is not None, DEADLINE_S
            ):
                raise TimeoutError(f"{self._num_tokens[version]} of {count} tokens of version {version} came")

    def _run(self) -> None:
        try:
            asyncio.run(self._play())
        except BaseException as error:
            with self._progress:
                self._failure = error
                self._progress.notify_all()

    async def _play(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._count)))

    async def _client(self, number: int) -> None:
        while not self._is_over:
            prompt = self._prompts[number % len(self._prompts)]
            length = self._lengths[number % len(self._lengths)]
            number += self._count + 1
            body = greedy(prompt, length) | {"stream": True, "logprobs": 0}
            if not await asyncio.wait_for(self._ask(body), DEADLINE_S):
                await asyncio.sleep(_PERIOD_S)

    async def _ask(self, body: dict[str, Any]) -> bool:
        """False where it was refused."""
        payload = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload)
            )
            status = int((await reader.readline()).split()[1])
            if status != 200:
                _, _, body_text = (await reader.read()).decode().partition("\r\n\r\n")
                self.refusals.append(f"{status}: {body_text}")
                return False
            self.answers.append(Answer.of_events(await self._events(reader)))
            return True
        finally:
            writer.close()
            await writer.wait_closed()

    async def _events(self, reader: asyncio.StreamReader) -> list[dict[str, Any]]:
        events = []
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                self._note(events[-1])
        return events

    def _note(self, event: dict[str, Any]) -> None:
        version = event["choices"][0].get("weight_version") if "choices" in event else None
        if version is not None:
            with self._progress:
                self._num_tokens[version] += 1
                self._progress.notify_all()
