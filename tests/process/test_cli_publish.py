"""`publish` and `retire` against a real channel."""

import json
import sys
from pathlib import Path

import pytest
from served_model import write_tiny_llama

from fastdeploy_rl.cli import main, progress
from fastdeploy_rl.cli.progress import SlowProgress


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


def test_a_checkpoint_is_published_turned_or_as_it_is_stored(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    channel = ["--ipc-dir", str(tmp_path / "channel")]
    found = {}
    for step, more in ((1, []), (2, ["--as-stored", "--layout", "tp:2"])):
        assert main(["publish", str(model), "--step", str(step), *channel, *more]) == 0
        manifest = json.loads(next((tmp_path / "channel").glob("manifest-*")).read_bytes())
        found[step] = {tensor["name"]: tensor for tensor in manifest["tensors"]}
    name = "model.layers.1.mlp.down_proj.weight"
    assert (found[1][name]["shape"], found[1][name].get("is_transposed", False)) == ([48, 32], False)
    assert (found[2][name]["shape"], found[2][name]["is_transposed"]) == ([32, 48], True)
    assert (found[2][name]["shard_axis"], len(found[2][name]["parts"])) == (1, 2)
    assert "is_transposed" not in found[2]["model.embed_tokens.weight"]
    assert main(["retire", *channel]) == 0


def test_a_bar_appears_only_where_somebody_watches_and_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with SlowProgress("publishing") as piped:
        monkeypatch.setattr(progress, "_APPEARS_AFTER_S", -1.0)
        piped.update(1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with SlowProgress("publishing") as watched:
        watched.update(1, 2)
        watched.update(2, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "publishing" in err
    with monkeypatch.context() as without, SlowProgress("publishing") as undrawn:
        without.setitem(sys.modules, "rich.console", None)
        undrawn.update(1, 2)
        undrawn.update(2, 2)
    monkeypatch.setattr(progress, "_APPEARS_AFTER_S", 3600.0)
    with SlowProgress("publishing") as quick:
        quick.update(2, 2)
    assert capsys.readouterr() == ("", "")


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
    assert "retired version 1.7: " in capsys.readouterr().out
    assert main(["retire", *channel]) == 0
    assert capsys.readouterr().out == "nothing was published\n"


def test_a_broken_checkpoint_is_named_and_nothing_is_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "model")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main(["publish", str(model), "--step", "1", "--ipc-dir", str(tmp_path / "channel")]) == 2
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "channel" / "LATEST").exists()
