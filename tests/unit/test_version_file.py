"""The files in which FastDeploy's trainers name a version: which one counts, and what is no version."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_rl.errors import VersionFormatError
from fastdeploy_rl.sources.version_file import wanted_version
from fastdeploy_rl.version import WeightVersion


def test_without_a_directory_or_a_file_nothing_is_asked_for(tmp_path: Path) -> None:
    assert wanted_version(None) is None
    assert wanted_version(tmp_path) is None
    assert wanted_version(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("step: 7\nversion: 8\n", 7),
        ("version: 8\n", 8),
        ("version: 8\nstep: 7\n", 7),
        ("step:\nversion: 8\n", 8),
        ('# by the trainer\n\nstep: "7"  # quoted\nother: [1, 2]\n', 7),
        ("step: '7'\r\nversion: 8\r\n", 7),
        ("---\nstep: 7 # plain\n...\n", 7),
        ("inner:\n  step: 9\nstep: 7\n", 7),
        ("step: 9\nstep: 7\n", 7),
        ("\ufeffstep: 7\nversion: 8\n", 7),
        ("step: 0", 0),
        ("step: 8.0", 8),
        ("step: 8.\nversion: 3.9", 8),
        ("step: 10.00 # as a float", 10),
    ],
)
def test_step_counts_before_version(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "version.yaml").write_text(text)
    (tmp_path / "version.txt").write_text("99")
    wanted = wanted_version(tmp_path)
    assert wanted is not None
    assert wanted.needs_epoch
    assert wanted.in_epoch(3) == WeightVersion(3, step)


def test_the_older_file_counts_where_the_newer_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "version.txt").write_text(" 12 \n")
    wanted = wanted_version(tmp_path)
    assert wanted is not None
    assert wanted == ("12", tmp_path / "version.txt")
    assert wanted.in_epoch(1) == WeightVersion(1, 12)


@pytest.mark.parametrize(("file", "text"), [("version.yaml", "version: 3.12"), ("version.txt", "3.12")])
def test_a_version_with_its_epoch_needs_no_other(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    wanted = wanted_version(tmp_path)
    assert wanted is not None
    assert not wanted.needs_epoch
    assert wanted.in_epoch(9) == WeightVersion(3, 12)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("version.yaml", ""),
        ("version.yaml", "revision: 7"),
        ("version.yaml", "  step: 7"),
        ("version.yaml", "step: seven"),
        ("version.yaml", "step: -7"),
        ("version.yaml", "step: 7 8"),
        ("version.yaml", "step: 007"),
        ("version.yaml", 'step: "7'),
        ("version.yaml", "step:7"),
        ("version.yaml", "step: 9223372036854775808"),
        ("version.yaml", "step: 1.2.3"),
        ("version.yaml", "step: 3.12"),
        ("version.yaml", "step: 3.1\nversion: 4"),
        ("version.yaml", "step: 08.0"),
        ("version.txt", ""),
        ("version.txt", "7\n8"),
        ("version.txt", "v7"),
        ("version.txt", "\0"),
        ("version.txt", "\u0667"),
    ],
)
def test_a_file_that_names_no_version_is_an_error_that_names_the_file(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(VersionFormatError, match=str(tmp_path / file)):
        wanted_version(tmp_path)


def test_what_is_no_small_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "version.yaml"
    path.write_bytes(b"step: 7\n" + b"#" * (64 << 10))
    with pytest.raises(VersionFormatError, match="more than 65536 bytes"):
        wanted_version(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(VersionFormatError, match="no regular file"):
        wanted_version(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(VersionFormatError, match="no regular file"):
        wanted_version(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=100) | st.binary(max_size=20).map(b"step: ".__add__))
def test_any_bytes_are_a_version_or_a_version_format_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "version.yaml").write_bytes(data)
    try:
        wanted = wanted_version(tmp_path)
    except VersionFormatError:
        return
    assert wanted is not None
    assert wanted.in_epoch(1) >= WeightVersion(0, 0)
