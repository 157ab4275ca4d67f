"""Named POSIX shared memory, created whole or not at all.

Owns name <-> mapping. Every page is reserved at creation, so that a store can never meet a full /dev/shm (which would
be a bus error). Refuses to know what lies inside. Goes through posix_ipc only: Python's own `shared_memory` has a
resource tracker that unlinks segments which are still in use elsewhere.
"""

import os
import stat
from types import TracebackType

import posix_ipc  # type: ignore[import-not-found,unused-ignore]  # a C extension without stubs

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ConfigurationError, NoSpaceError, SegmentError

SHM_DIR = "/dev/shm"


def free_bytes() -> int:
    """Bytes that /dev/shm can still give to this user."""
    stats = os.statvfs(SHM_DIR)
    return stats.f_bavail * stats.f_frsize


class SharedSegment:
    """One open segment. `close()` drops the mapping; `unlink()`
    drops the name, and belongs to whoever owns the segment."""

    def __init__(self, name: str, mapping: Mapping, inode: int) -> None:
        self.name = name
        self.mapping = mapping
        self._inode = inode

    @property
    def num_bytes(self) -> int:
        return self.mapping.num_bytes

    @property
    def is_current(self) -> bool:
        """The name still leads to what is mapped, and nobody has taken an end of it away: whoever touched bytes that
        are gone would be killed (SIGBUS)."""
        try:
            status = os.stat(_path(self.name), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == self._inode and status.st_size == self.num_bytes

    @classmethod
    def create(cls, name: str, num_bytes: int, *, mode: int = 0o600) -> "SharedSegment":
        """A new zeroed segment with all its pages reserved, mapped writable.

        SegmentError when the name is taken, NoSpaceError (bytes needed and free) when /dev/shm has no room; then no
        name is left.
        """
        if num_bytes <= 0:
            raise ConfigurationError(f"segment {name!r} needs a positive size, got {num_bytes}")
        _check_room(name, num_bytes)
        try:
            handle = posix_ipc.SharedMemory(_posix_name(name), posix_ipc.O_CREX, mode)
        except posix_ipc.ExistentialError as error:
            raise SegmentError(f"shared-memory segment {name!r} exists already: {_path(name)}") from error
        try:
            _reserve(handle.fd, name, num_bytes)
            return cls(name, Mapping.map_fd(handle.fd, num_bytes, True), os.fstat(handle.fd).st_ino)
        except BaseException:
            handle.unlink()
            raise
        finally:
            handle.close_fd()

    @classmethod
    def attach(cls, name: str, *, writable: bool = False) -> "SharedSegment":
        """An existing segment, whole. SegmentError when it is missing, empty, not ours to open, or no segment."""
        _check_regular(name)
        try:
            handle = posix_ipc.SharedMemory(_posix_name(name), read_only=not writable)
        except posix_ipc.ExistentialError as error:
            raise SegmentError(f"no shared-memory segment {name!r} ({_path(name)} is missing)") from error
        except (posix_ipc.PermissionsError, PermissionError) as error:
            raise SegmentError(f"shared-memory segment {name!r} belongs to someone else: {_path(name)}") from error
        try:
            status = os.fstat(handle.fd)
            if status.st_size == 0:
                raise SegmentError(f"shared-memory segment {name!r} is empty: its owner died while making it")
            return cls(name, Mapping.map_fd(handle.fd, status.st_size, writable), status.st_ino)
        except ValueError as error:
            raise SegmentError(f"shared-memory segment {name!r} shrinks while it is opened") from error
        finally:
            handle.close_fd()

    def close(self) -> None:
        """Unmaps; BufferError while arrays or tensors over the mapping live. A second close does nothing."""
        self.mapping.close()

    def unlink(self) -> None:
        """Removes the name; memory goes when the last mapping does. Nothing to do when the name is gone already."""
        unlink_segment(self.name)

    def __enter__(self) -> "SharedSegment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def unlink_segment(name: str) -> bool:
    """Removes a segment's name without opening it; False when there is none (any more)."""
    try:
        posix_ipc.unlink_shared_memory(_posix_name(name))
    except posix_ipc.ExistentialError:
        return False
    return True


def _posix_name(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in {".", ".."} or len(name) > 250:
        raise SegmentError(f"not a segment name: {name[:80]!r}")
    return "/" + name


def _path(name: str) -> str:
    return f"{SHM_DIR}/{name}"


def _check_regular(name: str) -> None:
    """A pipe in a segment's place would keep us for good when opened, a link would lead away."""
    try:
        status = os.lstat(_path(_posix_name(name)[1:]))
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        raise SegmentError(f"{_path(name)} is no shared-memory segment; remove it")


def _check_room(name: str, num_bytes: int) -> None:
    # Asked first: reserving page by page until it fails would take the memory of the whole machine on the way.
    free = free_bytes()
    if num_bytes > free:
        raise NoSpaceError(
            f"segment {name!r} needs {num_bytes} bytes of {SHM_DIR}, {free} are free: "
            "remove leftovers (fastdeploy-rl retire) or enlarge it (docker: --shm-size)"
        )


def _reserve(fd: int, name: str, num_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise NoSpaceError(
            f"segment {name!r} needs {num_bytes} bytes of {SHM_DIR}, {free_bytes()} are free: {error.strerror}"
        ) from error
