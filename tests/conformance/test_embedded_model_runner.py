"""The embedded runner with a tiny Llama: the common suite, with a tied and an untied head."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from model_runner_suite import ModelRunnerSuite, go_live, lay_out, mapping_of, values, version

from fastdeploy_rl._native import Mapping
from tests.engines.tiny_llama import PROMPTS, EmbeddedRunner, generate, make_checkpoint, next_step, submit

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class EmbeddedSubject:
    runner: EmbeddedRunner

    def answer(self) -> bytes:
        try:
            answers = generate(self.runner, PROMPTS[:3], 4)
        finally:
            self.runner.abort_requests("a step failed")
            self.runner.scheduler.take_outputs()
        return answers.logits.tobytes() + repr(answers.tokens).encode()

    def version_of_a_token(self) -> str:
        submit(self.runner, PROMPTS[:1], 1)
        step = next_step(self.runner)
        self.runner.accept(step, self.runner.execute(step))
        ((_, token),) = self.runner.scheduler.take_outputs()
        return token.version


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_checkpoint(root / name, tie_word_embeddings=name == "tied", num_key_value_heads=3)
        for name in ("tied", "untied")
    }


class TestEmbeddedRunner(ModelRunnerSuite):
    @pytest.fixture(params=["tied", "untied"])
    def subject(self, request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> EmbeddedSubject:
        return EmbeddedSubject(EmbeddedRunner(model_dirs[request.param], 0, 1, None))


def test_a_tied_head_is_the_embedding_bound_last(model_dirs: dict[str, Path]) -> None:
    """Tied answers are those of an untied model whose head holds the embedding's bytes, after each rebind."""
    tied = EmbeddedSubject(EmbeddedRunner(model_dirs["tied"], 0, 1, None))
    untied = EmbeddedSubject(EmbeddedRunner(model_dirs["untied"], 0, 1, None))
    for seed in (1, 2, 1):
        views = version(tied.runner, seed)
        spelled_out = lay_out(Mapping.private(2 * mapping_of(views).num_bytes), untied.runner)
        for name, view in spelled_out.items():
            np.copyto(view.numpy(), values(tied.runner, seed)[EMBEDDING if name == HEAD else name])
        assert go_live(tied, views, f"1.{seed}") == go_live(untied, spelled_out, f"1.{seed}")
