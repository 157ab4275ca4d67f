"""The memory of the KV cache, and prompts that take their beginning from it: what is read, these weights computed."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import GREEDY, Generated, generate, make_checkpoint, open_runner

from fastdeploy_rl.control.generation import GenerationRequest
from fastdeploy_rl.engines.embedded.kv_cache import CacheShape, KVCache
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.errors import LifecycleError
from fastdeploy_rl.memory.tensor_view import TensorView

SHAPE = CacheShape(num_layers=2, num_pages=4, num_kv_heads=1, head_dim=8)
PROMPT = [*range(3, 43), 5, 9]
SECOND = "b" * 64


def bytes_of(cache: KVCache, page: int) -> np.ndarray:
    return np.stack([layer.pages.numpy()[:, page] for layer in cache.layers])


def poison(cache: KVCache) -> None:
    for layer in cache.layers:
        layer.slots[:] = math.nan


def test_a_page_is_zero_when_it_is_handed_out_again_and_the_others_are_left_alone() -> None:
    cache = KVCache(SHAPE)
    cache.allocate()
    poison(cache)
    address = cache.address
    cache.allocate()
    cache.clear([1, 3])
    assert [bool(np.all(bytes_of(cache, page) == 0)) for page in range(4)] == [False, True, False, True]
    assert cache.address == address
    cache.drop()


def test_a_dropped_cache_has_no_address_and_comes_back_as_zeros() -> None:
    cache = KVCache(SHAPE)
    assert (cache.address, cache.num_bytes) == (0, 0)
    cache.allocate()
    poison(cache)
    cache.drop()
    assert (cache.address, cache.num_bytes) == (0, 0)
    with pytest.raises(LifecycleError, match="the KV cache is dropped"):
        _ = cache.layers
    cache.clear([0])
    cache.allocate()
    assert cache.address != 0
    assert all(np.all(bytes_of(cache, page) == 0) for page in range(4))
    cache.drop()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "first", seed=1)


@pytest.fixture
def second(tmp_path: Path) -> Mapping[str, TensorView]:
    return EmbeddedRunner(make_checkpoint(tmp_path / "second", seed=2), 0, 1, None).load()


def open_cold(first: Path, views: Mapping[str, TensorView] | None = None) -> EmbeddedRunner:
    runner = open_runner(first)
    if views is not None:
        runner.bind(views)
        runner.recapture_graphs()
    return runner


def num_found(runner: EmbeddedRunner) -> int:
    return runner.engine_load.num_prefix_hits


def test_a_prompt_that_finds_its_beginning_gets_the_tokens_of_one_that_computed_it(first: Path) -> None:
    cold = generate(open_cold(first), [PROMPT], 16)
    runner = open_cold(first)
    generate(runner, [PROMPT[:33]], 4)
    warm = generate(runner, [PROMPT], 16)
    assert num_found(runner) == 2
    assert warm.tokens == cold.tokens
    assert np.allclose(warm.logits, cold.logits, rtol=1e-4, atol=1e-4)


def test_after_weights_changed_the_same_prompt_is_computed_from_its_first_token_while_a_kept_request_goes_on(
    first: Path, second: Mapping[str, TensorView]
) -> None:
    """Bitwise what a cold engine makes of it: nothing of the kept request is read, and nothing that it left."""
    runner = open_cold(first)
    runner.scheduler.submit("kept", GenerationRequest(PROMPT, 24, GREEDY, ignore_eos=True))
    for _ in range(8):
        step = runner.scheduler.schedule()
        runner.accept(step, runner.execute(step))
    runner.bind(second)
    runner.keep_kv_cache(SECOND)
    runner.recapture_graphs()
    while (step := runner.scheduler.schedule()) is not None:
        runner.accept(step, runner.execute(step))
    kept = [token for _, token in runner.scheduler.take_outputs()]
    assert (len(kept), kept[-1].finish_reason) == (24, "length")
    again: Generated = generate(runner, [PROMPT], 8)
    cold = generate(open_cold(first, second), [PROMPT], 8)
    assert (num_found(runner), runner.engine_load.num_prefix_refusals) == (0, 2)
    assert again.tokens == cold.tokens
    assert np.array_equal(again.logits, cold.logits)
