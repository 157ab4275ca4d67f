"""generation_config.json: what a model's makers recommend becomes the default, and nonsense is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl.control.generation import GenerationDefaults
from fastdeploy_rl.engines.embedded.generation_config import FILE, read_generation_defaults
from fastdeploy_rl.errors import CheckpointError


def read(directory: Path, **fields: Any) -> GenerationDefaults:
    (directory / FILE).write_text(json.dumps(fields))
    return read_generation_defaults(directory)


def test_a_directory_without_the_file_has_neutral_defaults(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()


def test_what_the_file_says_is_the_default(tmp_path: Path) -> None:
    qwen = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    found = read(tmp_path, **qwen, max_new_tokens=2048, eos_token_id=[1, 2], transformers_version="4.37.0")
    assert found == GenerationDefaults(0.7, 0.8, 20, 0.0, 1.05, 2048)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [({"do_sample": False, "temperature": 0.7}, 0.0), ({"temperature": 0.7}, 0.7), ({"temperature": None}, 1.0)],
)
def test_only_a_file_that_says_so_makes_greedy_the_default(
    tmp_path: Path, fields: dict[str, Any], temperature: float
) -> None:
    assert read(tmp_path, **fields).temperature == temperature


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature cannot be -1"),
        ({"top_p": 0}, "top_p cannot be 0"),
        ({"repetition_penalty": 0}, "repetition_penalty cannot be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens cannot be 0"),
    ],
)
def test_values_that_cannot_be_are_named_with_the_file(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, **fields)
    assert FILE in str(caught.value)
