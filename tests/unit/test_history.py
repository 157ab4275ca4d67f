"""The history file: bounded, rotated, and readable whatever a crash or a stranger left in it."""

import fcntl
import logging
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from fastdeploy_rl.errors import ConfigurationError, RequestError, StepFailedError
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import HistoryEntry, RankReport, StepReport, UpdateReport, history_entry
from fastdeploy_rl.update import history
from fastdeploy_rl.update.history import append_history, read_history


def entry(command: int, reason: str = ""):
    return history_entry(UpdateReport(command, "update", "done", "1.2", "1.1", 0.2, 0.1, [], reason=reason), 8182, 0.0)


def numbers(path: Path, limit: int = 1000) -> list[int]:
    return [found.command for found in read_history(path, limit)]


def test_an_entry_keeps_the_story_and_leaves_the_tensors_out() -> None:
    """Content digest, steps and counts of reasons stay; nothing in it grows with the model."""
    ranks = [
        RankReport(
            rank=rank,
            steps=[StepReport("stage", 0.1 + rank), StepReport("install", 0.01)],
            stall_seconds=0.02,
            apply_mode="auto",
            aliased_bytes=10,
            copied_bytes=4,
            not_aliased={"a": "dtype F32 -> BF16", f"b{rank}": "dtype F32 -> BF16", "c": "gathered"},
        )
        for rank in (0, 1)
    ]
    receipt = Receipt("1.2", "ipc", "c0ffee", {f"t{n}": "0" * 64 for n in range(1000)}, {})
    report = UpdateReport(7, "update", "done", "1.2", "1.1", 1.5, 0.02, ranks, receipt=receipt)
    found = history_entry(report, 8182, 1_700_000_000.5)
    assert found == msgspec.json.decode(msgspec.json.encode(found), type=type(found))
    assert (found.when, found.content_digest, found.num_ranks) == ("2023-11-14T22:13:20.500Z", "c0ffee", 2)
    assert found.steps == {"stage": 1.1, "install": 0.01}
    assert found.not_aliased == {"dtype F32 -> BF16": 3, "gathered": 1}
    assert (found.apply_mode, found.aliased_bytes, found.copied_bytes) == ("auto", 20, 8)
    assert len(msgspec.json.encode(found)) < 600


def test_an_entry_is_bounded_whatever_the_report_holds() -> None:
    reasons = {f"t{n}": f"gathered from {n} published regions" for n in range(5000)}
    report = UpdateReport(
        1, "update", "rejected", "", "", 0, 0, [RankReport(0, [], not_aliased=reasons)], reason="é" * 10**6
    )
    assert len(msgspec.json.encode(history_entry(report, 1, 0.0))) < 8192


def test_lines_come_back_in_order_and_the_last_ones_only(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert read_history(path) == []
    for command in range(1, 31):
        append_history(path, entry(command))
    assert numbers(path) == list(range(1, 31))
    assert numbers(path, 3) == [28, 29, 30]
    assert len(read_history(path)) == 20
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_rotated_by_size_and_has_one_predecessor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "history.jsonl"
    for command in range(1, 51):
        append_history(path, entry(command))
        assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["history.jsonl", "history.jsonl.1"]
    kept = numbers(path)
    assert kept == list(range(kept[0], 51))
    assert len(kept) > len(path.read_text().splitlines())


def test_engines_that_share_a_full_file_put_it_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have it open before either rotates; no line is lost."""
    path = tmp_path / "history.jsonl"
    for command in range(1, 6):
        append_history(path, entry(command))
    monkeypatch.setattr(history, "MAX_FILE_BYTES", path.stat().st_size)
    have_opened, lock, late = threading.Barrier(2, timeout=10), history._lock, threading.local()

    def lock_after_both_opened(fd: int, deadline: float) -> None:
        if not hasattr(late, "has_waited"):
            late.has_waited = True
            have_opened.wait()
        lock(fd, deadline)

    monkeypatch.setattr(history, "_lock", lock_after_both_opened)
    writers = [threading.Thread(target=append_history, args=(path, entry(command))) for command in (6, 7)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(20)
    assert sorted(numbers(path)) == list(range(1, 8))
    assert len(path.read_text().splitlines()) == 2


def test_a_file_that_is_put_aside_while_it_is_read_gives_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "history.jsonl", history._read_file
    append_history(path, entry(1))
    append_history(path, entry(2))

    def read_then_rotate(file: Path) -> list[HistoryEntry]:
        found = read(file)
        if not (tmp_path / "history.jsonl.1").exists():
            path.rename(tmp_path / "history.jsonl.1")
            append_history(path, entry(3))
        return found

    monkeypatch.setattr(history, "_read_file", read_then_rotate)
    assert numbers(path) == [1, 2, 3]


def test_a_file_that_another_keeps_locked_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_LOCK_S", 0.01)
    path = tmp_path / "history.jsonl"
    append_history(path, entry(1))
    with open(path) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StepFailedError, match="cannot be written: another process held its lock"):
            append_history(path, entry(2))
    assert numbers(path) == [1]
    append_history(path, entry(3))
    assert numbers(path) == [1, 3]


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.symlink_to(path)
    with pytest.raises(ConfigurationError, match="lead in a circle"):
        read_history(path)
    with pytest.raises(StepFailedError, match="lead in a circle"):
        append_history(path, entry(1))


def test_a_line_torn_by_a_crash_is_skipped_and_the_next_one_stands_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history.jsonl"
    append_history(path, entry(1))
    append_history(path, entry(2))
    path.write_bytes(path.read_bytes()[:-30])
    with caplog.at_level(logging.WARNING):
        assert numbers(path) == [1]
    assert "event=history_skipped" in caplog.text
    assert "lines=1" in caplog.text
    append_history(path, entry(3))
    assert numbers(path) == [1, 3]


@pytest.mark.parametrize(
    "noise", [b"\xff\xfe\x00\n", b"[" * 100_000 + b"\n", b'{"when": 3}\n', b"no json\n\n\n", b'{"a":' * 50_000 + b"\n"]
)
def test_foreign_lines_are_skipped(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "history.jsonl"
    append_history(path, entry(1))
    with open(path, "ab") as file:
        file.write(noise)
    append_history(path, entry(2))
    assert numbers(path) == [1, 2]


def test_of_an_oversized_file_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.jsonl"
    for command in range(1, 101):
        append_history(path, entry(command))
    monkeypatch.setattr(history, "MAX_FILE_BYTES", 1000)
    kept = numbers(path)
    assert kept == list(range(kept[0], 101))
    assert 1 < len(kept) < 10


@pytest.mark.parametrize("limit", [0, -1, 10_001, True, 2.5, "7"])
def test_an_impossible_limit_is_refused(tmp_path: Path, limit: object) -> None:
    with pytest.raises(RequestError, match="limit must be"):
        read_history(tmp_path / "history.jsonl", limit)  # type: ignore[arg-type]


@pytest.mark.timeout(20)
def test_a_pipe_in_the_files_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match="no regular file"):
        read_history(path)
    with pytest.raises(StepFailedError, match="cannot be written"):
        append_history(path, entry(1))


def test_a_directory_in_the_files_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_history(tmp_path)
    with pytest.raises(StepFailedError, match="cannot be written"):
        append_history(tmp_path / "missing" / "history.jsonl", entry(1))


def test_a_link_in_the_run_directory_leads_to_the_file_and_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation happens where the file is, not where the link is."""
    monkeypatch.setattr(history, "MAX_FILE_BYTES", 1000)
    for place in ("run", "log"):
        (tmp_path / place).mkdir()
    link = tmp_path / "run" / "history.jsonl"
    link.symlink_to(tmp_path / "log" / "history.jsonl")
    for command in range(1, 21):
        append_history(link, entry(command))
    assert link.is_symlink()
    assert sorted(file.name for file in (tmp_path / "log").iterdir()) == ["history.jsonl", "history.jsonl.1"]
    assert numbers(link) == numbers(tmp_path / "log" / "history.jsonl")
