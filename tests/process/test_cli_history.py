"""`fastdeploy-rl history`: of a running engine, and of a file that one left behind."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_rl.board.board import HISTORY, Board
from fastdeploy_rl.cli import main
from fastdeploy_rl.report import HistoryEntry, RankReport, UpdateReport, history_entry
from fastdeploy_rl.update.history import append_history
from tests.process.numpy_engine import free_port


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


_REASON = "missing:\n  a \x1b[31m\n  b\n" + "c" * 300


def entries() -> list[HistoryEntry]:
    rank = RankReport(rank=0, steps=[], apply_mode="auto", aliased_bytes=2_500_000, copied_bytes=1_000_000)
    reports = [
        UpdateReport(1, "update", "done", "1.1", "0.0", 0.1234, 0.0021, [rank]),
        UpdateReport(2, "update", "rejected", "1.2", "1.1", 1.5, 0.0, [], "CoverageError", _REASON),
        UpdateReport(3, "clear", "done", "", "1.1", 0.01, 0.001, []),
    ]
    return [history_entry(report, 8182, 0.0) for report in reports]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(["history", *arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_running_engine_shows_its_commands_as_a_table(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--engine", f"{board.port}") == (0, "no command yet\n", "")
    for entry in entries():
        append_history(board.run_dir / HISTORY, entry)
    code, shown, _ = run(capsys, "--engine", f"{board.port}")
    assert code == 0
    header, *rows = shown.splitlines()
    assert header.split() == [
        "when",
        "command",
        "kind",
        "outcome",
        "version",
        "seconds",
        "stall",
        "aliased",
        "copied",
        "reason",
    ]
    assert rows[0].split() == [
        "1970-01-01T00:00:00.000Z",
        "1",
        "update",
        "done",
        "0.0",
        "->",
        "1.1",
        "0.123",
        "2.1",
        "ms",
        "2.5",
        "MB",
        "1.0",
        "MB",
    ]
    assert "rejected" in rows[1]
    assert "missing: a  [31m; b; ccc" in rows[1]
    assert rows[1].endswith("c ...")
    assert "1.1 -> none" in rows[2]
    assert "\x1b" not in shown
    columns = {row.index(word) for row, word in zip(rows, ["done", "rejected", "done"], strict=True)}
    assert columns == {header.index("outcome")}


def test_a_file_is_read_without_an_engine_and_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    for entry in entries():
        append_history(path, entry)
    code, shown, _ = run(capsys, "--file", str(path), "--limit", "2", "--json")
    assert code == 0
    assert [entry["command"] for entry in json.loads(shown)] == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "/nowhere/history.jsonl"], "no history file /nowhere/history.jsonl"),
        (["--file", "/dev/null"], "no regular file"),
        (["--file", "/"], "cannot be read"),
        (["--engine", "1"], "no engine at port 1"),
        (["--limit", "0"], "positive whole number"),
        (["--limit", "10001"], "limit must be 1 to 10000"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_code_2(
    board: Board, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    place = [] if "--engine" in arguments else ["--engine", f"{board.port}"]
    code, shown, complaint = run(capsys, *arguments, *place)
    assert (code, shown) == (2, "")
    assert words in complaint


def test_a_pause_has_one_version_and_a_sleep_that_drops_it_two(
    board: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, (kind, outcome, before, after) in enumerate(
        [
            ("pause", "done", "1.1", "1.1"),
            ("resume", "rejected", "1.1", ""),
            ("sleep", "done", "1.1", ""),
            ("wake", "done", "", "1.2"),
        ]
    ):
        report = UpdateReport(command, kind, outcome, after, before, 0.1, 0.0, [])
        append_history(board.run_dir / HISTORY, history_entry(report, 8182, 0.0))
    _, shown, _ = run(capsys, "--engine", f"{board.port}")
    words = [
        row.split("done" if "done" in row else "rejected")[1].split("0.100")[0].strip()
        for row in shown.splitlines()[1:]
    ]
    assert words == ["1.1", "1.1", "1.1 -> none", "none -> 1.2"]
