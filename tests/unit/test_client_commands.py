"""The commands of clients: what each method asks of an engine, over the board and over HTTP, and what it refuses."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import MAX_DEADLINE_S, Deadlines
from fastdeploy_rl.control.client import AsyncHttpEngine, HttpEngine, command_call
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.report import CommandKind, EngineStatus, UpdateReport
from fastdeploy_rl.update.client_commands import BlockingCommands, ClientCommand, waking_update_command
from fastdeploy_rl.version import WeightVersion

ALL = frozenset(Tag)
DONE = UpdateReport(3, "pause", "done", "1.2", "1.2", 0.01, 0.0, [])
PAUSED = EngineStatus(8182, "paused", "idle", "1.2", "c0", "NORMAL", False, "paused", 1, [], is_paused=True)

Call = Callable[[Any], Any]
CALLS: list[tuple[Call, ClientCommand, str, dict[str, Any]]] = [
    (
        lambda engine: engine.update(),
        ClientCommand(CommandKind.UPDATE, Deadlines.update_s),
        "update",
        {"deadline_s": 30.0, "force": False},
    ),
    (
        lambda engine: engine.update(WeightVersion(1, 2), deadline_s=5, force=True, kv="keep", in_flight="wait"),
        ClientCommand(CommandKind.UPDATE, 5, CommandOptions("wait", "keep"), "1.2", True),
        "update",
        {"deadline_s": 5, "version": "1.2", "force": True, "kv": "keep", "in_flight": "wait"},
    ),
    (
        lambda engine: engine.clear(deadline_s=6),
        ClientCommand(CommandKind.CLEAR, 6),
        "clear",
        {"deadline_s": 6},
    ),
    (
        lambda engine: engine.pause(),
        ClientCommand(CommandKind.PAUSE, Deadlines.pause_s, CommandOptions("abort")),
        "pause",
        {"deadline_s": 30.0, "mode": "abort", "on_timeout": "refuse"},
    ),
    (
        lambda engine: engine.pause("wait", on_timeout="abort", deadline_s=7),
        ClientCommand(CommandKind.PAUSE, 7, CommandOptions("wait", on_timeout="abort")),
        "pause",
        {"deadline_s": 7, "mode": "wait", "on_timeout": "abort"},
    ),
    (
        lambda engine: engine.resume(deadline_s=8),
        ClientCommand(CommandKind.RESUME, 8),
        "resume",
        {"deadline_s": 8},
    ),
    (
        lambda engine: engine.sleep(),
        ClientCommand(CommandKind.SLEEP, Deadlines.pause_s, CommandOptions("abort", tags=ALL, level=1)),
        "sleep",
        {
            "deadline_s": 30.0,
            "tags": ["weight", "kv_cache", "graph"],
            "level": 1,
            "mode": "abort",
            "on_timeout": "refuse",
        },
    ),
    (
        lambda engine: engine.sleep("kv_cache, weight", level=2, mode="keep", deadline_s=9),
        ClientCommand(
            CommandKind.SLEEP, 9, CommandOptions("keep", tags=frozenset({Tag.WEIGHT, Tag.KV_CACHE}), level=2)
        ),
        "sleep",
        {"deadline_s": 9, "tags": ["weight", "kv_cache"], "level": 2, "mode": "keep", "on_timeout": "refuse"},
    ),
    (
        lambda engine: engine.wake(),
        ClientCommand(CommandKind.WAKE, Deadlines.update_s, CommandOptions(tags=ALL)),
        "wake",
        {"deadline_s": 30.0, "tags": ["weight", "kv_cache", "graph"]},
    ),
    (
        lambda engine: engine.wake(("graph",), deadline_s=4, kv="rebuild"),
        ClientCommand(CommandKind.WAKE, 4, CommandOptions(kv="rebuild", tags=frozenset({Tag.GRAPH}))),
        "wake",
        {"deadline_s": 4, "tags": ["graph"], "kv": "rebuild"},
    ),
]


class Recording(BlockingCommands):
    """An engine that does what it is asked, and keeps it."""

    def __init__(self) -> None:
        self.asked: list[ClientCommand] = []

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        self.asked.append(command)
        return DONE

    def status(self) -> EngineStatus:
        return PAUSED


@pytest.mark.parametrize(("call", "command"), [(call, command) for call, command, _, _ in CALLS])
def test_each_method_asks_for_what_its_arguments_say(call: Call, command: ClientCommand) -> None:
    engine = Recording()
    assert call(engine) == DONE
    assert engine.asked == [command]
    assert CommandOptions.decode(command.options.encode()) == command.options


class Answering:
    """Behind a URL: keeps paths and bodies, answers with a report, or with `error`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.error: dict[str, Any] | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, content=msgspec.json.encode(PAUSED))
        self.asked.append((request.url.path, json.loads(request.content)))
        if self.error is not None:
            return httpx.Response(503, json={"error": self.error})
        return httpx.Response(200, content=msgspec.json.encode(DONE))


@pytest.mark.parametrize(("call", "route", "body"), [(call, route, body) for call, _, route, body in CALLS])
def test_over_http_each_method_has_its_route_and_body(call: Call, route: str, body: dict[str, Any]) -> None:
    answering = Answering()

    async def awaited() -> tuple[UpdateReport, bool]:
        async with AsyncHttpEngine("http://engine", transport=httpx.MockTransport(answering)) as engine:
            return await call(engine), await engine.is_paused()

    with HttpEngine("http://engine", transport=httpx.MockTransport(answering)) as engine:
        assert (call(engine), engine.is_paused()) == (DONE, True)
    assert asyncio.run(awaited()) == (DONE, True)
    assert answering.asked == [(f"/v1/weights/{route}", body)] * 2


def test_a_pause_that_came_too_late_raises_what_the_engine_raised() -> None:
    answering = Answering()
    answering.error = {"type": "DeadlineExceededError", "message": "3 requests had not ended; nothing changed"}
    with (
        HttpEngine("http://engine", transport=httpx.MockTransport(answering)) as engine,
        pytest.raises(DeadlineExceededError, match="3 requests had not ended; nothing changed"),
    ):
        engine.pause("wait", deadline_s=1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda engine: engine.pause("drain"), "mode must be one of abort, wait, keep, got 'drain'"),
        (lambda engine: engine.sleep(mode=""), "mode must be one of"),
        (lambda engine: engine.pause(on_timeout="wait"), "on_timeout must be one of refuse, abort"),
        (lambda engine: engine.pause(deadline_s=0), "deadline_s must be"),
        (lambda engine: engine.resume(deadline_s=float("nan")), "deadline_s must be"),
        (lambda engine: engine.update(kv="drop"), "kv must be one of rebuild, keep, got 'drop'"),
        (lambda engine: engine.update(in_flight="no"), "in_flight must be one of"),
        (lambda engine: engine.sleep("weights"), "tags are weight, kv_cache, graph, got 'weights'"),
        (lambda engine: engine.sleep(["weight", 3]), "tags are weight, kv_cache, graph, got 3"),
        (lambda engine: engine.sleep(level=0), "level must be one of 1, 2, got 0"),
        (lambda engine: engine.sleep(level=3), "level must be one of 1, 2, got 3"),
        (lambda engine: engine.sleep(level=True), "level must be one of 1, 2, got True"),
        (lambda engine: engine.sleep(level=1.0), "level must be one of 1, 2, got 1.0"),
        (lambda engine: engine.wake("weight,"), "tags are"),
        (lambda engine: engine.wake(kv="none"), "kv must be one of"),
    ],
)
def test_a_word_that_is_none_is_refused_before_anything_is_asked(call: Call, words: str) -> None:
    engine = Recording()
    with pytest.raises(ConfigurationError) as refused:
        call(engine)
    assert words in str(refused.value)
    assert engine.asked == []


def test_where_requests_may_end_on_their_own_the_answer_may_come_after_the_deadline() -> None:
    def limit(command: ClientCommand) -> float:
        return command_call(command).limit_s

    waiting = ClientCommand(CommandKind.PAUSE, 10, CommandOptions("wait"))
    aborting = ClientCommand(CommandKind.PAUSE, 10, CommandOptions("abort"))
    assert limit(aborting) == 10 + Deadlines.http_s
    assert limit(waiting) == limit(aborting) + Deadlines.quiet_s
    longest = ClientCommand(CommandKind.PAUSE, MAX_DEADLINE_S, CommandOptions("wait"))
    assert limit(longest) > MAX_DEADLINE_S


def test_what_a_route_cannot_say_is_refused_and_not_forgotten() -> None:
    with pytest.raises(ConfigurationError, match="wake the other tags by name"):
        command_call(waking_update_command(1.0))
