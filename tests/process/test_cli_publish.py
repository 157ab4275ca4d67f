"""`publish` and `retire` against a real channel."""

import json
from pathlib import Path

import pytest
from served_model import write_tiny_llama

from fastdeploy_rl.cli import main


def test_a_publication_can_be_made_and_retired(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    channel = ["--ipc-dir", str(tmp_path / "channel")]
    assert main(["publish", str(model), "--step", "7", *channel, "--json"]) == 0
    published = json.loads(capsys.readouterr().out)
    assert (published["version"], published["layout"]) == ("1.7", "full")
    assert main(["retire", *channel, "--json"]) == 0
    retired = json.loads(capsys.readouterr().out)
    assert retired["version"] == "1.7"
    assert retired["num_bytes"] >= published["num_bytes"]


def test_a_publication_that_fails_leaves_the_one_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    channel = ["--ipc-dir", str(tmp_path / "channel")]
    assert main(["publish", str(model), "--step", "7", *channel]) == 0
    latest = (tmp_path / "channel" / "LATEST").read_bytes()
    capsys.readouterr()
    assert main(["publish", str(model), "--step", "8", "--layout", "tp:5", *channel]) == 2
    assert "tp:5" in capsys.readouterr().err
    assert (tmp_path / "channel" / "LATEST").read_bytes() == latest
    assert main(["retire", *channel]) == 0


def test_a_broken_checkpoint_is_named_and_nothing_is_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["publish", str(model), "--step", "1", "--ipc-dir", str(tmp_path / "channel")]) == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "channel" / "LATEST").exists()
