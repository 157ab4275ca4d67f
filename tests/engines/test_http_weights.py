"""The weights' routes and FastDeploy's two, over a scripted
board; and the HTTP client of EngineController against them."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import RECEIPT, ScriptedBoard, ScriptedEngine, make_face

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.client import EngineUrl, HttpEngine
from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.control.weights_service import MAX_COMMANDS
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    EngineError,
    EngineNotFoundError,
    FastDeployRLError,
    NoPublicationError,
)
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.version import WeightVersion


class Weights:
    """The application over a scripted board; several requests at once by `ask`."""

    def __init__(self) -> None:
        self.board = ScriptedBoard()
        self.face = make_face(ScriptedEngine(), self.board)
        self.app = make_app(self.face)

    def ask(self, *calls: tuple[str, str, Any]) -> list[httpx.Response]:
        """Starts the calls one after another, each once the one before has reached the board, then opens the gate."""

        async def all_of_them() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                running = []
                for method, path, body in calls:
                    running.append(asyncio.create_task(http.request(method, path, json=body)))
                    await asyncio.to_thread(self.board.begun.wait, 20)
                if len(running) > 1:
                    await asyncio.wait(running[1:], timeout=20)
                self.board.gate.set()
                return await asyncio.gather(*running)

        return asyncio.run(all_of_them())

    def get(self, path: str) -> httpx.Response:
        self.board.begun.set()
        return self.ask(("GET", path, None))[0]


@pytest.fixture
def weights() -> Iterator[Weights]:
    weights = Weights()
    yield weights
    weights.face.weights.close()


UPDATE, CLEAR = "/update_model_weight", "/clear_load_weight"


def test_legacy_routes_answer_200_when_done(weights: Weights) -> None:
    assert weights.get(UPDATE).status_code == 200
    assert weights.get(CLEAR).status_code == 200
    assert [call[0] for call in weights.board.calls] == ["update", "clear"]


def test_clearing_what_is_cleared_is_already_so(weights: Weights) -> None:
    weights.board.legacy_status = "CLEARED"
    assert weights.get(CLEAR).status_code == 200
    assert weights.board.calls == []


@pytest.mark.parametrize("word", ["CLEARING", "CLEARED"])
def test_legacy_routes_work_while_part_of_the_engine_sleeps(weights: Weights, word: str) -> None:
    """The word tells of the sleep then, and not of a command."""
    weights.board.legacy_status, weights.board.asleep = word, {Tag.WEIGHT: "dropped"}
    assert weights.get(CLEAR).status_code == 200
    assert weights.get(UPDATE).status_code == 200
    assert [call[0] for call in weights.board.calls] == ["clear", "update"]


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(UPDATE, UPDATE, 400), (CLEAR, CLEAR, 400), (UPDATE, CLEAR, 403), (CLEAR, UPDATE, 403)],
)
def test_a_second_transition_is_refused_while_one_runs(weights: Weights, first: str, second: str, code: int) -> None:
    weights.board.gate.clear()
    answers = weights.ask(("GET", first, None), ("GET", second, None))
    assert [answer.status_code for answer in answers] == [200, code]
    assert len(weights.board.calls) == 1


@pytest.mark.parametrize(
    ("word", "path", "code"),
    [("UPDATING", UPDATE, 400), ("UPDATING", CLEAR, 403), ("CLEARING", CLEAR, 400), ("CLEARING", UPDATE, 403)],
)
def test_a_transition_that_someone_else_began_counts(weights: Weights, word: str, path: str, code: int) -> None:
    weights.board.legacy_status = word
    assert weights.get(path).status_code == code
    assert weights.board.calls == []


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(DeadlineExceededError("rank 1 did not vote"), 404), (CoverageError("missing: a; wrong shape: b"), 409)],
)
def test_legacy_update_that_fails_says_why(weights: Weights, outcome: FastDeployRLError, code: int) -> None:
    weights.board.outcome = outcome
    answer = weights.get(UPDATE)
    assert answer.status_code == code
    assert answer.json()["message"] == str(outcome)


def test_legacy_update_of_a_serving_engine_without_a_publication_is_already_so(weights: Weights) -> None:
    weights.board.outcome = NoPublicationError("nothing is published")
    assert weights.get(UPDATE).status_code == 200
    weights.board.legacy_status = "CLEARED"
    assert weights.get(UPDATE).status_code == 409


def test_update_returns_the_report(weights: Weights) -> None:
    (answer,) = weights.ask(("POST", "/v1/weights/update", {"version": "1.2", "deadline_s": 7}))
    assert (answer.json()["outcome"], answer.json()["version"]) == ("done", "1.2")
    assert weights.board.calls == [("update", "1.2", 7.0)]


def test_a_command_without_a_deadline_has_the_engines(weights: Weights) -> None:
    weights.app = make_app(weights.face, deadlines=Deadlines(update_s=70.0, clear_s=80.0, recompute_s=90.0))
    weights.board.begun.set()
    weights.ask(("POST", "/v1/weights/update", {}))
    weights.ask(("POST", "/v1/weights/clear", {}))
    weights.get("/v1/weights/receipt?recompute=true")
    assert weights.board.calls == [("update", None, 70.0), ("clear", 80.0), ("receipt", True, 90.0)]


@pytest.mark.parametrize(
    "body", [{"deadline_s": 0}, {"deadline_s": "x"}, {"deadline_s": 1e9}, {"version": 3}, {"what": 1}, []]
)
def test_bad_update_bodies_are_refused_before_the_board_is_asked(weights: Weights, body: Any) -> None:
    weights.board.begun.set()
    (answer,) = weights.ask(("POST", "/v1/weights/update", body))
    assert answer.status_code == 400
    assert weights.board.calls == []


def test_more_commands_than_threads_are_refused_and_status_is_still_read(weights: Weights) -> None:
    weights.board.gate.clear()
    commands = [("POST", "/v1/weights/update", {})] * MAX_COMMANDS

    async def flood() -> tuple[int, int]:
        transport = httpx.ASGITransport(app=weights.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            running = [asyncio.create_task(http.request(method, path, json=body)) for method, path, body in commands]
            while len(weights.board.calls) < MAX_COMMANDS:
                await asyncio.to_thread(weights.board.begun.wait, 1)
            surplus, status = await http.post("/v1/weights/update", json={}), await http.get("/v1/weights")
            weights.board.gate.set()
            await asyncio.gather(*running)
            return surplus.status_code, status.status_code

    assert asyncio.run(flood()) == (503, 200)


def test_a_command_whose_caller_went_away_still_counts_until_it_ends(weights: Weights) -> None:
    weights.board.gate.clear()
    service = weights.face.weights

    async def leave() -> tuple[int, int]:
        leaving = asyncio.create_task(service.update(None, deadline_s=20))
        await asyncio.to_thread(weights.board.begun.wait, 20)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        during = (await service.legacy_update()).code
        weights.board.gate.set()
        while service._running:
            await asyncio.sleep(0)
        return during, (await service.legacy_update()).code

    assert asyncio.run(asyncio.wait_for(leave(), 20)) == (400, 200)
    assert [call[0] for call in weights.board.calls] == ["update", "update"]


def test_metrics_tell_each_command_once(weights: Weights) -> None:
    weights.get(UPDATE)
    for _ in range(2):
        page = weights.get("/metrics").text
        assert 'fastdeploy_rl_updates_total{kind="update",outcome="done"} 1.0' in page
        assert 'fastdeploy_rl_weight_bytes_total{apply="aliased"} 5.0' in page
        assert 'fastdeploy_rl_step_seconds_count{step="install"} 1.0' in page


def test_last_report_is_there_once_a_command_was(weights: Weights) -> None:
    assert weights.get("/v1/weights/report").status_code == 400
    weights.get(CLEAR)
    assert weights.get("/v1/weights/report").json()["kind"] == "clear"


def test_receipt_flags(weights: Weights) -> None:
    assert weights.get("/v1/weights/receipt?recompute=true&deadline_s=3").json()["content_digest"] == "c0"
    assert weights.board.calls == [("receipt", True, 3.0)]
    assert weights.get("/v1/weights/receipt?recompute=maybe").status_code == 400
    assert weights.get("/v1/weights/receipt?deadline_s=soon").status_code == 400


class AppTransport(httpx.BaseTransport):
    """The synchronous client against the application."""

    def __init__(self, app: Any) -> None:
        self._transport = httpx.ASGITransport(app=app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def call() -> httpx.Response:
            answer = await self._transport.handle_async_request(
                httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            )
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return asyncio.run(call())


@pytest.fixture
def engine(weights: Weights) -> Iterator[HttpEngine]:
    engine = HttpEngine("http://engine", transport=AppTransport(weights.app))
    yield engine
    engine.close()


def test_a_rank_that_has_not_been_heard_yet_is_no_obstacle(engine: HttpEngine) -> None:
    assert [rank.heartbeat_age_s for rank in engine.status().ranks] == [0.1, None]


def test_client_gives_reports_status_and_receipts(weights: Weights, engine: HttpEngine) -> None:
    assert engine.update("1.2", deadline_s=5).version == "1.2"
    assert engine.update(WeightVersion(1, 1), deadline_s=5, force=True).version == "1.2"
    assert weights.board.calls == [("update", "1.2", 5.0), ("update", "1.1", 5.0, "force")]
    assert engine.clear(deadline_s=5).kind == "clear"
    assert engine.status().version == "1.1"
    assert engine.receipt(recompute=True, deadline_s=5) == RECEIPT
    assert [call[0] for call in weights.board.calls] == ["update", "update", "clear", "receipt"]


@pytest.mark.parametrize(
    "error",
    [
        CoverageError("missing: a"),
        ChecksumMismatchError("rank 1: w"),
        DeadlineExceededError("late"),
        NoPublicationError("none"),
    ],
)
def test_an_error_of_the_engine_arrives_as_the_same_class(
    weights: Weights, engine: HttpEngine, error: FastDeployRLError
) -> None:
    weights.board.outcome = error
    with pytest.raises(type(error), match=str(error)):
        engine.update(deadline_s=5)


def test_nobody_there_is_an_engine_not_found() -> None:
    engine = HttpEngine("http://127.0.0.1:1")
    with pytest.raises(EngineNotFoundError, match="no engine at"):
        engine.status()
    engine.close()


def test_something_that_is_no_engine_is_named() -> None:
    stranger = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    engine = HttpEngine("http://stranger", transport=stranger)
    with pytest.raises(EngineError, match="no answer of an engine"):
        engine.status()
    engine.close()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_base_url_of_openais_clients_names_the_same_engine(url: str) -> None:
    assert EngineUrl.parse(url) == EngineUrl("http://h:1")


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "8182x", "http://[::1", "http://h:99999", "http://h:x", "http://h:0", "http://h\0"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="URL"):
        HttpEngine(url)
