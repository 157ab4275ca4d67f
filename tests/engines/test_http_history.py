"""History over HTTP, and the async client of the same routes: one knowledge of them, two ways to wait."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import RECEIPT, ScriptedBoard, ScriptedEngine, make_face, report

from fastdeploy_rl.control import client
from fastdeploy_rl.control.client import AsyncHttpEngine, HttpEngine
from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.errors import (
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    EngineError,
    EngineNotFoundError,
    RequestError,
)
from fastdeploy_rl.report import HistoryEntry, history_entry
from fastdeploy_rl.update.history import append_history, read_history


class Board(ScriptedBoard):
    """One whose history is a file."""

    def __init__(self, history: Path) -> None:
        super().__init__()
        self.history = history

    def read_history(self, limit: int) -> list[HistoryEntry]:
        return read_history(self.history, limit)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "history.jsonl")


@pytest.fixture
def app(board: Board) -> Iterator[Any]:
    face = make_face(ScriptedEngine(), board)
    yield make_app(face)
    face.weights.close()


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 60))


def engine_of(app: Any) -> AsyncHttpEngine:
    return AsyncHttpEngine("http://engine", transport=httpx.ASGITransport(app=app))


def test_history_comes_newest_last_and_no_more_than_asked_for(board: Board, app: Any) -> None:
    entries = [history_entry(report(command, "update"), 8182, 0.0) for command in range(1, 31)]

    async def ask() -> None:
        async with engine_of(app) as engine:
            assert await engine.history() == []
            for entry in entries:
                append_history(board.history, entry)
            assert await engine.history() == entries[-20:]
            assert await engine.history(3) == entries[-3:]

    run(ask())


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1.5", "99999", "1e3", "٣"])
def test_an_impossible_limit_is_a_400(app: Any, limit: str) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as http:
            answer = await http.get("/v1/weights/history", params={"limit": limit})
            assert answer.status_code == 400
            assert "limit" in answer.json()["error"]["message"]
        async with engine_of(app) as engine:
            with pytest.raises(RequestError, match="limit"):
                await engine.history(0)

    run(ask())


def test_the_async_client_does_what_the_blocking_one_does(board: Board, app: Any) -> None:
    async def ask() -> None:
        async with engine_of(app) as engine:
            assert (await engine.update("1.2", deadline_s=5)).version == "1.2"
            assert (await engine.clear(deadline_s=5)).kind == "clear"
            assert (await engine.status()).version == "1.1"
            assert await engine.receipt(recompute=True, deadline_s=5) == RECEIPT
            board.outcome = CoverageError("missing: a")
            with pytest.raises(CoverageError, match="missing: a"):
                await engine.update(deadline_s=5)
            with pytest.raises(ConfigurationError, match="deadline_s must be"):
                await engine.update(deadline_s=float("nan"))

    run(ask())
    assert [call[0] for call in board.calls] == ["update", "clear", "receipt", "update"]


def test_the_loop_goes_on_while_a_command_waits_and_cancelling_hangs_up(board: Board, app: Any) -> None:
    board.gate.clear()

    async def ask() -> None:
        async with engine_of(app) as engine:
            waiting = asyncio.create_task(engine.update(deadline_s=20))
            await asyncio.to_thread(board.begun.wait, 20)
            assert (await engine.status()).version == "1.1"
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            board.gate.set()
            assert (await engine.update("1.2", deadline_s=20)).version == "1.2"

    run(ask())


def test_failures_on_the_way_are_those_of_the_blocking_client() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/weights":
            return httpx.Response(200, text="<html>")
        raise httpx.ReadTimeout("slow")

    async def ask() -> None:
        async with AsyncHttpEngine("http://127.0.0.1:1") as nobody:
            with pytest.raises(EngineNotFoundError, match="no engine at"):
                await nobody.status()
        async with AsyncHttpEngine("http://stranger", transport=httpx.MockTransport(answer)) as stranger:
            with pytest.raises(EngineError, match="no answer of an engine"):
                await stranger.status()
            with pytest.raises(DeadlineExceededError, match="no answer of http://stranger/v1/weights/clear after"):
                await stranger.clear()

    run(ask())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"x":' + b"[" * 100_000, "no answer of an engine.*recursion"),
        (b" " * 200_001, "larger than 200000 bytes"),
    ],
    ids=["nested", "large"],
)
def test_an_answer_that_no_engine_gives_is_an_error_to_both_clients(
    content: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 200_000)
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))

    async def ask() -> None:
        async with AsyncHttpEngine("http://stranger", transport=transport) as stranger:
            with pytest.raises(EngineError, match=words):
                await stranger.history()

    run(ask())
    with HttpEngine("http://stranger", transport=transport) as stranger, pytest.raises(EngineError, match=words):
        stranger.history()
