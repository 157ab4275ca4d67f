"""The other side: processes that share weights with this one, and how much of them can be seen from here.

Owns the question whether a pid means here what it meant to whoever wrote it down: a pid belongs to a namespace, so one
that an owner left in its lock file counts only where the process of that number holds the lock. Judges nothing.
"""

import enum
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastdeploy_rl.memory.owner_lock import is_alive, owner_of
from fastdeploy_rl.observe.doctor.kernel import FileIdentity, Kernel
from fastdeploy_rl.observe.doctor.leftovers import EngineAtPort, known_ports, publisher_numbers
from fastdeploy_rl.publish.channel import Channel


class Sight(enum.Enum):
    """What this process sees of another. OPEN: namespaces, environment, mounts. CLOSED: that it is there. ABSENT: it is
    not in this /proc."""

    OPEN = "open"
    CLOSED = "closed"
    ABSENT = "absent"


class Peer(NamedTuple):
    """`pid` as its owner or the user wrote it; None where nobody did. `lock`: the file that it holds, None for one that
    the user named."""

    role: str
    pid: int | None
    lock: Path | None = None

    @property
    def who(self) -> str:
        return f"{self.role} (pid {self.pid or 'unknown'})"

    @property
    def process(self) -> str:
        """Its directory in /proc; ask only for one that is not ABSENT."""
        return str(self.pid)


def find_peers(channel: Channel, named: Sequence[int]) -> list[Peer]:
    """Those that the user named; where none is named, all that live on the channel or on this machine's boards."""
    if named:
        return [Peer("peer", pid) for pid in named]
    found = [*_publishers(channel), *(peer for port in known_ports() for peer in _of_engine(EngineAtPort(port)))]
    return [peer for peer in found if peer.pid != os.getpid()]


def _publishers(channel: Channel) -> list[Peer]:
    locks = [channel.lock_of(number) for number in publisher_numbers(channel)]
    return [Peer("publisher", _pid_in(lock), lock) for lock in locks if is_alive(lock)]


def _of_engine(engine: EngineAtPort) -> list[Peer]:
    """Its ranks: they map the weights. An engine whose ranks hold no locks speaks for itself."""
    if not engine.is_alive:
        return []
    ranks = engine.rank_locks
    if ranks:
        return [Peer(f"rank {rank} at port {engine.port}", _pid_in(lock), lock) for rank, lock in ranks.items()]
    return [Peer(f"engine at port {engine.port}", _pid_in(lock), lock) for lock in engine.locks if is_alive(lock)]


def _pid_in(lock: Path) -> int | None:
    owner = owner_of(lock)
    return owner.pid if owner else None


def sight_of(kernel: Kernel, peer: Peer) -> Sight:
    if peer.pid is None or not kernel.exists(f"/proc/{peer.pid}"):
        return Sight.ABSENT
    if peer.lock is not None and _holds(kernel, peer.process, kernel.identity(str(peer.lock))) is False:
        return Sight.ABSENT  # the number belongs to another process here
    return Sight.OPEN if kernel.is_open_to_us(peer.process) else Sight.CLOSED


def _holds(kernel: Kernel, process: str, file: FileIdentity | None) -> bool | None:
    """Has the process that file open? None where it is not for us to see."""
    names = kernel.names(f"/proc/{process}/fd")
    if names is None or file is None:
        return None
    return any(kernel.identity(f"/proc/{process}/fd/{name}") == file for name in names)
