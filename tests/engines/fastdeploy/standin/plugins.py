"""How FastDeploy finds plugins: entry points of a group, of those that FD_PLUGINS names.

Keeps its two treacherous traits: what fails to load is logged and left out, and with a number of runners other than one
the assertion fails, which GpuWorker takes as "none"."""

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tests.engines.fastdeploy.standin import envs

PLUGINS_GROUP = "fastdeploy.model_runner_plugins"

_log = logging.getLogger(__name__)


def load_plugins_by_group(group: str) -> dict[str, Callable[[], Any]]:
    allowed = envs.FD_PLUGINS
    if allowed is None:
        return {}
    plugins: dict[str, Callable[[], Any]] = {}
    for plugin in entry_points(group=group):
        if plugin.name in allowed:
            try:
                plugins[plugin.name] = plugin.load()
            except Exception:
                _log.exception("plugin=%s event=not_loaded", plugin.name)
    return plugins


def load_model_runner_plugins():
    plugins = load_plugins_by_group(group=PLUGINS_GROUP)
    if len(plugins) != 1:
        raise AssertionError(f"{len(plugins)} plugins for the model runner, one is allowed")
    return next(iter(plugins.values()))()
