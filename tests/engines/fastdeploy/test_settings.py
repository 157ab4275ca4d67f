"""What a worker is told, and what is wrong with it: of FastDeploy's configuration only the fields that are read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.fastdeploy.settings import EngineSettings
from fastdeploy_rl.errors import ConfigurationError

PARALLEL = {
    "tensor_parallel_rank": 1,
    "tensor_parallel_size": 2,
    "enable_expert_parallel": False,
    "expert_parallel_rank": 0,
    "expert_parallel_size": 1,
    "engine_worker_queue_port": ["9923"],
    "local_engine_worker_queue_port": 9923,
}


def config(load_strategy: str = "ipc", rsync_config: Any = None, nnode: int = 1, **parallel: Any) -> SimpleNamespace:
    return SimpleNamespace(
        nnode=nnode,
        parallel_config=SimpleNamespace(**PARALLEL | parallel),
        load_config=SimpleNamespace(load_strategy=load_strategy, rsync_config=rsync_config),
        model_config=SimpleNamespace(model="/models/m"),
    )


def settings(**given: Any) -> EngineSettings:
    return EngineSettings.of(config(**given), 1)


def test_ranks_of_a_tensor_parallel_group_are_one_engine() -> None:
    found = settings()
    assert (found.port, found.own_port, found.rank, found.num_ranks) == (9923, 9923, 1, 2)
    assert (found.model_dir, found.metas_dir) == (Path("/models/m"), Path("/shared_ipc_meta"))
    assert found.rsync_config == ""


def test_ranks_of_an_expert_parallel_group_are_one_engine_at_the_first_ones_port() -> None:
    found = settings(
        enable_expert_parallel=True,
        expert_parallel_rank=3,
        expert_parallel_size=4,
        tensor_parallel_rank=0,
        tensor_parallel_size=1,
        engine_worker_queue_port=["9923", "9924", "9925", "9926"],
        local_engine_worker_queue_port="9926",
    )
    assert (found.port, found.own_port, found.rank, found.num_ranks, found.tp_rank) == (9923, 9926, 3, 4, 0)


@pytest.mark.parametrize("port", [9923, "9923", [9923], "9923,9924"])
def test_releases_without_a_port_of_the_rank_have_the_first_one(port: Any) -> None:
    old = config(engine_worker_queue_port=port)
    del old.parallel_config.local_engine_worker_queue_port
    del old.load_config.rsync_config
    assert EngineSettings.of(old, 1).port == 9923


def test_options_are_taken_out_and_the_rest_is_rsyncs() -> None:
    options = {"channel": "/dev/shm/w", "update_s": 20, "metas_dir": ""}
    found = settings(load_strategy="rsync", rsync_config={"fastdeploy_rl": options, "transport": "tcp"})
    assert (found.channel, found.metas_dir) == (Path("/dev/shm/w"), None)
    assert (found.deadlines.update_s, found.deadlines.finish_s) == (20, Deadlines.finish_s)
    assert msgspec.json.decode(found.rsync_config) == {"transport": "tcp"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"load_strategy": "meta"}, "meta"),
        ({"rsync_config": "{}"}, "no JSON object"),
        ({"rsync_config": ["x"]}, "no JSON object"),
        ({"rsync_config": {1: 2}}, "no JSON object"),
        ({"rsync_config": {"fastdeploy_rl": {"chanel": "x"}}}, "chanel.*options are channel"),
        ({"rsync_config": {"fastdeploy_rl": {"update_s": 0}}}, "update_s"),
        ({"rsync_config": {"fastdeploy_rl": {"frozen": ["draft"]}}}, "frozen"),
        ({"load_strategy": "rsync", "rsync_config": {"transport": "tcp", "address": object()}}, "--rsync-config"),
        ({"engine_worker_queue_port": ""}, "engine_worker_queue_port"),
        ({"engine_worker_queue_port": None}, "engine_worker_queue_port"),
        ({"nnode": 2}, "2 machines"),
        ({"tensor_parallel_rank": 2}, "rank 2 of 2"),
        ({"tensor_parallel_size": 32}, "32 ranks"),
    ],
)
def test_what_cannot_be_is_refused_and_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        settings(**given)
