"""Leases: a reader's claim on published memory, and the writer's look before it overwrites any.

A table in one small mapped file, a row per arena: a generation word (even: contents stand; odd: being written) and
slots for the tokens of holders. The protocol is Dekker's, over sequentially consistent words:

    reader: put the token into a slot, THEN read the generation   (moved: take the token out again, no lease)
    writer: make the generation odd, THEN look at the slots        (a live holder: make it even again, no write)

so that of a reader and a writer who meet, at least one sees the other. A token stands for a lock file in `holders/`
whose lock its process holds: live holders never expire, those of dead processes are void and are swept out by whoever
finds them. The module refuses to know manifests. Invariant: bytes under a live lease never change.
"""

import contextlib
import os
import secrets
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import DeadlineExceededError, NoPublicationError, SegmentError
from fastdeploy_rl.memory.owner_lock import Owner, OwnerLock, is_alive, owner_of

NUM_ARENAS = 16
NUM_SLOTS = 64
"""Leases one arena can carry at once: each rank of each engine holds one."""

_MAGIC = int.from_bytes(b"FDRLLEAS", "little")
_ABI = 1
_BELL = 16
_HEADER_BYTES = 64
_ROW_BYTES = 2048
_SLOTS = 64
_SLOT_BYTES = 16  # token, wall-clock milliseconds when it was taken
_SEGMENT = _SLOTS + NUM_SLOTS * _SLOT_BYTES
_SEGMENT_BYTES = 128
_VERSION = _SEGMENT + _SEGMENT_BYTES
_VERSION_BYTES = 64
_TABLE_BYTES = _HEADER_BYTES + NUM_ARENAS * _ROW_BYTES

_SLICE_NS = 50_000_000
"""A dead holder rings no bell, so waits look up at least this often."""


class HolderInfo(NamedTuple):
    """A live lease, for messages."""

    arena: int
    version: str
    owner: Owner | None
    taken_s: float

    def __str__(self) -> str:
        pid = self.owner.pid if self.owner else "unknown"
        since = time.strftime("%H:%M:%S", time.localtime(min(self.taken_s, time.time())))
        return f"pid {pid} (since {since}, {time.time() - self.taken_s:.1f} s ago) on version {self.version or '?'}"


class Holder:
    """This process as a holder of leases: a random token and the lock that shows it is alive."""

    def __init__(self, holders_dir: Path) -> None:
        self.token = secrets.randbits(63) | 1
        self._lock = OwnerLock(_lock_path(holders_dir, self.token))

    def start(self) -> None:
        self._lock.acquire()

    def close(self) -> None:
        """Leases that were not released are void from here on."""
        self._lock.release()

    def __enter__(self) -> "Holder":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Lease:
    """One taken slot. The arena's bytes stay as they are until `release` (a second release does nothing)."""

    def __init__(self, table: "LeaseTable", arena: int, generation: int, slot: int, token: int) -> None:
        self.arena = arena
        self.generation = generation
        self._table = table
        self._slot = slot
        self._token = token
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._table.release_slot(self.arena, self._slot, self._token)


class LeaseTable:
    """The mapped table of one publisher of a channel; `with` opens one that is there. Readers `take`; the one live
    publisher uses the rest."""

    def __init__(self, path: Path, holders_dir: Path) -> None:
        self.path = path
        self._holders_dir = holders_dir
        self._mapping: Mapping | None = None
        self._inode = 0
        self._fd = -1

    # --- opening -----------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the file where there is none (whole, by rename) and opens it. Only under the channel's lock."""
        if not self.path.exists():
            temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}.tmp")
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, struct.pack("<QQ", _MAGIC, _ABI))
                os.posix_fallocate(fd, 0, _TABLE_BYTES)
                os.rename(temporary, self.path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        self.open()

    def open(self) -> None:
        """Maps an existing table. NoPublicationError when there is
        none, SegmentError when the file is something else."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NoPublicationError(f"nothing was ever published here: {self.path} is missing") from error
        except OSError as error:
            raise SegmentError(f"{self.path} is no lease table: {error.strerror}") from error
        try:
            if os.fstat(fd).st_size < _TABLE_BYTES:
                raise SegmentError(f"{self.path} is no lease table: {os.fstat(fd).st_size} bytes, not {_TABLE_BYTES}")
            if os.pread(fd, 16, 0) != struct.pack("<QQ", _MAGIC, _ABI):
                raise SegmentError(f"{self.path} is no lease table of this version of fastdeploy_rl")
            self._mapping = Mapping.map_fd(fd, _TABLE_BYTES, True)
            self._inode = os.fstat(fd).st_ino
            self._fd = fd
        except BaseException:
            os.close(fd)
            raise

    @property
    def is_open(self) -> bool:
        return self._mapping is not None

    @property
    def is_at_path(self) -> bool:
        """False when the open table's file was removed, replaced by another, or cut short."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == self._inode and status.st_size >= _TABLE_BYTES

    @property
    def is_cut(self) -> bool:
        """Somebody took the file's end away: whoever touched what was there would be killed (SIGBUS)."""
        return self._mapping is not None and os.fstat(self._fd).st_size < _TABLE_BYTES

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
            os.close(self._fd)

    def __enter__(self) -> "LeaseTable":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _words(self) -> Mapping:
        if self._mapping is None:
            raise SegmentError(f"lease table {self.path} is not open")
        if self.is_cut:
            raise SegmentError(f"lease table {self.path} was cut short under those who use it: make the channel anew")
        return self._mapping

    # --- readers -----------------------------------------------------------------------------------

    def generation(self, arena: int) -> int:
        return _native.load_u64(self._words, _row(arena))

    def take(self, arena: int, generation: int, token: int) -> Lease:
        """Claims the contents that `generation` stands for, before a byte of them is read; never blocks.

        `token` belongs to a started `Holder`. NoPublicationError when they were superseded, SegmentError when every
        slot is held by a live process.
        """
        slot = self._claim_slot(arena, token)
        if self.generation(arena) != generation:
            self.release_slot(arena, slot, token)
            raise NoPublicationError(
                f"superseded, or taken back by its trainer: arena {arena} of {self.path.parent} moved on from "
                f"generation {generation} to {self.generation(arena)}; ask for the latest version again"
            )
        return Lease(self, arena, generation, slot, token)

    def release_slot(self, arena: int, slot: int, token: int) -> None:
        if self.is_cut:
            return  # there is nothing left to give back to
        _native.compare_exchange_u64(self._words, _slot(arena, slot), token, 0)
        _native.ring_bell(self._words, _BELL)

    def _claim_slot(self, arena: int, token: int) -> int:
        for _ in range(2):
            for slot in range(NUM_SLOTS):
                offset = _slot(arena, slot)
                if _native.compare_exchange_u64(self._words, offset, 0, token) == 0:
                    _native.store_u64(self._words, offset + 8, int(time.time() * 1000))
                    return slot
            if len(self.holders(arena)) == NUM_SLOTS:
                break
        raise SegmentError(
            f"arena {arena} of {self.path.parent} already carries {NUM_SLOTS} leases of live processes, one of each "
            "rank of each engine: let some engines clear, or give them a channel of their own"
        )

    # --- the writer --------------------------------------------------------------------------------

    def holders(self, arena: int) -> tuple[HolderInfo, ...]:
        """Live leases on an arena. Slots of dead holders are emptied on the way, and their lock files removed."""
        return tuple(
            HolderInfo(arena, self.version(arena), owner_of(_lock_path(self._holders_dir, token)), taken_ms / 1000)
            for token, taken_ms in self._live_slots(arena)
        )

    def begin_write(self, arena: int) -> tuple[HolderInfo, ...]:
        """Claims an arena for writing. Empty: it is the caller's until `end_write`, and no reader can get a lease.
        Otherwise live leases forbid it: they are returned, and nothing changed."""
        if _native.add_u64(self._words, _row(arena), 1) % 2 == 0:
            self.cancel_write(arena)
            raise SegmentError(f"arena {arena} of {self.path.parent} is already being written")
        holders = self.holders(arena)
        if holders:
            self.cancel_write(arena)
        return holders

    def end_write(self, arena: int) -> int:
        """Ends a write, complete or given up. The generation that stands for the new contents; what nobody is told of,
        nobody can lease."""
        return _native.add_u64(self._words, _row(arena), 1)

    def cancel_write(self, arena: int) -> None:
        """Ends a write that changed no byte: the contents stand again under the generation they had."""
        _native.add_u64(self._words, _row(arena), -1 % 2**64)

    def withdraw(self, arena: int) -> None:
        """Takes the contents off the table, leased or not: nobody gets a new lease on them. Those who hold one keep it,
        and the row stays theirs until they let go."""
        _native.add_u64(self._words, _row(arena), 2)
        self.set_segment(arena, "")
        self.set_version(arena, "")

    def wait_free(self, arenas: Iterable[int], deadline_ns: int) -> int:
        """Begins to write the first of `arenas` that no live process leases; as `begin_write`, else.

        DeadlineExceededError naming the holders when none becomes free in time; then nothing changed.
        """
        arenas = tuple(arenas)
        begun = time.monotonic()
        while True:
            bell = _native.load_i32(self._words, _BELL)
            blockers: list[HolderInfo] = []
            for arena in arenas:
                # Looked at first: while `begin_write` looks, nobody gets a lease on contents that may well stay.
                holders = self.holders(arena) or self.begin_write(arena)
                if not holders:
                    return arena
                blockers.extend(holders)
            now = time.monotonic_ns()
            if now >= deadline_ns:
                raise DeadlineExceededError.waiting_for(
                    f"free memory of {self.path.parent}",
                    since_s=begun,
                    hint=f"it is still leased by {'; '.join(map(str, blockers))}. Let those engines update or clear",
                )
            _native.futex_wait_i32(self._words, _BELL, bell, min(deadline_ns, now + _SLICE_NS))

    def is_written(self, arena: int) -> bool:
        """Between `begin_write` and its end: nobody can lease the arena."""
        return self.generation(arena) % 2 == 1

    def repair(self, kept: Collection[int] = ()) -> tuple[int, ...]:
        """After a publisher died: ends every write it left open, but for the `kept` arenas. What those arenas hold is
        named by no manifest."""
        broken = tuple(arena for arena in range(NUM_ARENAS) if arena not in kept and self.is_written(arena))
        for arena in broken:
            self.end_write(arena)
        return broken

    # --- what a row says about its arena: written by the publisher only -----------------------------------------------

    def segment(self, arena: int) -> str:
        """Name of the arena's shared-memory segment; empty where there is none."""
        return self._text(_row(arena) + _SEGMENT, _SEGMENT_BYTES)

    def set_segment(self, arena: int, name: str) -> None:
        self._set_text(_row(arena) + _SEGMENT, _SEGMENT_BYTES, name)

    def version(self, arena: int) -> str:
        """Text of the version the arena holds, for messages."""
        return self._text(_row(arena) + _VERSION, _VERSION_BYTES)

    def set_version(self, arena: int, version: str) -> None:
        self._set_text(_row(arena) + _VERSION, _VERSION_BYTES, version)

    def lock_paths(self, arena: int) -> tuple[Path, ...]:
        """The lock files of all whose tokens stand in the row, dead or alive. Sweeps nothing: for onlookers."""
        tokens = (_native.load_u64(self._words, _slot(arena, slot)) for slot in range(NUM_SLOTS))
        return tuple(_lock_path(self._holders_dir, token) for token in tokens if token)

    def _text(self, offset: int, size: int) -> str:
        with memoryview(self._words) as view:
            return bytes(view[offset : offset + size]).split(b"\0", 1)[0].decode("ascii", "replace")

    def _set_text(self, offset: int, size: int, text: str) -> None:
        data = text.encode("ascii")
        if len(data) >= size:
            raise SegmentError(
                f"{text[:200]!r} has {len(data)} bytes; a row of the lease table has room for {size - 1}"
            )
        with memoryview(self._words) as view:
            view[offset : offset + size] = data.ljust(size, b"\0")

    def _live_slots(self, arena: int) -> Iterator[tuple[int, int]]:
        words = self._words
        for slot in range(NUM_SLOTS):
            offset = _slot(arena, slot)
            token = _native.load_u64(words, offset)
            if token == 0:
                continue
            lock = _lock_path(self._holders_dir, token)
            if is_alive(lock):
                yield token, _native.load_u64(self._words, offset + 8)
            else:
                _native.compare_exchange_u64(self._words, offset, token, 0)
                with contextlib.suppress(OSError):  # what is no file there is nobody's lock, and in nobody's way
                    lock.unlink()


def _row(arena: int) -> int:
    if not 0 <= arena < NUM_ARENAS:
        raise SegmentError(f"no arena {arena}: a lease table has {NUM_ARENAS}")
    return _HEADER_BYTES + arena * _ROW_BYTES


def _slot(arena: int, slot: int) -> int:
    return _row(arena) + _SLOTS + slot * _SLOT_BYTES


def _lock_path(holders_dir: Path, token: int) -> Path:
    return holders_dir / f"{token:016x}.lock"
