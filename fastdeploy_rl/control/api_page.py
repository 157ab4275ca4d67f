"""The routes of an application and what is said about them: /openapi.json, and /docs as one page of plain HTML.

Owns the table of routes that both are made from: a route is added here, with its spec, or it does not exist. Refuses
to know what routes do. Invariant: the page needs nothing from anywhere else, no script among it, and whatever text is
in it is escaped.
"""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from fastdeploy_rl.control.api_key import OPEN_PATHS
from fastdeploy_rl.control.http_messages import json_answer
from fastdeploy_rl.control.openai_format import Json
from fastdeploy_rl.errors import RequestError

TITLE, VERSION = "fastdeploy_rl", "1"
Handler = Callable[..., Awaitable[Response]]
_REF = "#/components/schemas/"

CODES = {
    200: "done",
    400: "the request cannot be served as written",
    401: "the API key is missing or unknown",
    403: "the opposite transition is running",
    404: "there is no such thing here",
    409: "rejected with the reason; nothing changed",
    429: "full: come back later",
    500: "it failed, with the reason",
    503: "not serving, with the reason: come back later",
    504: "its deadline ran out",
}
COMMAND_CODES = (200, 400, 409, 500, 503, 504)
"""Of a command to all ranks."""

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em}"
    "h2{margin:2em 0 0;font-size:1.1em}pre{background:#f3f3f3;padding:.6em;overflow:auto}"
    "td,th{text-align:left;padding:0 1.5em 0 0;vertical-align:top}"
)
# No script, no picture, no other host: also a text that got past the escaping could do nothing.
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Query(NamedTuple):
    """A query parameter. `kind`: a type of JSON Schema."""

    name: str
    kind: str
    text: str


class RouteSpec(NamedTuple):
    """A route. `takes`, `gives`: types of the bodies, None where there is none or it is no JSON."""

    method: str
    path: str
    summary: str
    takes: Any = None
    gives: Any = None
    codes: tuple[int, ...] = (200,)
    query: tuple[Query, ...] = ()


OWN_ROUTES = "/v1/weights"
"""What begins so is ours alone: nobody sends a parameter there that another server knows."""


class ApiRoutes:
    """Adds routes to an application, and remembers what was said about them."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.specs: list[RouteSpec] = []

    def get(self, path: str, summary: str, **spec: Any) -> Callable[[Handler], Handler]:
        """Decorates the handler of GET `path`; `spec`: the other fields of a RouteSpec."""
        return self._add(RouteSpec("GET", path, summary, **spec))

    def post(self, path: str, summary: str, **spec: Any) -> Callable[[Handler], Handler]:
        return self._add(RouteSpec("POST", path, summary, **spec))

    def _add(self, spec: RouteSpec) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            checks = [Depends(_query_check(spec))] if spec.path.startswith(OWN_ROUTES) else []
            self._app.add_api_route(spec.path, handler, methods=[spec.method], name=spec.summary, dependencies=checks)
            self.specs.append(spec)
            return handler

        return add


def _query_check(spec: RouteSpec) -> Callable[[Request], None]:
    known = {query.name for query in spec.query}

    def check(request: Request) -> None:
        """What is said where nobody reads it must not be lost: a command would do more than was meant."""
        if unknown := sorted(request.query_params.keys() - known):
            hint = "; say it in the body, as JSON" if spec.takes is not None else ""
            raise RequestError(f"{spec.path} takes no query parameter `{unknown[0]:.40}`{hint}")

    return check


def add_page_routes(routes: ApiRoutes, *, wants_key: bool) -> None:
    """To be added last: they show all that were added before, and themselves."""

    @routes.get("/openapi.json", "the routes, as an OpenAPI document")
    async def openapi() -> Response:
        return json_answer(openapi_document(routes.specs, wants_key=wants_key))

    @routes.get("/docs", "the routes, as a page to read")
    async def docs() -> Response:
        page = html_page(openapi_document(routes.specs, wants_key=wants_key))
        return Response(page, headers=_HEADERS, media_type="text/html")


def openapi_document(routes: Sequence[RouteSpec], *, wants_key: bool) -> Json:
    """OpenAPI 3.1: paths, and the schemas of their bodies as msgspec knows them."""
    kinds = [kind for route in routes for kind in (route.takes, route.gives) if kind is not None]
    made, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    schemas = dict(zip(map(str, kinds), made, strict=True))
    paths: Json = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _operation(route, schemas, wants_key)
    document: Json = {"openapi": "3.1.0", "info": {"title": TITLE, "version": VERSION}, "paths": paths}
    parts: Json = {"schemas": components}
    if wants_key:
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document | {"components": parts}


def _path(route: RouteSpec) -> str:
    """Starlette's `{name:path}` is `{name}` there."""
    return route.path.replace(":path}", "}")


def _operation(route: RouteSpec, schemas: Json, wants_key: bool) -> Json:
    has_key = wants_key and route.path not in OPEN_PATHS
    codes = sorted({*route.codes, *([401] if has_key else [])})
    operation: Json = {
        "summary": route.summary,
        "responses": {str(code): {"description": CODES[code]} for code in codes},
    }
    if route.gives is not None:
        operation["responses"]["200"]["content"] = _content(schemas[str(route.gives)])
    if route.takes is not None:
        operation["requestBody"] = {"content": _content(schemas[str(route.takes)])}
    if parameters := [*_path_parameters(route), *map(_query_parameter, route.query)]:
        operation["parameters"] = parameters
    return operation | ({"security": [{"key": []}]} if has_key else {})


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _path_parameters(route: RouteSpec) -> Iterator[Json]:
    for part in _path(route).split("/"):
        if part.startswith("{"):
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameter(query: Query) -> Json:
    return {"name": query.name, "in": "query", "description": query.text, "schema": {"type": query.kind}}


def html_page(document: Json) -> str:
    """Every operation of the document with its parameters, bodies and codes; then the schemas."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(document['info']['title'])}</title>",
        f"<style>{_STYLE}</style><h1>{escape(document['info']['title'])}</h1>",
        "<p>The same as <a href=/openapi.json>/openapi.json</a>.</p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts += _operation_html(f"{method.upper()} {path}", operation)
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><pre>{escape(json.dumps(schema, indent=1))}</pre>')
    return "\n".join(parts)


def _operation_html(title: str, operation: Json) -> Iterator[str]:
    yield f"<h2><code>{escape(title)}</code></h2><p>{escape(operation['summary'])}</p>"
    yield "<table>"
    for parameter in operation.get("parameters", ()):
        about = f"{parameter['in']}, {parameter['schema']['type']}"
        text = parameter.get("description", "")
        yield _row(escape(f"{parameter['name']} ({about})"), escape(text))
    if "requestBody" in operation:
        yield _row("body", _schema_html(operation["requestBody"]["content"]))
    for code, response in operation["responses"].items():
        gives = f": {_schema_html(response['content'])}" if "content" in response else ""
        yield _row(escape(code), escape(response["description"]) + gives)
    yield "</table>"


def _row(name: str, cell: str) -> str:
    return f"<tr><th>{name}<td>{cell}"


def _schema_html(content: Json) -> str:
    schema = content["application/json"]["schema"]
    is_list = schema.get("type") == "array"
    reference = (schema["items"] if is_list else schema).get("$ref")
    if reference is None:
        return f"<code>{escape(json.dumps(schema))}</code>"
    name = escape(reference.removeprefix(_REF))
    return ("list of " if is_list else "") + f'<a href="#{name}">{name}</a>'
