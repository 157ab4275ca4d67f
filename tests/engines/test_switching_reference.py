"""The reference that engines are held against is right itself: against a Llama without a cache, and it tells apart what
must be told apart. And the embedded runner, alone in this process, agrees with it."""

import numpy as np
import numpy_llama
import pytest
from lively_model import SETTINGS, write_lively_model
from served_engine import Model, Weights
from switching_reference import Answer, Span, SwitchingLlama, Version, decode, disagreements
from tiny_llama import GREEDY, next_step, open_runner

from fastdeploy_rl.control.generation import GenerationRequest
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner

PROMPT = [5, 6, 7, 8, 200, 17]
SPANS = (Span("1.1", 0, 9), Span("1.2", 9, 20), Span("1.3", 20, 24))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    place = tmp_path_factory.mktemp("models")
    return [write_lively_model(place / str(seed), seed) for seed in range(3)]


def versions_of(models: list[Model], keeps_kv: tuple[bool, bool, bool]) -> dict[str, Version]:
    return {
        span.version: Version(model.weights, keeps) for span, model, keeps in zip(SPANS, models, keeps_kv, strict=True)
    }


def cold(weights: Weights, token_ids: list[int]) -> np.ndarray:
    return numpy_llama.log_softmax(numpy_llama.logits(SETTINGS, weights, token_ids))


def test_in_pieces_it_says_what_the_model_says_without_a_cache(models: list[Model]) -> None:
    llama = SwitchingLlama(SETTINGS, models[0].weights)
    tokens = list(range(30, 50))
    pieces = [llama.extend(tokens[start:end]) for start, end in ((0, 7), (7, 8), (8, 20))]
    np.testing.assert_allclose(np.concatenate(pieces), cold(models[0].weights, tokens), atol=1e-12)


def test_after_a_rebuild_nothing_of_the_old_weights_counts(models: list[Model]) -> None:
    llama = SwitchingLlama(SETTINGS, models[0].weights)
    llama.extend(PROMPT)
    llama.switch(models[1].weights, keeps_kv=False)
    np.testing.assert_allclose(llama.extend([9])[-1], cold(models[1].weights, [*PROMPT, 9])[-1], atol=1e-12)


def test_a_kept_sequence_is_neither_that_of_the_old_nor_of_the_new_weights(models: list[Model]) -> None:
    llama = SwitchingLlama(SETTINGS, models[0].weights)
    llama.extend(PROMPT)
    llama.switch(models[1].weights, keeps_kv=True)
    kept = llama.extend([9])[-1]
    for model in models[:2]:
        assert np.abs(kept - cold(model.weights, [*PROMPT, 9])[-1]).max() > 0.1


@pytest.mark.parametrize("keeps_kv", [(False, False, False), (False, True, False), (False, True, True)])
def test_what_it_decodes_agrees_with_itself_and_with_nothing_else(
    models: list[Model], keeps_kv: tuple[bool, bool, bool]
) -> None:
    versions = versions_of(models, keeps_kv)
    answer = Answer(PROMPT, *decode(SETTINGS, versions, PROMPT, SPANS), SPANS, "length")
    assert disagreements(SETTINGS, versions, answer) == []
    tokens = list(answer.tokens)
    tokens[15] = (tokens[15] + 1) % 264
    late = (Span("1.1", 0, 10), Span("1.2", 10, 20), SPANS[2])
    for wrong in (
        answer._replace(tokens=tokens),
        answer._replace(logprobs=[value + 0.01 for value in answer.logprobs]),
        answer._replace(spans=late),
        answer._replace(spans=SPANS[:2]),
        answer._replace(spans=SPANS[1:]),
        answer._replace(spans=(SPANS[0], SPANS[1]._replace(version="1.0"), SPANS[2])),
        answer._replace(logprobs=answer.logprobs[1:]),
    ):
        assert disagreements(SETTINGS, versions | {"1.0": versions["1.2"]}, wrong)
    other = versions_of(models, (False, not keeps_kv[1], keeps_kv[2]))
    assert disagreements(SETTINGS, other, answer)


def run_to(runner: EmbeddedRunner, count: int) -> None:
    for _ in range(count):
        step = next_step(runner)
        runner.accept(step, runner.execute(step))


@pytest.mark.parametrize("keeps_kv", [(False, False, False), (False, True, True), (False, True, False)])
def test_a_runner_that_switches_says_what_the_reference_says(
    models: list[Model], keeps_kv: tuple[bool, bool, bool]
) -> None:
    """Two requests beside each other, with another prompt each."""
    runner = open_runner(models[0].directory)
    prompts = {"a": PROMPT, "b": [3, 1, 4] * 11}
    for name, prompt in prompts.items():
        request = GenerationRequest(prompt, SPANS[-1].end, GREEDY, ignore_eos=True, num_logprobs=0)
        runner.scheduler.submit(name, request)
    for span, model, keeps in zip(SPANS, models, keeps_kv, strict=True):
        if span.start:
            runner.bind(EmbeddedRunner(model.directory, 0, 1, None).load())
            change = runner.keep_kv_cache if keeps else runner.rebuild_kv_cache
            change(span.version[-1] * 64)
            runner.recapture_graphs()
            runner.set_version(span.version)
        run_to(runner, span.end - span.start)
    made = runner.scheduler.take_outputs()
    versions = versions_of(models, keeps_kv)
    for name, prompt in prompts.items():
        tokens = [token for request_id, token in made if request_id == name]
        assert [token.version for token in tokens] == [s.version for s in SPANS for _ in range(s.start, s.end)]
        decoded = decode(SETTINGS, versions, prompt, SPANS)
        assert [token.token_id for token in tokens] == decoded.tokens
        np.testing.assert_allclose([token.logprob for token in tokens], decoded.logprobs, atol=1e-4)


def test_a_prompt_that_was_half_computed_begins_again_under_the_new_weights(models: list[Model]) -> None:
    """Its tokens say one version, and no key or value of another counts: spans could not tell of it. A request that
    makes tokens already goes on with what it has."""
    runner = open_runner(models[0].directory, max_step_tokens=16)
    prompts = {"early": [7], "late": list(range(40))}
    for name, prompt in prompts.items():
        request = GenerationRequest(prompt, 12, GREEDY, ignore_eos=True, num_logprobs=0)
        runner.scheduler.submit(name, request)
        run_to(runner, 2)
    runner.bind(EmbeddedRunner(models[1].directory, 0, 1, None).load())
    runner.keep_kv_cache("2" * 64)
    runner.recapture_graphs()
    runner.set_version("1.2")
    while (step := next_step(runner)) is not None:
        runner.accept(step, runner.execute(step))
    made = runner.scheduler.take_outputs()
    versions = {"1.1": Version(models[0].weights), "1.2": Version(models[1].weights, keeps_kv=True)}
    for name, spans in (("early", [Span("1.1", 0, 4), Span("1.2", 4, 12)]), ("late", [Span("1.2", 0, 12)])):
        tokens = [token for request_id, token in made if request_id == name]
        assert [token.version for token in tokens] == [s.version for s in spans for _ in range(s.start, s.end)]
        assert [token.token_id for token in tokens] == decode(SETTINGS, versions, prompts[name], spans).tokens
