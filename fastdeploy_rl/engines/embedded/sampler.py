"""Which token comes next, given the logits of one position.

Owns greedy and random choice and the log-probabilities that are reported. Knows nothing of requests or batches.
Invariant: a choice is a pure function of (logits, options, seed, tokens so far): the same request gives the same tokens
whatever shares its batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_rl.control.generation import SamplingOptions

Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.intp]

_NUCLEUS_FLOORS = (1e-2, 1e-4, 1e-6, 0.0)
_TOP_DEPTHS = (np.float32(4), np.float32(8), np.float32(16))
_SORTED_AT_ONCE = 4096
"""Sorting, or halving, a whole vocabulary costs milliseconds. The few tokens that matter are found by comparing all to
a floor under the likeliest one, a lower one where they were not all above it."""
_COLDEST = 1e-6
"""A temperature below this is this: as good as greedy, and float32 can still divide by it."""


class SampledToken(NamedTuple):
    """Logarithms, where they were asked for, are natural ones of the probability under the model itself: no
    temperature, no penalty, nothing cut off. `top_logprobs`: (token id, logarithm) of the most likely, falling."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(
    logits: Floats,
    options: SamplingOptions,
    *,
    seed: int,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    num_logprobs: int | None = None,
) -> SampledToken:
    """`logits`: [vocab] float32, not changed. `generated`: the tokens of the completion so far. Ties go to the smaller
    token id."""
    adjusted = _adjust(logits, options, prompt, generated)
    if options.temperature == 0:
        token_id = int(np.argmax(adjusted))
    else:
        token_id = _draw(adjusted, options, _uniform(seed, len(generated)))
    if num_logprobs is None:
        return SampledToken(token_id)
    norm = _log_sum_exp(logits)
    top = _most_likely(logits, num_logprobs) if num_logprobs else ()
    return SampledToken(
        token_id, float(logits[token_id]) - norm, tuple((int(other), float(logits[other]) - norm) for other in top)
    )


def _log_sum_exp(logits: Floats) -> float:
    peak = logits.max()
    return float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))


def _uniform(seed: int, position: int) -> float:
    """The `position`-th number of a counter-based stream, in [0, 1): nothing to keep between tokens."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _adjust(logits: Floats, options: SamplingOptions, prompt: Sequence[int], generated: Sequence[int]) -> Floats:
    """Penalties and bias: logit - count * frequency - (count > 0) * presence + bias, as OpenAI defines them, after
    Hugging Face's repetition penalty. The logits themselves where none is asked for."""
    penalises = (options.presence_penalty or options.frequency_penalty) and len(generated) > 0
    if not (penalises or options.logit_bias or options.repetition_penalty != 1):
        return logits
    adjusted = logits.copy()
    if options.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *generated], np.intp))
        values = adjusted[seen]
        adjusted[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    if penalises:
        token_ids, counts = np.unique(np.array(generated, np.intp), return_counts=True)
        adjusted[token_ids] -= (counts * options.frequency_penalty + options.presence_penalty).astype(np.float32)
    for token_id, bias in options.logit_bias.items():
        adjusted[token_id] += np.float32(bias)
    return adjusted


def _draw(logits: Floats, options: SamplingOptions, uniform: float) -> int:
    """`min_p`, then `top_k`, then `top_p`, each of what the ones before left."""
    peak = logits.max()
    if not np.isfinite(peak):  # weights that have diverged: no choice means anything, but the engine must live on
        return int(np.argmax(logits))
    if 0 < options.top_k < len(logits):
        token_ids = _most_likely(logits, options.top_k)
        weights = _weights(logits[token_ids], peak, options)
        token_ids, weights = _keep(token_ids, weights, options.top_p * weights.sum(dtype=np.float64))
    elif options.top_p < 1:
        token_ids, weights = _nucleus(logits, peak, options)
    else:
        token_ids, weights = np.arange(len(logits)), _weights(logits, peak, options)
    cumulative = np.cumsum(weights, dtype=np.float64)
    chosen = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(token_ids[min(int(chosen), len(token_ids) - 1)])


def _weights(logits: Floats, peak: np.float32, options: SamplingOptions) -> Floats:
    """Proportional to the probabilities at this temperature; 1 at `peak`, 0 where `min_p` cuts."""
    with np.errstate(over="ignore", under="ignore"):  # far below the peak, or at a temperature near 0
        weights: Floats = np.exp((logits - peak) / np.float32(max(options.temperature, _COLDEST)))
    if options.min_p:
        weights[weights < options.min_p] = 0.0
    return weights


def _nucleus(logits: Floats, peak: np.float32, options: SamplingOptions) -> tuple[TokenIds, Floats]:
    """The fewest most likely tokens that hold `top_p` of the whole."""
    weights = _weights(logits, peak, options)
    wanted = options.top_p * float(weights.sum(dtype=np.float64))
    for least in _NUCLEUS_FLOORS:
        token_ids = np.flatnonzero(weights >= least)
        if weights[token_ids].sum(dtype=np.float64) >= wanted:
            break
    token_ids = token_ids[np.argsort(-logits[token_ids], kind="stable")]
    return _keep(token_ids, weights[token_ids], wanted)


def _keep(token_ids: TokenIds, weights: Floats, wanted: float) -> tuple[TokenIds, Floats]:
    """The first tokens, up to the one with which they weigh as much as `wanted`."""
    kept = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), wanted)) + 1
    return token_ids[:kept], weights[:kept]


def _most_likely(logits: Floats, count: int) -> TokenIds:
    """Token ids by falling logit, the first `count` of them."""
    peak = logits.max()
    for depth in _TOP_DEPTHS:
        token_ids = np.flatnonzero(logits >= peak - depth)
        if len(token_ids) >= count:
            break
    else:
        token_ids = np.arange(len(logits))
    if len(token_ids) > max(_SORTED_AT_ONCE, count):
        values = logits[token_ids]
        token_ids = token_ids[values >= np.partition(values, -count)[-count]]
    return token_ids[np.argsort(-logits[token_ids], kind="stable")][:count]
