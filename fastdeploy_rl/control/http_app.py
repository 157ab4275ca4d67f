"""The HTTP face of an engine: OpenAI's routes, FastDeploy's control routes, and the weights.

Owns routes, status codes and the size of bodies. Refuses to know processes and boards: both come in behind Protocols.
Invariant: whatever fails answers in OpenAI's error form with the code of its class in errors.py; a 429 or 503 carries
Retry-After and the reason; what a client that went away asked for is cancelled at once, queued, streamed or whole;
where there are API keys, all but /health and /metrics answers 401 without one (api_key.py).

    GET  /health                     200 while it serves, else 503 with the reason
    GET  /v1/models                  the model and the live version
    GET  /v1/models/NAME             the same of one model; 404 for any other
    POST /v1/completions             OpenAI; streamed or whole
    POST /v1/chat/completions        OpenAI; streamed or whole
    GET  /metrics                    Prometheus
    GET  /clear_load_weight          FastDeploy: 200, 400, 403, 404; 409 rejected
    GET  /update_model_weight        FastDeploy: 200, 400, 403, 404; 409 rejected
    GET  /v1/weights                 status and live version
    GET  /v1/weights/report          of the last command, also where the status word asked for it
    GET  /v1/weights/history         how the last commands ended, newest last; ?limit=N
    GET  /v1/weights/receipt         the proof; ?recompute=true reads live memory again
    POST /v1/weights/update          {"version"?, "deadline_s"?, "force"?} -> report
    POST /v1/weights/clear           {"deadline_s"?} -> report
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.api_key import ApiKeyGuard
from fastdeploy_rl.control.completions import CompletionService, RunningCompletion
from fastdeploy_rl.control.metrics import CONTENT_TYPE, EngineMetrics
from fastdeploy_rl.control.openai_format import error_body
from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES, Body, parse_chat, parse_completion
from fastdeploy_rl.control.weights_service import LegacyAnswer, WeightsService
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    NotServingError,
    OverloadedError,
    RequestError,
)
from fastdeploy_rl.update.history import DEFAULT_LIMIT

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_RETRIED = (NotServingError.http_status, OverloadedError.http_status)


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/weights/update. No version means the newest; no deadline the engine's; `force` allows a version that
    goes back."""

    version: str | None = None
    deadline_s: float | None = None
    force: bool = False


class ClearBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/weights/clear."""

    deadline_s: float | None = None


@dataclass(frozen=True)
class EngineFace:
    """What the routes stand on."""

    completions: CompletionService
    weights: WeightsService
    metrics: EngineMetrics


def make_app(face: EngineFace, api_keys: Sequence[str] = (), deadlines: Deadlines | None = None) -> FastAPI:
    """The application; starts nothing and owns nothing of `face`. Without `api_keys` every client is served."""
    app = FastAPI(title="fastdeploy_rl", openapi_url=None, docs_url=None, redoc_url=None)
    deadlines = deadlines or Deadlines()
    app.state.deadlines = deadlines  # for `_read_body`, which has nothing but the request
    if api_keys:
        app.add_middleware(ApiKeyGuard, keys=api_keys)
    app.add_exception_handler(FastDeployRLError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_error)
    _add_engine_routes(app, face)
    _add_completion_routes(app, face)
    _add_weight_routes(app, face.weights, deadlines)
    _add_legacy_routes(app, face.weights)
    return app


def _add_engine_routes(app: FastAPI, face: EngineFace) -> None:
    @app.get("/health")
    async def health() -> Response:
        await face.weights.check_serving()
        face.completions.engine.check_admitting()
        return _json({"status": "serving"})

    started = int(time.time())

    async def model_card() -> dict[str, Any]:
        status = await face.weights.status()
        card = {"id": face.completions.model_name, "object": "model", "created": started, "owned_by": "fastdeploy_rl"}
        live = {"weight_version": status.version, "content_digest": status.content_digest}
        return card | live | {"max_model_len": face.completions.engine.max_model_len}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [await model_card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        face.completions.check_model(name)
        return _json(await model_card())

    @app.get("/metrics")
    async def metrics() -> Response:
        for report in await face.weights.new_reports():
            face.metrics.observe_report(report)
        page = face.metrics.render(await face.weights.status(), face.completions.engine.load)
        return Response(page, media_type=CONTENT_TYPE)


def _add_completion_routes(app: FastAPI, face: EngineFace) -> None:
    watches: set[asyncio.Task[None]] = set()  # the event loop itself does not keep a task alive

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _complete(face, watches, request, parse_completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _complete(face, watches, request, parse_chat)


async def _complete(
    face: EngineFace, watches: set["asyncio.Task[None]"], request: Request, parse: Callable[[bytes], Body]
) -> Response:
    body = parse(await _read_body(request))
    # In a thread: making tokens of megabytes of text takes seconds, in which nobody else would be answered.
    running = await asyncio.to_thread(face.completions.prepare, body)
    await face.weights.check_serving()
    running.start()
    watch = asyncio.create_task(_cancel_when_gone(request, running))
    watches.add(watch)
    watch.add_done_callback(watches.discard)
    if body.stream:
        return StreamingResponse(await running.stream(), media_type="text/event-stream")
    return _json(await running.whole())


async def _cancel_when_gone(request: Request, running: RunningCompletion) -> None:
    """Until the client hung up, or has its response: then there is nothing left to cancel."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.cancel()


def _add_weight_routes(app: FastAPI, weights: WeightsService, deadlines: Deadlines) -> None:
    @app.get("/v1/weights")
    async def status() -> Response:
        return _json(await weights.status())

    @app.get("/v1/weights/report")
    async def report() -> Response:
        return _json(await weights.last_report())

    @app.get("/v1/weights/history")
    async def history(request: Request) -> Response:
        return _json(await weights.history(_count(request, "limit", DEFAULT_LIMIT)))

    @app.get("/v1/weights/receipt")
    async def receipt(request: Request) -> Response:
        deadline_s = _seconds(request, "deadline_s", deadlines.recompute_s)
        return _json(await weights.receipt(recompute=_flag(request, "recompute"), deadline_s=deadline_s))

    @app.post("/v1/weights/update")
    async def update(request: Request) -> Response:
        body = _decode(await _read_body(request), UpdateBody)
        deadline_s = deadlines.update_s if body.deadline_s is None else body.deadline_s
        return _json(await weights.update(body.version, deadline_s=deadline_s, force=body.force))

    @app.post("/v1/weights/clear")
    async def clear(request: Request) -> Response:
        body = _decode(await _read_body(request), ClearBody)
        return _json(await weights.clear(deadline_s=deadlines.clear_s if body.deadline_s is None else body.deadline_s))


def _add_legacy_routes(app: FastAPI, weights: WeightsService) -> None:
    @app.get("/clear_load_weight")
    async def clear_load_weight() -> Response:
        return _legacy(await weights.legacy_clear())

    @app.get("/update_model_weight")
    async def update_model_weight() -> Response:
        return _legacy(await weights.legacy_update())


def _legacy(answer: LegacyAnswer) -> Response:
    return _json({"code": answer.code, "message": answer.message}, answer.code)


async def _answer_error(request: Request, error: Exception) -> Response:
    status = error.http_status if isinstance(error, FastDeployRLError) else 500
    if status >= 500:
        _log.warning("path=%s status=%d error=%s reason=%s", request.url.path, status, type(error).__name__, error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRIED else {}
    return _json(error_body(error), status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same form."""
    code, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    return _json(error_body(RequestError(f"{request.method} {request.url.path}: {detail}")), code)


async def _read_body(request: Request) -> bytes:
    """A client that stops in the middle of its request must not be waited for without an end."""
    begun = time.monotonic()
    try:
        return await asyncio.wait_for(_whole_body(request), request.app.state.deadlines.body_s)
    except asyncio.TimeoutError as error:  # builtin TimeoutError from Python 3.11 on
        raise DeadlineExceededError.waiting_for("whole request body", since_s=begun, hint="send it at once") from error


async def _whole_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the request body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the request body is not what this route takes: {error}") from error


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"`{name}` must be true or false, got {text[:40]!r}")
    return text in ("true", "1")


def _count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise RequestError(f"`{name}` must be a whole number, got {text[:40]!r}")
    return int(text)


def _seconds(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise RequestError(f"`{name}` must be a number of seconds, got {text[:40]!r}") from error


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
