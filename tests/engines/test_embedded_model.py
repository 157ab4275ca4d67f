"""The embedded engine computes what PaddleFormers computes, on any number of ranks, batched or alone."""

from pathlib import Path

import pytest
from tiny_llama import (
    PROMPTS,
    Generated,
    generate,
    generate_alone,
    generate_over_ranks,
    generate_with_paddleformers,
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


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Generated]:
    """A tiny checkpoint and what PaddleFormers makes of it."""
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param), **MODELS[request.param])
    return directory, generate_with_paddleformers(directory, PROMPTS, NUM_TOKENS, directory / "reference.npz")


def test_logits_agree_with_paddleformers(model: tuple[Path, Generated]) -> None:
    directory, expected = model
    actual = generate(open_runner(directory), PROMPTS, 1)
    assert relative_error(actual.logits, expected.logits) < 1e-4


def test_batch_gives_the_greedy_tokens_of_paddleformers(model: tuple[Path, Generated]) -> None:
    directory, expected = model
    assert generate(open_runner(directory), PROMPTS, NUM_TOKENS).tokens == expected.tokens


def test_alone_gives_the_greedy_tokens_of_paddleformers(model: tuple[Path, Generated]) -> None:
    directory, expected = model
    assert generate_alone(open_runner(directory), PROMPTS, NUM_TOKENS).tokens == expected.tokens


def test_greedy_tokens_vary(model: tuple[Path, Generated]) -> None:
    """Else the tests above would prove little."""
    _, expected = model
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(PROMPTS)
    assert min(len(set(tokens)) for tokens in expected.tokens) > 3


def test_chunked_prompt_gives_the_same_tokens(model: tuple[Path, Generated]) -> None:
    """Prompts go through the model in pieces of seven tokens."""
    directory, expected = model
    assert generate_alone(open_runner(directory, max_step_tokens=7), PROMPTS, NUM_TOKENS).tokens == expected.tokens


def test_preempted_requests_give_the_same_tokens(model: tuple[Path, Generated]) -> None:
    """Room for one of the longest requests: the five take turns."""
    directory, expected = model
    runner = open_runner(directory, max_model_len=144, num_kv_pages=9)
    assert generate(runner, PROMPTS, NUM_TOKENS).tokens == expected.tokens


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_together_give_the_greedy_tokens_of_one(tmp_path: Path, num_ranks: int) -> None:
    directory = make_checkpoint(tmp_path / "model", tie_word_embeddings=num_ranks == 3)
    expected = generate(open_runner(directory), PROMPTS, NUM_TOKENS)
    batched, alone = generate_over_ranks(
        directory, num_ranks, PROMPTS, NUM_TOKENS, tmp_path / "ranks.npz", num_alone=len(PROMPTS)
    )
    assert relative_error(batched.logits, expected.logits) < 1e-4
    assert batched.tokens == expected.tokens
    assert alone.tokens == expected.tokens
