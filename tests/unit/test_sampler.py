"""The next token is a pure function of logits, options, seed and position."""

import math

import msgspec
import numpy as np
import pytest

from fastdeploy_rl.control.generation import SamplingOptions
from fastdeploy_rl.engines.embedded.sampler import sample

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 2.5], np.float32)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum()


def draw(options: SamplingOptions, count: int, seed: int = 7) -> list[int]:
    return [sample(LOGITS, options, seed=seed, generated=[0] * position).token_id for position in range(count)]


def test_greedy_takes_the_largest_logit_and_the_first_of_equal_ones() -> None:
    greedy = SamplingOptions(temperature=0.0)
    assert sample(LOGITS, greedy, seed=0).token_id == 1
    assert sample(np.zeros(4, np.float32), greedy, seed=0).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_logprob_is_the_models_own(temperature: float) -> None:
    options = SamplingOptions(temperature=temperature, frequency_penalty=2.0, logit_bias={0: 3.0})
    token_id, logprob, top = sample(LOGITS, options, seed=1, generated=[1, 1, 4], num_logprobs=3)
    assert logprob == pytest.approx(math.log(PROBABILITIES[token_id]), rel=1e-6)
    assert [other for other, _ in top] == [1, 4, 2]
    assert [value for _, value in top] == pytest.approx([math.log(PROBABILITIES[other]) for other in (1, 4, 2)])


def test_logprobs_are_not_worked_out_unless_asked_for() -> None:
    assert sample(LOGITS, SamplingOptions(temperature=0.0), seed=0) == (1, None, ())
    assert sample(LOGITS, SamplingOptions(temperature=0.0), seed=0, num_logprobs=0)[2] == ()


def test_logprob_of_large_logits_is_finite() -> None:
    logits = np.array([3e4, 1e4, -3e4], np.float32)
    assert sample(logits, SamplingOptions(temperature=0.0), seed=0, num_logprobs=0) == (0, 0.0, ())


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
        (SamplingOptions(min_p=0.5), {1, 4}),
        (SamplingOptions(min_p=0.5, top_k=4), {1, 4}),
        (SamplingOptions(min_p=0.2, top_p=0.8), {1, 4}),
        (SamplingOptions(top_k=4, top_p=0.7), {1, 4}),
    ],
)
def test_narrowing_keeps_exactly_the_most_likely(options: SamplingOptions, allowed: set[int]) -> None:
    assert set(draw(options, 2000)) == allowed


def test_top_k_of_equal_logits_keeps_the_smaller_ids() -> None:
    flat, options = np.zeros(6, np.float32), SamplingOptions(top_k=2)
    tokens = {sample(flat, options, seed=3, generated=[0] * i).token_id for i in range(99)}
    assert tokens == {0, 1}


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 0.9999])
def test_a_nucleus_is_found_without_sorting_everything_and_is_the_same(top_p: float) -> None:
    logits = np.random.default_rng(1).normal(size=5000).astype(np.float32) * 3
    order = np.argsort(-logits, kind="stable")
    shares = np.exp(logits[order].astype(np.float64))
    kept = int(np.searchsorted(np.cumsum(shares) / shares.sum(), top_p)) + 1
    found = [sample(logits, SamplingOptions(top_p=top_p), seed=s).token_id for s in range(300)]
    assert set(found) <= set(order[:kept].tolist())
    narrow = SamplingOptions(top_k=kept)
    assert found == [sample(logits, narrow, seed=s).token_id for s in range(300)]


@pytest.mark.parametrize(
    ("options", "generated", "chosen"),
    [
        (SamplingOptions(), [1, 4], 1),
        (SamplingOptions(frequency_penalty=0.3), [1, 1], 4),
        (SamplingOptions(frequency_penalty=0.3), [1], 1),
        (SamplingOptions(presence_penalty=0.6), [1, 1, 1], 4),
        (SamplingOptions(presence_penalty=0.6), [1, 4], 1),
        (SamplingOptions(presence_penalty=-2.0), [2], 2),
        (SamplingOptions(logit_bias={3: 5.0}), [], 3),
        (SamplingOptions(logit_bias={1: -100.0}), [], 4),
        (SamplingOptions(repetition_penalty=1.3), [1], 4),
    ],
)
def test_penalties_and_bias_change_the_choice_as_defined(
    options: SamplingOptions, generated: list[int], chosen: int
) -> None:
    before = LOGITS.copy()
    greedy = msgspec.structs.replace(options, temperature=0.0)
    assert sample(LOGITS, greedy, seed=0, generated=generated).token_id == chosen
    assert (before == LOGITS).all()


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    greedy = {"seed": 0, "prompt": [1, 1, 1]}
    assert sample(LOGITS, SamplingOptions(temperature=0.0, repetition_penalty=1.3), **greedy).token_id == 4
    assert sample(LOGITS, SamplingOptions(temperature=0.0, frequency_penalty=2.0), **greedy).token_id == 1


def test_same_seed_and_position_give_the_same_token() -> None:
    options = SamplingOptions(top_p=0.9)
    assert draw(options, 50) == draw(options, 50)
    assert draw(options, 50) != draw(options, 50, seed=8)


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
@pytest.mark.parametrize("count", [1, 20, 4999, 5000])
def test_the_most_likely_are_those_of_a_full_sort(scale: float, count: int) -> None:
    logits = np.random.default_rng(2).normal(size=5000).astype(np.float32) * np.float32(scale)
    top = sample(logits, SamplingOptions(temperature=0.0), seed=0, num_logprobs=count).top_logprobs
    assert [token_id for token_id, _ in top] == np.argsort(-logits, kind="stable")[:count].tolist()


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(top_k=3), SamplingOptions(top_p=0.5)])
def test_logits_that_are_no_numbers_still_give_a_token(options: SamplingOptions) -> None:
    for logits in (np.full(8, np.nan, np.float32), np.array([1, np.inf, 2, np.nan], np.float32)):
        token_id, logprob, top = sample(logits, options, seed=1, num_logprobs=2)
        assert 0 <= token_id < len(logits)
        assert math.isnan(logprob)
        assert len(top) == 2


def test_a_temperature_near_zero_is_greedy() -> None:
    assert set(draw(SamplingOptions(temperature=1e-300), 20)) == {1}
