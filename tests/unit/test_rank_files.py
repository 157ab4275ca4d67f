"""The files of a run directory: written whole, over room that was taken beforehand, or not at all."""

import errno
import os
from pathlib import Path

import pytest

from fastdeploy_rl.errors import StepFailedError
from fastdeploy_rl.report import RankReport, StepReport
from fastdeploy_rl.update.rank_files import RankFiles, RankPart

LIKELY = RankPart(RankReport(rank=0, steps=[]))
PART = RankPart(RankReport(rank=0, steps=[StepReport("stage", 0.5, 7)], error="é" * 1000), fence_reason="it tore")


def test_the_last_word_is_written_over_the_room_that_was_reserved(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    files.reserve_part(0, 3, LIKELY)
    (reserved,) = tmp_path.iterdir()
    assert reserved.stat().st_blocks * 512 >= 64 << 10
    inode = reserved.stat().st_ino
    files.write_part(0, 3, PART)
    (written,) = tmp_path.iterdir()
    assert written.stat().st_ino == inode
    assert files.read_part(0, 3) == PART


def test_what_was_reserved_goes_with_its_command(tmp_path: Path) -> None:
    files = RankFiles(tmp_path)
    files.reserve_part(0, 3, LIKELY)
    files.remove_command(3)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_beforehand_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StepFailedError, match=r"cannot be written.*No space left"):
        RankFiles(tmp_path).reserve_part(0, 3, LIKELY)
    assert list(tmp_path.iterdir()) == []


def test_a_last_word_that_is_taken_away_while_it_is_written_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rank that was started again says so about a command whose files rank 0 removes just then."""
    files, replace = RankFiles(tmp_path), os.replace

    def replace_after_removal(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        files.remove_command(4)
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_removal)
    files.write_part(2, 4, RankPart(is_reborn=True))
    assert files.read_part(2, 4).is_reborn
