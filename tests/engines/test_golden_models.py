"""Qwen2, Qwen3 and Llama compute what transformers on torch computes: logits kept as data, made by scripts/make_golden.

Tolerance: both sides compute in float32 from the same values, in different orders of summation. Measured: at most 4e-6
of the largest logit; a bias or a norm that is left out changes a hundred times the tolerance and more (tested below).
"""

import json
import uuid
from pathlib import Path

import numpy as np
import pytest
from golden_steps import GOLDEN, expected_logits, golden_error, pieces, whole_prompts
from tiny_llama import SLOT_BYTES, open_runner, relative_error, run_python

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.engines.embedded.model_config import read_config
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.memory.shared_segment import SharedSegment

TOLERANCE = 2e-5
RANKS = {
    "qwen2": (2, 3),
    "qwen2-tied-bf16": (2,),
    "qwen3": (3,),
    "qwen3-bias-bf16": (2, 3),
    "llama-bias-f16": (2,),
}
"""The rank counts beyond one over which each model splits; none of them divides the vocabulary of 101."""


@pytest.mark.parametrize("name", RANKS)
def test_prompts_give_the_logits_of_transformers(name: str) -> None:
    assert golden_error(open_runner(GOLDEN / name), name, whole_prompts(name)) < TOLERANCE


@pytest.mark.parametrize("name", RANKS)
def test_prompts_in_pieces_and_single_tokens_in_one_batch_give_the_logits_of_transformers(name: str) -> None:
    assert golden_error(open_runner(GOLDEN / name), name, pieces(name)) < TOLERANCE


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_together_give_the_logits_of_transformers(tmp_path: Path, num_ranks: int) -> None:
    models = [name for name, counts in RANKS.items() if num_ranks in counts]
    run_over_ranks(models, num_ranks, tmp_path / "logits.npz")
    with np.load(tmp_path / "logits.npz") as logits:
        errors = {
            key: relative_error(logits[key], expected_logits(name, steps))
            for name in models
            for key, steps in ((f"{name}_whole", whole_prompts(name)), (f"{name}_pieces", pieces(name)))
        }
    assert len(errors) == 2 * len(models)
    assert {key: error for key, error in errors.items() if not error < TOLERANCE} == {}


def run_over_ranks(models: list[str], num_ranks: int, out: Path) -> None:
    segment = f"fastdeploy_rl_test.{uuid.uuid4().hex}"
    job = {"models": models, "num_ranks": num_ranks, "segment": segment, "out": str(out)}
    with SharedSegment.create(segment, CollectiveGroup.required_bytes(num_ranks, SLOT_BYTES)) as meeting:
        try:
            run_python("golden_rank.py", *(job | {"rank": rank} for rank in range(num_ranks)))
        finally:
            meeting.unlink()


@pytest.mark.parametrize("name", RANKS)
def test_no_parameter_could_be_wrong_unseen(name: str) -> None:
    """A bias left out, a norm of ones, a matrix turned upside down: each alone is far outside the tolerance."""
    runner = open_runner(GOLDEN / name)
    steps = whole_prompts(name)
    errors = {}
    for parameter, view in runner.bound().items():
        values = view.numpy()
        right = values.copy()
        values[:] = 0 if parameter.endswith(".bias") else 1 if values.ndim == 1 else right[::-1]
        errors[parameter] = golden_error(runner, name, steps)
        values[:] = right
    assert {parameter: error for parameter, error in errors.items() if error < 100 * TOLERANCE} == {}
    assert golden_error(runner, name, steps) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "suffixes"),
    [
        ("qwen2", {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        ("qwen3", {"q_norm.weight", "k_norm.weight"}),
        (
            "qwen3-bias-bf16",
            {"q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"},
        ),
        (
            "llama-bias-f16",
            {f"{part}_proj.bias" for part in ("q", "k", "v", "o", "gate", "up", "down")},
        ),
    ],
)
def test_layers_have_what_their_kind_has_beyond_llama(name: str, suffixes: set[str]) -> None:
    names = [spec.name for spec in open_runner(GOLDEN / name).parameters()]
    plain = {f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    layer = {".".join(own.split(".")[4:]) for own in names if own.startswith("model.layers.1.")}
    assert layer - plain - {"weight"} == suffixes


def test_stretched_rotation_matters(tmp_path: Path) -> None:
    """Else the golden logits of Llama would not show that llama3 scaling is right."""
    name = "llama-bias-f16"
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    for path in (GOLDEN / name).iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert golden_error(open_runner(tmp_path), name, whole_prompts(name)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", RANKS)
def test_vocabulary_is_no_hindrance_and_heads_are(name: str) -> None:
    config = read_config(GOLDEN / name)
    for num_ranks in range(2, 5):
        if num_ranks in RANKS[name]:
            config.check_divides(num_ranks)
        else:
            with pytest.raises(ConfigurationError, match=r"not divisible: (num|intermediate)"):
                config.check_divides(num_ranks)
