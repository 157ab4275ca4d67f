"""FastDeploy's V1 control routes, with FastDeploy's bodies, answers and codes.

Owns FastDeploy's forms (its api_server.py, request.py and common_engine.py, 2.6): ControlResponse with 200 or 500, and
400 for a value of a wrong type. Refuses to know what a command does. Where FastDeploy leaves an engine in a state that
cannot serve, this refuses or waits instead: nothing is served before all tags are awake, whoever resumes it.

    POST /v1/pause                   ends requests in flight; {"mode"?, "on_timeout"?, "deadline_s"?} beyond FastDeploy
    POST /v1/resume
    GET  /v1/is_paused               {"is_paused": bool}: paused, or something sleeps
    POST /v1/sleep                   {"tags"?}: also as query; {"level"?, "mode"?, "on_timeout"?, "deadline_s"?} beyond
    POST /v1/wakeup                  {"tags"?}: also as query; {"deadline_s"?} beyond
    POST /v1/update_weights          {"version"?, "verify_checksum"?}, while it is paused; {"deadline_s"?} beyond
"""

import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from fastdeploy_rl.config import ABORT, OFFLOAD_LEVEL, REFUSE, Deadlines, checked_deadline
from fastdeploy_rl.control.api_page import ApiRoutes, Query
from fastdeploy_rl.control.http_messages import json_answer, read_body
from fastdeploy_rl.control.weight_routes import (
    InFlightWord,
    OnTimeoutWord,
    PauseBody,
    SleepLevel,
    TagWords,
    deadline_or,
)
from fastdeploy_rl.control.weights_service import WeightsService
from fastdeploy_rl.errors import (
    ConfigurationError,
    FastDeployRLError,
    LifecycleError,
    NoPublicationError,
    PeerLostError,
    RequestError,
    VersionRegressError,
)
from fastdeploy_rl.lifecycle import Residency, Tag, UpdateEvent
from fastdeploy_rl.report import EngineStatus, RankReport

_log = logging.getLogger(__name__)
CONTROL_CODES = (200, 400, 500)
SLEEP_TAGS = (Tag.WEIGHT.value, Tag.KV_CACHE.value)
"""FastDeploy's; its graphs go and come with them, as here. A caller may name `graph` too."""
_MEANT = {
    "version": "a string",
    "verify_checksum": "a boolean",
    "tags": "a list of strings, or one with commas",
    "level": "an integer",
    "deadline_s": "a number",
}

_BodyT = TypeVar("_BodyT")


class ControlResponse(msgspec.Struct, frozen=True):
    """FastDeploy's, of every control route; `error_message` is "Success" where there was none."""

    request_id: str
    status: str
    error_message: str
    result: Any = None


class V1Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No field."""


class V1SleepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No tags: weight and kv_cache. No level: weights stay in host memory, and what was published meanwhile comes in
    their place at the wakeup."""

    tags: TagWords = None
    level: SleepLevel = OFFLOAD_LEVEL
    mode: InFlightWord = ABORT
    on_timeout: OnTimeoutWord = REFUSE
    deadline_s: float | None = None


class V1WakeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No tags: all that sleeps."""

    tags: TagWords = None
    deadline_s: float | None = None


class V1UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No version means the newest. Bytes are checked whether `verify_checksum` is true or not, unless the engine's
    checksums are off: then true is an error."""

    version: str | None = None
    verify_checksum: bool | None = None
    deadline_s: float | None = None


def add_v1_routes(routes: ApiRoutes, weights: WeightsService, deadlines: Deadlines) -> None:
    commands = V1Commands(weights, deadlines)
    spec: dict[str, Any] = {"gives": ControlResponse, "codes": CONTROL_CODES}
    tags = (Query("tags", "string", "weight,kv_cache: as in the body, where there is none"),)

    @routes.post("/v1/pause", "FastDeploy's: ends requests in flight, takes no more", takes=PauseBody, **spec)
    async def pause(request: Request) -> Response:
        return await _control("pause", request, PauseBody, commands.pause)

    @routes.post("/v1/resume", "FastDeploy's: takes requests again", takes=V1Nothing, **spec)
    async def resume(request: Request) -> Response:
        return await _control("resume", request, V1Nothing, commands.resume)

    @routes.get("/v1/is_paused", "FastDeploy's: whether it is paused, or something sleeps", **spec)
    async def is_paused(request: Request) -> Response:
        return await _control("is_paused", request, V1Nothing, commands.is_paused)

    @routes.post("/v1/sleep", "FastDeploy's: frees memory", takes=V1SleepBody, query=tags, **spec)
    async def sleep(request: Request) -> Response:
        return await _control("sleep", request, V1SleepBody, commands.sleep)

    @routes.post("/v1/wakeup", "FastDeploy's: brings memory back, and resumes", takes=V1WakeBody, query=tags, **spec)
    async def wakeup(request: Request) -> Response:
        return await _control("wakeup", request, V1WakeBody, commands.wakeup)

    @routes.post("/v1/update_weights", "FastDeploy's: another version", takes=V1UpdateBody, **spec)
    async def update_weights(request: Request) -> Response:
        return await _control("update_weights", request, V1UpdateBody, commands.update_weights)


class V1Commands:
    """What each route does; returns FastDeploy's `result`."""

    def __init__(self, weights: WeightsService, deadlines: Deadlines) -> None:
        self._weights = weights
        self._deadlines = deadlines

    async def pause(self, body: PauseBody) -> None:
        deadline_s = deadline_or(body.deadline_s, self._deadlines.pause_s)
        await self._weights.pause(body.mode, on_timeout=body.on_timeout, deadline_s=deadline_s)

    async def resume(self, body: V1Nothing) -> None:
        await self._weights.resume(deadline_s=self._deadlines.pause_s)

    async def is_paused(self, body: V1Nothing) -> dict[str, bool]:
        return {"is_paused": _is_paused(await self._weights.status())}

    async def sleep(self, body: V1SleepBody) -> list[None]:
        status = await self._weights.status()
        await self._weights.sleep(
            list(SLEEP_TAGS) if body.tags is None else _named(body.tags),
            level=body.level,
            mode=body.mode,
            on_timeout=body.on_timeout,
            deadline_s=deadline_or(body.deadline_s, self._deadlines.pause_s),
        )
        return [None] * len(status.ranks)

    async def wakeup(self, body: V1WakeBody) -> list[None]:
        tags = None if body.tags is None else _named(body.tags)
        deadline_s = checked_deadline(deadline_or(body.deadline_s, self._deadlines.update_s))
        begun = time.monotonic()
        status = await self._weights.status()
        if (tags is None or Tag.WEIGHT.value in tags) and status.residency.get(
            Tag.WEIGHT.value
        ) == Residency.OFFLOADED.value:
            # FastDeploy reloads from its source: what was published since is meant. Where nothing newer is to be had,
            # as where the trainer is gone, it is what slept.
            with contextlib.suppress(NoPublicationError, VersionRegressError, PeerLostError):
                await self._weights.update(deadline_s=deadline_s)
        await self._weights.wake(tags, deadline_s=max(0.001, deadline_s - (time.monotonic() - begun)))
        return [None] * len(status.ranks)

    async def update_weights(self, body: V1UpdateBody) -> list[dict[str, object]]:
        if body.verify_checksum and not self._weights.has_checksums:
            raise ConfigurationError("verify_checksum needs checksums, and this engine's are off (--no-checksums)")
        status = await self._weights.status()
        if not _is_paused(status):
            raise LifecycleError("Pause LLM Engine first before calling updating weights")
        deadline_s = deadline_or(body.deadline_s, self._deadlines.update_s)
        report = await self._weights.update(body.version, deadline_s=deadline_s)
        told = {rank.rank: rank for rank in report.ranks}
        return [_costs(told.get(rank.rank), rank.rank, report.version) for rank in status.ranks]


def _is_paused(status: EngineStatus) -> bool:
    """FastDeploy's sleep is a pause too."""
    return status.is_paused or bool(status.asleep)


def _named(tags: Sequence[str] | str) -> list[str]:
    """ConfigurationError with FastDeploy's message for a tag that is none, an empty text among them."""
    named = tags.split(",") if isinstance(tags, str) else list(tags)
    allowed = [tag.value for tag in Tag]
    for tag in named or [""]:
        if tag.strip() not in allowed:
            raise ConfigurationError(f"Unsupported tag [{tag:.40}], expected one of {allowed}")
    return [tag.strip() for tag in named]


def _costs(report: RankReport | None, rank: int, version: str) -> dict[str, object]:
    """FastDeploy's result of one rank, seconds; zeros where there was nothing to do."""
    steps = report.steps if report is not None else []
    total = sum((step.seconds for step in steps), 0.0)
    sync = sum((step.seconds for step in steps if step.step == UpdateEvent.STAGE.value), 0.0)
    return {"sync_cost": sync, "update_cost": total - sync, "total_cost": total, "version": version, "rank": rank}


# --- FastDeploy's forms ----------------------------------------------------------------------------


async def _control(
    method: str, request: Request, kind: type[_BodyT], act: Callable[[_BodyT], Awaitable[Any]]
) -> Response:
    request_id = f"control-{uuid.uuid4()}"
    try:
        body = _decode(await read_body(request), request, kind)
    except msgspec.ValidationError as error:
        return json_answer({"error": "Invalid parameter type", "message": _wrong_type(str(error))}, 400)
    except FastDeployRLError as error:
        return _failure(method, request_id, error)
    try:
        result = await act(body)
    except FastDeployRLError as error:
        return _failure(method, request_id, error)
    return json_answer(ControlResponse(request_id, "success", "Success", result))


def _failure(method: str, request_id: str, error: FastDeployRLError) -> Response:
    _log.warning("control=%s request=%s error=%s reason=%s", method, request_id, type(error).__name__, error)
    message = f"Failed to run control method {method}: {request_id} {error}"
    return json_answer(ControlResponse(request_id, "error", message), 500)


def _decode(data: bytes, request: Request, kind: type[_BodyT]) -> _BodyT:
    """The body, or the query where there is none. msgspec.ValidationError for a value of a wrong type, RequestError for
    a field that is none and for what is no JSON."""
    try:
        if data:
            return msgspec.json.decode(data, type=kind)
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `([^`]*)`", str(error))
        if unknown is None:
            raise
        raise RequestError(f"got an unexpected argument {unknown.group(1)!r:.80}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error


def _wrong_type(reason: str) -> str:
    """msgspec says `Expected `str | null`, got `int` - at `$.version``."""
    place = re.search(r"at `\$\.([a-z_]+)", reason)
    name = place.group(1) if place else ""
    return f"{name} must be {_MEANT[name]}" if name in _MEANT else reason
