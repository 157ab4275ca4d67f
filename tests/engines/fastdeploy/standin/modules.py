"""The stand-ins under the names of FastDeploy's modules, for one process that must find a FastDeploy."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = "tests.engines.fastdeploy.standin"
_MODULES = {
    "fastdeploy.envs": "envs",
    "fastdeploy.inter_communicator": "ipc_signal",
    "fastdeploy.inter_communicator.ipc_signal": "ipc_signal",
    "fastdeploy.plugins.utils": "plugins",
    "fastdeploy.plugins.model_runner": "plugins",
    "fastdeploy.rl.dynamic_weight_manager": "dynamic_weight_manager",
    "fastdeploy.model_executor.model_loader": "model_loader",
    "fastdeploy.platforms": "platforms",
    "fastdeploy.utils": "utils",
    "fastdeploy.worker.gpu_model_runner": "gpu_model_runner",
}
"""FastDeploy's name -> ours. Packages above them are made as they are needed."""
_OF_THE_IMPORT = {"__name__", "__spec__", "__loader__", "__package__", "__file__", "__cached__", "__builtins__"}


class _Finder(MetaPathFinder, Loader):
    """Imports one of ours when FastDeploy's name is asked for, and not before."""

    def find_spec(self, fullname, path=None, target=None):
        is_package = any(name.startswith(fullname + ".") for name in _MODULES)
        if fullname in _MODULES or is_package:
            return ModuleSpec(fullname, self, is_package=is_package)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        ours = _MODULES.get(module.__name__)
        if ours is not None:
            content = vars(importlib.import_module(f"{_HERE}.{ours}"))
            vars(module).update({name: content[name] for name in content.keys() - _OF_THE_IMPORT})


def install() -> None:
    """From now on `import fastdeploy` finds the stand-ins, in this process."""
    sys.meta_path.insert(0, _Finder())
