"""A directory that only this user can enter, wherever it lies (its parent may be world-writable, as /dev/shm is).

Owns the check that nobody else put it there, can look inside, or can put another one in its place. Invariant: after
`open_private_directory` the path is a real directory of ours with mode 0700 or less, and no directory on the way to it
lets strangers rename what lies in it.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fastdeploy_rl.errors import ConfigurationError


def open_private_directory(path: Path) -> None:
    """Makes `path`, and what is missing above it, with mode 0700; or checks the one that is there. ConfigurationError
    when it is no directory, a symbolic link, someone else's, or open to others."""
    try:
        for missing in [path, *(parent for parent in path.parents if not parent.exists())][::-1]:
            missing.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise ConfigurationError(f"{path} is no directory") from error
    except (OSError, ValueError) as error:
        raise _impossible(path, error) from error
    check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """As `open_private_directory` for one that must exist; makes nothing. FileNotFoundError when it is missing."""
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigurationError(f"{path} is no directory (symbolic links are not followed)")
        if status.st_uid != os.geteuid():
            raise ConfigurationError(
                f"{path} belongs to user {status.st_uid}, not {os.geteuid()}: name another directory"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise ConfigurationError(f"{path} is open to other users (mode {mode:04o}): chmod 700 {path}")
        for parent in _directories_above(path):
            _check_parent(path, parent)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise _impossible(path, error) from error


def _directories_above(path: Path) -> Iterator[Path]:
    """Those in the path as it is written, where links lie, and those where the links lead."""
    seen = set()
    for start in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for parent in start.parents:
            if parent not in seen:
                seen.add(parent)
                yield parent


def _check_parent(path: Path, parent: Path) -> None:
    """The sticky bit keeps strangers from renaming what is not theirs; our own group is us, on most systems."""
    status = os.stat(parent)
    mode = stat.S_IMODE(status.st_mode)
    strangers = stat.S_IWOTH if status.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
    if mode & strangers and not mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"{path} can be replaced by other users: {parent} is open to them (mode {mode:04o}); "
            "name a directory elsewhere, or take that right away"
        )


def _impossible(path: Path, error: Exception) -> ConfigurationError:
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigurationError(f"directory {path!s:.500} cannot be used: {reason}")
