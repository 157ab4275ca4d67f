"""Pausing, sleeping and waking over HTTP: this engine's own routes, and FastDeploy's V1 routes in FastDeploy's form."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import ScriptedBoard, ScriptedEngine, make_face

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.client import HttpEngine
from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.errors import (
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    LifecycleError,
    NoPublicationError,
)


class Engine:
    """The application over a scripted board."""

    def __init__(self, *, has_checksums: bool = True, **deadlines: float) -> None:
        self.board = ScriptedBoard()
        self.face = make_face(ScriptedEngine(), self.board, has_checksums=has_checksums)
        self.app = make_app(self.face, deadlines=Deadlines(**deadlines))

    def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                return await http.request(method, path, **content)

        return asyncio.run(call())

    def control(self, name: str, **content: Any) -> dict[str, Any]:
        """A V1 route that does what it is asked."""
        answer = self.ask("GET" if name == "is_paused" else "POST", f"/v1/{name}", **content)
        body = answer.json()
        assert (answer.status_code, body["status"], body["error_message"]) == (200, "success", "Success"), body
        return body

    @property
    def is_paused(self) -> bool:
        return self.control("is_paused")["result"]["is_paused"]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.face.weights.close()


# --- own routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body", "call"),
    [
        ("pause", {}, ("pause", "abort", "refuse", 30.0)),
        ("pause", {"mode": "wait", "on_timeout": "abort", "deadline_s": 7}, ("pause", "wait", "abort", 7.0)),
        ("resume", {}, ("resume", 30.0)),
        ("sleep", {}, ("sleep", "weight,kv_cache,graph", 1, "abort", "refuse", 30.0)),
        ("sleep", {"tags": ["kv_cache"], "mode": "keep"}, ("sleep", "kv_cache", 1, "keep", "refuse", 30.0)),
        ("sleep", {"tags": "weight, graph", "level": 2}, ("sleep", "weight,graph", 2, "abort", "refuse", 30.0)),
        ("wake", {"tags": "weight", "kv": "keep", "deadline_s": 3}, ("wake", "weight", "keep", 3.0)),
        ("wake", {}, ("wake", "weight,kv_cache,graph", "", 30.0)),
        ("update", {"kv": "keep", "in_flight": "wait"}, ("update", None, 30.0, "kv keep", "wait")),
    ],
)
def test_each_command_reaches_the_board_and_answers_its_report(
    engine: Engine, route: str, body: Any, call: tuple[object, ...]
) -> None:
    answer = engine.ask("POST", f"/v1/weights/{route}", json=body)
    assert (answer.status_code, answer.json()["kind"], answer.json()["outcome"]) == (200, route, "done")
    assert engine.board.calls == [call]


def test_a_silent_command_has_the_engines_deadline() -> None:
    engine = Engine(pause_s=11.0, update_s=12.0)
    for route in ("pause", "resume", "sleep", "wake"):
        engine.ask("POST", f"/v1/weights/{route}")
    for route in ("pause", "resume", "sleep"):
        engine.control(route)
    assert [call[-1] for call in engine.board.calls] == [11.0, 11.0, 11.0, 12.0, 11.0, 11.0, 11.0]
    engine.face.weights.close()


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("pause", {"mode": "halt"}, "mode must be one of abort, wait, keep"),
        ("pause", {"on_timeout": "wait"}, "on_timeout must be"),
        ("pause", {"level": 1}, "unknown field `level`"),
        ("sleep", {"tags": "weights"}, "tags are weight, kv_cache, graph"),
        ("sleep", {"tags": [1]}, "tags"),
        ("sleep", {"level": 3}, "level must be"),
        ("sleep", {"level": True}, "level"),
        ("wake", {"kv": "drop"}, "kv must be"),
        ("wake", {"deadline_s": 0}, "deadline_s must be"),
        ("update", {"in_flight": "stop"}, "in_flight must be"),
        ("resume", {"mode": "abort"}, "unknown field `mode`"),
    ],
)
def test_words_that_are_none_are_refused_before_the_board_is_asked(
    engine: Engine, route: str, body: Any, words: str
) -> None:
    answer = engine.ask("POST", f"/v1/weights/{route}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert engine.board.calls == []


def test_while_paused_or_asleep_health_and_requests_say_so_and_the_card_tells_where_memory_is(engine: Engine) -> None:
    for command, reason in (("pause", "it is paused"), ("sleep", "weight, kv_cache, graph asleep")):
        engine.ask("POST", f"/v1/weights/{command}", json={})
        for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
            answer = engine.ask(method, path, json={"prompt": "hi"} if method == "POST" else None)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, reason)
            assert int(answer.headers["Retry-After"]) >= 1
        engine.ask("POST", "/v1/weights/resume", json={})
    (card,) = engine.ask("GET", "/v1/models").json()["data"]
    status = engine.ask("GET", "/v1/weights").json()
    assert card["residency"] == {"weight": "offloaded", "kv_cache": "dropped", "graph": "dropped"}
    shown = ("residency", "asleep", "is_paused", "live_since", "source", "apply_mode", "receipt_digest")
    assert {name: card[name] for name in shown} == {name: status[name] for name in shown}
    assert (card["weight_version"], card["newest_version"], card["source"]) == ("1.1", "1.1", "ipc")
    engine.ask("POST", "/v1/weights/wake", json={})
    assert engine.ask("GET", "/health").status_code == 200


class AppTransport(httpx.BaseTransport):
    """The synchronous client against the application."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path, content = str(request.url), request.read()
        answer = self._engine.ask(request.method, path, headers=request.headers, content=content)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


def test_the_client_speaks_these_routes(engine: Engine) -> None:
    with HttpEngine("http://engine", transport=AppTransport(engine)) as client:
        client.pause("wait", on_timeout="abort", deadline_s=4)
        assert client.is_paused()
        client.sleep(["weight"], level=2, deadline_s=5)
        client.wake("weight", kv="keep", deadline_s=6)
        assert not client.is_paused()
        client.update("1.2", deadline_s=7, in_flight="abort")
    assert engine.board.calls == [
        ("pause", "wait", "abort", 4.0),
        ("sleep", "weight", 2, "abort", "refuse", 5.0),
        ("wake", "weight", "keep", 6.0),
        ("update", "1.2", 7.0, "abort"),
    ]


# --- FastDeploy's ----------------------------------------------------------------------------------


def test_a_control_answer_has_fastdeploys_four_fields(engine: Engine) -> None:
    for name in ("pause", "resume"):
        body = engine.control(name)
        assert set(body) == {"request_id", "status", "error_message", "result"}
        assert re.fullmatch("control-[0-9a-f-]{36}", body["request_id"])
        assert body["result"] is None


def test_a_sleep_is_a_pause_and_a_wakeup_of_everything_resumes(engine: Engine) -> None:
    assert not engine.is_paused
    engine.control("pause")
    assert engine.is_paused
    assert engine.control("sleep")["result"] == [None, None]
    assert engine.control("wakeup", params={"tags": "weight"})["result"] == [None, None]
    assert engine.is_paused
    assert engine.ask("GET", "/health").status_code == 503
    engine.control("wakeup", params={"tags": "kv_cache"})
    assert not engine.is_paused
    assert engine.ask("GET", "/health").status_code == 200


@pytest.mark.parametrize(
    ("content", "tags"),
    [
        ({}, "weight,kv_cache"),
        ({"json": {}}, "weight,kv_cache"),
        ({"json": {"tags": None}}, "weight,kv_cache"),
        ({"params": {"tags": "weight,kv_cache"}}, "weight,kv_cache"),
        ({"params": {"tags": "kv_cache"}}, "kv_cache"),
        ({"json": {"tags": "weight,graph"}}, "weight,graph"),
        ({"json": {"tags": ["kv_cache", "weight"]}}, "weight,kv_cache"),
        ({"json": {"tags": "weight"}, "params": {"tags": "kv_cache"}}, "weight"),
    ],
)
def test_tags_come_as_list_or_text_in_body_or_query(engine: Engine, content: Any, tags: str) -> None:
    engine.control("sleep", **content)
    assert engine.board.calls == [("sleep", tags, 1, "abort", "refuse", 30.0)]
    engine.control("wakeup", **content)
    silent = not content.get("params") and not content.get("json", {}).get("tags")
    assert engine.board.calls[-1][1] == ("weight,kv_cache,graph" if silent else tags)


def test_beyond_fastdeploy_a_pause_and_a_sleep_have_modes_and_a_sleep_its_level(engine: Engine) -> None:
    engine.control("pause", json={"mode": "wait", "on_timeout": "abort", "deadline_s": 9})
    engine.control("sleep", params={"level": "1", "mode": "keep", "tags": "weight"})
    assert engine.board.calls == [("pause", "wait", "abort", 9.0), ("sleep", "weight", 1, "keep", "refuse", 30.0)]


def test_a_checkpoint_stays_in_host_memory_and_the_wakeup_brings_what_was_published_since(engine: Engine) -> None:
    engine.board.source, engine.board.newest_version = "checkpoint", ""
    engine.control("sleep")
    assert engine.board.calls == [("sleep", "weight,kv_cache", 1, "abort", "refuse", 30.0)]
    engine.control("wakeup", json={"tags": "kv_cache"})
    engine.control("wakeup")
    assert [call[0] for call in engine.board.calls[1:]] == ["wake", "update", "wake"]
    assert not engine.is_paused


def test_a_checkpoint_in_host_memory_comes_back_where_nothing_was_published(engine: Engine) -> None:
    engine.board.source, engine.board.newest_version = "checkpoint", ""
    engine.control("sleep")
    engine.board.refused["update"] = NoPublicationError("nothing is published")
    engine.control("wakeup")
    assert [call[0] for call in engine.board.calls[1:]] == ["update", "wake"]
    assert not engine.is_paused


def test_a_publication_that_cannot_be_taken_over_wakes_nothing(engine: Engine) -> None:
    engine.board.source, engine.board.newest_version = "checkpoint", ""
    engine.control("sleep")
    engine.board.refused["update"] = CoverageError("missing: a")
    answer = engine.ask("POST", "/v1/wakeup")
    assert (answer.status_code, answer.json()["error_message"][-10:]) == (500, "missing: a")
    assert engine.is_paused
    assert [call[0] for call in engine.board.calls] == ["sleep", "update"]


def test_weights_that_were_dropped_come_with_the_wake_itself(engine: Engine) -> None:
    engine.control("sleep", json={"level": 2})
    engine.control("wakeup")
    assert [call[0] for call in engine.board.calls] == ["sleep", "wake"]


def test_weights_are_updated_only_while_it_is_paused(engine: Engine) -> None:
    refused = engine.ask("POST", "/v1/update_weights", json={"version": "1.2"})
    assert refused.status_code == 500
    assert refused.json()["error_message"].endswith("Pause LLM Engine first before calling updating weights")
    assert engine.board.calls == []
    engine.control("pause")
    result = engine.control("update_weights", json={"version": "1.2", "verify_checksum": True})["result"]
    assert engine.board.calls[1] == ("update", "1.2", 30.0)
    assert [rank["rank"] for rank in result] == [0, 1]
    assert result[0] == {"sync_cost": 0.0, "update_cost": 0.01, "total_cost": 0.01, "version": "1.2", "rank": 0}
    assert engine.is_paused
    engine.control("update_weights", json={"version": "", "verify_checksum": False})
    engine.control("update_weights")
    assert [call[1] for call in engine.board.calls[2:]] == [None, None]


def test_a_check_that_this_engine_cannot_make_is_an_error() -> None:
    engine = Engine(has_checksums=False)
    engine.control("pause")
    answer = engine.ask("POST", "/v1/update_weights", json={"verify_checksum": True})
    assert answer.status_code == 500
    assert "checksums" in answer.json()["error_message"]
    assert len(engine.board.calls) == 1
    engine.control("update_weights", json={"verify_checksum": False})
    engine.face.weights.close()


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("update_weights", {"version": 3}, "version must be a string"),
        ("update_weights", {"verify_checksum": "yes"}, "verify_checksum must be a boolean"),
        ("sleep", {"tags": 5}, "tags must be a list of strings, or one with commas"),
        ("sleep", {"tags": ["weight", 5]}, "tags must be a list of strings, or one with commas"),
        ("wakeup", [], "Expected `object`, got `array`"),
    ],
)
def test_a_value_of_a_wrong_type_is_fastdeploys_400(engine: Engine, route: str, body: Any, message: str) -> None:
    answer = engine.ask("POST", f"/v1/{route}", json=body)
    assert (answer.status_code, answer.json()) == (400, {"error": "Invalid parameter type", "message": message})
    assert engine.board.calls == []


@pytest.mark.parametrize(
    ("route", "content", "words"),
    [
        ("sleep", {"json": {"tags": "weights"}}, "Unsupported tag [weights]"),
        ("sleep", {"params": {"tags": ""}}, "Unsupported tag []"),
        ("wakeup", {"json": {"tags": []}}, "Unsupported tag []"),
        ("sleep", {"json": {"what": 1}}, "unexpected argument 'what'"),
        ("wakeup", {"params": {"level": "1"}}, "unexpected argument 'level'"),
        ("pause", {"json": {"clear_cache": True}}, "unexpected argument 'clear_cache'"),
        ("resume", {"json": {"deadline_s": 1}}, "unexpected argument 'deadline_s'"),
        ("update_weights", {"json": {"force": True}}, "unexpected argument 'force'"),
        ("pause", {"json": {"mode": "halt"}}, "mode must be one of"),
        ("sleep", {"json": {"level": 7}}, "level must be"),
        ("sleep", {"content": b"{"}, "not valid JSON"),
        ("wakeup", {"json": {"deadline_s": -1}}, "deadline_s must be"),
    ],
)
def test_what_no_route_knows_is_an_error_in_fastdeploys_form(
    engine: Engine, route: str, content: Any, words: str
) -> None:
    answer = engine.ask("POST", f"/v1/{route}", **content)
    body = answer.json()
    assert (answer.status_code, body["status"], body["result"]) == (500, "error", None)
    assert body["error_message"].startswith(f"Failed to run control method {route}: {body['request_id']} ")
    assert words in body["error_message"]
    assert engine.board.calls == []


@pytest.mark.parametrize(
    "error", [DeadlineExceededError("rank 1 is not quiet"), LifecycleError("weight sleeps"), ConfigurationError("no")]
)
def test_what_goes_wrong_in_a_command_is_fastdeploys_500(engine: Engine, error: Exception) -> None:
    engine.board.outcome = error
    answer = engine.ask("POST", "/v1/resume")
    assert (answer.status_code, answer.json()["status"]) == (500, "error")
    assert answer.json()["error_message"].endswith(str(error))
    assert not engine.is_paused


@pytest.mark.parametrize("command", ["pause", "sleep", "wake", "update", "clear", "resume"])
def test_what_is_said_in_the_query_of_our_own_routes_is_refused_and_not_overheard(engine: Engine, command: str) -> None:
    answer = engine.ask("POST", f"/v1/weights/{command}?mode=keep")
    assert (answer.status_code, engine.board.calls) == (400, [])
    assert "takes no query parameter `mode`; say it in the body" in answer.json()["error"]["message"]
