"""What dead processes left on this machine, and its removal.

Owns the question whose a file is, and whether its owner lives: only a lock that the kernel dropped says that somebody
is dead, never a pid or an age. Invariant: `remove` touches nothing before it holds that very lock itself, so that
nobody alive ever loses a name; what no lock speaks for is listed and left alone.

An engine leaves a board, status words and their second links, its collectives, a run directory and its lock; a
publisher its arenas, manifests and lock; a holder of leases its lock.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from fastdeploy_rl.board.board import Board, board_name, engine_dir, owner_lock_path
from fastdeploy_rl.board.layout import MAGIC, MAGIC_OFFSET, board_bytes
from fastdeploy_rl.board.legacy import WORDS, word_name
from fastdeploy_rl.errors import NoPublicationError, SegmentError
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.memory.shared_segment import SHM_DIR, SharedSegment
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.leases import NUM_ARENAS, LeaseTable
from fastdeploy_rl.publish.publisher import retire

_PORT = re.compile(
    r"fastdeploy_rl_(?:board|collectives)\.(\d{1,5})|fastdeploy_rl_link\.[a-z_]+\.(\d{1,5})(?:\.new)?", re.ASCII
)
_ARENA = re.compile(r"fastdeploy_rl\.(\d+)\.([0-9a-f]{12})\..+", re.ASCII)
_OURS = re.compile(r"fastdeploy_rl[._].*", re.ASCII)


class Item(NamedTuple):
    """A file or directory, with all that lies in it."""

    path: Path
    num_bytes: int


class Remains(Protocol):
    """What one dead process left."""

    @property
    def who(self) -> str:
        """The dead, for people: what it was, its port or channel, its pid."""
        ...

    @property
    def in_use_by(self) -> str:
        """Who alive still uses part of it; it then stays. Empty: nobody."""
        ...

    def items(self) -> list[Item]:
        """What is there now."""
        ...

    def remove(self) -> None:
        """Takes it away, under the lock of the dead; does nothing where somebody alive has taken that."""
        ...


def find_remains(channel: Channel) -> list[Remains]:
    """Of every engine of this user on this machine, and of the publisher and the holders of one channel."""
    remains: list[Remains] = []
    for port in known_ports():
        engine = EngineAtPort(port)
        if not engine.is_alive and engine.has_lock:
            remains.append(engine)
    if channel.path.is_dir():
        remains += [*dead_publishers(channel), *dead_holders(channel)]
    return remains


def remove_unused(dead: Remains) -> list[Item]:
    """Removes it unless somebody alive uses it; returns what is gone."""
    if dead.in_use_by:
        return []
    items = dead.items()
    dead.remove()
    return [item for item in items if not os.path.lexists(item.path)]


# --- engines ---------------------------------------------------------------------------------------------------------


def known_ports() -> list[int]:
    """Ports at which an engine of this user is or was."""
    matches = (_PORT.fullmatch(name) for name in own_names(SHM_DIR))
    ports = {int(match[1] or match[2]) for match in matches if match}
    runs = (re.fullmatch(r"(\d{1,5})(?:\.lock)?", name) for name in own_names(engine_dir(0).parent))
    return sorted(ports | {int(match[1]) for match in runs if match})


class EngineAtPort:
    """All that carries one port, and the locks that speak for it. `is_alive` may well be true."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._told = board_run_dir(port)
        self._run_dirs = [engine_dir(port)]
        if self._told is not None and self._told not in self._run_dirs:
            self._run_dirs.append(self._told)  # the engine was started with another runtime directory

    @property
    def locks(self) -> list[Path]:
        return [owner_lock_path(path) for path in self._run_dirs]

    @property
    def is_alive(self) -> bool:
        return any(is_alive(lock) for lock in self.locks)

    @property
    def rank_locks(self) -> dict[int, Path]:
        """Rank -> the lock of its process, for those that live."""
        paths = (path for run_dir in self._run_dirs for path in (run_dir / "ranks").glob("*.lock"))
        return {int(path.stem): path for path in sorted(paths) if path.stem.isdecimal() and is_alive(path)}

    @property
    def has_lock(self) -> bool:
        """False: nothing tells whether the owner lives. An engine takes its lock before it makes anything, so that a
        board or a run directory without one is that of a dead one - unless the board names a place that is not here:
        another container's, whose engine may well live."""
        if self._told is not None:
            return self._told.parent.is_dir()
        return any(path.exists() for path in (*self.locks, *self._run_dirs))

    @property
    def who(self) -> str:
        owners = [owner for lock in self.locks if (owner := owner_of(lock))]
        return f"engine at port {self.port} ({owners[0] if owners else 'pid unknown'})"

    in_use_by = ""

    def items(self) -> list[Item]:
        return _items([*self._segments(), *self._run_dirs, *self.locks])

    def remove(self) -> None:
        with ExitStack() as stack:
            for lock in self.locks:
                if lock.parent.is_dir() and not _take(stack, lock):
                    return
            for path in self._segments():
                path.unlink(missing_ok=True)
            for run_dir in self._run_dirs:
                shutil.rmtree(run_dir, ignore_errors=True)

    def _segments(self) -> list[Path]:
        names = [board_name(self.port), f"fastdeploy_rl_collectives.{self.port}"]
        links = [name for name in own_names(SHM_DIR) if _is_link_at(name, self.port)]
        return [_shm(name) for name in (*names, *_words_behind(links, self.port), *links)]


def board_run_dir(port: int) -> Path | None:
    """The run directory that a board of this user names; None where there is no such board."""
    name = board_name(port)
    if name not in own_names(SHM_DIR):
        return None
    try:
        segment = SharedSegment.attach(name, writable=True)
    except SegmentError:
        return None
    with segment:
        if segment.num_bytes < board_bytes(1):
            return None
        board = Board(port, segment, None)
        path = board.run_dir
        is_board = board.load(MAGIC_OFFSET) == MAGIC and (path.name, path.parent.name) == (str(port), "engines")
    return path if is_board and path.is_absolute() else None


def _is_link_at(name: str, port: int) -> bool:
    match = _PORT.fullmatch(name)
    return match is not None and match[2] is not None and int(match[2]) == port


def _words_behind(links: Sequence[str], port: int) -> list[str]:
    """Status words that are the dead engine's own: one that leads elsewhere than its second link was made anew by
    somebody else, perhaps by a FastDeploy that lives."""
    words = []
    for word in WORDS:
        name = word_name(word, port)
        if any(f".{name}" in link and _is_same(_shm(name), _shm(link)) for link in links):
            words.append(name)
    return words


# --- channels --------------------------------------------------------------------------------------------------------


def publisher_numbers(channel: Channel) -> tuple[int, ...]:
    """Of all that publish on the channel together, or did; 0 alone where there is no channel yet."""
    return (0, *channel.publishers()) if channel.path.is_dir() else (0,)


def killed_publishers(channel: Channel) -> list[Path]:
    """Their locks. A publisher that ends in order takes its lock file away: one that lies there unlocked was killed."""
    locks = [channel.lock_of(number) for number in publisher_numbers(channel)]
    return [lock for lock in locks if lock.exists() and not is_alive(lock)]


def dead_publishers(channel: Channel) -> list["DeadPublisher"]:
    """At most one: what several published together goes together, once none of them is alive."""
    is_any_alive = any(is_alive(channel.lock_of(number)) for number in publisher_numbers(channel))
    return [DeadPublisher(channel)] if killed_publishers(channel) and not is_any_alive else []


class DeadPublisher:
    """The publication of a publisher that was killed. It still serves engines, so it stays while one leases it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def who(self) -> str:
        owners = ", ".join(str(owner_of(lock) or "pid unknown") for lock in killed_publishers(self._channel))
        return f"publisher of {self._channel.path} ({owners})"

    @property
    def in_use_by(self) -> str:
        holders = [lock for lock in leasing_locks(self._channel) if is_alive(lock)]
        return ", ".join(str(owner_of(lock) or lock.stem) for lock in holders)

    def items(self) -> list[Item]:
        names = os.listdir(self._channel.path)
        files = [name for name in names if name == "LATEST" or name.startswith("manifest-") or name.endswith(".tmp")]
        arenas = arena_names(self._channel.key)
        locks = killed_publishers(self._channel)
        return _items([*(self._channel.path / name for name in files), *map(_shm, arenas), *locks])

    def remove(self) -> None:
        retire(self._channel.path)
        with ExitStack() as stack:
            locks = [self._channel.lock_of(number) for number in publisher_numbers(self._channel)]
            if not all(_take(stack, lock) for lock in locks):
                return
            # In no row of a table, so that nobody can reach them: their publisher died between two steps.
            for name in set(arena_names(self._channel.key)) - set(segments_in_tables(self._channel)):
                _shm(name).unlink(missing_ok=True)


def dead_holders(channel: Channel) -> list["DeadHolder"]:
    paths = sorted(channel.holders_dir.glob("*.lock"))
    return [DeadHolder(path) for path in paths if not is_alive(path)]


class DeadHolder:
    """The lock file of an engine's rank that held leases. Its leases are void already."""

    in_use_by = ""

    def __init__(self, lock: Path) -> None:
        self._lock = lock

    @property
    def who(self) -> str:
        return f"holder of leases ({owner_of(self._lock) or 'pid unknown'})"

    def items(self) -> list[Item]:
        return _items([self._lock])

    def remove(self) -> None:
        with ExitStack() as stack:
            if self._lock.exists():
                _take(stack, self._lock)


def leasing_locks(channel: Channel) -> list[Path]:
    """Lock files of all who stand in the channel's lease tables, dead or alive."""
    return [lock for table in _open_tables(channel) for row in range(NUM_ARENAS) for lock in table.lock_paths(row)]


def segments_in_tables(channel: Channel) -> list[str]:
    """Names of the segments that the channel's lease tables know."""
    return [name for table in _open_tables(channel) for row in range(NUM_ARENAS) if (name := table.segment(row))]


def _open_tables(channel: Channel) -> Iterator[LeaseTable]:
    for number in publisher_numbers(channel):
        table = LeaseTable(channel.leases_of(number), channel.holders_dir)
        try:
            table.open()
        except NoPublicationError:
            continue
        try:
            yield table
        finally:
            table.close()


def arena_names(channel_key: str) -> list[str]:
    """Segments of this user in /dev/shm that were made for one channel."""
    return [name for name in own_names(SHM_DIR) if (match := _ARENA.fullmatch(name)) and match[2] == channel_key]


# --- what no lock speaks for -----------------------------------------------------------------------------------------


def find_unclaimed(channel: Channel) -> list[Item]:
    """Segments of this user that belong to a channel which is not looked at, or to nobody that is known."""
    claimed = set(arena_names(channel.key))
    for port in known_ports():
        engine = EngineAtPort(port)
        if engine.is_alive or engine.has_lock:
            claimed |= {item.path.name for item in engine.items()}
    names = (name for name in own_names(SHM_DIR) if _OURS.fullmatch(name) and name not in claimed)
    return _items(_shm(name) for name in names if not _shm(name).is_dir())


def users_of(paths: Iterable[Path]) -> dict[Path, list[int]]:
    """Processes that have each of the segments mapped, as far as this user may look."""
    users: dict[Path, list[int]] = {path: [] for path in paths}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        maps = _maps_of(pid)
        for path in users:
            if str(path) in maps:
                users[path].append(pid)
    return users


def _maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return ""


# --- files -----------------------------------------------------------------------------------------------------------


def _shm(name: str) -> Path:
    return Path(SHM_DIR) / name


def own_names(directory: str | Path) -> list[str]:
    """Entries of this user in a directory; none where there is no such directory."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if _is_own(entry))
    except FileNotFoundError:
        return []


def _is_own(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _items(paths: Iterable[Path]) -> list[Item]:
    return [Item(path, size) for path in paths if (size := _size(path)) is not None]


def _size(path: Path) -> int | None:
    """Bytes of a file, or of all files of a directory; None where there is nothing of that name."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISDIR(status.st_mode):
        return sum(_size(Path(entry)) or 0 for entry in _entries(path))
    return status.st_size


def _entries(directory: Path) -> Iterator[str]:
    with os.scandir(directory) as entries:
        yield from (entry.path for entry in entries)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.lstat(other))
    except FileNotFoundError:
        return False


def _take(stack: ExitStack, path: Path) -> bool:
    """Takes a lock until the stack unwinds, which also removes its file; False where somebody alive has it."""
    lock = OwnerLock(path)
    if not lock.try_acquire():
        return False
    stack.callback(lock.release)
    return True
