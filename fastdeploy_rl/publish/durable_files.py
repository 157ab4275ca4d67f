"""Files that appear whole or not at all, and outlast a loss of power once they are said to be written.

Owns the order (write, fsync, rename, fsync of the directory) and what is said of a full disk. Refuses to know what is
written and by whom. Invariant: whatever fails, what was at the path is there still, and nothing unfinished beside it.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_rl.errors import NoSpaceError, SegmentError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def storing(path: Path, advice: str) -> Iterator[None]:
    """What the system says inside becomes a SegmentError that names `path`, or, with that advice, a NoSpaceError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpaceError(f"{path} cannot be written: {error.strerror}; {advice}") from error
        raise SegmentError(f"{path} cannot be written: {error.strerror}") from error


class PendingFile(NamedTuple):
    """A file that is written, on the disk, and not yet at its `path`."""

    path: Path
    unfinished: Path

    def finish(self) -> None:
        """Puts it there, in place of one that is there. OSError as the system gives it."""
        os.rename(self.unfinished, self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Removes it; nothing to do where it was finished."""
        self.unfinished.unlink(missing_ok=True)


def write_pending(path: Path, pieces: "Iterable[Buffer]", mode: int = 0o600, group: int | None = None) -> PendingFile:
    """Writes the pieces beside `path`. `group`: whose the file is to be, and who may read it then. OSError as the
    system gives it."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    pending = PendingFile(path, unfinished)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            if group is not None:
                os.fchown(file.fileno(), -1, group)
                os.fchmod(file.fileno(), mode | stat.S_IRGRP)
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        pending.discard()
        raise
    return pending


def write_whole(path: Path, pieces: "Iterable[Buffer]", mode: int = 0o600) -> None:
    """Puts the pieces into a file at `path`, in place of one that is there. OSError as the system gives it."""
    pending = write_pending(path, pieces, mode)
    try:
        pending.finish()
    except BaseException:
        pending.discard()
        raise


def sync_directory(path: Path) -> None:
    """Returns when the names in it are on the disk. OSError as fsync gives it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
