"""The next token is a pure function of logits, options, seed and position."""

import math

import numpy as np
import pytest

from fastdeploy_rl.control.generation import SamplingOptions
from fastdeploy_rl.engines.embedded.sampler import sample

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 2.5], np.float32)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum()


def draw(options: SamplingOptions, count: int, seed: int = 7) -> list[int]:
    return [sample(LOGITS, options, seed=seed, position=position).token_id for position in range(count)]


def test_greedy_takes_the_largest_logit_and_the_first_of_equal_ones() -> None:
    greedy = SamplingOptions(temperature=0.0)
    assert sample(LOGITS, greedy, seed=0, position=0).token_id == 1
    assert sample(np.zeros(4, np.float32), greedy, seed=0, position=0).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_logprob_is_the_models_own(temperature: float) -> None:
    token_id, logprob = sample(LOGITS, SamplingOptions(temperature=temperature), seed=1, position=3)
    assert logprob == pytest.approx(math.log(PROBABILITIES[token_id]), rel=1e-6)


def test_logprob_of_large_logits_is_finite() -> None:
    logits = np.array([3e4, 1e4, -3e4], np.float32)
    assert sample(logits, SamplingOptions(temperature=0.0), seed=0, position=0) == (0, 0.0)


def test_frequencies_follow_the_probabilities() -> None:
    counts = np.bincount(draw(SamplingOptions(), 4000), minlength=5) / 4000
    assert np.abs(counts - PROBABILITIES).max() < 0.03


def test_temperature_sharpens() -> None:
    sharp = np.exp(LOGITS / 0.25) / np.exp(LOGITS / 0.25).sum()
    counts = np.bincount(draw(SamplingOptions(temperature=0.25), 4000), minlength=5) / 4000
    assert np.abs(counts - sharp).max() < 0.03


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (SamplingOptions(top_k=1), {1}),
        (SamplingOptions(top_k=2), {1, 4}),
        (SamplingOptions(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingOptions(top_p=0.01), {1}),
        (SamplingOptions(top_p=0.6), {1, 4}),
        (SamplingOptions(top_p=0.6, top_k=1), {1}),
        (SamplingOptions(top_p=0.999999), {0, 1, 2, 3, 4}),
    ],
)
def test_narrowing_keeps_exactly_the_most_likely(options: SamplingOptions, allowed: set[int]) -> None:
    assert set(draw(options, 2000)) == allowed


def test_top_k_of_equal_logits_keeps_the_smaller_ids() -> None:
    tokens = {sample(np.zeros(6, np.float32), SamplingOptions(top_k=2), seed=3, position=i).token_id for i in range(99)}
    assert tokens == {0, 1}


def test_same_seed_and_position_give_the_same_token() -> None:
    options = SamplingOptions(top_p=0.9)
    assert draw(options, 50) == draw(options, 50)
    assert draw(options, 50) != draw(options, 50, seed=8)
