"""The embedded runner under the weight manager's hands: rebinding, clearing, versions, requests in flight."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import GREEDY, PROMPTS, generate, make_checkpoint, next_step, open_runner, submit

from fastdeploy_rl._native import Mapping as NativeMapping
from fastdeploy_rl.control.generation import GenerationRequest
from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.errors import ConfigurationError, LifecycleError, RequestError, StaleGraphError
from fastdeploy_rl.memory.tensor_view import TensorView


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "first", seed=1)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "second", seed=2)


def advance(runner: EmbeddedRunner, count: int) -> None:
    for _ in range(count):
        step = next_step(runner)
        runner.accept(step, runner.execute(step))


def update(runner: EmbeddedRunner, views: Mapping[str, TensorView], version: str) -> None:
    """What the manager does between two steps."""
    runner.drain(0)
    runner.bind(views)
    runner.rebuild_kv_cache("1" * 64)
    runner.recapture_graphs()
    runner.set_version(version)


def poison(runner: EmbeddedRunner) -> None:
    """NaN into every byte of the cache that this runner could ever read."""
    for layer in runner._cache.layers:
        layer.slots[:] = math.nan


def test_parameters_name_global_shapes_and_ties(tmp_path: Path) -> None:
    runner = EmbeddedRunner(make_checkpoint(tmp_path / "model", tie_word_embeddings=True), 0, 1, None)
    specs = {spec.name: spec for spec in runner.parameters()}
    assert len(specs) == 2 * 9 + 3
    assert specs["model.layers.0.mlp.up_proj.weight"].shape == (48, 96)
    head = specs["lm_head.weight"]
    assert (head.coverage, head.tied_to) == (Coverage.TIED, "model.embed_tokens.weight")
    assert specs.keys() - runner.load().keys() == {"lm_head.weight"}


def test_bound_is_what_was_bound_and_empty_after_unbind(first: Path) -> None:
    runner = EmbeddedRunner(first, 0, 1, None)
    views = runner.load()
    runner.bind(views)
    assert runner.bound() == views
    runner.unbind()
    assert runner.bound() == {}


def test_parameters_are_the_bound_memory_itself(first: Path, second: Path) -> None:
    """A byte written into the bound memory counts in the next step: nothing was copied at the bind."""
    runner = open_runner(first)
    other = generate(open_runner(second), PROMPTS, 8).tokens
    for name, view in EmbeddedRunner(second, 0, 1, None).load().items():
        np.copyto(runner.bound()[name].numpy(), view.numpy())
    assert generate(runner, PROMPTS, 8).tokens == other


@pytest.mark.parametrize("is_tied", [False, True])
def test_unbind_lets_go_of_every_byte(tmp_path: Path, is_tied: bool) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "model", tie_word_embeddings=is_tied))
    generate(runner, PROMPTS, 4)
    arena = next(iter(runner.bound().values())).mapping
    assert arena.num_exports > 0
    runner.unbind()
    assert arena.num_exports == 0
    arena.close()


def test_step_without_weights_or_without_cache_is_refused(first: Path) -> None:
    runner = open_runner(first)
    submit(runner, [[5, 6]], 4)
    step = next_step(runner)
    runner.drop_kv_cache()
    with pytest.raises(LifecycleError, match="the KV cache is dropped"):
        runner.execute(step)
    runner.rebuild_kv_cache("1" * 64)
    runner.unbind()
    with pytest.raises(LifecycleError, match="no weights are bound"):
        runner.execute(step)


def test_dropped_cache_holds_no_memory_and_comes_back(first: Path) -> None:
    runner = open_runner(first)
    expected = generate(runner, PROMPTS, 16).tokens
    assert runner._cache.num_bytes > 0
    runner.drop_kv_cache()
    assert runner._cache.num_bytes == 0
    runner.drop_kv_cache()
    runner.rebuild_kv_cache("0" * 64)
    assert generate(runner, PROMPTS, 16).tokens == expected


def test_warm_engine_gives_the_tokens_of_a_cold_one_and_back(first: Path, second: Path) -> None:
    warm = open_runner(first)
    before = generate(warm, PROMPTS, 16).tokens
    old, new = dict(warm.bound()), EmbeddedRunner(second, 0, 1, None).load()
    update(warm, new, "1.2")
    cold = generate(open_runner(second), PROMPTS, 16).tokens
    assert cold != before
    assert generate(warm, PROMPTS, 16).tokens == cold
    update(warm, old, "1.3")
    assert generate(warm, PROMPTS, 16).tokens == before


def test_request_in_flight_goes_on_under_the_new_weights_with_its_tokens_kept(first: Path, second: Path) -> None:
    """The rest is what a cold engine with the new weights makes of prompt + kept tokens: no old key or value counts."""
    runner = open_runner(first)
    submit(runner, [PROMPTS[2]], 12)
    advance(runner, 5)
    kept = [token for _, token in runner.scheduler.take_outputs()]
    update(runner, EmbeddedRunner(second, 0, 1, None).load(), "1.2")
    advance(runner, 7)
    rest = [token for _, token in runner.scheduler.take_outputs()]
    expected = generate(open_runner(second), [PROMPTS[2] + [token.token_id for token in kept]], 7).tokens[0]
    assert [token.token_id for token in rest] == expected
    assert [token.version for token in kept + rest] == ["1.1"] * 5 + ["1.2"] * 7


def test_what_lies_in_a_page_from_before_is_never_seen(first: Path) -> None:
    """Even NaN, which a masked position would spread: pages are cleared when they are handed out."""
    runner = open_runner(first)
    expected = generate(runner, PROMPTS, 24)
    poison(runner)
    runner.rebuild_kv_cache("1" * 64)
    actual = generate(runner, PROMPTS, 24)
    assert actual.tokens == expected.tokens
    assert np.array_equal(actual.logits, expected.logits)


def test_abort_requests_ends_all_with_the_reason(first: Path) -> None:
    runner = open_runner(first)
    submit(runner, PROMPTS, 8)
    advance(runner, 2)
    runner.scheduler.take_outputs()
    runner.abort_requests("weights are cleared")
    ended = [token for _, token in runner.scheduler.take_outputs()]
    assert {(token.finish_reason, token.error) for token in ended} == {("abort", "weights are cleared")}
    assert len(ended) == len(PROMPTS)
    assert next_step(runner) is None


def test_request_in_a_step_may_be_aborted_before_its_token_is_taken(first: Path) -> None:
    runner = open_runner(first)
    submit(runner, [[5, 6], [7, 8]], 4)
    step = next_step(runner)
    logits = runner.execute(step)
    runner.scheduler.abort("0", "client left")
    runner.accept(step, logits)
    outputs = runner.scheduler.take_outputs()
    assert [(name, token.finish_reason) for name, token in outputs] == [("0", "abort"), ("1", "")]
    assert outputs[1].token.token_id == int(np.argmax(logits[1]))


def test_prompt_that_is_too_long_is_refused(first: Path) -> None:
    runner = open_runner(first, max_model_len=32)
    with pytest.raises(RequestError, match="prompt too long: 32 tokens, and the engine takes 32"):
        runner.scheduler.submit("a", GenerationRequest([5] * 32, 1, GREEDY))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": 257}, "max_model_len must be 2 to 256 for this model, got 257"),
        ({"max_model_len": 0}, "max_model_len must be 2 to 256"),
        ({"num_kv_pages": 15}, "15 KV pages of 16 tokens do not hold one request of max_model_len 256; at least 16"),
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
    ],
)
def test_limits_that_cannot_work_are_named(first: Path, limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        EmbeddedRunner(first, 0, 1, None, **limits)


def test_shorter_requests_need_no_tables_for_all_positions_of_the_model(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", max_position_embeddings=2**31 - 1)
    runner = open_runner(directory, max_model_len=64, num_kv_pages=4)
    submit(runner, [[5, 6]], 1)
    assert runner.execute(next_step(runner)).shape == (1, runner.config.vocab_size)


def test_model_that_does_not_split_is_refused_before_anything_is_loaded(first: Path) -> None:
    (first / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="does not split over 4 ranks"):
        EmbeddedRunner(first, 0, 4, None)


def test_other_ranks_have_no_scheduler_and_keep_quiet(first: Path) -> None:
    class Silent:
        """Never called: nothing here computes."""

    runner = EmbeddedRunner(first, 1, 2, Silent())
    with pytest.raises(LifecycleError, match="rank 1 has no scheduler"):
        _ = runner.scheduler
    runner.abort_requests("no effect")
    runner.drain(0)
    runner.rebuild_kv_cache("0" * 64)
    runner.drop_kv_cache()


def test_bound_views_of_any_mapping_are_accepted(first: Path) -> None:
    """Published memory is one mapping for each rank: here every tensor lies in one of its own."""
    runner = open_runner(first)
    expected = generate(runner, PROMPTS, 8).tokens
    scattered = {}
    for name, view in runner.bound().items():
        mapping = NativeMapping.private(view.num_bytes + 512)
        scattered[name] = TensorView(mapping, 512, view.dtype, view.shape)
        np.copyto(scattered[name].numpy(), view.numpy())
    update(runner, scattered, "1.2")
    assert generate(runner, PROMPTS, 8).tokens == expected


# --- graphs of the decode step ---------------------------------------------------------------------


def decoding(runner: EmbeddedRunner, count: int = 2) -> None:
    """So many requests, so far that each of the next steps is one token of each."""
    submit(runner, PROMPTS[:count], 12)
    advance(runner, 2)


def test_decode_steps_run_through_graphs_and_give_the_same_to_the_bit(first: Path) -> None:
    """Prompts of different lengths, requests that end: steps with prompts in them, and of other sizes, run without."""
    eager, graphed = open_runner(first, graph_batch_sizes=()), open_runner(first, graph_batch_sizes=(1, 7))
    assert (eager.recapture_graphs(), graphed.recapture_graphs()) == (0, 2)
    for runner in (eager, graphed):
        submit(runner, PROMPTS, 6)
        for index, tokens in ((5, 4), (6, 9)):
            runner.scheduler.submit(str(index), GenerationRequest([5, 6], tokens, GREEDY, ignore_eos=True))
    while (step := next_step(eager)) is not None:
        same = next_step(graphed)
        logits = eager.execute(step)
        assert np.array_equal(graphed.execute(same), logits)
        eager.accept(step, logits)
        graphed.accept(same, logits)
    assert eager.engine_load.num_graph_replays == 0
    assert graphed.engine_load.num_graphs_captured == 2
    assert 0 < graphed.engine_load.num_graph_replays < step_count(graphed)


def test_stale_decode_step_is_refused_and_changes_nothing(first: Path, second: Path) -> None:
    runner = open_runner(first)
    runner.recapture_graphs()
    submit(runner, [[5] * 15, [6] * 15], 12)
    advance(runner, 2)
    poison(runner)
    runner.bind(EmbeddedRunner(second, 0, 1, None).load())
    runner.keep_kv_cache("2" * 64)
    step = next_step(runner)
    assert len(step.new_pages) == 2
    before = [layer.slots.copy() for layer in runner._cache.layers]
    with pytest.raises(StaleGraphError, match="recapture_graphs"):
        runner.execute(step)
    assert all(
        np.array_equal(layer.slots, was, equal_nan=True)
        for layer, was in zip(runner._cache.layers, before, strict=True)
    )
    assert runner.recapture_graphs() == 16
    assert runner.execute(step).shape == (2, runner.config.vocab_size)


def test_without_the_guard_a_stale_graph_answers_with_the_weights_before(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU would do: the logits are those of the old weights, to the bit, though new ones are bound."""
    old, new, hazard = (open_runner(path) for path in (first, second, first))
    monkeypatch.setattr(hazard._graphs, "check_valid", lambda: None)
    hazard.recapture_graphs()
    for runner in (old, new, hazard):
        decoding(runner)
        for layer in runner._cache.layers:
            layer.slots[:] = 0.5  # the same keys and values, so that weights alone make the difference
    hazard.bind(EmbeddedRunner(second, 0, 1, None).load())
    hazard.keep_kv_cache("2" * 64)
    step = next_step(hazard)
    expected_old, expected_new = old.execute(step), new.execute(step)
    assert not np.array_equal(expected_old, expected_new)
    assert np.array_equal(hazard.execute(step), expected_old)
    hazard.recapture_graphs()
    assert np.array_equal(hazard.execute(step), expected_new)


def test_a_piece_of_a_prompt_is_no_decode_step_though_it_is_one_token(first: Path) -> None:
    """A device's graph computes logits of all its rows: of this one nobody wants any."""
    runner = open_runner(first, max_step_tokens=1)
    runner.recapture_graphs()
    submit(runner, [[5, 6, 7]], 2)
    for wanted, replays in ((0, 0), (0, 0), (1, 1), (1, 2)):
        step = next_step(runner)
        logits = runner.execute(step)
        runner.accept(step, logits)
        assert (len(logits), runner.engine_load.num_graph_replays) == (wanted, replays)


def test_cache_that_lies_elsewhere_needs_graphs_of_its_own(first: Path) -> None:
    runner = open_runner(first)
    assert runner.recapture_graphs() == 16
    before, size = runner._cache.address, runner._cache.num_bytes
    runner.drop_kv_cache()
    in_its_place = NativeMapping.private(size)
    runner.rebuild_kv_cache("0" * 64)
    assert runner.recapture_graphs() == (0 if runner._cache.address == before else 16)
    del in_its_place


def test_steps_run_without_graphs_while_the_cache_was_away_until_they_are_captured(first: Path) -> None:
    runner = open_runner(first)
    runner.recapture_graphs()
    expected = generate(runner, PROMPTS, 8)
    replays = runner.engine_load.num_graph_replays
    assert replays > 0
    runner.drop_kv_cache()
    runner.rebuild_kv_cache("0" * 64)
    assert np.array_equal(generate(runner, PROMPTS, 8).logits, expected.logits)
    assert runner.engine_load.num_graph_replays == replays
    runner.recapture_graphs()
    assert generate(runner, PROMPTS, 8).tokens == expected.tokens
    assert runner.engine_load.num_graph_replays > replays


def test_failed_bind_leaves_nothing_bound_and_no_graph_in_use(first: Path) -> None:
    runner = open_runner(first)
    views = dict(runner.bound())
    runner.recapture_graphs()
    expected = generate(runner, PROMPTS, 4).tokens
    with pytest.raises(KeyError):
        runner.bind({name: view for name, view in views.items() if "layers.1" not in name})
    assert runner.bound() == {}
    assert next(iter(views.values())).mapping.num_exports == 0
    runner.bind(views)
    assert runner.recapture_graphs() == 0
    assert generate(runner, PROMPTS, 4).tokens == expected


def test_kept_requests_go_on_with_their_pages(first: Path, second: Path) -> None:
    """No token of theirs is computed again: the next step has one of each."""
    runner = open_runner(first)
    decoding(runner)
    pages = [list(runner.scheduler.find(name).pages) for name in "01"]
    runner.bind(EmbeddedRunner(second, 0, 1, None).load())
    runner.keep_kv_cache("2" * 64)
    step = next_step(runner)
    assert [(len(part.token_ids), part.pages) for part in step.slices] == [(1, held) for held in pages]
    runner.rebuild_kv_cache("2" * 64)
    assert all(part.start == 0 for part in next_step(runner).slices)


def step_count(runner: EmbeddedRunner) -> int:
    """Of all steps so far."""
    return runner.scheduler._num_steps
