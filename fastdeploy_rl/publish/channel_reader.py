"""One process as a reader of a channel: its leases on published segments, its mappings of them, and who vouches for
them.

Owns the lease tables that it opened, its token in them, and mappings that are kept to be used again. Copies nothing and
checks no bytes. Invariant: nobody reads a segment before its lease is taken, nor after it is given back; a mapping may
outlive the lease, unread.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ManifestError, NoPublicationError, SegmentError
from fastdeploy_rl.manifest import Manifest, Segment
from fastdeploy_rl.memory.owner_lock import Owner, is_alive, owner_of
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.memory.tensor_view import check_unused
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.leases import NUM_ARENAS, Holder, Lease, LeaseTable


class Lender(NamedTuple):
    """The trainer whose own memory some segments are: its lock, and who held that when we took our lease. None: nobody
    did."""

    lock: Path
    owner: Owner | None

    @classmethod
    def at(cls, lock: Path) -> "Lender":
        owner = owner_of(lock)
        return cls(lock, owner if is_alive(lock) else None)

    @property
    def is_there(self) -> bool:
        """The same as then: another one that took its place knows nothing of what it may still do."""
        return self.owner is not None and is_alive(self.lock) and owner_of(self.lock) == self.owner


class LeasedSegments:
    """Published segments, leased and mapped read-only. Immutable, so that parameters may alias them, unless they are
    the memory of a trainer that is gone: from it nothing is known but that its bytes were right when they were read."""

    def __init__(
        self,
        leases: list[Lease],
        segments: list[SharedSegment],
        lenders: tuple[Lender, ...],
        keep: Callable[[SharedSegment], None],
    ) -> None:
        """`keep` takes a segment that is not needed any more."""
        self._leases = leases
        self._segments = segments
        self._lenders = lenders
        self._keep = keep
        self.is_immutable = self.is_vouched()

    def is_vouched(self) -> bool:
        """False for borrowed memory whose trainer has died, or closed its publisher, since it was staged or before.
        What the publisher copied is vouched for by the lease alone."""
        return self.is_released or all(lender.is_there for lender in self._lenders)

    @property
    def segments(self) -> tuple[Mapping, ...]:
        return tuple(segment.mapping for segment in self._segments)

    @property
    def is_released(self) -> bool:
        return not self._leases

    def release(self) -> None:
        """Lets the segments go, then the leases. SegmentError while
        arrays or tensors lie in a segment: all leases then stay."""
        for segment in self._segments:
            check_unused(segment.mapping, f"published segment {segment.name!r}")
        while self._segments:
            self._keep(self._segments.pop())
        while self._leases:
            self._leases.pop().release()


class ChannelReader:
    """The open lease tables, one for each process that publishes; this process's token in them; and mappings of arenas
    that take turns: mapping one anew costs as much as half a read of it."""

    def __init__(self, channel: Channel, tables: dict[int, LeaseTable], holder: Holder, resources: ExitStack) -> None:
        self._channel = channel
        self._tables = tables
        self._holder = holder
        self._resources = resources
        self._kept: dict[str, SharedSegment] = {}
        self._staged: list[LeasedSegments] = []

    @classmethod
    def open(cls, channel: Channel) -> "ChannelReader":
        channel.check()
        with ExitStack() as stack:
            table = stack.enter_context(LeaseTable(channel.leases_of(0), channel.holders_dir))
            holder = stack.enter_context(Holder(channel.holders_dir))
            return cls(channel, {0: table}, holder, stack.pop_all())

    def lease(self, manifest: Manifest) -> LeasedSegments:
        """Leases and maps every segment of the version, read-only. All of it or, on an error, none."""
        self._drop_replaced()
        with ExitStack() as undo:
            leases = [self._lease(segment, undo) for segment in manifest.segments]
            segments = [self._map(segment, undo) for segment in manifest.segments]
            staged = LeasedSegments(leases, segments, self._lenders(manifest), self._keep)
            undo.pop_all()
        self._staged = [earlier for earlier in self._staged if not earlier.is_released] + [staged]
        return staged

    @property
    def is_idle(self) -> bool:
        """Nothing that was staged here is held."""
        return all(staged.is_released for staged in self._staged)

    @property
    def is_current(self) -> bool:
        """False when the channel, or one of its tables, was removed or made anew since."""
        return all(table.is_at_path for table in self._tables.values())

    def release(self) -> None:
        """What is staged here; SegmentError as `LeasedSegments.release` gives it, then a later call goes on."""
        for staged in self._staged:
            staged.release()

    def trim(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    def close(self) -> None:
        self.trim()
        self._resources.close()

    def _keep(self, segment: SharedSegment) -> None:
        self._kept[segment.name] = segment
        self._drop_replaced()

    def _drop_replaced(self) -> None:
        """Memory whose name is in no row any more belongs to no publication to come: it must not stay for our sake."""
        names = {table.segment(row) for table in self._tables.values() for row in range(NUM_ARENAS)}
        for name in [name for name in self._kept if name not in names]:
            self._kept.pop(name).close()

    def _lenders(self, manifest: Manifest) -> tuple[Lender, ...]:
        publishers = sorted({segment.publisher for segment in manifest.segments if segment.is_borrowed})
        return tuple(Lender.at(self._channel.lock_of(publisher)) for publisher in publishers)

    def _lease(self, segment: Segment, undo: ExitStack) -> Lease:
        if segment.kind != "shm":
            raise ManifestError(f"segment {segment.locator!r} is a {segment.kind}, and no memory of this channel")
        if segment.arena >= NUM_ARENAS:
            raise ManifestError(
                f"segment {segment.locator!r} claims row {segment.arena} of a lease table of {NUM_ARENAS}"
            )
        table = self._table(segment.publisher)
        lease = table.take(segment.arena, segment.generation, self._holder.token)
        undo.callback(lease.release)
        if table.segment(segment.arena) != segment.locator:
            raise ManifestError(f"segment {segment.locator!r} is not the one of arena {segment.arena} of {table.path}")
        return lease

    def _table(self, publisher: int) -> LeaseTable:
        """The lease table of one of the processes that publish together, opened when first needed."""
        if publisher not in self._tables:
            table = LeaseTable(self._channel.leases_of(publisher), self._channel.holders_dir)
            self._tables[publisher] = self._resources.enter_context(table)
        return self._tables[publisher]

    def _map(self, segment: Segment, undo: ExitStack) -> SharedSegment:
        mapped = self._kept.pop(segment.locator, None)
        if mapped is not None and not mapped.is_current:
            mapped.close()
            mapped = None
        try:
            mapped = mapped or SharedSegment.attach(segment.locator)
        except SegmentError as error:
            raise NoPublicationError(f"the memory of this version is gone: {error}; publish again") from error
        undo.enter_context(mapped)
        if mapped.num_bytes != segment.num_bytes:
            raise ManifestError(
                f"segment {segment.locator!r} has {mapped.num_bytes} bytes, its manifest says {segment.num_bytes}"
            )
        return mapped
