"""Who is alive: an exclusive flock on a file, held for as long as its owner lives.

The kernel drops the lock when the owner dies, however it dies. Owns the file's
life and the note inside (pid and start time, which serve messages only: pids mean
nothing across containers). Invariant: a path is owned by one open lock at most, and
by the process that took it: children that it forks, as data loaders do, neither hold
nor release it.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import SegmentError

_MAX_ATTEMPTS = 10_000
_SWEEP_POLL_S = 0.001
_NOTE_BYTES = 64
_LATEST_S = 2.0**36
"""No note of ours is of a later time, and `time.localtime` has no year for much later ones."""


class Owner(NamedTuple):
    """What an owner wrote about itself, for messages: process id as it sees it, and wall-clock seconds when it took the
    lock."""

    pid: int
    since_s: float

    def __str__(self) -> str:
        return f"pid {self.pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since_s))}"


class OwnerLock:
    """Exclusive claim on `path`; descriptor is close-on-exec, file is 0600 and removed on release."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._fd = -1

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    @property
    def is_at_path(self) -> bool:
        """False when the file was removed under its owner: whoever comes then makes, and owns, another."""
        return self.is_held and _is_at(self.path, self._fd)

    def try_acquire(self) -> bool:
        """Takes the lock; False when a live owner has it (nothing
        changes then). Never blocks; the directory must exist."""
        if self.is_held:
            raise SegmentError(f"lock {self.path} is already held by this very object")
        fd = _lock_file(self.path)
        if fd < 0:
            return False
        with contextlib.suppress(OSError):  # a full disk: then nobody can tell who holds it, and the lock is held
            os.pwrite(fd, f"{os.getpid()} {time.time():.3f}\n".encode().ljust(_NOTE_BYTES), 0)
        self._fd = fd
        _held.add(self)
        return True

    def acquire(self) -> None:
        """As `try_acquire`, but raises SegmentError naming the owner that still lives after a moment."""
        # Whoever takes away what the dead left may meet the file between its making and its locking, and hold it.
        deadline = time.monotonic() + Deadlines.lock_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise SegmentError(f"{self.path} is held by a live process ({owner_of(self.path) or 'unknown'})")
            time.sleep(_SWEEP_POLL_S)

    def release(self) -> None:
        """Removes the file, then drops the lock; a second release does nothing. A file that somebody else has made in
        its place stays."""
        if not self.is_held:
            return
        is_at_path = self.is_at_path
        fd = self._forget()
        # In this order: whoever finds the file gone or unlocked sees a dead owner; whoever opened it before finds,
        # after it got the lock, that the path no longer leads to it, and looks again.
        if is_at_path:
            self.path.unlink(missing_ok=True)
        os.close(fd)

    def _forget(self) -> int:
        """The descriptor, which is the caller's now."""
        _held.discard(self)
        fd, self._fd = self._fd, -1
        return fd

    def __enter__(self) -> "OwnerLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


_held: set[OwnerLock] = set()
"""By this process."""


def _let_go_in_child() -> None:
    """With its copy of a descriptor a forked child would keep the lock of an owner that died."""
    for lock in list(_held):
        os.close(lock._forget())


os.register_at_fork(after_in_child=_let_go_in_child)


def is_alive(path: str | Path) -> bool:
    """True while someone holds the lock on `path`. What is no regular file, or can be no path, is nobody's lock."""
    try:
        fd = _open_regular(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, SegmentError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise SegmentError(f"{path} cannot be looked at: {error.strerror}") from error
    try:
        return not _try_flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def owner_of(path: str | Path) -> Owner | None:
    """The note of the last owner of `path`, dead or alive; None when there is none that can be read."""
    try:
        fd = _open_regular(path, os.O_RDONLY)
    except (OSError, SegmentError, ValueError):
        return None
    try:
        pid, since = os.read(fd, _NOTE_BYTES).split()
        owner = Owner(int(pid), float(since))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return owner if owner.pid >= 0 and 0 <= owner.since_s < _LATEST_S else None


def _lock_file(path: Path) -> int:
    """A descriptor that holds the exclusive lock of the file that `path` names now, or -1 when someone alive has it."""
    for _ in range(_MAX_ATTEMPTS):
        fd = _open_regular(path, os.O_RDWR | os.O_CREAT)
        if _try_flock(fd, fcntl.LOCK_EX):
            if _is_at(path, fd):
                return fd
        elif not _try_flock(fd, fcntl.LOCK_SH):
            os.close(fd)
            return -1
        # A passing `is_alive` held it shared, or the last owner removed the file under us: look again.
        os.close(fd)
        os.sched_yield()
    raise SegmentError(f"{path} changed hands {_MAX_ATTEMPTS} times while it was being locked")


def _open_regular(path: str | Path, flags: int) -> int:
    """SegmentError for what somebody put in a lock file's place: opening a pipe there would keep us for good."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise SegmentError(f"{path} is no lock file: {error.strerror}; remove it") from error
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise SegmentError(f"{path} is no lock file, but of another kind; remove it")


def _try_flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False
