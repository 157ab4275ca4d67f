"""A directory that only this user can enter, wherever it lies (its parent may be world-writable, as /dev/shm is).

Owns the check that nobody else put it there or can look inside. Invariant: after `open_private_directory` the path is a
real directory of ours with mode 0700 or less.
"""

import os
import stat
from pathlib import Path

from fastdeploy_rl.errors import ConfigurationError


def open_private_directory(path: Path) -> None:
    """Makes `path` (0700, parents too) or checks the one that is there. ConfigurationError when it is no directory, a
    symbolic link, someone else's, or open to others."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigurationError(f"{path} is no directory") from error
    except OSError as error:
        raise ConfigurationError(f"directory {path} cannot be made: {error.strerror}") from error
    check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """As `open_private_directory` for one that must exist; makes nothing. FileNotFoundError when it is missing."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{path} is no directory (symbolic links are not followed)")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"{path} belongs to user {status.st_uid}, not {os.geteuid()}: name another directory")
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigurationError(f"{path} is open to other users (mode {mode:04o}): chmod 700 {path}")
