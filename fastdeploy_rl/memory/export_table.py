"""Who holds what one process has exported: a table in a small mapped file, a row for each allocation.

A row has a nonce (0: nothing is exported there) and slots for the tokens of importers. The protocol is Dekker's, over
sequentially consistent words:

    importer: put the token into a slot, THEN read the nonce   (another one: take the token out again, no claim)
    exporter: take the nonce away, THEN look at the slots      (a live importer: put it back, refuse to free)

so that of an importer and an exporter who meet, at least one sees the other. Tokens stand for lock files whose locks
their processes hold: claims of live importers never expire, those of dead ones are void. Refuses to know what memory
is. Invariant: an allocation whose row was withdrawn has no live importer, and none comes any more.
"""

import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

from fastdeploy_rl import _native
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import PeerLostError, SegmentError, StaleMemoryError
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of

NUM_ROWS = 1024
"""Allocations that one process can export at once."""
NUM_SLOTS = 31
"""Processes that can hold one of them at once."""

_MAGIC = int.from_bytes(b"FDRLEXPT", "little")
_ABI = 1
_HEADER_BYTES = 64
_ROW_BYTES = 8 * (1 + NUM_SLOTS)
_TABLE_BYTES = _HEADER_BYTES + NUM_ROWS * _ROW_BYTES


def new_token() -> int:
    """Names an exporter, an importer or an export; never 0."""
    return secrets.randbits(63) | 1


def exporter_lock(directory: Path, token: int) -> OwnerLock:
    """Held by the exporter for as long as it lives."""
    return OwnerLock(directory / f"exporter-{token:016x}.lock")


def importer_lock(directory: Path, token: int) -> OwnerLock:
    """Held by the importer for as long as it lives."""
    return OwnerLock(directory / f"importer-{token:016x}.lock")


def remove_leftovers(directory: Path) -> None:
    """Takes away what dead exporters and importers left in `directory`; whoever lives keeps everything."""
    for path in [*directory.glob("exporter-*.lock"), *directory.glob("importer-*.lock")]:
        lock = OwnerLock(path)
        if lock.try_acquire():
            path.with_suffix(".table").unlink(missing_ok=True)
            lock.release()


class ExportTable:
    """The table of one exporter. The exporter creates and removes it; importers open it. For one thread."""

    def __init__(self, directory: Path, token: int) -> None:
        self._directory = directory
        self._lock_path = exporter_lock(directory, token).path
        self._path = self._lock_path.with_suffix(".table")
        self._mapping: Mapping | None = None

    def create(self) -> None:
        """Makes the file, with all its pages, and maps it. Only while the exporter's lock is held."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _TABLE_BYTES)
            os.pwrite(fd, struct.pack("<QQ", _MAGIC, _ABI), 0)
            self._mapping = Mapping.map_fd(fd, _TABLE_BYTES, True)
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(fd)

    def open(self) -> None:
        """Maps the table of another process. PeerLostError when its exporter is gone, SegmentError when the file is
        something else."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise PeerLostError(f"the process that exported this memory is gone: {self._path} is missing") from error
        try:
            if os.fstat(fd).st_size < _TABLE_BYTES:
                raise SegmentError(f"{self._path} is no table of exports: {os.fstat(fd).st_size} bytes")
            mapping = Mapping.map_fd(fd, _TABLE_BYTES, True)
        finally:
            os.close(fd)
        if (_native.load_u64(mapping, 0), _native.load_u64(mapping, 8)) != (_MAGIC, _ABI):
            raise SegmentError(f"{self._path} is no table of exports of this version")
        self._mapping = mapping

    def close(self) -> None:
        """Unmaps; a second close does nothing."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def unlink(self) -> None:
        """Removes the file. Only by the exporter."""
        self._path.unlink(missing_ok=True)

    @property
    def _words(self) -> Mapping:
        if self._mapping is None:
            raise SegmentError(f"{self._path} is not open")
        return self._mapping

    # --- exporter --------------------------------------------------------------------------------------

    def add(self, nonce: int) -> int:
        """Puts an export into a free row and answers which. SegmentError when all are taken."""
        for row in range(NUM_ROWS):
            if _native.load_u64(self._words, _row(row)) == 0:
                _native.store_u64(self._words, _row(row), nonce)
                return row
        raise SegmentError(f"this process exports {NUM_ROWS} allocations already: free some, or make them larger")

    def withdraw(self, row: int, nonce: int) -> None:
        """Takes the export away; nobody can claim it from here on. SegmentError, naming the live importers, while
        there are any: it then stays as it was."""
        # Looked at before, too: who holds a claim already must not find the export gone for the moment in between.
        self._refuse_while_held(row)
        _native.store_u64(self._words, _row(row), 0)
        try:
            self._refuse_while_held(row)
        except SegmentError:
            _native.store_u64(self._words, _row(row), nonce)
            raise

    def _refuse_while_held(self, row: int) -> None:
        importers = self.importers(row)
        if importers:
            raise SegmentError(f"the memory is still in use by {len(importers)} importers: {'; '.join(importers)}")

    def revoke(self, row: int) -> None:
        """Takes the export away although importers may hold it: the memory is gone already. They learn of it when
        they look."""
        _native.store_u64(self._words, _row(row), 0)

    def importers(self, row: int) -> list[str]:
        """The live importers of a row, for messages; claims of dead ones are swept out."""
        return [self._name(token) for token in self._live_tokens(row)]

    def _live_tokens(self, row: int) -> Iterator[int]:
        for offset in _slots(row):
            token = _native.load_u64(self._words, offset)
            if token == 0:
                continue
            if is_alive(importer_lock(self._directory, token).path):
                yield token
            else:
                _native.compare_exchange_u64(self._words, offset, token, 0)

    def _name(self, token: int) -> str:
        return str(owner_of(importer_lock(self._directory, token).path) or f"importer {token:016x}")

    # --- importer --------------------------------------------------------------------------------------

    def take(self, row: int, nonce: int, token: int) -> int:
        """Claims an export and answers the slot. StaleMemoryError when it was withdrawn, PeerLostError when the
        exporter is dead, SegmentError when too many processes hold it; then nothing is claimed."""
        slot = self._put_token(row, token)
        try:
            self.check(row, nonce)
        except BaseException:
            self.give_back(slot, token)
            raise
        return slot

    def check(self, row: int, nonce: int) -> None:
        """StaleMemoryError unless the export stands, PeerLostError when the exporter is dead."""
        if not is_alive(self._lock_path):
            raise PeerLostError(
                f"the process that exported this memory is gone ({owner_of(self._lock_path) or 'it has closed'})"
            )
        if _native.load_u64(self._words, _row(row)) != nonce:
            raise StaleMemoryError(
                f"the exporter ({owner_of(self._lock_path) or 'unknown'}) has freed this memory, or uses it for "
                "something else: ask it for a new record"
            )

    def give_back(self, slot: int, token: int) -> None:
        """Ends a claim."""
        _native.compare_exchange_u64(self._words, slot, token, 0)

    def _put_token(self, row: int, token: int) -> int:
        for _ in range(2):
            for offset in _slots(row):
                if _native.compare_exchange_u64(self._words, offset, 0, token) == 0:
                    return offset
            self.importers(row)  # frees the slots of dead ones
        raise SegmentError(f"{NUM_SLOTS} processes hold this memory already")


def _row(row: int) -> int:
    if not 0 <= row < NUM_ROWS:
        raise StaleMemoryError(f"no export {row}: a table has {NUM_ROWS} rows")
    return _HEADER_BYTES + row * _ROW_BYTES


def _slots(row: int) -> range:
    return range(_row(row) + 8, _row(row) + _ROW_BYTES, 8)
