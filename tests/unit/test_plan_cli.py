"""`fastdeploy-rl plan`: what it says of a publication, and how it refuses what is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.cli import main
from fastdeploy_rl.manifest import Fused, Manifest, Part, Run, Segment, Tensor, build_manifest, encode
from fastdeploy_rl.publish.channel import Channel

LAYER = "model.layers.0."
SUM = Fletcher4(1, 2, 3, 4).hex()


def tensor(name: str, shape: tuple[int, ...], offset: int, **changes: object) -> Tensor:
    whole = Tensor(name, "F32", shape, None, (Part(0, offset, 0, 0),), SUM)
    return msgspec.structs.replace(whole, **changes)


def publication() -> Manifest:
    """A turned down_proj, fused gate and up, a row-split head, a norm; and the head's second name."""
    gate_up = Fused(1, (Run(f"{LAYER}mlp.gate_proj.weight", 0, 4), Run(f"{LAYER}mlp.up_proj.weight", 0, 4)))
    tensors = [
        tensor(f"{LAYER}mlp.down_proj.weight", (4, 4), 0, is_transposed=True),
        tensor(f"{LAYER}mlp.up_gate_proj.weight", (4, 8), 512, fused=gate_up),
        tensor("lm_head.weight", (6, 4), 1024),
        tensor("model.norm.weight", (4,), 1536),
    ]
    segment = Segment(kind="shm", locator="arena", num_bytes=4096, arena=0, generation=2)
    return build_manifest("3.7", "full", [segment], tensors, {"model.embed_tokens.weight": "lm_head.weight"})


@pytest.fixture
def manifest_file(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_bytes(encode(publication()))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["plan", *map(str, arguments)])
    except SystemExit as left:
        code = int(left.code or 0)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_each_rank_is_told_what_comes_in_and_goes_out_and_why(
    capsys: pytest.CaptureFixture[str], manifest_file: Path
) -> None:
    code, text, _ = run(capsys, manifest_file, "--tensor-parallel-size", 2, "--json")
    document = json.loads(text)
    assert code == 0
    assert (document["version"], document["layout"], document["num_bytes"]) == ("3.7", "full", 64 + 128 + 96 + 16)
    assert [rank["bytes_out"] for rank in document["ranks"]] == [32 + 64 + 48 + 16] * 2
    assert [rank["bytes_in"] for rank in document["ranks"]] == [32 + 64 + 48 + 16] * 2
    assert document["ranks"][1]["num_aliased"] == 2
    assert document["ranks"][1]["not_aliased"] == [
        {"reason": "slice of columns is not contiguous", "count": 2, "num_bytes": 64},
        {"reason": "transposed", "count": 1, "num_bytes": 32},
    ]


def test_people_get_the_same_in_lines_and_each_parameter_on_request(
    capsys: pytest.CaptureFixture[str], manifest_file: Path
) -> None:
    _, short, _ = run(capsys, manifest_file, "--tensor-parallel-size", 1)
    assert "version 3.7 for 1 rank: each byte is written once and counted once" in short
    assert "copied: transposed" in short
    assert "norm" not in short
    _, long, _ = run(capsys, manifest_file, "--tensor-parallel-size", 1, "--verbose")
    assert "  model.norm.weight  F32 [4]  in place\n" in long
    assert f"  {LAYER}mlp.down_proj.weight  F32 [4, 4]  copied: transposed\n" in long


def test_the_latest_of_a_channel_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    channel = Channel(tmp_path / "channel")
    channel.open()
    channel.write_latest(channel.write_manifest(publication()))
    code, text, _ = run(capsys, channel.path, "--tensor-parallel-size", 3)
    assert (code, text.partition(" for ")[0]) == (2, "")
    code, text, _ = run(capsys, channel.path, "--tensor-parallel-size", 2)
    assert (code, text.partition(" for ")[0]) == (0, "version 3.7")


def test_a_model_that_was_not_published_is_refused(
    capsys: pytest.CaptureFixture[str], manifest_file: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    code, text, complaint = run(capsys, manifest_file, "--tensor-parallel-size", 2, "--model", tmp_path)
    assert (code, text) == (2, "")
    assert f"{LAYER}self_attn.q_proj.weight: missing" in complaint


BAD = {
    "nothing": (lambda path: None, "No such file or directory"),
    "a pipe": (os.mkfifo, "is neither a manifest file nor a channel"),
    "an empty directory": (lambda path: path.mkdir(), "nothing is published in"),
    "no manifest": (lambda path: path.write_text("{}"), "manifest cannot be read"),
    "half of one": (lambda path: path.write_bytes(encode(publication())[:-9]), "manifest cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_publication_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    make, words = BAD[case]
    make(tmp_path / "bad")
    code, text, complaint = run(capsys, tmp_path / "bad", "--tensor-parallel-size", 2)
    assert (code, text, complaint.count("\n")) == (2, "", 1)
    assert words in complaint


@pytest.mark.parametrize("size", ["0", "-1", "two", "1025", "9" * 30])
def test_a_rank_count_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], manifest_file: Path, size: str
) -> None:
    code, _, complaint = run(capsys, manifest_file, "--tensor-parallel-size", size)
    assert code == 2
    assert "expected" in complaint


def test_planning_needs_no_framework(manifest_file: Path) -> None:
    probe = (
        f"import sys; from fastdeploy_rl.cli import main; main(['plan', {str(manifest_file)!r}, "
        "'--tensor-parallel-size', '2']); print([n for n in ('paddle', 'torch') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=60)
    assert done.stderr.decode().strip() == "[]"
