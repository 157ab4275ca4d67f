"""Updates over the board while FastDeploy's runner has requests: two ranks as threads, each with a seat and the
stand-in runner, on weights that a trainer publishes."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.board.legacy import create_words, unlink_words
from fastdeploy_rl.config import ABORT, KEEP, REBUILD
from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.engines.fastdeploy.cache_transfer import CacheTransfer
from fastdeploy_rl.engines.fastdeploy.engine_hooks import EngineHooks
from fastdeploy_rl.engines.fastdeploy.expert_parallel import ExpertParallel
from fastdeploy_rl.engines.fastdeploy.model_runner import FastDeployModelRunner
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.engines.fastdeploy.seat import Seat
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings, PluginOptions
from fastdeploy_rl.errors import LifecycleError
from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig
from tests.engines.fastdeploy.standin.gpu_model_runner import GPUModelRunner
from tests.engines.fastdeploy.standin.trainer import as_the_engine, random_weights
from tests.process.numpy_engine import free_port

NUM_RANKS = 2
PROMPT = {"prompt": [1, 2, 3], "max_tokens": 5, "request_id": "r"}


class Rank:
    def __init__(self, rank: int, port: int, channel: Path, kv_policy: str) -> None:
        fd_config = FDConfig(EngineLine(port, rank, NUM_RANKS, "ipc", "", {}, "", graphs=True))
        self.gpu = GPUModelRunner(fd_config, "cpu", rank, NUM_RANKS, rank)
        self.gpu.load_model()
        self.seat = Seat(settings(rank, port, channel, kv_policy))
        hooks = EngineHooks(
            self.gpu,
            expert_parallel=ExpertParallel(fd_config.parallel_config, self.seat.meet),
            cache_transfer=CacheTransfer(port, has_process=False, has_prefix_tree=False),
        )
        self.runner = FastDeployModelRunner(ModelWeights(self.gpu.model, rank, NUM_RANKS), hooks)

    def start(self) -> None:
        self.seat.take(self.runner)
        self.gpu.update_share_input_block_num(8)
        self.gpu.capture_model()

    def begin(self) -> None:
        self.gpu.insert_tasks_v1([PROMPT], 1)
        self.gpu.execute_model()

    def finish(self) -> str:
        while self.runner.num_requests():
            self.gpu.execute_model()
        return repr(self.gpu.outputs["r"]) + self.gpu.logits.pop("r")


def settings(rank: int, port: int, channel: Path, kv_policy: str) -> EngineSettings:
    return EngineSettings(
        port=port,
        own_port=port,
        rank=rank,
        num_ranks=NUM_RANKS,
        tp_rank=rank,
        load_strategy="ipc",
        model_dir=channel,
        channel=channel,
        metas_dir=None,
        options=PluginOptions(update_s=10.0, clear_s=10.0, attach_s=10.0, kv_policy=kv_policy),
        rsync_config="",
        is_expert_parallel=False,
    )


class Scene:
    def __init__(self, stack: ExitStack, channel: Path, kv_policy: str) -> None:
        self.port = free_port()
        create_words(self.port)
        stack.callback(unlink_words, self.port)
        self.publisher = stack.enter_context(WeightPublisher(channel))
        self.publish(1)
        self.pool = stack.enter_context(ThreadPoolExecutor(NUM_RANKS))
        made = [self.pool.submit(Rank, rank, self.port, channel, kv_policy) for rank in range(NUM_RANKS)]
        self.ranks = [each.result(20) for each in made]
        for rank in self.ranks:
            stack.callback(rank.seat.close)
        for each in [self.pool.submit(rank.start) for rank in self.ranks]:
            each.result(20)

    def publish(self, step: int) -> None:
        self.publisher.publish(random_weights(step), step=step, convention=as_the_engine)

    @contextmanager
    def looping(self) -> Iterator[EngineController]:
        """FastDeploy's loop turns, and has nothing to compute."""
        is_over, meeting = threading.Event(), threading.Barrier(NUM_RANKS)

        def turns(rank: Rank) -> None:
            while not (meeting.wait(20) >= 0 and is_over.is_set() and meeting.wait(20) >= 0):
                rank.seat.look_for_command()
                time.sleep(0.001)

        running = [self.pool.submit(turns, rank) for rank in self.ranks]
        try:
            with EngineController(self.port) as engine:
                yield engine
        finally:
            is_over.set()
            for each in running:
                each.result(20)

    def finish(self) -> list[str]:
        return [rank.finish() for rank in self.ranks]

    def begin(self) -> None:
        for rank in self.ranks:
            rank.begin()


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    """Its parameter: what an update does to the KV cache."""
    with ExitStack() as stack:
        yield Scene(stack, tmp_path / "channel", getattr(request, "param", REBUILD))


def test_an_update_that_would_cost_requests_their_kv_is_rejected_and_they_go_on(scene: Scene) -> None:
    scene.begin()
    expected = scene.finish()
    scene.begin()
    scene.publish(2)
    with scene.looping() as engine:
        for in_flight in (KEEP, ABORT):
            with pytest.raises(LifecycleError, match="1 requests are in flight"):
                engine.update(in_flight=in_flight)
            assert engine.status().version == "1.1"
        assert [entry.outcome for entry in engine.history(2)] == ["rejected"] * 2
    assert scene.finish() == expected


@pytest.mark.parametrize("scene", [KEEP], indirect=True)
def test_with_kv_that_is_kept_requests_go_on_by_the_new_weights(scene: Scene) -> None:
    scene.begin()
    undisturbed = scene.finish()
    scene.begin()
    scene.publish(2)
    with scene.looping() as engine:
        assert engine.update(in_flight=KEEP).version == "1.2"
    assert all(after != before for after, before in zip(scene.finish(), undisturbed, strict=True))
