"""A /dev/shm of a command's own, in a mount namespace: as small as a test wants it, and away from everybody else's."""

import os
import subprocess

DEADLINE_S = 60.0


def private_shm(num_bytes: int) -> list[str] | None:
    """A prefix for a command; None where this machine lets nobody mount."""
    prefix = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    prefix += ["sh", "-c", f'mount -t tmpfs -o size={num_bytes} none /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=DEADLINE_S)
    except (OSError, subprocess.CalledProcessError):
        return None
    return prefix
