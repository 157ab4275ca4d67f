"""SmolLM2-135M-Instruct: the embedded engine on one and three ranks against PaddleFormers."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import (
    HERE,
    Case,
    Generated,
    ask_paddleformers,
    generate,
    generate_alone,
    generate_over_ranks,
    open_runner,
    relative_error,
)

from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.engines.embedded.tokenizer import Tokenizer
from fastdeploy_rl.errors import ConfigurationError

NUM_TOKENS = 64
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Count to ten."]
TEXT = "Once upon a time"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def directory() -> Path:
    """Made once in the user's cache."""
    command = [sys.executable, "-W", "ignore", str(HERE.parents[1] / "scripts/make_model")]
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE)
    return Path(done.stdout.decode().strip())


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.open(directory)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    return [*chats, tokenizer.encode(TEXT)]


@pytest.fixture(scope="module")
def batched(directory: Path, prompts: list[list[int]]) -> Generated:
    """One rank, all prompts at once."""
    return generate(open_runner(directory), prompts, NUM_TOKENS)


@pytest.fixture(scope="module")
def expected(
    directory: Path, prompts: list[list[int]], batched: Generated, tmp_path_factory: pytest.TempPathFactory
) -> Generated:
    return ask_paddleformers([Case(directory, prompts, batched)], tmp_path_factory.mktemp("reference"))[0]


def test_made_model_is_what_its_sums_say(directory: Path) -> None:
    lines = (directory / "SHA256SUMS").read_text().splitlines()
    assert "model.safetensors" in {line.split("  ")[1] for line in lines}
    for digest, name in (line.split("  ") for line in lines if "model.safetensors" not in line):
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest


def test_batch_on_one_rank_agrees_with_paddleformers(batched: Generated, expected: Generated) -> None:
    assert relative_error(batched.logits, expected.logits) < 1e-4
    assert batched.tokens == expected.tokens


def test_alone_on_one_rank_agrees_with_paddleformers(
    directory: Path, prompts: list[list[int]], expected: Generated
) -> None:
    alone = generate_alone(open_runner(directory), prompts, NUM_TOKENS)
    assert relative_error(alone.logits, expected.logits) < 1e-4
    assert alone.tokens == expected.tokens


def test_three_ranks_agree_with_paddleformers_batched_and_alone(
    directory: Path, prompts: list[list[int]], expected: Generated, tmp_path: Path
) -> None:
    batched, alone = generate_over_ranks(directory, 3, prompts, NUM_TOKENS, tmp_path / "ranks.npz")
    assert relative_error(batched.logits, expected.logits) < 1e-4
    assert batched.tokens == expected.tokens
    assert alone.tokens == expected.tokens


def test_it_knows_the_capital_of_france(tokenizer: Tokenizer, expected: Generated) -> None:
    answer = expected.tokens[0]
    assert tokenizer.decode(answer[: answer.index(tokenizer.eos_token_ids[0])]) == "The capital of France is Paris."


def test_two_ranks_do_not_divide_it(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"num_attention_heads 9, num_key_value_heads 3.*can be 1, 3$"):
        EmbeddedRunner(directory, 0, 2, None)
