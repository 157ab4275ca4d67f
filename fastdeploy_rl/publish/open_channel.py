"""A channel in the hands of one live publisher, between start and close: the life of its arenas and versions.

Owns the locks of the process, its lease table and memory, and what it knows of the versions that stand; how one more
gets there is publish/publication.py's. Refuses to know tensors. Invariant: what was published last is always read from
`LATEST` itself, so that an interruption at any point leaves nothing to be remembered wrongly.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from fastdeploy_rl.errors import (
    ChannelBusyError,
    FastDeployRLError,
    ManifestError,
    SegmentError,
    VersionFormatError,
    VersionRegressError,
)
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.owner_lock import OwnerLock, owner_of
from fastdeploy_rl.publish.arena_shelf import ArenaShelf
from fastdeploy_rl.publish.arrangement import Arrangement
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.former_versions import FormerVersions
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.publish.meeting import Found, Meeting, Part
from fastdeploy_rl.publish.publication import Prepared, Publication, PublishObserver, Surroundings, Wish, run
from fastdeploy_rl.publish.trainer_memory import LentMemory
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


class OpenChannel:
    """See the module; made by `open`."""

    def __init__(
        self,
        channel: Channel,
        part: Part,
        lock: OwnerLock,
        meeting: Meeting,
        table: LeaseTable,
        shelf: ArenaShelf,
        former: FormerVersions,
        epoch: int,
    ) -> None:
        self.channel = channel
        self.part = part
        self.shelf = shelf
        self.memory = LentMemory(shelf, table, partial(former.withdraw, part.index))
        self.latest: Latest | None = None
        self._epoch = epoch
        self._meeting = meeting
        self._table = table
        self._former = former
        self._latest_segments: tuple[Segment, ...] = ()
        self._checked: object = None
        self._lock = lock
        self._resources = ExitStack()

    @classmethod
    def open(cls, channel: Channel, part: Part, max_arenas: int) -> "OpenChannel":
        channel.open()
        with ExitStack() as stack:
            lock = _locked(channel, part.index)
            stack.callback(lock.release)
            table = LeaseTable(channel.leases_of(part.index), channel.holders_dir)
            stack.callback(table.close)
            table.create()
            epoch = channel.read_epoch() if part.index else channel.take_epoch()
            former = FormerVersions(channel)
            on_change = partial(former.withdraw, part.index)
            shelf = ArenaShelf(table, channel.key, epoch, max_arenas, part.index, on_change)
            stack.callback(shelf.close)
            meeting = Meeting(channel, part)
            if part.count > 1:
                stack.callback(meeting.close)
                meeting.open()
            opened = cls(channel, part, lock, meeting, table, shelf, former, epoch)
            opened._begin()
            opened._resources = stack.pop_all()
        return opened

    @property
    def epoch(self) -> int:
        """Part 0 took it; the others read what it took last."""
        return self.channel.read_epoch() if self.part.index else self._epoch

    def refresh(self) -> None:
        """Reads what stands now, and mends what an interruption left half done."""
        latest = self.channel.read_latest()
        if latest != self.latest:
            self._note(latest, self._segments_of(latest))
        self.shelf.reconcile()

    @contextmanager
    def telling_others(self, step: int) -> Iterator[None]:
        """Whoever breaks off inside tells the other parts, so that none waits in vain."""
        if self.part.count == 1:
            yield
            return
        self._meeting.begin()
        try:
            yield
        except BaseException as error:
            self._tell(step, error)
            raise

    def publish(self, wish: Wish, observer: PublishObserver | None) -> Manifest:
        """Inside `telling_others`."""
        around = Surroundings(
            self.channel,
            self.part,
            self._table,
            self.shelf,
            self.memory,
            self._meeting,
            self._prepare,
            self._conclude,
        )
        return run(Publication(around, wish), observer).manifest

    def close(self, keep: bool) -> None:
        with self._resources:
            if not self._lock.is_held:
                return  # in a child that the publisher forked: nothing here is its to remove
            if not self._lock.is_at_path:
                self._former.clear()  # the channel was removed: what stands there now is another publisher's
                self.shelf.unlink()
                return
            if self.part.index == 0 and self.part.count > 1:
                self._meeting.await_acknowledged()
            self.refresh()
            if keep:
                self.shelf.unlink(kept=self._kept_rows(self.part.index))
                return
            if self.part.index == 0 or self._kept_rows(self.part.index):
                self.channel.remove_latest()
                self._note(None, ())
            self.shelf.unlink()
            self._tidy()

    def sweep_all_parts(self) -> int:
        """Removes what all other publishers left; bytes. ChannelBusyError where one lives: then nothing is removed."""
        indices = self.channel.publishers()
        with ExitStack() as locks:
            for index in indices:
                locks.callback(_locked(self.channel, index).release)
            return sum(self._emptied(index) for index in indices)

    # --- life --------------------------------------------------------------------------------------

    def _check_in_place(self) -> None:
        if not (self._lock.is_at_path and self._table.is_at_path):
            raise SegmentError(
                f"channel {self.channel.path} was removed, or made anew, under its publisher: "
                "close this publisher and start another"
            )

    def _begin(self) -> None:
        self.refresh()
        self._former.load(self.latest)
        index = self.part.index
        self.shelf.trim(self._kept_rows(index), self._former.rows_of_newest(index))
        if index == 0:
            self._sweep_surplus_parts()
            self._former.sweep(self.latest)

    def _note(self, latest: Latest | None, segments: tuple[Segment, ...]) -> None:
        """`LATEST` says so now; what it said before is a former version."""
        if latest is None:
            self._former.clear()
        elif self.latest is not None and latest != self.latest:
            self._former.add(self.latest.file, self._latest_segments)
        self.latest, self._latest_segments = latest, segments

    def _tidy(self) -> None:
        """What is decided is not undone because something old cannot be removed yet: the next one tries again."""
        if self.part.index:
            return
        try:
            self._sweep_surplus_parts()
            self._former.sweep(self.latest)
        except (OSError, ChannelBusyError, SegmentError) as error:
            _log.warning("channel=%s event=not_tidied reason=%s", self.channel.path, error)

    def _sweep_surplus_parts(self) -> None:
        """What processes left that took part before, when there were more of them."""
        for index in self.channel.publishers():
            if index >= self.part.count and not self._kept_rows(index):
                self._sweep(index)

    def _sweep(self, index: int) -> None:
        with ExitStack() as stack:
            stack.callback(_locked(self.channel, index).release)
            self._emptied(index)

    def _emptied(self, index: int) -> int:
        """Under that publisher's lock: its memory and files are gone; bytes of memory."""
        with ExitStack() as stack:
            table = stack.enter_context(LeaseTable(self.channel.leases_of(index), self.channel.holders_dir))
            withdraw = partial(self._former.withdraw, index)
            shelf = ArenaShelf(table, self.channel.key, self._epoch, NUM_ARENAS, index, withdraw)
            stack.callback(shelf.close)
            shelf.reconcile()
            num_bytes = shelf.num_bytes
            shelf.unlink()
            self.channel.leases_of(index).unlink()
            self.channel.remove_leftovers_of(index)
            return num_bytes

    def _kept_rows(self, publisher: int) -> frozenset[int]:
        """Rows of that publisher's table that LATEST names."""
        return frozenset(segment.arena for segment in self._latest_segments if segment.publisher == publisher)

    def _segments_of(self, latest: Latest | None) -> tuple[Segment, ...]:
        if latest is None:
            return ()
        try:
            return self.channel.read_manifest(latest).segments
        except FileNotFoundError:
            # Somebody removed it by hand; no reader can follow LATEST, so there is nothing to protect.
            _log.warning("channel=%s version=%s missing=%s", self.channel.path, latest.version, latest.file)
            return ()

    # --- what stands at both ends of a publication -------------------------------------------------

    def _tell(self, step: int, error: BaseException) -> None:
        try:
            if self.part.index == 0:
                self._meeting.refuse(error)
            else:
                self._meeting.report(step, error)
        except (OSError, FastDeployRLError) as untold:
            _log.warning("channel=%s part=%d event=untold reason=%s", self.channel.path, self.part.index, untold)

    def _prepare(self, wish: Wish) -> Prepared:
        self._check_in_place()
        self.refresh()
        version = self._next_version(wish.step)
        self._check(wish.arrangement, version)
        index = self.part.index
        return Prepared(version, self._kept_rows(index), self._former.rows_of_newest(index))

    def _conclude(self, found: Found) -> None:
        self._note(found.latest, found.manifest.segments)
        self._tidy()

    def _check(self, arrangement: Arrangement, version: WeightVersion) -> None:
        # A training loop publishes the same tensors again and again; checking them anew costs a twentieth of the copy.
        description = arrangement.description
        if description != self._checked:
            arrangement.check(version)
            self._checked = description

    def _next_version(self, step: int) -> WeightVersion:
        version = WeightVersion(self.epoch, step)
        last = WeightVersion.parse(self.latest.version) if self.latest else None
        # Whether it goes on from the last one is for part 0 to say: it may be about to take another epoch.
        if self.part.index == 0 and last is not None and version <= last:
            raise VersionRegressError(
                f"step {step} would publish {version}, but {self.channel.path} is at {last}: steps must go up"
            )
        return version


def remove_unreadable(channel: Channel) -> None:
    """Takes a publication away that no reader can follow, and leaves any other. ChannelBusyError while a publisher is
    alive."""
    lock = _locked(channel, 0)
    try:
        latest = channel.read_latest()
        if latest is not None:
            WeightVersion.parse(latest.version)
            channel.read_manifest(latest)
    except FileNotFoundError:
        pass  # the manifest: an open channel lives with that
    except (ManifestError, VersionFormatError) as error:
        _log.warning("channel=%s event=unreadable_publication reason=%s", channel.path, error)
        channel.remove_latest()
    finally:
        lock.release()


def _locked(channel: Channel, publisher: int) -> OwnerLock:
    lock = OwnerLock(channel.lock_of(publisher))
    if not lock.try_acquire():
        who = f"part {publisher} of it " if publisher else ""
        raise ChannelBusyError(
            f"channel {channel.path} already has a live publisher {who}"
            f"({owner_of(lock.path) or 'unknown'}): end that one first, or publish on another channel"
        )
    return lock
