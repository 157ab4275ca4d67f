"""The routes of the weights: status, proofs and commands, and FastDeploy's two legacy routes.

Owns their bodies. Refuses to know what a command does and how it gets to the ranks. Invariant: a command whose words
cannot be is refused before anybody is told of it.

    GET  /v1/weights                 status and live version
    GET  /v1/weights/report          of the last command, also where the status word asked for it
    GET  /v1/weights/history         how the last commands ended, newest last; ?limit=N
    GET  /v1/weights/receipt         the proof; ?recompute=true reads live memory again
    POST /v1/weights/update          {"version"?, "deadline_s"?, "force"?, "kv"?, "in_flight"?} -> report
    POST /v1/weights/clear           {"deadline_s"?} -> report
    POST /v1/weights/pause           {"mode"?, "on_timeout"?, "deadline_s"?} -> report
    POST /v1/weights/resume          {"deadline_s"?} -> report
    POST /v1/weights/sleep           {"tags"?, "level"?, "mode"?, "on_timeout"?, "deadline_s"?} -> report
    POST /v1/weights/wake            {"tags"?, "kv"?, "deadline_s"?} -> report
    GET  /clear_load_weight          FastDeploy: 200, 400, 403, 404; 409 rejected
    GET  /update_model_weight        FastDeploy: 200, 400, 403, 404; 409 rejected
"""

from typing import Annotated, Any

import msgspec
from fastapi import Request, Response

from fastdeploy_rl.config import ABORT, IN_FLIGHT, KV_POLICIES, ON_TIMEOUT, REFUSE, SLEEP_LEVELS, Deadlines
from fastdeploy_rl.control.api_page import COMMAND_CODES, ApiRoutes, Query
from fastdeploy_rl.control.http_messages import json_answer, query_count, query_flag, query_seconds, read_json
from fastdeploy_rl.control.weights_service import LegacyAnswer, WeightsService
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.history import DEFAULT_LIMIT


def _one_of(words: tuple[Any, ...]) -> Any:
    """For the schema; whether a word is one of them is checked where all clients' words are."""
    return msgspec.Meta(extra_json_schema={"enum": list(words)})


KvWord = Annotated[str, _one_of(KV_POLICIES)]
InFlightWord = Annotated[str, _one_of(IN_FLIGHT)]
OnTimeoutWord = Annotated[str, _one_of(ON_TIMEOUT)]
SleepLevel = Annotated[int, _one_of(SLEEP_LEVELS)]
TagWords = list[Annotated[str, _one_of(tuple(tag.value for tag in Tag))]] | str | None


class UpdateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No version means the newest; no deadline the engine's; `force` allows a version that goes back."""

    version: str | None = None
    deadline_s: float | None = None
    force: bool = False
    kv: KvWord | None = None
    in_flight: InFlightWord | None = None


class DeadlineBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No deadline means the engine's own."""

    deadline_s: float | None = None


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`mode`: what becomes of requests in flight; `on_timeout`: what follows where `wait` takes too long."""

    mode: InFlightWord = ABORT
    on_timeout: OnTimeoutWord = REFUSE
    deadline_s: float | None = None


class SleepBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tags`: a list, or one text with commas; none means all. `level` 1 keeps weights in host memory, 2 drops them."""

    tags: TagWords = None
    level: SleepLevel = 1
    mode: InFlightWord = ABORT
    on_timeout: OnTimeoutWord = REFUSE
    deadline_s: float | None = None


class WakeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tags` as of a sleep; `kv` as of an update, for weights that were dropped."""

    tags: TagWords = None
    kv: KvWord | None = None
    deadline_s: float | None = None


class LegacyBody(msgspec.Struct, frozen=True):
    """What FastDeploy's two legacy routes answer; `code` is the status."""

    code: int
    message: str


def add_weight_routes(routes: ApiRoutes, weights: WeightsService, deadlines: Deadlines) -> None:
    _add_reading_routes(routes, weights, deadlines)
    _add_update_routes(routes, weights, deadlines)
    _add_standby_routes(routes, weights, deadlines)
    _add_legacy_routes(routes, weights)


def _add_reading_routes(routes: ApiRoutes, weights: WeightsService, deadlines: Deadlines) -> None:
    @routes.get("/v1/weights", "status of engine and ranks, and the live version", gives=EngineStatus)
    async def status() -> Response:
        return json_answer(await weights.status())

    @routes.get("/v1/weights/report", "of the last command", gives=UpdateReport, codes=(200, 400))
    async def report() -> Response:
        return json_answer(await weights.last_report())

    limit = Query("limit", "integer", f"how many, {DEFAULT_LIMIT} if silent")

    @routes.get(
        "/v1/weights/history",
        "how the last commands ended, newest last",
        gives=list[HistoryEntry],
        codes=(200, 400),
        query=(limit,),
    )
    async def history(request: Request) -> Response:
        return json_answer(await weights.history(query_count(request, "limit", DEFAULT_LIMIT)))

    recompute = Query("recompute", "boolean", "whether live memory is read again")
    within = Query("deadline_s", "number", "for that")

    @routes.get(
        "/v1/weights/receipt",
        "the proof of what is live",
        gives=Receipt,
        codes=COMMAND_CODES,
        query=(recompute, within),
    )
    async def receipt(request: Request) -> Response:
        deadline_s = query_seconds(request, "deadline_s", deadlines.recompute_s)
        return json_answer(await weights.receipt(recompute=query_flag(request, "recompute"), deadline_s=deadline_s))


def _add_update_routes(routes: ApiRoutes, weights: WeightsService, deadlines: Deadlines) -> None:
    command: dict[str, Any] = {"gives": UpdateReport, "codes": COMMAND_CODES}

    @routes.post("/v1/weights/update", "all ranks take a version over, or none", takes=UpdateBody, **command)
    async def update(request: Request) -> Response:
        body: UpdateBody = await read_json(request, UpdateBody)
        report = await weights.update(
            body.version,
            deadline_s=deadline_or(body.deadline_s, deadlines.update_s),
            force=body.force,
            kv=body.kv,
            in_flight=body.in_flight,
        )
        return json_answer(report)

    @routes.post("/v1/weights/clear", "frees weights and KV cache", takes=DeadlineBody, **command)
    async def clear(request: Request) -> Response:
        body: DeadlineBody = await read_json(request, DeadlineBody)
        return json_answer(await weights.clear(deadline_s=deadline_or(body.deadline_s, deadlines.clear_s)))


def _add_standby_routes(routes: ApiRoutes, weights: WeightsService, deadlines: Deadlines) -> None:
    command: dict[str, Any] = {"gives": UpdateReport, "codes": COMMAND_CODES}

    @routes.post("/v1/weights/pause", "closes admission, then every rank is quiet", takes=PauseBody, **command)
    async def pause(request: Request) -> Response:
        body: PauseBody = await read_json(request, PauseBody)
        deadline_s = deadline_or(body.deadline_s, deadlines.pause_s)
        return json_answer(await weights.pause(body.mode, on_timeout=body.on_timeout, deadline_s=deadline_s))

    @routes.post("/v1/weights/resume", "opens admission after a pause", takes=DeadlineBody, **command)
    async def resume(request: Request) -> Response:
        body: DeadlineBody = await read_json(request, DeadlineBody)
        return json_answer(await weights.resume(deadline_s=deadline_or(body.deadline_s, deadlines.pause_s)))

    @routes.post("/v1/weights/sleep", "gives memory back to the machine", takes=SleepBody, **command)
    async def sleep(request: Request) -> Response:
        body: SleepBody = await read_json(request, SleepBody)
        report = await weights.sleep(
            body.tags,
            level=body.level,
            mode=body.mode,
            on_timeout=body.on_timeout,
            deadline_s=deadline_or(body.deadline_s, deadlines.pause_s),
        )
        return json_answer(report)

    @routes.post("/v1/weights/wake", "brings back what sleeps", takes=WakeBody, **command)
    async def wake(request: Request) -> Response:
        body: WakeBody = await read_json(request, WakeBody)
        deadline_s = deadline_or(body.deadline_s, deadlines.update_s)
        return json_answer(await weights.wake(body.tags, deadline_s=deadline_s, kv=body.kv))


def deadline_or(asked: float | None, default: float) -> float:
    """What a body asked for, else the engine's own; checked where the command is."""
    return default if asked is None else asked


def _add_legacy_routes(routes: ApiRoutes, weights: WeightsService) -> None:
    codes = (200, 400, 403, 404, 409)

    @routes.get("/clear_load_weight", "FastDeploy's: frees weights and KV cache", gives=LegacyBody, codes=codes)
    async def clear_load_weight() -> Response:
        return _legacy(await weights.legacy_clear())

    @routes.get("/update_model_weight", "FastDeploy's: takes the newest version over", gives=LegacyBody, codes=codes)
    async def update_model_weight() -> Response:
        return _legacy(await weights.legacy_update())


def _legacy(answer: LegacyAnswer) -> Response:
    return json_answer(LegacyBody(answer.code, answer.message), answer.code)
