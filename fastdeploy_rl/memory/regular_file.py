"""Regular files at paths where anything may lie: opened without waiting for whoever writes to a pipe, read in bounds.

Refuses to know formats. Invariant: all that is wrong with the path or with what is there is an OSError whose `strerror`
says it, for the caller to put into an error of its own.
"""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, *, follows_links: bool = True) -> int:
    """A descriptor to read from; the caller closes it. `follows_links` False: a symbolic link at `path` is an error."""
    try:
        # Without O_NONBLOCK a pipe in a file's place would keep us for good.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, max_bytes: int, *, follows_links: bool = True) -> bytes:
    """All of a file that has no more than `max_bytes`."""
    with open(open_regular(path, follows_links=follows_links), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data
