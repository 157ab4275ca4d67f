"""What a model's makers recommend for sampling: generation_config.json, the defaults of requests that are silent.

Owns reading `temperature, top_p, top_k, min_p, repetition_penalty, do_sample, max_new_tokens` (and `max_length` is
nobody's: it counts the prompt). A file that says `do_sample: false` makes greedy the default; one that does not mention
it is taken at its numbers, as vLLM does. Its stop tokens belong to the model (model_config.py). Anything else in the
file speaks of methods that this engine does not have, such as beams, and changes nothing.
"""

from pathlib import Path

import msgspec

from fastdeploy_rl.control.generation import GenerationDefaults
from fastdeploy_rl.engines.embedded.model_config import read_json
from fastdeploy_rl.errors import CheckpointError

FILE = "generation_config.json"


class _Fields(msgspec.Struct, frozen=True):
    """Unknown fields are left alone: the file is a library's, not ours."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Neutral ones where the directory has no such file. CheckpointError names a value that cannot be."""
    path = directory / FILE
    if not path.exists():
        return GenerationDefaults()
    try:
        fields = msgspec.convert(read_json(path), _Fields)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
    _check(fields, path)
    return GenerationDefaults(
        temperature=0.0 if fields.do_sample is False else _given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(0, fields.top_k or 0),
        min_p=_given(fields.min_p, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        max_tokens=fields.max_new_tokens,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _check(fields: _Fields, path: Path) -> None:
    possible = {
        "temperature": fields.temperature is None or 0 <= fields.temperature <= 100,
        "top_p": fields.top_p is None or 0 < fields.top_p <= 1,
        "min_p": fields.min_p is None or 0 <= fields.min_p <= 1,
        "repetition_penalty": fields.repetition_penalty is None or 0 < fields.repetition_penalty <= 100,
        "max_new_tokens": fields.max_new_tokens is None or fields.max_new_tokens >= 1,
    }
    odd = [name for name, is_possible in possible.items() if not is_possible]
    if odd:
        raise CheckpointError(
            f"{path}: {odd[0]} cannot be {getattr(fields, odd[0])!r}; mend the file, or ignore it with "
            "`--generation-config none`"
        )
