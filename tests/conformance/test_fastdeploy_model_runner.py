"""FastDeploy's models under the common suite: a main model with a tied head, and one with an MTP model beside it; the
runner that derives KV and graphs from them is the stand-in for FastDeploy's."""

from dataclasses import dataclass

import pytest
from model_runner_suite import ModelRunnerSuite, Subject, alternate, go_live, version
from paddle import nn

from fastdeploy_rl import ModelGroup
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.model_runner import FastDeployModelRunner
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.errors import NotServingError
from fastdeploy_rl.runner import ModelRunner
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.gpu_model_runner import GPUModelRunner
from tests.engines.fastdeploy.standin.model_loader import MODEL, Parameter, StandinModel

REQUESTS = [
    {"prompt": [1, 2, 3], "max_tokens": 3},
    {"prompt": [4], "max_tokens": 2},
    {"prompt": [7, 30], "max_tokens": 4},
]


@dataclass(frozen=True)
class FastDeploySubject:
    runner: ModelRunner
    main: FastDeployModelRunner
    gpu_runner: GPUModelRunner

    def answer(self) -> bytes:
        """FastDeploy's loop computes nothing while its runner `is_sleeping`."""
        if not (self.runner.bound() and self.runner.has_kv_cache):
            raise NotServingError("weights or KV cache are not there")
        runner = self.gpu_runner
        runner.outputs, runner.logits = {}, {}
        runner.insert_tasks_v1(REQUESTS, len(REQUESTS))
        while runner.outputs and self.main.num_requests():
            runner.execute_model()
        return repr((runner.outputs, runner.logits)).encode()

    def version_of_a_token(self) -> str:
        return self.main.version


def make_model() -> StandinModel:
    """With a second norm, and a head that is the embedding."""
    body = {name: parameter for name, parameter in MODEL.items() if name != "lm_head.weight"}
    model = StandinModel({**body, "norm.weight": Parameter((8,), None)}, 1)
    model.add_sublayer("lm_head", nn.Layer())
    model.lm_head.add_parameter("weight", model.embed_tokens.weight)
    return model


def subject_after_fastdeploys_start(*, mtp: bool) -> FastDeploySubject:
    fd_config = FDConfig(EngineLine(1, 0, 1, "ipc", "", {}, "", mtp=mtp, graphs=True))
    gpu_runner = GPUModelRunner(fd_config, "cpu", 0, 1, 0)
    gpu_runner.model = make_model()
    gpu_runner._init_speculative_proposer()
    hooks = EngineHooks(
        gpu_runner,
        expert_parallel=ExpertParallel(fd_config.parallel_config, lambda: None),
        cache_transfer=CacheTransfer(1, has_process=False, has_prefix_tree=False),
    )
    main = FastDeployModelRunner(ModelWeights(gpu_runner.model, 0, 1), hooks)
    runner: ModelRunner = main
    if mtp:
        runner = ModelGroup(main, mtp=FastDeployModelRunner(ModelWeights(gpu_runner.proposer.model, 0, 1)))
    runner.bind(version(runner, 0))
    runner.rebuild_kv_cache("0" * 64)
    assert (runner.recapture_graphs(), runner.has_kv_cache) == (0, False)
    gpu_runner.profile_run()
    gpu_runner.update_share_input_block_num(gpu_runner.num_gpu_blocks)
    gpu_runner.capture_model()
    return FastDeploySubject(runner, main, gpu_runner)


class FastDeploySuite(ModelRunnerSuite):
    """FastDeploy keeps the graphs of one set of addresses: what others keep for several is another claim here."""

    mtp = False

    @pytest.fixture
    def subject(self) -> FastDeploySubject:
        subject = subject_after_fastdeploys_start(mtp=self.mtp)
        subject.runner.drop_kv_cache()
        subject.runner.unbind()
        return subject

    def test_alternating_memory_is_captured_in_the_first_round_alone(self, subject: Subject) -> None:
        """No: each time that it changes, and then answers are those of the memory that is bound."""
        a, b = version(subject.runner, 1), version(subject.runner, 2)
        assert set(alternate(subject, a, b, rounds=2)) == {3}
        assert go_live(subject, a) != go_live(subject, b)

    def test_capturing_costs_nothing_where_it_was_done_before(self, subject: Subject) -> None:
        """Where it was done last."""
        known, unknown = version(subject.runner, 1), version(subject.runner, 2)
        go_live(subject, known)
        assert subject.runner.recapture_seconds(known) == 0
        assert subject.runner.recapture_seconds(unknown) > 0
        go_live(subject, unknown, "1.2")
        assert subject.runner.recapture_seconds(known) > 0 == subject.runner.recapture_seconds(unknown)


class TestFastDeployRunner(FastDeploySuite):
    pass


class TestFastDeployRunnerWithMTP(FastDeploySuite):
    mtp = True


@pytest.mark.parametrize("mtp", [False, True])
def test_what_fastdeploy_captured_at_its_start_is_known_and_let_go(mtp: bool) -> None:
    """Its graphs are of the weights of the start: after the first update they answer for nobody."""
    subject = subject_after_fastdeploys_start(mtp=mtp)
    subject.runner.drain(0)
    assert subject.runner.has_graphs
    views = version(subject.runner, 1)
    updated = go_live(subject, views)
    subject.runner.drop_graphs()
    assert subject.answer() == updated


def test_what_fastdeploy_captured_at_its_start_stays_where_nothing_moves() -> None:
    subject = subject_after_fastdeploys_start(mtp=True)
    graphs = subject.gpu_runner.model.graphs[1]
    subject.runner.drain(0)
    subject.runner.rebuild_kv_cache("1" * 64)
    assert subject.runner.recapture_graphs() == 0
    assert subject.gpu_runner.model.graphs[1] is graphs
