"""Qwen2 and Qwen3 as served engines: what a trainer publishes in torch's layout, with its vocabulary padded, is what a
cold engine reads from the same weights as a checkpoint, to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from served_engine import Model, ServedEngine
from tiny_llama import generate, open_runner, random_tensors

from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint, save_checkpoint
from fastdeploy_rl.errors import CoverageError
from fastdeploy_rl.plan.conventions import hugging_face
from fastdeploy_rl.publish.publisher import WeightPublisher
from tests.process.served_model import CONFIG, write_tiny_llama

VOCABULARY = 265  # does not divide by the ranks
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
PROMPT = [5, 6, 7, 8, 9]
KINDS: dict[str, dict[str, object]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


class Warm(NamedTuple):
    """An engine of two ranks that started on other weights than `model`."""

    engine: ServedEngine
    model: Model


def write(directory: Path, kind: str, seed: int) -> Model:
    changes = KINDS[kind] | {"vocab_size": VOCABULARY}
    write_tiny_llama(directory, **changes)
    weights = random_tensors(directory, seed)
    save_checkpoint(directory, CONFIG | changes, weights)
    return Model(directory, weights)


@pytest.fixture(scope="module", params=KINDS)
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    place = tmp_path_factory.mktemp(request.param)
    first, second = (write(place / name, request.param, seed) for seed, name in enumerate(("first", "second")))
    with ServedEngine(first, place / "engine", num_ranks=2) as engine:
        engine.await_ready()
        yield Warm(engine, second)


def as_torch_has_it(model: Model, num_rows: int) -> dict[str, np.ndarray]:
    """Linear weights [out, in]; a vocabulary of `num_rows`, of which the last mean nothing."""
    turned = {
        name: np.ascontiguousarray(value.T) if name.endswith("_proj.weight") else value
        for name, value in model.weights.items()
    }
    return turned | {
        name: np.concatenate([value, np.full((num_rows - len(value), value.shape[1]), 7, np.float32)])
        for name, value in turned.items()
        if name in VOCABULARY_TENSORS
    }


def cold_bytes(model: Model, rank: int) -> dict[str, bytes]:
    with Checkpoint.open(model.directory) as checkpoint:
        return {name: view.numpy().tobytes() for name, view in checkpoint.load(rank, 2).items()}


@pytest.mark.parametrize("num_rows", [VOCABULARY, VOCABULARY + 1, 320])
def test_what_torch_publishes_is_what_a_cold_engine_reads(warm: Warm, num_rows: int) -> None:
    with WeightPublisher(warm.engine.channel) as publisher:
        published = publisher.publish(as_torch_has_it(warm.model, num_rows), step=1, convention=hugging_face)
        report = warm.engine.control.update(published.version)
    assert report.outcome == "done"
    for rank in range(2):
        assert warm.engine.bytes_of(rank) == cold_bytes(warm.model, rank)
    assert warm.engine.tokens(PROMPT, 12) == generate(open_runner(warm.model.directory), [PROMPT], 12).tokens[0]


def test_too_small_a_vocabulary_is_refused_and_changes_nothing(warm: Warm) -> None:
    before = [warm.engine.bytes_of(rank) for rank in range(2)]
    weights = as_torch_has_it(warm.model, VOCABULARY)
    weights |= {name: weights[name][:-1].copy() for name in VOCABULARY_TENSORS if name in weights}
    with WeightPublisher(warm.engine.channel) as publisher:
        published = publisher.publish(weights, step=1, convention=hugging_face)
        with pytest.raises(CoverageError, match=r"model\.embed_tokens\.weight"):
            warm.engine.control.update(published.version)
    assert [warm.engine.bytes_of(rank) for rank in range(2)] == before


def test_parameter_of_another_kind_of_model_is_refused(warm: Warm) -> None:
    """Llama's tensors do not make a Qwen: what is missing is named."""
    foreign = {
        name: value for name, value in warm.model.weights.items() if not name.endswith((".bias", "_norm.weight"))
    }
    with WeightPublisher(warm.engine.channel) as publisher:
        published = publisher.publish(foreign, step=1)
        with pytest.raises(CoverageError, match=r"q_proj\.bias: missing"):
            warm.engine.control.update(published.version)
