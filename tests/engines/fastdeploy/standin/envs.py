"""The environment as FastDeploy reads it: anew each time that a name is asked for."""

import os
from collections.abc import Callable
from typing import Any

_VARIABLES: dict[str, Callable[[], Any]] = {
    "FD_PLUGINS": lambda: os.environ["FD_PLUGINS"].split(",") if "FD_PLUGINS" in os.environ else None,
    "FD_ENABLE_V1_UPDATE_WEIGHTS": lambda: bool(int(os.environ.get("FD_ENABLE_V1_UPDATE_WEIGHTS", "0"))),
    "ENABLE_V1_KVCACHE_SCHEDULER": lambda: int(os.environ.get("ENABLE_V1_KVCACHE_SCHEDULER", "1")),
}


def __getattr__(name: str) -> Any:
    if name not in _VARIABLES:
        raise AttributeError(f"no variable {name}")
    return _VARIABLES[name]()
