"""Load strategy `ipc`, whoever the trainer is: our channel where something is published there, else FastDeploy's files.

Owns which of the two a version comes from. Refuses to know either. Invariant: a version is staged from where it was
resolved.

Looked at anew each time, so that a trainer may change over while its engine runs. What our publisher announced comes
first, since it has a manifest and leases; but not what one left behind that is gone, where FastDeploy's files came
later. A version that is asked for by name may come from either.
"""

import logging
import os
import threading
from pathlib import Path

from fastdeploy_rl.errors import FastDeployRLError, NoPublicationError
from fastdeploy_rl.memory.owner_lock import is_alive
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig, StagedSource, WeightSource
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.sources.ipc_metas import IpcMetasSource, has_ipc_metas, newest_metas_ns
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

_PUBLISHED = "source=channel reason='both have something; what a WeightPublisher announced comes first'"
_LEFT_BEHIND = (
    "source=ipc_metas reason='both have something; the publisher is gone, the files are newer than what it left'"
)
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
        self._told = ""

    def _sources(self) -> tuple[WeightSource, ...]:
        """Those that have something now, the one that counts first. NoPublicationError names both places."""
        is_published, has_metas = self._channel.read_latest() is not None, has_ipc_metas(self._metas_dir)
        if is_published and has_metas:
            is_left_behind = not is_alive(self._channel.lock_of(0)) and self._are_metas_newer()
            self._tell(_LEFT_BEHIND if is_left_behind else _PUBLISHED)
            return (self._metas, self._ours) if is_left_behind else (self._ours, self._metas)
        if is_published or has_metas:
            self._tell("")
            return (self._ours,) if is_published else (self._metas,)
        raise NoPublicationError(
            f"nothing is published in {self._config.channel} (a trainer announces versions there with a "
            f"WeightPublisher), and {self._metas_dir} has none of FastDeploy's ipc_metas files"
        )

    def _are_metas_newer(self) -> bool:
        """Than what was announced last; False where that was taken away meanwhile."""
        try:
            return newest_metas_ns(self._metas_dir) > os.stat(self._channel.path / "LATEST").st_mtime_ns
        except FileNotFoundError:
            return False

    def _tell(self, why: str) -> None:
        """Once, until it changes: there are two to choose from."""
        if why and why != self._told and not self._config.rank:
            _log.warning("event=source_chosen channel=%s metas_dir=%s %s", self._channel.path, self._metas_dir, why)
        self._told = why

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """By name also from the source that does not count, where the other one does not have that version."""
        first, *others = self._sources()
        try:
            return self._resolved_by(first, version, deadline_ns)
        except NoPublicationError as error:
            if version is None or not others:
                raise
            try:
                return self._resolved_by(others[0], version, deadline_ns)
            except FastDeployRLError as other:
                raise NoPublicationError(f"{error}; and {other}") from error

    def _resolved_by(
        self, source: WeightSource, version: WeightVersion | None, deadline_ns: int
    ) -> ResolvedPublication:
        resolved = source.resolve(version, deadline_ns=deadline_ns)
        with self._lock:
            self._known[id(resolved.manifest)] = resolved, source
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return resolved

    def _home(self, resolved: ResolvedPublication) -> WeightSource:
        with self._lock:
            known = self._known.get(id(resolved.manifest))
        return known[1] if known is not None else self._sources()[0]

    def current_epoch(self, *, deadline_ns: int) -> int:
        return self._sources()[0].current_epoch(deadline_ns=deadline_ns)

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        return self._sources()[0].newest_version(deadline_ns=deadline_ns)

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
