"""A channel in the hands of one live publisher, between start and close: the life of its arenas and versions.

Owns the locks of the process, its lease table and memory, and the order of a publication: check, find a place, copy and
sum up, announce. Refuses to know tensors' frameworks. Invariant: until `LATEST` names the new version, the one before
stands untouched; whatever fails, arenas are free again and borrowed memory is the trainer's again. What was published
last is always read from `LATEST` itself, so that an interruption at any point leaves nothing to be remembered wrongly.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.errors import ChannelBusyError, ManifestError, SegmentError, VersionFormatError, VersionRegressError
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.owner_lock import OwnerLock, owner_of
from fastdeploy_rl.publish.arena_shelf import ArenaInHand, ArenaShelf
from fastdeploy_rl.publish.arrangement import ArrangedTensor, Arrangement, Piece, in_arena
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.contribution import Contribution, unite
from fastdeploy_rl.publish.copying import OnProgress, copy_out
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.publish.meeting import Found, Meeting, Part
from fastdeploy_rl.publish.trainer_memory import LentMemory, Place
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


class Wish(NamedTuple):
    """What is to be published: how, until when, and whom to tell on the way."""

    arrangement: Arrangement
    step: int
    is_borrowed: bool
    deadline_ns: int
    on_progress: OnProgress | None


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
        epoch: int,
    ) -> None:
        self.channel = channel
        self.part = part
        self.shelf = shelf
        self.memory = LentMemory(shelf, table)
        self.latest: Latest | None = None
        self._epoch = epoch
        self._meeting = meeting
        self._table = table
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
            shelf = ArenaShelf(table, channel.key, epoch, max_arenas, part.index)
            stack.callback(shelf.close)
            meeting = Meeting(channel, part)
            if part.count > 1:
                stack.callback(meeting.close)
                meeting.open()
            opened = cls(channel, part, lock, meeting, table, shelf, epoch)
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
            self.latest, self._latest_segments = latest, self._segments_of(latest)
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

    def publish(self, wish: Wish) -> Manifest:
        """Inside `telling_others`."""
        self._check_in_place()
        self.refresh()
        version = self._next_version(wish.step)
        self._check(wish.arrangement, version)
        found = self._publish_borrowed(wish, version) if wish.is_borrowed else self._publish_copy(wish, version)
        self.latest, self._latest_segments = found.latest, found.manifest.segments
        self._tidy()
        return found.manifest

    def close(self, keep: bool) -> None:
        with self._resources:
            if not self._lock.is_at_path:
                self.shelf.unlink()  # the channel was removed: what stands there now is another publisher's
                return
            if self.part.index == 0 and self.part.count > 1:
                self._meeting.await_acknowledged()
            self.refresh()
            if keep:
                self.shelf.unlink(kept=self._kept_rows(self.part.index))
                return
            if self.part.index == 0 or self._kept_rows(self.part.index):
                self.channel.remove_latest()
                self.latest, self._latest_segments = None, ()
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
        self.shelf.trim(self._kept_rows(self.part.index))
        if self.part.index == 0:
            self.channel.remove_superseded(self.latest)
            self._sweep_surplus_parts()

    def _tidy(self) -> None:
        """What is decided is not undone because something old cannot be removed yet: the next one tries again."""
        if self.part.index:
            return
        try:
            self.channel.remove_superseded(self.latest)
            self._sweep_surplus_parts()
        except (OSError, ChannelBusyError) as error:
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
            table = LeaseTable(self.channel.leases_of(index), self.channel.holders_dir)
            table.open()
            stack.callback(table.close)
            shelf = ArenaShelf(table, self.channel.key, self._epoch, NUM_ARENAS, index)
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

    # --- one publication ---------------------------------------------------------------------------

    def _tell(self, step: int, error: BaseException) -> None:
        try:
            self._meeting.refuse(error) if self.part.index == 0 else self._meeting.report(step, error)
        except (OSError, ManifestError) as untold:
            _log.warning("channel=%s part=%d event=untold reason=%s", self.channel.path, self.part.index, untold)

    def _publish_copy(self, wish: Wish, version: WeightVersion) -> Found:
        arrangement = wish.arrangement
        kept = self._kept_rows(self.part.index)
        with self.shelf.writing(arrangement.num_bytes, kept, wish.deadline_ns) as arena:
            self._table.set_version(arena.row, str(version))
            sums = copy_out(arrangement, arena.mapping, wish.on_progress)
        segment = self._segment(arena, is_borrowed=False)
        return self._announce(arrangement.contribution(self.part.index, [segment], in_arena, sums), wish, version)

    def _publish_borrowed(self, wish: Wish, version: WeightVersion) -> Found:
        arrangement = wish.arrangement
        places = self._places(arrangement.tensors)
        rows = sorted({place.row for place in places.values()})
        self.memory.check_owned(rows)
        sums = copy_out(arrangement, None, wish.on_progress)
        with self.memory.exporting(rows, str(version)):
            return self._announce(self._borrowed_contribution(arrangement, rows, places, sums), wish, version)

    def _places(self, tensors: Sequence[ArrangedTensor]) -> dict[str, Place]:
        """One without bytes lies where another does: memory that is not published otherwise stays the trainer's."""
        places: dict[str, Place] = {}
        for tensor in sorted(tensors, key=lambda tensor: tensor.host.key.num_bytes, reverse=True):
            if places and not tensor.host.key.num_bytes:
                places[tensor.name] = next(iter(places.values()))
            else:
                places[tensor.name] = self.memory.locate(tensor.trainer_name, tensor.host)
        return places

    def _borrowed_contribution(
        self, arrangement: Arrangement, rows: Sequence[int], places: dict[str, Place], sums: list[list[Fletcher4]]
    ) -> Contribution:
        def place(tensor: ArrangedTensor, piece: Piece) -> tuple[int, int]:
            return rows.index(places[tensor.name].row), places[tensor.name].offset

        segments = [self._segment(self.memory.segment(row), is_borrowed=True) for row in rows]
        return arrangement.contribution(self.part.index, segments, place, sums)

    def _segment(self, arena: ArenaInHand, is_borrowed: bool) -> Segment:
        """Of an arena whose write has ended."""
        return Segment(
            kind="shm",
            locator=arena.segment,
            num_bytes=arena.mapping.num_bytes,
            arena=arena.row,
            generation=self._table.generation(arena.row),
            publisher=self.part.index,
            is_borrowed=is_borrowed,
        )

    def _announce(self, own: Contribution, wish: Wish, version: WeightVersion) -> Found:
        if self.part.index:
            return self._meeting.follow(wish.step, own, wish.deadline_ns)
        if self.part.count > 1:
            return self._meeting.lead(version, own, wish.deadline_ns)
        manifest = unite(version, [own])
        return Found(manifest, self.channel.write_publication(manifest))

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


def deadline_ns(seconds: float) -> int:
    """As an absolute CLOCK_MONOTONIC time."""
    return time.monotonic_ns() + int(seconds * 1e9)
