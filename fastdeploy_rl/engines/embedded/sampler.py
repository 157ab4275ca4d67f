"""Which token comes next, given the logits of one position.

Owns greedy and random choice and the log-probability that is reported. Knows nothing
of requests or batches. Invariant: a choice is a pure function of (logits, options,
seed, position): the same request gives the same tokens whatever shares its batch.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdeploy_rl.control.generation import SamplingOptions

Floats = npt.NDArray[np.float32]


class SampledToken(NamedTuple):
    """`logprob` is the natural logarithm of the probability under the model itself: no temperature, nothing cut off."""

    token_id: int
    logprob: float


def sample(logits: Floats, options: SamplingOptions, *, seed: int, position: int) -> SampledToken:
    """`logits`: [vocab] float32. `position` counts the tokens
    generated before this one. Ties go to the smaller token id."""
    token_id = int(np.argmax(logits)) if options.temperature == 0 else _draw(logits, options, _uniform(seed, position))
    return SampledToken(token_id, float(logits[token_id]) - _log_sum_exp(logits))


def _log_sum_exp(logits: Floats) -> float:
    peak = logits.max()
    return float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))


def _uniform(seed: int, position: int) -> float:
    """The `position`-th number of a counter-based stream, in [0, 1): nothing to keep between tokens."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: Floats, options: SamplingOptions, uniform: float) -> int:
    token_ids = _most_likely(logits, options.top_k) if options.top_k or options.top_p < 1 else np.arange(len(logits))
    scaled = logits[token_ids].astype(np.float64) / options.temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    total = cumulative[-1]
    if options.top_p < 1:
        kept = int(np.searchsorted(cumulative, options.top_p * total)) + 1
        total = cumulative[min(kept, len(cumulative)) - 1]
    chosen = np.searchsorted(cumulative, uniform * total, side="right")
    return int(token_ids[min(int(chosen), len(token_ids) - 1)])


def _most_likely(logits: Floats, top_k: int) -> npt.NDArray[np.intp]:
    """Token ids by falling logit, the first `top_k` of them (all for 0)."""
    if not 0 < top_k < len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, -top_k)[-top_k]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:top_k]
