"""One mapped board: typed reads and writes of its records and words, and waiting for them to change.

Owns records in two copies, bells and the life of the segments. Refuses to know what a command does. Invariant: each
record has one writer process; whoever stores something that others may wait for rings the bell afterwards."""

import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.legacy import (
    WEIGHTS_WORD,
    WORDS,
    adopt_word,
    create_words,
    unlink_links,
    unlink_words,
)
from fastdeploy_rl.command_options import tags_in
from fastdeploy_rl.config import Deadlines, runtime_dir
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, EngineNotFoundError, SegmentError
from fastdeploy_rl.lifecycle import Admission, LegacyStatus, Residency, Tag
from fastdeploy_rl.memory.owner_lock import Owner, OwnerLock, is_alive, owner_of
from fastdeploy_rl.memory.private_directory import open_private_directory
from fastdeploy_rl.memory.shared_segment import SharedSegment, unlink_segment
from fastdeploy_rl.report import LOST_PHASE, EngineStatus, RankStatus, utc_text

_log = logging.getLogger(__name__)

_Record = TypeVar("_Record", bound=NamedTuple)
_LOOK_AGAIN_NS = 200_000_000
"""A waiter looks at its condition this often even if no bell rings: a writer may die between store and bell."""
_READ_RANK_S = 0.002
"""A rank's slot that cannot be read for so long counts as silent; whoever waits for its vote looks again."""
_SPINS_BEFORE_YIELD = 100
_LEGACY_NAMES: dict[int, str] = {status.value: status.name for status in LegacyStatus}

HISTORY = "history.jsonl"
"""In the run directory: the engine's history, or a link to where that stays when the engine is gone."""


class Leftovers(NamedTuple):
    """What an engine that was killed left at a port. `owner` is None where nothing says who that was."""

    owner: Owner | None
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"of a dead engine ({self.owner or 'unknown'}): {', '.join(self.names)}"


def rank_lock_path(run_dir: Path, rank: int) -> Path:
    """The lock that a rank's process holds while it lives."""
    return run_dir / "ranks" / f"{rank}.lock"


def board_name(port: int) -> str:
    return f"fastdeploy_rl_board.{port}"


def engine_dir(port: int) -> Path:
    """Where an engine keeps what belongs to its life only: reports, the locks of its clients."""
    return runtime_dir() / "engines" / str(port)


def owner_lock_path(run_dir: Path) -> Path:
    """The lock that an engine holds while it lives, beside its run directory. The board says where that is, so that
    whoever has another runtime directory finds the same one."""
    return run_dir.parent / f"{run_dir.name}.lock"


class Board:
    """The board of the engine at `port`, attached. Made by `create` (the owner) or `attach` (everyone else)."""

    def __init__(self, port: int, segment: SharedSegment, lock: OwnerLock | None) -> None:
        self.port = port
        self.num_ranks = _native.load_u64(segment.mapping, layout.NUM_RANKS_OFFSET)
        self.words: tuple[str, ...] = WORDS
        """Owner: those of FastDeploy's status words that it writes: all, or where they are FastDeploy's own the one of
        the weights."""
        self.reclaimed: Leftovers | None = None
        """Owner: what `create` removed first, for whoever tells the operator."""
        self._segment = segment
        self._lock = lock
        self._run_dir = _read_run_dir(segment.mapping)
        self._writing = threading.Lock()
        self._is_abandoned = False

    # --- life --------------------------------------------------------------------------------------

    @classmethod
    def create(cls, port: int, *, num_ranks: int, history: Path | None = None, adopts_words: bool = False) -> "Board":
        """Owner: board, words, run directory and owner lock of a new engine; what a dead engine left at this port is
        reclaimed, which is logged and stands in `reclaimed`. `history`: a file that outlives the engine; without one
        its history goes with the run directory. `adopts_words`: the words are FastDeploy's, which has made them and
        takes them away.

        ConfigurationError when a live engine has the port; then nothing of it was touched."""
        if not 0 < num_ranks <= layout.MAX_RANKS:
            raise ConfigurationError(f"an engine has 1 to {layout.MAX_RANKS} ranks, got {num_ranks}")
        _refuse_live_engine(port)
        run_dir = engine_dir(port)
        dead = owner_of(owner_lock_path(run_dir))
        lock = _lock_port(port, run_dir)
        try:
            names = remove_leftovers(port, keeps_words=adopts_words)
            _make_run_dir(run_dir, history)
            if adopts_words:
                adopt_word(WEIGHTS_WORD, port)
            else:
                create_words(port)
            segment = SharedSegment.create(board_name(port), layout.board_bytes(num_ranks))
            _write_header(segment.mapping, port, num_ranks, run_dir)
            board = cls(port, segment, lock)
            board.words = (WEIGHTS_WORD,) if adopts_words else WORDS
            board.reclaimed = _reclaimed(port, dead, names)
            return board
        except BaseException:
            remove_leftovers(port, keeps_words=adopts_words)
            lock.release()
            raise

    @classmethod
    def attach(cls, port: int) -> "Board":
        """EngineNotFoundError when nothing is there, when its owner is dead, or when it speaks another abi."""
        try:
            segment = SharedSegment.attach(board_name(port), writable=True)
        except SegmentError as error:
            raise EngineNotFoundError(
                f"no engine at port {port}: {error}; start one with `fastdeploy-rl serve`, or FastDeploy with the "
                f"plugin (a number is an engine worker queue port; where the HTTP port is meant: http://127.0.0.1:{port})"
            ) from error
        try:
            _check_header(segment.mapping, port)
            return cls(port, segment, None)
        except BaseException:
            segment.close()
            raise

    @property
    def mapping(self) -> _native.Mapping:
        return self._segment.mapping

    @property
    def run_dir(self) -> Path:
        """As it was when this board was made or attached: nobody is led elsewhere afterwards."""
        return self._run_dir

    def is_owner_alive(self) -> bool:
        return self._lock is not None or is_alive(owner_lock_path(self.run_dir))

    def close(self) -> None:
        """Detaches; the owner also removes board, words that it made, and run directory."""
        self._segment.close()
        if self._lock is not None:
            remove_leftovers(self.port, keeps_words=self.words != WORDS)
            self._lock.release()

    # --- records -----------------------------------------------------------------------------------

    def read(self, record: type[_Record], offset: int, within_s: float = Deadlines.read_s) -> _Record:
        """The record that its writer wrote last. DeadlineExceededError where something else wrote there, or the writer
        overtakes this reader for longer than `within_s`."""
        deadline_ns = time.monotonic_ns() + int(within_s * 1e9)
        for attempt in _attempts(deadline_ns):
            data = self._read_copy(record, offset)
            if data is not None:
                return layout.unpack(record, data)
            if attempt > _SPINS_BEFORE_YIELD:
                os.sched_yield()
        raise DeadlineExceededError(
            f"port {self.port}: {record.__name__} at {offset:#x} could not be read within {within_s} s: "
            "another process wrote there"
        )

    def _read_copy(self, record: type, offset: int) -> bytes | None:
        """None where the copy was overwritten meanwhile, or is not what its writer wrote."""
        counter = _native.load_u64(self.mapping, offset)
        start = offset + layout.copy_offset(record, counter)
        with memoryview(self.mapping) as view:
            copy = bytes(view[start : start + layout.CHECKSUM_BYTES + layout.record_bytes(record)])
        return layout.checked(copy) if _native.load_u64(self.mapping, offset) == counter else None

    def write(self, record: NamedTuple, offset: int) -> None:
        """Stores a record and rings the bell. Only the record's one writer process may call this."""
        with self._writing:
            counter = _native.load_u64(self.mapping, offset) + 1
            start = offset + layout.copy_offset(type(record), counter)
            self._store_bytes(layout.with_checksum(layout.pack(record)), start)
            _native.store_u64(self.mapping, offset, counter % (1 << 64))
        self.ring()

    def read_plain(self, record: type[_Record], offset: int) -> _Record:
        """A record that is handed over by a state word, so that nobody writes it meanwhile."""
        with memoryview(self.mapping) as view:
            return layout.unpack(record, bytes(view[offset : offset + layout.record_bytes(record)]))

    def write_plain(self, record: NamedTuple, offset: int) -> None:
        self._store_bytes(layout.pack(record), offset)

    def _store_bytes(self, data: bytes, offset: int) -> None:
        with memoryview(self.mapping) as view:
            view[offset : offset + len(data)] = data

    # --- words, bells, waiting ---------------------------------------------------------------------

    def load(self, offset: int) -> int:
        return _native.load_u64(self.mapping, offset)

    def store(self, offset: int, value: int) -> None:
        _native.store_u64(self.mapping, offset, value)
        self.ring()

    def exchange(self, offset: int, expected: int, desired: int) -> int:
        """Compare-and-swap; returns what was there. Rings the bell when it took effect."""
        found = _native.compare_exchange_u64(self.mapping, offset, expected, desired)
        if found == expected:
            self.ring()
        return found

    def take_ticket(self) -> int:
        return _native.add_u64(self.mapping, layout.TICKET_OFFSET, 1)

    def ring(self) -> None:
        _native.ring_bell(self.mapping, layout.BELL_OFFSET)

    def ring_doorbell(self) -> None:
        _native.ring_bell(self.mapping, layout.DOORBELL_OFFSET)

    def wait_doorbell(self, heard: int, deadline_ns: int) -> int:
        """Blocks until the doorbell's count differs from `heard` or the deadline passed; returns the count."""
        _native.futex_wait_i32(self.mapping, layout.DOORBELL_OFFSET, heard, deadline_ns)
        return _native.load_i32(self.mapping, layout.DOORBELL_OFFSET)

    def wait_until(self, condition: Callable[[], bool], deadline_ns: int) -> bool:
        """Blocks until `condition()` holds (looked at after every bell); False when the deadline passed first, or when
        this process gave its waits up."""
        while True:
            heard = _native.load_i32(self.mapping, layout.BELL_OFFSET)
            if condition():
                return True
            now = time.monotonic_ns()
            if now >= deadline_ns or self._is_abandoned:
                return False
            _native.futex_wait_i32(self.mapping, layout.BELL_OFFSET, heard, min(deadline_ns, now + _LOOK_AGAIN_NS))

    def abandon_waits(self) -> None:
        """This process stops: whoever of its threads waits here is told at once that time is up."""
        self._is_abandoned = True
        self.ring()
        self.ring_doorbell()

    # --- lost ranks --------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.load(layout.GENERATION_OFFSET)

    def advance_generation(self) -> int:
        """Whoever starts a rank again counts first; returns the new generation."""
        return _native.add_u64(self.mapping, layout.GENERATION_OFFSET, 1)

    def lost_ranks(self) -> frozenset[int]:
        """Those that died and are not back."""
        return layout.ranks_in(self.load(layout.LOST_OFFSET))

    def mark_lost(self, rank: int) -> None:
        """For whoever saw that rank die. What is undecided of the present command is decided: NO."""
        self._set_bit(layout.LOST_OFFSET, rank, True)
        for offset in (layout.INSTALL_DECISION_OFFSET, layout.COMMIT_DECISION_OFFSET):
            word = self.load(offset)
            if word & 3 == layout.Decision.OPEN:
                self.exchange(offset, word, word | layout.Decision.NO)

    def mark_back(self, rank: int) -> None:
        """For the rank itself, when its slot says what it holds."""
        self._set_bit(layout.LOST_OFFSET, rank, False)
        self._set_bit(layout.CONDEMNED_OFFSET, rank, False)

    def condemned_ranks(self) -> frozenset[int]:
        """Those that whoever watches over the processes must kill, and start again."""
        return layout.ranks_in(self.load(layout.CONDEMNED_OFFSET))

    def condemn(self, rank: int) -> None:
        """For a rank that another one keeps from going on or back."""
        self._set_bit(layout.CONDEMNED_OFFSET, rank, True)

    def _set_bit(self, offset: int, rank: int, is_set: bool) -> None:
        while True:
            word = self.load(offset)
            wanted = word | 1 << rank if is_set else word & ~(1 << rank)
            if word == wanted or self.exchange(offset, word, wanted) == word:
                return

    # --- what an onlooker sees ---------------------------------------------------------------------

    def read_rank(self, rank: int) -> layout.RankRecord:
        """What that rank wrote last; UNREADABLE_RANK where that is not to be read now."""
        try:
            return self.read(layout.RankRecord, layout.rank_offset(rank), _READ_RANK_S)
        except DeadlineExceededError:
            return layout.UNREADABLE_RANK

    def status(self) -> EngineStatus:
        """The engine as its ranks wrote it down last; while a rank is lost it does not serve, whatever stands there."""
        record = self.read(layout.StatusRecord, layout.STATUS_OFFSET)
        now = time.monotonic_ns()
        lost = sorted(self.lost_ranks())
        if lost and record.is_serving:
            reason = f"ranks {lost} died; the engine serves again when they are back"
            record = record._replace(admission=Admission.FENCED.value, version="", is_serving=0, reason=reason)
        return EngineStatus(
            port=self.port,
            admission=record.admission or "starting",
            update=record.update or "idle",
            version=record.version,
            content_digest=record.content_digest if record.version else "",
            legacy_status=_LEGACY_NAMES.get(record.legacy_status, str(record.legacy_status)),
            is_serving=bool(record.is_serving),
            reason=record.reason if record.admission else "the engine is starting",
            commands_done=record.commands_done,
            ranks=[
                _rank_status(rank, self.read_rank(rank), now, is_lost=rank in lost) for rank in range(self.num_ranks)
            ],
            residency={tag.value: getattr(record, tag.value) or Residency.DROPPED.value for tag in Tag},
            asleep=[tag.value for tag in Tag if tag in tags_in(record.asleep)],
            is_paused=bool(record.is_held),
            live_since=utc_text(record.live_since_ns / 1e9) if record.version and record.live_since_ns else "",
            source=record.source,
            apply_mode=record.apply_mode if record.version else "",
            receipt_digest=record.content_digest if record.version and record.has_receipt else "",
            newest_version=record.newest_version,
        )


def _rank_status(rank: int, record: layout.RankRecord, now_ns: int, *, is_lost: bool) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=record.pid,
        phase=LOST_PHASE if is_lost else record.phase or "starting",
        command=record.command,
        version=record.version,
        heartbeat_age_s=(now_ns - record.heartbeat_ns) / 1e9 if record.heartbeat_ns else None,
        error=record.reason,
    )


def _attempts(deadline_ns: int) -> Iterator[int]:
    attempt = 0
    while attempt <= _SPINS_BEFORE_YIELD or time.monotonic_ns() < deadline_ns:
        yield attempt
        attempt += 1


def remove_leftovers(port: int, *, keeps_words: bool = False) -> list[str]:
    """Removes board, words (not `keeps_words`: they are another program's) and run directory at `port`; returns the
    names of the segments that were there. Only for whoever holds the port's owner lock."""
    names = [board_name(port)] if unlink_segment(board_name(port)) else []
    names += unlink_links(port) if keeps_words else unlink_words(port)
    shutil.rmtree(engine_dir(port), ignore_errors=True)
    return names


def _reclaimed(port: int, dead: Owner | None, names: list[str]) -> Leftovers | None:
    if not names:
        return None
    leftovers = Leftovers(dead, tuple(names))
    _log.warning("port=%d event=reclaimed leftovers=%r", port, str(leftovers))
    return leftovers


def _make_run_dir(run_dir: Path, history: Path | None) -> None:
    for path in (run_dir, run_dir / "clients", run_dir / "ranks"):
        path.mkdir(mode=0o700)
    if history is not None:
        (run_dir / HISTORY).symlink_to(history.absolute())


def _read_run_dir(mapping: _native.Mapping) -> Path:
    with memoryview(mapping) as view:
        text = bytes(view[layout.RUN_DIR_OFFSET : layout.RUN_DIR_OFFSET + layout.RUN_DIR_BYTES])
    return Path(os.fsdecode(text.rstrip(b"\0")))


def _refuse_live_engine(port: int) -> None:
    """Whatever runtime directory a live engine was started with, its board says where its lock is."""
    try:
        segment = SharedSegment.attach(board_name(port))
    except SegmentError:
        return
    with segment:
        if not _is_board(segment.mapping):
            return
        path = owner_lock_path(_read_run_dir(segment.mapping))
        if is_alive(path):
            raise _port_taken(port, path)


def _lock_port(port: int, run_dir: Path) -> OwnerLock:
    open_private_directory(runtime_dir())
    run_dir.parent.mkdir(mode=0o700, exist_ok=True)
    lock = OwnerLock(owner_lock_path(run_dir))
    try:
        lock.acquire()
    except SegmentError as error:
        raise _port_taken(port, lock.path) from error
    return lock


def _port_taken(port: int, lock_path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"engine worker queue port {port} belongs to a live engine ({owner_of(lock_path)}); choose another one"
    )


def _write_header(mapping: _native.Mapping, port: int, num_ranks: int, run_dir: Path) -> None:
    text = os.fsencode(run_dir)
    if len(text) > layout.RUN_DIR_BYTES:
        raise ConfigurationError(f"the run directory's path is longer than {layout.RUN_DIR_BYTES} bytes: {run_dir}")
    with memoryview(mapping) as view:
        view[layout.RUN_DIR_OFFSET : layout.RUN_DIR_OFFSET + len(text)] = text
    for offset, value in (
        (layout.ABI_OFFSET, layout.ABI),
        (layout.NUM_RANKS_OFFSET, num_ranks),
        (layout.NONCE_OFFSET, secrets.randbits(63)),
        (layout.PORT_OFFSET, port),
        (layout.GENERATION_OFFSET, 1),
        (layout.MAGIC_OFFSET, layout.MAGIC),  # last: whoever reads it finds the rest
    ):
        _native.store_u64(mapping, offset, value)


def _is_board(mapping: _native.Mapping) -> bool:
    is_large = mapping.num_bytes >= layout.board_bytes(1)
    return is_large and _native.load_u64(mapping, layout.MAGIC_OFFSET) == layout.MAGIC


def _check_header(mapping: _native.Mapping, port: int) -> None:
    if not _is_board(mapping):
        raise EngineNotFoundError(
            f"port {port}: {board_name(port)} is no board, or its engine is just starting; try again"
        )
    abi = _native.load_u64(mapping, layout.ABI_OFFSET)
    num_ranks = _native.load_u64(mapping, layout.NUM_RANKS_OFFSET)
    is_sound = 0 < num_ranks <= layout.MAX_RANKS and mapping.num_bytes >= layout.board_bytes(num_ranks)
    if abi != layout.ABI or not is_sound:
        raise EngineNotFoundError(
            f"port {port}: board abi {abi} (expected {layout.ABI}) of {num_ranks} ranks in {mapping.num_bytes} bytes"
        )
    if not is_alive(owner_lock_path(_read_run_dir(mapping))):
        raise EngineNotFoundError(
            f"port {port}: the engine that made this board is dead; start one with `fastdeploy-rl serve`"
        )
