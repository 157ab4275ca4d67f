"""Where a stand-in is called in another way than FastDeploy's own class of that name. Runs in `real_peer`'s process."""

import importlib
import inspect
import re
from typing import Any

from tests.engines.fastdeploy.standin.config import EngineLine, FDConfig

_HERE = "tests.engines.fastdeploy.standin"
_CLASSES = {
    "common_engine:EngineService": "fastdeploy.engine.common_engine",
    "control:ControlRequest": "fastdeploy.engine.request",
    "control:ControlResponse": "fastdeploy.engine.request",
    "dynamic_weight_manager:DynamicWeightManager": "fastdeploy.rl.dynamic_weight_manager",
    "engine_client:EngineClient": "fastdeploy.entrypoints.engine_client",
    "gpu_model_runner:GPUModelRunner": "fastdeploy.worker.gpu_model_runner",
    "gpu_model_runner:InputBatch": "fastdeploy.worker.input_batch",
    "gpu_model_runner:MTPProposer": "fastdeploy.spec_decode.mtp",
    "gpu_model_runner:ProposerInputBatch": "fastdeploy.worker.input_batch",
    "gpu_worker:GpuWorker": "fastdeploy.worker.gpu_worker",
    "ipc_signal:IPCSignal": "fastdeploy.inter_communicator.ipc_signal",
    "task_queue:EngineWorkerQueue": "fastdeploy.inter_communicator.engine_worker_queue",
    "worker_loop:PaddleDisWorkerProc": "fastdeploy.worker.worker_process",
}
_FUNCTIONS = {
    "model_loader:get_model_loader": "fastdeploy.model_executor.model_loader",
    "utils:get_logger": "fastdeploy.utils",
    "ipc_signal:shared_memory_exists": "fastdeploy.inter_communicator.ipc_signal",
    "plugins:load_plugins_by_group": "fastdeploy.plugins.utils",
    "plugins:load_model_runner_plugins": "fastdeploy.plugins.model_runner",
}
_CONFIGS = {
    "cache_config": "fastdeploy.config:CacheConfig",
    "eplb_config": "fastdeploy.config:EPLBConfig",
    "graph_opt_config": "fastdeploy.config:GraphOptimizationConfig",
    "load_config": "fastdeploy.config:LoadConfig",
    "model_config": "fastdeploy.config:ModelConfig",
    "parallel_config": "fastdeploy.config:ParallelConfig",
    "routing_replay_config": "fastdeploy.config:RoutingReplayConfig",
    "scheduler_config": "fastdeploy.scheduler:SchedulerConfig",
    "speculative_config": "fastdeploy.config:SpeculativeConfig",
}
_OUR_OWN = {
    # How a test makes them, where FastDeploy has the rest of an engine to give, and their inner parts.
    "EngineService": {"__init__"},
    "EngineClient": {"__init__", "_change"},
    "EngineWorkerQueue": {"__init__", "_take_in"},
    "PaddleDisWorkerProc": {
        "_answer",
        "_attach",
        "_barrier",
        "_follow_signal",
        "_serve",
        "_sleep_until_updating",
    },
}


def differences() -> dict[str, Any]:
    """`compared`: how many names; `differences`: name -> [ours, theirs], for what FastDeploy has not in that way."""
    pairs = [(f"{_HERE}.{ours}", f"{origin}:{ours.partition(':')[2]}") for ours, origin in _FUNCTIONS.items()]
    for ours, origin in _CLASSES.items():
        name = ours.partition(":")[2]
        members = _members(f"{_HERE}.{ours}") - _OUR_OWN.get(name, set())
        pairs += [(f"{_HERE}.{ours}.{member}", f"{origin}:{name}.{member}") for member in sorted(members)]
    found = {ours: [_signature(ours), _signature(theirs)] for ours, theirs in pairs}
    return {"compared": len(found), "differences": {name: both for name, both in found.items() if both[0] != both[1]}}


def unknown_fields() -> list[str]:
    """What the stand-in's configuration has and FastDeploy's sources of that namespace do not name."""
    fd_config = vars(FDConfig(EngineLine(1, 0, 1, "ipc", "", {}, "")))
    unknown = sorted(fd_config.keys() - _CONFIGS.keys())
    for namespace, path in _CONFIGS.items():
        sources = "".join(inspect.getsource(kind) for kind in _find(path).__mro__ if kind is not object)
        fields = vars(fd_config[namespace])
        unknown += [f"{namespace}.{name}" for name in fields if not re.search(rf"\b{name}\b", sources)]
    return unknown


def _members(path: str) -> set[str]:
    kinds = (staticmethod, classmethod, property)
    members = vars(_find(path)).items()
    return {name for name, value in members if inspect.isfunction(value) or isinstance(value, kinds)}


def _find(path: str) -> Any:
    """None for what is not there."""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = inspect.getattr_static(found, attribute, None)
    return found


def _signature(path: str) -> Any:
    """[name, kind, default] of each parameter; "property"; None for what is not there."""
    found = _find(path)
    if found is None or isinstance(found, property):
        return None if found is None else "property"
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    parameters = inspect.signature(found).parameters.values()
    return [[parameter.name, parameter.kind.name, repr(parameter.default)] for parameter in parameters]
