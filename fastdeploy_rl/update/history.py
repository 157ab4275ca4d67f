"""An engine's history: one JSON line for each command that ended, in a file of bounded size.

Owns the file's form, its rotation and how it is read back. Where it lies is the board's owner's choice: the run
directory goes with the engine, so `serve` keeps the file beside its logs and the run directory only leads there; an
engine that chose no place has it in the run directory itself. Refuses to know commands. Invariant: at most two files of
MAX_FILE_BYTES each, the older one with `.1` behind its name; engines that share a file write and rotate it one at a
time, under its lock; a reader takes no more than that into memory, and whatever else it finds (a line torn by a crash,
foreign text) is left out, which a log line says."""

import errno
import fcntl
import logging
import os
import stat
import time
from pathlib import Path

import msgspec

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import ConfigurationError, RequestError, StepFailedError
from fastdeploy_rl.report import HistoryEntry

_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 20
MAX_LIMIT = 10_000
DEFAULT_LIMIT = 20
_LOCK_S = Deadlines.history_lock_s
_LOOK_AGAIN_S = 0.001
_MAX_READS = 3
_TAIL = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def append_history(path: Path, entry: HistoryEntry) -> None:
    """One line more; the file is made, or put aside as the predecessor, where that is due. StepFailedError when the
    line could not be written whole. Several engines may share a file."""
    line = msgspec.json.encode(entry) + b"\n"
    try:
        fd = _open_with_room(_real(path), len(line))
        try:
            if not _ends_whole(fd):
                line = b"\n" + line  # a writer died inside its line: ours must not hang on to it
            if os.write(fd, line) != len(line):
                raise OSError(0, "no room for the whole line")
        finally:
            os.close(fd)
    except OSError as error:
        raise StepFailedError(f"history {path} cannot be written: {error.strerror}") from error


def read_history(path: Path, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
    """The last `limit` entries of the file and its predecessor, the newest last; none where there is no file.

    RequestError for an impossible limit, ConfigurationError for what is no readable file."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise RequestError(f"limit must be 1 to {MAX_LIMIT}, got {limit!r:.40}")
    try:
        path = _real(path)
    except OSError as error:
        raise ConfigurationError(f"history {path} cannot be read: {error.strerror}") from error
    entries: list[HistoryEntry] = []
    for _ in range(_MAX_READS):
        place = _place(path)
        entries = _read_file(path)
        if len(entries) < limit:
            entries = _read_file(_predecessor(path)) + entries
        if _place(path) == place:
            break  # else it was put aside while we read: lines came twice
    return entries[-limit:]


def _predecessor(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _real(path: Path) -> Path:
    """Where links lead; rotation happens there. OSError where they lead in a circle."""
    try:
        return path.resolve()
    except RuntimeError as error:  # what pathlib makes of ELOOP
        raise OSError(errno.ELOOP, "its links lead in a circle") from error


def _open_with_room(path: Path, num_bytes: int) -> int:
    """The file that `path` names now, locked, with room for so many bytes."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        fd = _open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            _lock(fd, deadline)
            if _is_at(path, fd):  # else it was put aside while we waited
                size = os.fstat(fd).st_size
                if not size or size + num_bytes < MAX_FILE_BYTES:
                    return fd
                os.replace(path, _predecessor(path))
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise OSError(errno.EBUSY, f"another process held its lock for {_LOCK_S:g} s") from None
            time.sleep(_LOOK_AGAIN_S)


def _is_at(path: Path, fd: int) -> bool:
    found = os.fstat(fd)
    return _place(path) == (found.st_dev, found.st_ino)


def _place(path: Path) -> tuple[int, int] | None:
    """What tells the file at `path` from every other; None where none can be looked at."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open_regular(path: Path, flags: int) -> int:
    fd = os.open(path, flags | _TAIL, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(0, "it is no regular file")


def _ends_whole(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


def _read_file(path: Path) -> list[HistoryEntry]:
    try:
        data = _read_tail(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(f"history {path} cannot be read: {error.strerror}") from error
    entries: list[HistoryEntry] = []
    num_bad = 0
    for line in data.splitlines():
        try:
            entries.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            num_bad += bool(line.strip())
    if num_bad:
        _log.warning("event=history_skipped path=%s lines=%d reason='no entry, or torn by a crash'", path, num_bad)
    return entries


def _read_tail(path: Path) -> bytes:
    """The end of the file, from a line's beginning on; all of it where we wrote it."""
    fd = _open_regular(path, os.O_RDONLY)
    try:
        start = max(0, os.fstat(fd).st_size - MAX_FILE_BYTES)
        data = os.pread(fd, MAX_FILE_BYTES, start)
    finally:
        os.close(fd)
    return data.partition(b"\n")[2] if start else data


_DECODER = msgspec.json.Decoder(HistoryEntry)
