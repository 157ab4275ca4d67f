"""Live, verified weight updates for LLM inference engines during RL post-training.

Importing this package is cheap: no framework and no GPU is touched until a name below is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdeploy_rl.control.async_controller import AsyncEngineController as AsyncEngineController
    from fastdeploy_rl.control.controller import EngineController as EngineController
    from fastdeploy_rl.manager import DynamicWeightManager as DynamicWeightManager
    from fastdeploy_rl.model_group import ModelGroup as ModelGroup
    from fastdeploy_rl.plan.namespaces import namespaced as namespaced
    from fastdeploy_rl.publish.fastdeploy_compat import FastDeployFiles as FastDeployFiles
    from fastdeploy_rl.publish.publisher import WeightPublisher as WeightPublisher
    from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter as SnapshotWriter
    from fastdeploy_rl.publish.weight_server import WeightServer as WeightServer
    from fastdeploy_rl.version import WeightVersion as WeightVersion

_EXPORTS = {
    "AsyncEngineController": "fastdeploy_rl.control.async_controller",
    "DynamicWeightManager": "fastdeploy_rl.manager",
    "EngineController": "fastdeploy_rl.control.controller",
    "FastDeployFiles": "fastdeploy_rl.publish.fastdeploy_compat",
    "ModelGroup": "fastdeploy_rl.model_group",
    "SnapshotWriter": "fastdeploy_rl.publish.snapshot_writer",
    "WeightPublisher": "fastdeploy_rl.publish.publisher",
    "WeightServer": "fastdeploy_rl.publish.weight_server",
    "WeightVersion": "fastdeploy_rl.version",
    "namespaced": "fastdeploy_rl.plan.namespaces",
}

__all__ = [
    "AsyncEngineController",
    "DynamicWeightManager",
    "EngineController",
    "FastDeployFiles",
    "ModelGroup",
    "SnapshotWriter",
    "WeightPublisher",
    "WeightServer",
    "WeightVersion",
    "namespaced",
]


def __dir__() -> list[str]:
    """With the names below, for whoever completes them at a prompt."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fastdeploy_rl' has no attribute {name!r}")
    try:
        return getattr(import_module(_EXPORTS[name]), name)
    except ImportError as error:
        if "_native" not in str(error):
            raise
        raise ImportError(
            f"the native core is not built for this Python in {__path__[0]}: pip install the repository into this "
            "environment, and start Python elsewhere than in a repository that was built for another one"
        ) from error
