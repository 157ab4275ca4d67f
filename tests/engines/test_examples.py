"""The examples run as a reader would run them, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.served_model import write_tiny_llama

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(name: str, *options: str) -> str:
    environ = dict(os.environ) | {"PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        capture_output=True,
        text=True,
        timeout=110,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("load_strategy", ["ipc", "ipc_snapshot", "rsync"])
def test_the_numpy_trainer_starts_an_engine_and_every_version_is_verified(tmp_path: Path, load_strategy: str) -> None:
    model = write_tiny_llama(tmp_path / "model")
    options = ["--model", str(model), "--ipc-dir", str(tmp_path / "channel"), "--ranks", "2", "--steps", "2"]
    options += ["--load-strategy", load_strategy]
    lines = _run("numpy_trainer.py", *options).splitlines()
    assert [line for line in lines if line.startswith("version")] == [
        "version 1.1: 0 MB live and verified",
        "version 1.2: 0 MB live and verified",
    ]
    assert lines[-1] == "every rank read its live memory again: all as published"


def test_an_engine_that_does_not_start_is_said(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "config.json").unlink()
    command = [sys.executable, str(EXAMPLES / "numpy_trainer.py")]
    options = ["--model", str(model), "--ipc-dir", str(tmp_path / "channel")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode != 0
    assert "config.json" in done.stderr
    assert done.stderr.endswith("the engine did not start: see its message above\n")
    assert not (tmp_path / "channel").exists()


def test_the_numpy_trainer_explains_itself() -> None:
    assert "--engine" in _run("numpy_trainer.py", "--help")


def test_the_torch_trainer_explains_itself() -> None:
    pytest.importorskip("torch", reason="torch is not installed here")
    assert "--engine" in _run("torch_trainer.py", "--help")
