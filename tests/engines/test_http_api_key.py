"""The routes behind API keys: who gets through, what a refusal says, and that it changed nothing."""

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, ScriptedBoard, ScriptedEngine, make_face
from starlette.routing import Route

from fastdeploy_rl.control.api_key import OPEN_PATHS
from fastdeploy_rl.control.async_controller import AsyncEngineController
from fastdeploy_rl.control.client import AsyncHttpEngine, HttpEngine
from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.control.http_app import make_app
from fastdeploy_rl.control.text_client import TextClient
from fastdeploy_rl.errors import AuthenticationError, ConfigurationError, EngineError

KEY, OTHER_KEY = "sk-first-0123456789", "sk-second-9876543210"
COMPLETION = {"model": MODEL, "prompt": "France?", "max_tokens": 16}


class Guarded:
    """An application with two keys over a scripted board and engine."""

    def __init__(self) -> None:
        self.engine, self.board = ScriptedEngine(), ScriptedBoard()
        self.face = make_face(self.engine, self.board)
        self.app = make_app(self.face, [KEY, OTHER_KEY])
        self.transport = httpx.ASGITransport(app=self.app)

    def ask(self, method: str, path: str, headers: Any = (), **content: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with httpx.AsyncClient(transport=self.transport, base_url="http://engine") as http:
                return await http.request(method, path, headers=headers, **content)

        return asyncio.run(call())

    def routes(self) -> list[tuple[str, str]]:
        """Every method and path of the application, from its own table."""
        found = [route for route in self.app.routes if isinstance(route, Route) or hasattr(route, "methods")]
        return [(method, re.sub(r"{.*}", MODEL, route.path)) for route in found for method in sorted(route.methods)]

    def is_untouched(self) -> bool:
        return not self.board.calls and not self.engine.requests


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    for variable in ("FASTDEPLOY_RL_API_KEY", "FD_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    guarded = Guarded()
    yield guarded
    guarded.face.weights.close()


def bearer(key: str | bytes, scheme: bytes = b"Bearer ") -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", scheme + (key if isinstance(key, bytes) else key.encode()))]


def test_every_route_but_two_wants_a_key(guarded: Guarded) -> None:
    routes = guarded.routes()
    assert len(routes) >= 14
    for method, path in routes:
        answer = guarded.ask(method, path, content=b"{}" if method == "POST" else b"")
        assert (answer.status_code == 200) == (path in OPEN_PATHS), (method, path)
        assert answer.status_code in (200, 401)
    assert guarded.is_untouched()


@pytest.mark.parametrize("path", ["/nothing", "/health/", "/HEALTH", "/health%2f..%2fv1/weights"])
def test_what_only_looks_like_an_open_route_wants_a_key(guarded: Guarded, path: str) -> None:
    assert guarded.ask("GET", path).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        bearer(OTHER_KEY),
        bearer(KEY, b"bearer "),
        bearer(KEY, b"BEARER   "),
        [(b"authorization", b"Bearer " + KEY.encode())],
    ],
)
def test_a_known_key_opens_the_routes(guarded: Guarded, headers: Any) -> None:
    assert guarded.ask("GET", "/v1/weights", headers).status_code == 200
    assert guarded.ask("POST", "/v1/weights/update", headers, json={}).status_code == 200
    assert guarded.ask("GET", "/clear_load_weight", headers).status_code == 200
    assert guarded.ask("POST", "/v1/completions", headers, json=COMPLETION).status_code == 200


REFUSED = {
    "none": [],
    "wrong": bearer("sk-wrong"),
    "empty": bearer(""),
    "blanks": bearer("    "),
    "no scheme": bearer(KEY, b""),
    "another scheme": bearer(KEY, b"Basic "),
    "two schemes": bearer(KEY, b"Bearer Bearer "),
    "a tab": bearer(KEY, b"Bearer\t"),
    "a prefix": bearer(KEY[:-1]),
    "too much": bearer(KEY + "x"),
    "both keys": bearer(f"{KEY},{OTHER_KEY}"),
    "very long": bearer("x" * 60_000),
    "very long behind the key": bearer(KEY + " " + "x" * 60_000),
    "not ASCII": bearer("schl\u00fcssel-\u4e2d".encode()),
    "not UTF-8": bearer(b"\xff\xfe" + KEY.encode()),
    "twice": bearer(KEY) + bearer(KEY),
    "twice, one wrong": bearer("sk-wrong") + bearer(KEY),
    "another header": [(b"X-API-Key", KEY.encode())],
    "another case": bearer(KEY.upper()),
}


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
def test_without_a_known_key_nothing_happens(guarded: Guarded, headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for method, path in [
        ("GET", "/v1/weights"),
        ("POST", "/v1/weights/update"),
        ("POST", "/v1/weights/clear"),
        ("GET", "/clear_load_weight"),
        ("GET", "/update_model_weight"),
        ("POST", "/v1/completions"),
    ]:
        answer = guarded.ask(method, path, headers, content=b"" if method == "GET" else b"{}")
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer ")
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("AuthenticationError", "invalid_api_key")
        assert "FASTDEPLOY_RL_API_KEY" in error["message"]
        assert KEY not in answer.text
    assert guarded.is_untouched()
    assert KEY not in caplog.text
    assert "x" * 100 not in caplog.text


def test_a_key_in_the_query_is_none(guarded: Guarded) -> None:
    assert guarded.ask("GET", f"/v1/weights?api_key={KEY}&Authorization=Bearer%20{KEY}").status_code == 401


def test_without_keys_every_client_is_served() -> None:
    face = make_face(ScriptedEngine(), ScriptedBoard())

    async def ask() -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(face)), base_url="http://engine"
        ) as http:
            return (await http.get("/v1/weights", headers=bearer("any"))).status_code

    assert asyncio.run(ask()) == 200
    face.weights.close()


# --- clients ---------------------------------------------------------------------------------------------------------


class Sent:
    """A server that answers 401 to all and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[str | None] = []
        self.transport = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.shown.append(request.headers.get("Authorization"))
        return httpx.Response(401, json={"error": "Unauthorized"})  # FastDeploy's form of it


@pytest.fixture
def sent(guarded: Guarded) -> Sent:
    return Sent()


def all_calls(url: str, sent: Sent, **settings: Any) -> list[Any]:
    """What every client of a URL shows."""

    async def ask_async() -> None:
        async with AsyncHttpEngine(url, transport=sent.transport, **settings) as engine:
            with pytest.raises(AuthenticationError, match="FASTDEPLOY_RL_API_KEY"):
                await engine.update()

    with HttpEngine(url, transport=sent.transport, **settings) as engine:
        for call in (engine.update, engine.clear, engine.status, engine.receipt, engine.history):
            with pytest.raises(AuthenticationError, match="FASTDEPLOY_RL_API_KEY"):
                call()
    asyncio.run(ask_async())
    with TextClient(url, deadline_s=5, transport=sent.transport, **settings) as text:
        with pytest.raises(AuthenticationError):
            text.ask("/v1/completions", COMPLETION)
        with pytest.raises(AuthenticationError):
            list(text.stream("/v1/completions", COMPLETION))
        with pytest.raises(AuthenticationError):
            text.model()
    return sent.shown


def test_every_client_shows_the_key_it_was_given(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDEPLOY_RL_API_KEY", OTHER_KEY)
    assert set(all_calls("http://engine", sent, api_key=KEY)) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, None),
        ({"FASTDEPLOY_RL_API_KEY": KEY}, KEY),
        ({"FASTDEPLOY_RL_API_KEY": f" {KEY} , {OTHER_KEY}"}, KEY),
        ({"FD_API_KEY": KEY}, KEY),
        ({"FD_API_KEY": OTHER_KEY, "FASTDEPLOY_RL_API_KEY": KEY}, KEY),
        ({"FD_API_KEY": KEY, "FASTDEPLOY_RL_API_KEY": ""}, KEY),
    ],
)
def test_every_client_shows_the_environments_key_otherwise(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], shown: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert set(all_calls("http://engine", sent)) == {shown and f"Bearer {shown}"}


def test_an_empty_key_shows_none(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDEPLOY_RL_API_KEY", KEY)
    assert set(all_calls("http://engine", sent, api_key="")) == {None}


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schl\u00fcssel", "x" * 5000, "tab\t", "\x00"])
def test_what_can_be_no_key_is_refused_without_being_told(key: str, sent: Sent) -> None:
    for make in (
        lambda: HttpEngine("http://engine", api_key=key),
        lambda: AsyncHttpEngine("http://engine", api_key=key),
        lambda: TextClient("http://engine", deadline_s=5, api_key=key),
        lambda: EngineController("http://engine", api_key=key).__enter__(),
        lambda: asyncio.run(AsyncEngineController("http://engine", api_key=key).__aenter__()),
    ):
        with pytest.raises(ConfigurationError, match="api_key must be") as caught:
            make()
        assert key not in str(caught.value)


def test_a_redirect_takes_no_key_elsewhere(guarded: Guarded) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(307, headers={"Location": "http://elsewhere/v1/weights"}, json={})

    with (
        HttpEngine("http://engine", api_key=KEY, transport=httpx.MockTransport(answer)) as engine,
        pytest.raises(EngineError),
    ):
        engine.status()
    assert asked == ["engine"]
