"""The publisher's shared-memory segments, one per row of the lease table: arenas, reused for version after version, and
memory lent to the trainer.

Owns which row has which segment, and their making, growing and unlinking. What a dead publisher left is taken over as
arenas. Refuses to know what a version is. Invariant: every segment's name stands in its row before the segment exists,
so that none can be lost; an arena is only written between `begin_write` and `end_write` of its row, and not before
`on_change` was told; lent memory is never chosen as an arena.
"""

import logging
import os
import secrets
from collections.abc import Callable, Collection
from typing import NamedTuple

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, NoSpaceError, SegmentError
from fastdeploy_rl.memory.shared_segment import SharedSegment, free_bytes, unlink_segment
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable

_log = logging.getLogger(__name__)
_PAGE_BYTES = 4096


class ArenaInHand(NamedTuple):
    """An arena while it is being written: `row` of the lease table, `segment` name, its whole mapping."""

    row: int
    segment: str
    mapping: Mapping


class ArenaShelf:
    """All arenas of a channel that belong to publisher number `publisher`, in the hands of its one live process.
    `on_change` is told each row whose contents are about to be written over or to go."""

    def __init__(
        self,
        table: LeaseTable,
        channel_key: str,
        epoch: int,
        max_arenas: int,
        publisher: int,
        on_change: Callable[[int], object],
    ) -> None:
        self._table = table
        self._on_change = on_change
        self._owned = f"fastdeploy_rl.{os.getuid()}.{channel_key}."
        self._prefix = f"{self._owned}{epoch}.{publisher}"
        self._max_arenas = max_arenas
        self._segments: dict[int, SharedSegment] = {}
        self._lent: dict[int, SharedSegment] = {}

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for held in (self._segments, self._lent) for segment in held.values())

    def reconcile(self) -> None:
        """Makes the shelf agree with the table, whatever broke off before: a publisher
        that died, or our own last publication if it was interrupted. Open writes end,
        named segments are taken over, names without a segment are forgotten."""
        self._table.repair(kept=self._lent)
        for row in range(NUM_ARENAS):
            name = self._table.segment(row)
            if name and row not in self._segments and row not in self._lent:
                self._take_over(row, name)

    def trim(self, kept: Collection[int], spared: Collection[int]) -> None:
        """Unlinks surplus arenas (more than `max_arenas`) that nobody leases, and none of the `kept` rows; `spared`
        ones last."""
        for row in sorted(self._segments, key=lambda row: (row in spared, row)):
            if len(self._segments) > self._max_arenas and row not in kept and not self._table.begin_write(row):
                self._on_change(row)
                self._drop(row)
                self._table.end_write(row)

    def begin(self, num_bytes: int, kept: Collection[int], spared: Collection[int], deadline_ns: int) -> ArenaInHand:
        """A free arena of at least `num_bytes`, to be filled until `end`; none of the `kept` rows, and one of the
        `spared` only where no other is free or can be made.

        Waits for leases to be released: DeadlineExceededError naming the holders. NoSpaceError where it must grow and
        cannot, or where lent memory and `kept` rows are all there is.
        """
        row = self._free_row(num_bytes, kept, spared, deadline_ns)
        try:
            self._on_change(row)
            segment = self._fit(row, num_bytes)
        except BaseException:
            self._table.end_write(row)
            raise
        return ArenaInHand(row, segment.name, segment.mapping)

    def end(self, row: int) -> None:
        """The arena is filled, or given up."""
        self._table.end_write(row)

    def lend(self, num_bytes: int) -> ArenaInHand:
        """A new segment for the trainer to write into for as long as the publisher lives; its row stays as between
        `begin_write` and `end_write` until its contents are published. NoSpaceError where no row or no memory is
        left."""
        row = next((row for row in self._unused_rows() if not self._table.begin_write(row)), None)
        if row is None:
            raise self._no_row()
        try:
            segment = self._fit(row, num_bytes)
        except BaseException:
            self._table.end_write(row)
            raise
        self._lent[row] = self._segments.pop(row)
        return ArenaInHand(row, segment.name, segment.mapping)

    def unlink(self, kept: Collection[int] = ()) -> None:
        """Removes all segments but those of the `kept` rows from the channel.
        Memory goes when the last process that maps it lets go."""
        for row in [row for row in self._segments if row not in kept]:
            self._on_change(row)
            self._table.withdraw(row)
            self._drop(row)
        for row in [row for row in self._lent if row not in kept]:
            self._on_change(row)
            self._table.withdraw(row)
            # Arrays of the trainer lie in it: its mapping ends with the last of them.
            self._lent.pop(row).unlink()

    def close(self) -> None:
        """Unmaps what is left, but for memory that the trainer has; segments keep their names."""
        self._lent.clear()
        while self._segments:
            _, segment = self._segments.popitem()
            segment.close()

    def _unused_rows(self) -> list[int]:
        return [row for row in range(NUM_ARENAS) if row not in self._segments and row not in self._lent]

    def _no_row(self) -> NoSpaceError:
        return NoSpaceError(
            f"all {NUM_ARENAS} rows of {self._table.path} are taken: allocate fewer, larger pieces of memory"
        )

    def _take_over(self, row: int, name: str) -> None:
        if not name.startswith(self._owned):
            _log.warning("arena=%d segment=%r event=foreign: this channel never made it", row, name)
            self._table.withdraw(row)
            return
        try:
            self._segments[row] = SharedSegment.attach(name, writable=True)
        except SegmentError as error:
            _log.warning("arena=%d segment=%s lost=%s", row, name, error)
            unlink_segment(name)
            self._table.withdraw(row)

    def _free_row(self, num_bytes: int, kept: Collection[int], spared: Collection[int], deadline_ns: int) -> int:
        own = sorted((row for row in self._segments if row not in kept), key=lambda row: self._excess(row, num_bytes))
        fresh = self._fresh_rows(len(own))
        if not own and not fresh:
            raise self._no_row()
        # A publication must not fail for want of memory that is there in a spared arena.
        last = [row for row in own if row in spared] if free_bytes() >= num_bytes else []
        first = [row for row in own if row not in last]
        for row in [*first, *fresh, *last]:
            if not self._table.begin_write(row):
                return row
        try:
            return self._table.wait_free(own or fresh, deadline_ns)
        except DeadlineExceededError as error:
            raise DeadlineExceededError(f"no free arena: {error}, or allow more arenas (max_arenas)") from None

    def _excess(self, row: int, num_bytes: int) -> tuple[bool, int]:
        """Least where the arena is large enough, and no larger than needed; most where it must grow."""
        size = self._segments[row].num_bytes
        return size < num_bytes, size

    def _fresh_rows(self, num_own: int) -> list[int]:
        """Rows for one more arena, where there may be one. `num_own`: how many arenas hold no part of the latest
        version."""
        # The latest version counts once: one that was borrowed from a trainer that is gone may lie in several rows.
        num_versions = num_own + (num_own < len(self._segments))
        return self._unused_rows() if num_versions < self._max_arenas else []

    def _fit(self, row: int, num_bytes: int) -> SharedSegment:
        segment = self._segments.get(row)
        if segment is not None and segment.num_bytes >= num_bytes:
            return segment
        if segment is not None:
            self._drop(row)
        name = f"{self._prefix}.{row}.{secrets.token_hex(4)}"
        self._table.set_segment(row, name)
        try:
            self._segments[row] = SharedSegment.create(name, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        except BaseException:
            self._table.set_segment(row, "")
            raise
        return self._segments[row]

    def _drop(self, row: int) -> None:
        segment = self._segments.pop(row)
        segment.unlink()
        self._table.set_segment(row, "")
        segment.close()
