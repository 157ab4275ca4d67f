"""What the routes read of a request, and how they answer it: bodies, query parameters, JSON, errors.

Owns the size of bodies, the time in which one must be there, and the form of errors. Refuses to know which routes there
are. Invariant: whatever cannot be read is a RequestError that says what and where; a 429 or 503 carries Retry-After.
"""

import asyncio
import logging
import time
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from fastdeploy_rl.control.openai_format import error_body
from fastdeploy_rl.control.openai_schema import MAX_BODY_BYTES
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    NotServingError,
    OverloadedError,
    RequestError,
)

_log = logging.getLogger(__name__)
RETRY_AFTER_S = 1
_RETRIED = (NotServingError.http_status, OverloadedError.http_status)


async def read_body(request: Request) -> bytes:
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


async def read_json(request: Request, kind: Any) -> Any:
    """The body as `kind`; an empty one as `{}`."""
    data = await read_body(request)
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not what this route takes: {error}") from error


def query_flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise RequestError(f"`{name}` must be true or false, got {text[:40]!r}")
    return text in ("true", "1")


def query_count(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise RequestError(f"`{name}` must be a whole number, got {text[:40]!r}")
    return int(text)


def query_seconds(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise RequestError(f"`{name}` must be a number of seconds, got {text[:40]!r}") from error


def json_answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def answer_error(request: Request, error: Exception) -> Response:
    """In OpenAI's form, with the code of the error's class."""
    status = error.http_status if isinstance(error, FastDeployRLError) else 500
    if status >= 500:
        _log.warning("path=%s status=%d error=%s reason=%s", request.url.path, status, type(error).__name__, error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRIED else {}
    return json_answer(error_body(error), status, headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the same form."""
    code, detail = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, str(error))
    return json_answer(error_body(RequestError(f"{request.method} {request.url.path}: {detail}")), code)
