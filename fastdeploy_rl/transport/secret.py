"""The secret that both ends of a connection share, and how it is read. It stands in no message and no log."""

import errno
import os
import stat
from pathlib import Path

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.memory.regular_file import open_regular

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """The file's bytes without blanks and newlines around them. ConfigurationError for one that others may read, that
    is no regular file, or whose secret is shorter than 16 bytes or longer than 4096."""
    try:
        descriptor = open_regular(path)
        try:
            _check_private(path, os.fstat(descriptor))
            data = os.read(descriptor, MAX_SECRET_BYTES + 64)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"secret file {path!s:.200}: {error.strerror}{_hint(error)}") from error
    return checked_secret(data.strip(), f"secret file {path}")


def checked_secret(secret: bytes, what: str = "the secret") -> bytes:
    """`secret` if nobody guesses it; ConfigurationError that names `what` and tells nothing of it."""
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigurationError(
            f"{what} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes; make one with: openssl rand -hex 32"
        )
    return secret


def _hint(error: OSError) -> str:
    if error.errno != errno.ENOENT:
        return ""
    return "; server and engines need the same one: (umask 077; openssl rand -hex 32 > FILE) makes it"


def _check_private(path: Path, status: os.stat_result) -> None:
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"secret file {path} is open to other users: chmod 600 {path}")
