"""Load strategies by name, imported only when asked for.

Owns the names, and which of them find weights without a trainer. Invariant: a name that is not here is refused with
those that are.
"""

from importlib import import_module
from typing import cast

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.sources.base import SourceConfig, WeightSource

IPC, IPC_SNAPSHOT, RSYNC = "ipc", "ipc_snapshot", "rsync"
_SOURCES = {
    IPC: "fastdeploy_rl.sources.ipc_or_metas:create",
    IPC_SNAPSHOT: "fastdeploy_rl.sources.ipc_snapshot:SnapshotSource",
    RSYNC: "fastdeploy_rl.sources.rsync:create",
}


def load_strategies() -> tuple[str, ...]:
    """The names that `create` knows."""
    return tuple(sorted(_SOURCES))


def check_load_strategy(load_strategy: str) -> None:
    """ConfigurationError unless `create` knows the name."""
    if load_strategy not in _SOURCES:
        raise ConfigurationError(f"unknown load strategy {load_strategy!r:.80}; use {', '.join(load_strategies())}")


def takes_newest_at_start(load_strategy: str) -> bool:
    """An engine that starts comes up on the newest version, without a trainer that tells it to."""
    return load_strategy in (IPC_SNAPSHOT, RSYNC)


def create(load_strategy: str, config: SourceConfig) -> WeightSource:
    """A source of that kind; nothing is opened before it is used, and the caller closes it."""
    check_load_strategy(load_strategy)
    module, _, name = _SOURCES[load_strategy].partition(":")
    return cast(WeightSource, getattr(import_module(module), name)(config))
