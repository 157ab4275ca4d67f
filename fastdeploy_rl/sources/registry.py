"""Load strategies by name, imported only when asked for.

Owns the names. Invariant: every name of the design is either
here or refused with a word about what can be used instead.
"""

from importlib import import_module
from typing import cast

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.sources.base import SourceConfig, WeightSource

_SOURCES = {"ipc": "fastdeploy_rl.sources.ipc:IpcSource"}
_PLANNED = ("ipc_snapshot", "rsync")


def load_strategies() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(sorted(_SOURCES))


def check_load_strategy(load_strategy: str) -> None:
    """ConfigurationError unless `create` knows the name."""
    if load_strategy in _SOURCES:
        return
    available = ", ".join(load_strategies())
    if load_strategy in _PLANNED:
        raise ConfigurationError(f"load strategy {load_strategy!r} is not available in this version; use {available}")
    raise ConfigurationError(f"unknown load strategy {load_strategy!r:.80}; use {available}")


def create(load_strategy: str, config: SourceConfig) -> WeightSource:
    """A source of that kind; nothing is opened before it is used, and the caller closes it."""
    check_load_strategy(load_strategy)
    module, _, name = _SOURCES[load_strategy].partition(":")
    return cast(WeightSource, getattr(import_module(module), name)(config))
