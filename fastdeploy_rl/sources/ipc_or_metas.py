"""Load strategy `ipc`, whoever the trainer is: our channel where something is published there, else FastDeploy's files.

Owns which of the two a version comes from. Refuses to know either. Invariant: a version is staged from where it was
resolved.

Looked at anew each time, so that a trainer may change over while its engine runs: what our publisher announced comes
first, since it has a manifest and leases.
"""

import threading
from pathlib import Path

from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig, StagedSource, WeightSource
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.sources.ipc_metas import IpcMetasSource, has_ipc_metas
from fastdeploy_rl.version import WeightVersion

_MAX_KNOWN = 16
"""Versions that were resolved and may still be staged; an update stages what it has just resolved."""


def create(config: SourceConfig) -> WeightSource:
    """A source of that kind. Without a `metas_dir` of the config, our channel's alone."""
    return IpcSource(config) if config.metas_dir is None else IpcOrMetasSource(config, config.metas_dir)


class IpcOrMetasSource:
    """One engine rank that reads where the trainer writes. Opens nothing before it is used."""

    def __init__(self, config: SourceConfig, metas_dir: Path) -> None:
        self._config = config
        self._metas_dir = metas_dir
        self._channel = Channel(config.channel)
        self._ours = IpcSource(config)
        self._metas = IpcMetasSource(config, metas_dir)
        self._lock = threading.Lock()
        self._known: dict[int, tuple[ResolvedPublication, WeightSource]] = {}

    def _source(self) -> WeightSource:
        """The one that has something now. NoPublicationError names both places."""
        if self._channel.read_latest() is not None:
            return self._ours
        if has_ipc_metas(self._metas_dir):
            return self._metas
        raise NoPublicationError(
            f"nothing is published in {self._config.channel} (a trainer announces versions there with a "
            f"WeightPublisher), and {self._metas_dir} has none of FastDeploy's ipc_metas files"
        )

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        source = self._source()
        resolved = source.resolve(version, deadline_ns=deadline_ns)
        with self._lock:
            self._known[id(resolved.manifest)] = resolved, source
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return resolved

    def _home(self, resolved: ResolvedPublication) -> WeightSource:
        with self._lock:
            known = self._known.get(id(resolved.manifest))
        return known[1] if known is not None else self._source()

    def current_epoch(self, *, deadline_ns: int) -> int:
        return self._source().current_epoch(deadline_ns=deadline_ns)

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        return self._source().newest_version(deadline_ns=deadline_ns)

    def discredit(self, resolved: ResolvedPublication) -> None:
        self._home(resolved).discredit(resolved)

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        return self._home(resolved).stage(resolved, plan, deadline_ns=deadline_ns)

    def trim(self) -> None:
        self._ours.trim()
        self._metas.trim()

    def close(self) -> None:
        try:
            self._ours.close()
        finally:
            self._metas.close()
