"""The numpy runner: the common suite, alone and as one rank of three."""

from dataclasses import dataclass

import pytest
from model_runner_suite import ModelRunnerSuite

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NUM_GRAPHS, NumpyModel, NumpyRunner

MODEL = NumpyModel(
    (
        ParameterSpec("embed", "F32", (12, 5), 0),
        ParameterSpec("up", "F32", (5, 18), 1),
        ParameterSpec("norm", "F32", (5,), None),
        ParameterSpec("bias", "F32", (5,), None),
        ParameterSpec("scale", "F32", (), None),
        ParameterSpec("empty", "F32", (0, 4), None),
        ParameterSpec("head", "F32", (12, 5), 0, Coverage.TIED, "embed"),
    )
)


@dataclass(frozen=True)
class NumpySubject:
    runner: NumpyRunner

    def answer(self) -> bytes:
        return self.runner.token().to_bytes(8, "little")

    def version_of_a_token(self) -> str:
        return self.runner.version


class TestNumpyRunner(ModelRunnerSuite):
    @pytest.fixture(params=[(0, 1), (1, 3)], ids=["alone", "rank 1 of 3"])
    def subject(self, request: pytest.FixtureRequest) -> NumpySubject:
        return NumpySubject(NumpyRunner(MODEL, *request.param))


def test_calls_are_remembered_in_order() -> None:
    runner = NumpyRunner(MODEL, 0, 1)
    runner.load(1)
    runner.drain(0)
    runner.set_version("1.1")
    runner.unbind()
    assert runner.calls == ["bind", "drain", "version 1.1", "unbind"]


def test_time_to_capture_is_what_was_set_for_memory_that_is_new() -> None:
    runner = NumpyRunner(MODEL, 0, 1)
    runner.capture_seconds = 0.25
    views = runner.load(1)
    runner.rebuild_kv_cache("0" * 64)
    assert runner.recapture_seconds(views) == 0.25
    assert (runner.recapture_graphs(), runner.num_captured) == (NUM_GRAPHS, NUM_GRAPHS)
    assert runner.recapture_seconds(views) == 0
    runner.drop_graphs()
    assert runner.recapture_seconds(views) == 0.25
