"""The entry point of group `fastdeploy.model_runner_plugins`: what FastDeploy asks for its model runner.

FastDeploy takes any exception here for "no plugin", and starts with its own runner, without a word. So nothing here
raises: where something is wrong, the class that is returned says so when FastDeploy makes a runner of it, and the start
fails. Importing this module touches neither Paddle nor FastDeploy. Invariant: `model_runner` returns a class; its
`recorded_error` is empty exactly where it works.
"""

import logging
from typing import Any

_log = logging.getLogger(__name__)


def model_runner() -> type:
    """FastDeploy's GPUModelRunner, with weights that this package keeps; or, where that cannot be had, a class that
    cannot be made an object of and tells why. May be called any number of times."""
    try:
        return _model_runner()
    except Exception as error:  # an exception would be a fallback that nobody sees
        _log.exception("event=plugin_failed")
        return refusal(f"{type(error).__name__}: {error}")


def _model_runner() -> type:
    from fastdeploy.model_executor.model_loader import get_model_loader
    from fastdeploy.platforms import current_platform
    from fastdeploy.worker.gpu_model_runner import GPUModelRunner

    from fastdeploy_rl.engines.fastdeploy.activity import open_log
    from fastdeploy_rl.engines.fastdeploy.runner_class import runner_class

    others = (getattr(current_platform, name, None) for name in ("is_xpu", "is_intel_hpu", "is_maca"))
    if any(is_other() for is_other in others if is_other is not None):
        raise RuntimeError("the plugin has a model runner for CUDA devices only; unset FD_PLUGINS on this platform")
    open_log()
    return runner_class(GPUModelRunner, get_model_loader)


def refusal(reason: str) -> type:
    """A class in the place of a runner: FastDeploy's start ends with the reason."""

    class RefusedModelRunner:
        recorded_error = reason

        def __init__(self, *arguments: Any, **named: Any) -> None:
            raise RuntimeError(
                f"fastdeploy_rl is named in FD_PLUGINS and cannot run: {reason}; "
                "mend that (fastdeploy-rl doctor --fastdeploy), or take it out of FD_PLUGINS"
            )

    return RefusedModelRunner
