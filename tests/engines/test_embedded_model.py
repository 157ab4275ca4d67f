"""The embedded engine computes what PaddleFormers computes, on any number of ranks, batched or alone."""

from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_llama import (
    PROMPTS,
    Case,
    Generated,
    ask_paddleformers,
    generate,
    generate_alone,
    generate_over_ranks,
    make_checkpoint,
    open_runner,
    relative_error,
)

NUM_TOKENS = 64
MODELS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "grouped": {"num_key_value_heads": 3, "num_hidden_layers": 3},
}


class Tiny(NamedTuple):
    """A checkpoint, what one rank makes of the prompts in one batch, and what PaddleFormers makes of them."""

    directory: Path
    actual: Generated
    expected: Generated


@pytest.fixture(scope="module")
def all_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    """PaddleFormers takes seconds to import: it is asked about all models at once."""
    out = tmp_path_factory.mktemp("models")
    directories = {name: make_checkpoint(out / name, **changes) for name, changes in MODELS.items()}
    actual = {name: generate(open_runner(path), PROMPTS, NUM_TOKENS) for name, path in directories.items()}
    expected = ask_paddleformers([Case(directories[name], PROMPTS, actual[name]) for name in MODELS], out)
    return {name: Tiny(directories[name], actual[name], answer) for name, answer in zip(MODELS, expected, strict=True)}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, all_models: dict[str, Tiny]) -> Tiny:
    return all_models[request.param]


def test_logits_agree_with_paddleformers(model: Tiny) -> None:
    assert relative_error(model.actual.logits, model.expected.logits) < 1e-4


def test_batch_gives_the_greedy_tokens_of_paddleformers(model: Tiny) -> None:
    assert model.actual.tokens == model.expected.tokens


def test_alone_gives_the_greedy_tokens_of_paddleformers(model: Tiny) -> None:
    assert generate_alone(open_runner(model.directory), PROMPTS, NUM_TOKENS).tokens == model.expected.tokens


def test_greedy_tokens_vary(model: Tiny) -> None:
    """Else the tests above would prove little."""
    assert len({tuple(tokens) for tokens in model.expected.tokens}) == len(PROMPTS)
    assert min(len(set(tokens)) for tokens in model.expected.tokens) > 3


def test_chunked_prompt_gives_the_same_tokens(model: Tiny) -> None:
    """Prompts go through the model in pieces of seven tokens."""
    assert (
        generate_alone(open_runner(model.directory, max_step_tokens=7), PROMPTS, NUM_TOKENS).tokens
        == model.expected.tokens
    )


def test_preempted_requests_give_the_same_tokens(model: Tiny) -> None:
    """Room for one of the longest requests: the five take turns."""
    runner = open_runner(model.directory, max_model_len=144, num_kv_pages=9)
    assert generate(runner, PROMPTS, NUM_TOKENS).tokens == model.expected.tokens


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_together_give_the_greedy_tokens_of_one(tmp_path: Path, num_ranks: int) -> None:
    directory = make_checkpoint(tmp_path / "model", tie_word_embeddings=num_ranks == 3)
    expected = generate(open_runner(directory), PROMPTS, NUM_TOKENS)
    batched, alone = generate_over_ranks(directory, num_ranks, PROMPTS, NUM_TOKENS, tmp_path / "ranks.npz")
    assert relative_error(batched.logits, expected.logits) < 1e-4
    assert batched.tokens == expected.tokens
    assert alone.tokens == expected.tokens
