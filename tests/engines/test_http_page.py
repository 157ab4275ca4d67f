"""/openapi.json and /docs: every route is there with its words, and nothing in the page comes from elsewhere."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import ScriptedBoard, ScriptedEngine, make_face
from fastapi.routing import APIRoute

from fastdeploy_rl.control.api_page import Query, RouteSpec, html_page, openapi_document
from fastdeploy_rl.control.http_app import make_app

HTTP_METHODS = {"get", "post"}


@pytest.fixture
def app() -> Iterator[Any]:
    face = make_face(ScriptedEngine(), ScriptedBoard())
    yield make_app(face)
    face.weights.close()


def get(app: Any, path: str, **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as http:
            return await http.get(path, headers=headers)

    return asyncio.run(call())


def operations(document: Any) -> dict[tuple[str, str], Any]:
    return {(method, path): words for path, each in document["paths"].items() for method, words in each.items()}


def test_both_list_every_route_of_the_application(app: Any) -> None:
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    known = {(method.lower(), route.path.replace(":path}", "}")) for route in routes for method in route.methods}
    assert set(operations(get(app, "/openapi.json").json())) == known
    assert len(known) > 25
    page = get(app, "/docs")
    assert page.headers["Content-Type"].startswith("text/html")
    assert [route for route in known if f"<code>{route[0].upper()} {route[1]}</code>" not in page.text] == []


def test_the_page_needs_nothing_from_elsewhere(app: Any) -> None:
    page = get(app, "/docs")
    assert "<script" not in page.text
    assert re.findall(r"(?:src|href)=[\"']?(?:https?:|//)", page.text) == []
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    targets = set(re.findall(r'href="#([^"]+)"', page.text))
    assert targets != set()
    assert [target for target in targets if f'id="{target}"' not in page.text] == []


def test_bodies_have_their_schema_with_the_words_that_may_be(app: Any) -> None:
    document = get(app, "/openapi.json").json()
    schemas = document["components"]["schemas"]
    sleep = operations(document)["post", "/v1/weights/sleep"]
    assert sleep["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/SleepBody"}
    fields = schemas["SleepBody"]["properties"]
    assert (fields["mode"]["enum"], fields["level"]["enum"]) == (["abort", "wait", "keep"], [1, 2])
    assert schemas["SleepBody"]["additionalProperties"] is False
    references = set(re.findall(r'"#/components/schemas/(\w+)"', get(app, "/openapi.json").text))
    assert references - set(schemas) == set()
    limit = operations(document)["get", "/v1/weights/history"]["parameters"]
    assert [(each["name"], each["in"], each["schema"]) for each in limit] == [("limit", "query", {"type": "integer"})]


def test_where_there_are_keys_both_want_one_and_say_which_routes_do() -> None:
    face = make_face(ScriptedEngine(), ScriptedBoard())
    app = make_app(face, ["sk-0123456789"])
    assert [get(app, path).status_code for path in ("/docs", "/openapi.json")] == [401, 401]
    document = get(app, "/openapi.json", Authorization="Bearer sk-0123456789").json()
    open_paths = {path for (_, path), words in operations(document).items() if "security" not in words}
    assert open_paths == {"/health", "/metrics"}
    face.weights.close()


def test_whatever_text_there_is_cannot_become_markup() -> None:
    bad = "<script>alert('&\"')</script>"
    route = RouteSpec("POST", f"/{bad}/{{{bad}}}", bad, takes=list[int], query=(Query(bad, bad, bad),))
    page = html_page(openapi_document([route], wants_key=True))
    assert "<script" not in page
    assert "alert('" not in page
    assert page.count("&lt;script&gt;") >= 5
