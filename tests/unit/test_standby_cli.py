"""The verbs that pause an engine and put it to sleep, and what `status` and reports show of that."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs

from fastdeploy_rl.cli import main
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.control import controller
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, LifecycleError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.report import CommandKind, EngineStatus, RankReport, UpdateReport
from fastdeploy_rl.update.client_commands import BlockingCommands, ClientCommand

SERVING = EngineStatus(
    *(8182, "serving", "idle", "1.2", "c0", "NORMAL", True, "", 4, []),
    residency={"weight": "resident", "kv_cache": "resident", "graph": "resident"},
    live_since="2026-12-01T00:00:00.000Z",
    source="ipc",
    apply_mode="alias",
    newest_version="1.2",
)
RANK = RankReport(0, [], apply_mode="auto")


class Engine(BlockingCommands):
    """In the place of the one at the address."""

    def __init__(self) -> None:
        self.asked: list[ClientCommand] = []
        self.error: FastDeployRLError | None = None
        self.report = UpdateReport(3, "pause", "done", "1.2", "1.2", 0.0125, 0.0, [RANK, RANK])
        self.shown = SERVING

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        self.asked.append(command)
        if self.error is not None:
            raise self.error
        return structs.replace(self.report, kind=command.kind.name.lower())

    def status(self) -> EngineStatus:
        return self.shown


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    @contextmanager
    def opened(address: int | str, *, api_key: str | None) -> Iterator[Engine]:
        yield engine

    monkeypatch.setattr(controller, "EngineController", opened)
    return engine


def run(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    try:
        code = main(words.split())
    except SystemExit as left:
        code = int(left.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("pause", ClientCommand(CommandKind.PAUSE, 30, CommandOptions("abort"))),
        (
            "pause --mode wait --on-timeout abort --deadline 5",
            ClientCommand(CommandKind.PAUSE, 5, CommandOptions("wait", on_timeout="abort")),
        ),
        ("resume --deadline 4", ClientCommand(CommandKind.RESUME, 4)),
        ("sleep", ClientCommand(CommandKind.SLEEP, 30, CommandOptions("abort", tags=frozenset(Tag), level=1))),
        (
            "sleep --tags graph,weight --level 2 --mode keep",
            ClientCommand(
                CommandKind.SLEEP, 30, CommandOptions("keep", tags=frozenset({Tag.GRAPH, Tag.WEIGHT}), level=2)
            ),
        ),
        ("wake", ClientCommand(CommandKind.WAKE, 30, CommandOptions(tags=frozenset(Tag)))),
        (
            "wake --tags kv_cache --kv keep",
            ClientCommand(CommandKind.WAKE, 30, CommandOptions(kv="keep", tags=frozenset({Tag.KV_CACHE}))),
        ),
        (
            "update 1.2 --kv rebuild --in-flight abort",
            ClientCommand(CommandKind.UPDATE, 30, CommandOptions("abort", "rebuild"), "1.2"),
        ),
    ],
)
def test_each_verb_asks_for_what_it_says(
    engine: Engine, capsys: pytest.CaptureFixture[str], words: str, command: ClientCommand
) -> None:
    code, shown, complaint = run(capsys, words)
    assert (code, complaint) == (0, "")
    assert engine.asked == [command]
    assert shown.startswith(f"{command.kind.name.lower()} done: version 1.2")
    code, shown, _ = run(capsys, f"{words} --json")
    assert (code, json.loads(shown)["outcome"]) == (0, "done")


@pytest.mark.parametrize(
    "words",
    [
        "pause --mode drain",
        "pause --on-timeout wait",
        "sleep --tags weights",
        "sleep --tags weight,",
        "sleep --level 3",
        "wake --kv drop",
        "update --in-flight drop",
    ],
)
def test_words_that_are_none_are_wrong_usage(engine: Engine, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, shown, complaint = run(capsys, words)
    assert (code, shown) == (2, "")
    assert f"usage: fastdeploy-rl {words.split()[0]}" in complaint
    assert engine.asked == []


@pytest.mark.parametrize(
    ("words", "error", "code"),
    [
        ("pause --mode wait", DeadlineExceededError("2 requests had not ended; nothing changed"), 1),
        ("resume", LifecycleError("weight is asleep; wake it first"), 2),
    ],
)
def test_what_the_engine_refuses_is_one_line_and_its_exit_code(
    engine: Engine, capsys: pytest.CaptureFixture[str], words: str, error: FastDeployRLError, code: int
) -> None:
    engine.error = error
    assert run(capsys, words) == (code, "", f"fastdeploy-rl: error: {error}\n")


def lines(text: str) -> list[str]:
    """With single blanks."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_pause_is_shown_in_three_lines(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = run(capsys, "pause")
    assert lines(shown) == ["pause done: version 1.2", "seconds 0.013", "ranks 2"]


def test_a_wake_shows_what_it_brought_back(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    rank = RankReport(0, [], copied_bytes=5_000_000, kv="rebuilt", applied="copy", graphs_captured=3)
    ranks = [structs.replace(rank, applied_reason="an arena does not fit"), structs.replace(rank, rank=1)]
    engine.report = structs.replace(engine.report, version="1.3", ranks=ranks)
    _, shown, _ = run(capsys, "wake")
    assert lines(shown) == [
        "wake done: version 1.3 (was 1.2)",
        "seconds 0.013",
        "ranks 2",
        "copied 10.0 MB",
        "applied copy: an arena does not fit",
        "kv cache rebuilt",
        "graphs captured 6",
    ]


def status_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    code, shown, _ = run(capsys, "status")
    assert code == 0
    return lines(shown)


def test_status_tells_since_when_a_version_is_live_and_how_it_came(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = status_lines(capsys)
    assert shown[:3] == [
        "engine 8182: serving, version 1.2",
        "live since 2026-12-01T00:00:00.000Z, from ipc, by alias",
        "memory weight resident, kv_cache resident, graph resident",
    ]
    assert not [line for line in shown if line.startswith(("paused", "newest"))]


def test_status_tells_what_sleeps_and_that_it_is_paused(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {
        "admission": "paused",
        "version": "",
        "is_serving": False,
        "reason": "the engine is asleep",
        "residency": {"weight": "offloaded", "kv_cache": "resident", "graph": "dropped"},
        "asleep": ["weight"],
        "is_paused": True,
        "live_since": "",
        "apply_mode": "",
        "newest_version": "1.4",
    }
    engine.shown = structs.replace(SERVING, **changes)
    shown = status_lines(capsys)
    assert shown[:4] == [
        "engine 8182: paused, version none",
        "paused yes, until somebody resumes it",
        "newest version 1.4",
        "memory weight offloaded (asleep), kv_cache resident, graph dropped",
    ]
    assert not [line for line in shown if line.startswith("live since")]
