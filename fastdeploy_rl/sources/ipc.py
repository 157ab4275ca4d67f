"""Load strategy `ipc`: the publisher's shared memory on this machine, read where it lies.

Owns which publication is meant, and this process's reader of the channel. Copies nothing and checks no bytes (whoever
reads them does, against the manifest).
"""

import time
from collections.abc import Iterator, Sequence

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.plan import Plan, PlannedParameter
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.channel_reader import ChannelReader, LeasedSegments
from fastdeploy_rl.publish.former_versions import is_standing
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.version import WeightVersion


class IpcSource:
    """One engine process as a reader of one channel. Opens the channel when first used, so that an engine can start
    before its trainer."""

    def __init__(self, config: SourceConfig) -> None:
        self._channel = Channel(config.channel)
        self._resolved: tuple[Latest, Manifest] | None = None
        self._reader: ChannelReader | None = None
        self._replaced: list[ChannelReader] = []

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        """What `LATEST` names, or a former version whose memory is intact. NoPublicationError when nothing is published
        or, naming the latest, when the version asked for cannot be had (any more)."""
        self._channel.check()
        latest, manifest = self._publication(deadline_ns)
        found = WeightVersion.parse(latest.version)
        if version is None:
            return ResolvedPublication(found, manifest)
        if version != found:
            return ResolvedPublication(version, self._former(version, found))
        # A copy stands for as long as it is the latest; borrowed memory may be its trainer's again.
        if any(segment.is_borrowed for segment in manifest.segments) and not self._is_standing(manifest):
            raise NoPublicationError(f"version {version} is not to be had: its trainer has taken its memory back")
        return ResolvedPublication(found, manifest)

    def _former(self, version: WeightVersion, latest: WeightVersion) -> Manifest:
        # What is newer than the latest was announced by nobody (yet).
        manifest = self._channel.read_version(version) if version < latest else None
        if manifest is None or not self._is_standing(manifest):
            raise NoPublicationError(f"version {version} is not to be had: {self._channel.path} has {latest}")
        return manifest

    def _is_standing(self, manifest: Manifest) -> bool:
        return is_standing(self._channel, manifest.segments)

    def _publication(self, deadline_ns: int) -> tuple[Latest, Manifest]:
        """What LATEST names; a manifest is decoded once, since its digest stands in LATEST."""
        known = self._resolved
        if known is not None and known[0] == self._channel.read_latest():
            return known
        self._resolved = known = self._channel.read_publication(deadline_ns)
        return known

    def current_epoch(self, *, deadline_ns: int) -> int:
        return self.resolve(None, deadline_ns=deadline_ns).version.epoch

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        latest = self._channel.read_latest()
        return WeightVersion.parse(latest.version) if latest else None

    def discredit(self, resolved: ResolvedPublication) -> None:
        """Older versions in memory are there for the way back; what is published is what is to be taken."""

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> "IpcStaged":
        """Leases and maps every segment of the version, read-only. All of it or, on an error, none."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceededError(f"no time left to stage version {resolved.version}")
        if self._reader is not None and not self._reader.is_current:
            self._replaced.append(self._reader)  # what is leased there stays so until it is released
            self._reader = None
        self._close_idle_replaced()
        if self._reader is None:
            self._reader = ChannelReader.open(self._channel)
        return IpcStaged(plan, self._reader.lease(resolved.manifest))

    def trim(self) -> None:
        """Unmaps the segments that nobody uses now."""
        self._close_idle_replaced()
        if self._reader is not None:
            self._reader.trim()

    def close(self) -> None:
        """Releases what is staged and this process's standing as a holder. SegmentError while parameters still lie in
        published memory: the leases then stay, so that nobody overwrites it; unbind and close again."""
        readers = [*self._replaced, *([self._reader] if self._reader else [])]
        for reader in readers:
            reader.release()
        self._replaced, self._reader = [], None
        for reader in readers:
            reader.close()

    def _close_idle_replaced(self) -> None:
        """Lets go of channels that were replaced and from which nothing is staged any more."""
        idle = [reader for reader in self._replaced if reader.is_idle]
        self._replaced = [reader for reader in self._replaced if reader not in idle]
        for reader in idle:
            reader.close()


class IpcStaged:
    """A version that lies in leased memory. Immutable, unless its lender was gone already."""

    is_copied_unless_asked = False

    def __init__(self, plan: Plan, leased: LeasedSegments) -> None:
        self.plan = plan
        self._leased = leased
        self.is_immutable = leased.is_immutable

    @property
    def segments(self) -> tuple[Mapping, ...]:
        return self._leased.segments

    def arrivals(self, *, deadline_ns: int) -> Iterator[Sequence[PlannedParameter]]:
        yield self.plan.everything

    def bring_in(self, planned: Sequence[PlannedParameter]) -> None:
        """It is memory."""

    def is_vouched(self) -> bool:
        return self._leased.is_vouched()

    def release(self) -> None:
        self._leased.release()
