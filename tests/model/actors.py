"""Processes in the guise of threads: an actor can be stopped for a while, or be dead, at any of its stores.

Owns the counting of stores and what death means: from a chosen store on nothing of the actor is seen by anybody any
more, and its locks are free, as the kernel sets them free. Refuses to know who the actors are. Threads of a dead actor
stay where they were until `bury`: unwinding them earlier would tidy up, and a killed process does not tidy up.

A store is whatever others can see: bytes of a record, a word, a bell, a file, a lease."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import StatusWord
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.plan.plan import Plan
from fastdeploy_rl.sources.base import ResolvedPublication, StagedSource
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.version import WeightVersion

BURIAL_S = 100.0
"""Whoever waits longer in a test has been forgotten there."""
FOREVER = 1 << 62


class ActorDiedError(BaseException):
    """Ends a thread of a dead actor; conftest.py sees to it that nobody reports that."""


class Actor:
    """`locks`: those that the kernel would free; asked at the moment of death."""

    def __init__(self, name: str, locks: Callable[[], list[OwnerLock]] = list) -> None:
        self.name = name
        self.locks = locks
        self.stores = 0
        self.is_dead = False
        self.last_words = ""
        """What the store was that was not made any more."""
        self._last = FOREVER
        self._is_stalled = False
        self._is_buried = False
        self._changed = threading.Condition(threading.RLock())

    # --- from outside ------------------------------------------------------------------------------

    def crash_after(self, stores: int) -> None:
        """So many more, counted from now; the next one is never made."""
        with self._changed:
            self._last = self.stores + stores

    def spare(self) -> None:
        """Takes `crash_after` back."""
        with self._changed:
            self._last = FOREVER

    def stall(self) -> None:
        """Like SIGSTOP, as far as others can see."""
        with self._changed:
            self._is_stalled = True

    def resume(self) -> None:
        with self._changed:
            self._is_stalled = False
            self._changed.notify_all()

    def kill(self, last_words: str = "killed") -> None:
        with self._changed:
            if not self.is_dead:
                for lock in self.locks():
                    _free(lock)
                self.last_words, self.is_dead = last_words, True  # last: others look at it without our lock
            self._changed.notify_all()

    def bury(self) -> None:
        """Its threads end."""
        with self._changed:
            self._is_buried = True
            self._changed.notify_all()

    # --- from its own threads ----------------------------------------------------------------------

    def act(self, what: str) -> None:
        """Before something that others see without it being a store; does not come back where the actor is dead."""
        with self._changed:
            self._wait_while_stalled()
            if self.is_dead:
                self._lie_still()

    def store(self, what: str) -> None:
        """Before a store; the one that was the last is made by nobody."""
        with self._changed:
            self._wait_while_stalled()
            if self.stores >= self._last:
                self.kill(what)
            if self.is_dead:
                self._lie_still()
            self.stores += 1

    @contextlib.contextmanager
    def locking(self, what: str) -> Iterator[None]:
        """A store in whose middle nobody dies: it takes a lock, which is found and set free only afterwards."""
        with self._changed:
            self.store(what)
            yield

    def is_dying(self) -> bool:
        """The next store is the one that is not made."""
        return self.stores >= self._last and not self.is_dead

    def _wait_while_stalled(self) -> None:
        self._changed.wait_for(lambda: not self._is_stalled or self.is_dead or self._is_buried, BURIAL_S)

    def _lie_still(self) -> None:
        self._changed.wait_for(lambda: self._is_buried, BURIAL_S)
        raise ActorDiedError(f"{self.name} is dead")


def _free(lock: OwnerLock) -> None:
    """As the kernel does: the file stays."""
    fd, lock._fd = lock._fd, -1
    if fd >= 0:
        os.close(fd)


class ActorLock(OwnerLock):
    """A lock of an actor that says so in its `locks`."""

    def __init__(self, path: Path, actor: Actor) -> None:
        super().__init__(path)
        self._actor = actor

    def acquire(self) -> None:
        with self._actor.locking(f"lock {self.path.name}"):
            super().acquire()


class CrashingBoard(Board):
    """An actor's attachment of a board. An actor that dies in the middle of a record leaves half of its bytes there."""

    actor: Actor

    @classmethod
    def attach_for(cls, port: int, actor: Actor) -> "CrashingBoard":
        board = cls.attach(port)
        board.actor = actor
        return board

    def _store_bytes(self, data: bytes, offset: int) -> None:
        if self.actor.is_dying():
            super()._store_bytes(data[: len(data) // 2], offset)
        self.actor.store(f"bytes at {offset:#x}")
        super()._store_bytes(data, offset)

    def store(self, offset: int, value: int) -> None:
        self.actor.store(f"word {value} at {offset:#x}")
        super().store(offset, value)

    def exchange(self, offset: int, expected: int, desired: int) -> int:
        self.actor.store(f"exchange of {expected} for {desired} at {offset:#x}")
        return super().exchange(offset, expected, desired)

    def take_ticket(self) -> int:
        self.actor.store("ticket")
        return super().take_ticket()

    def ring(self) -> None:
        self.actor.store("bell")
        super().ring()

    def ring_doorbell(self) -> None:
        self.actor.store("doorbell")
        super().ring_doorbell()

    def forsake(self) -> None:
        """After its actor's death: whoever waits here is told to end."""
        self._is_abandoned = True
        _native.ring_bell(self.mapping, layout.BELL_OFFSET)
        _native.ring_bell(self.mapping, layout.DOORBELL_OFFSET)


class CrashingWord(StatusWord):
    """An actor's attachment of a status word."""

    def __init__(self, word: str, port: int, actor: Actor) -> None:
        super().__init__(word, port)
        self._actor = actor
        self._what = word

    def exchange(self, expected: int, desired: int) -> int:
        self._actor.store(f"{self._what} from {expected} to {desired}")
        return super().exchange(expected, desired)

    def store(self, value: int) -> None:
        self._actor.store(f"{self._what} {value}")
        super().store(value)

    def follow(self) -> bool:
        self._actor.act(self._what)
        return super().follow()


class ActorFiles(RankFiles):
    """An actor's hand in the run directory; replacing a file is one store."""

    def __init__(self, run_dir: Path, actor: Actor) -> None:
        super().__init__(run_dir)
        self._actor = actor

    def _write(self, name: str, record: Any) -> None:
        self._actor.store(f"file {name}")
        super()._write(name, record)

    def _reserve(self, name: str, num_bytes: int) -> None:
        self._actor.store(f"file {name}, reserved")
        super()._reserve(name, num_bytes)

    def remove_command(self, command: int) -> None:
        self._actor.store(f"files of command {command}, removed")
        super().remove_command(command)

    def remove_receipt(self) -> None:
        self._actor.store("receipt, removed")
        super().remove_receipt()


class ActorSource(IpcSource):
    """A rank's view of the channel; taking leases is one store."""

    def __init__(self, config: Any, actor: Actor) -> None:
        super().__init__(config)
        self._actor = actor

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        self._actor.act("resolve")
        return super().resolve(version, deadline_ns=deadline_ns)

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        with self._actor.locking("leases"):
            return super().stage(resolved, plan, deadline_ns=deadline_ns)

    def held_locks(self) -> list[OwnerLock]:
        return [reader._holder._lock for reader in self._readers()]

    def token(self) -> int:
        """Under which it holds leases; 0 before the first."""
        return self._reader._holder.token if self._reader is not None else 0

    def forsake(self) -> None:
        """What a process lets go of by ending: tables and mappings."""
        for reader in self._readers():
            reader._resources.close()
        self._reader, self._replaced, self._staged = None, [], []

    def _readers(self) -> list[Any]:
        return [*self._replaced, *([self._reader] if self._reader is not None else [])]


def wait_until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = 20.0) -> None:
    """Polls, bounded; AssertionError says what it was."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(what())
        time.sleep(0.002)  # bounded by the deadline above


def join(thread: threading.Thread, seconds: float = 20.0) -> None:
    with contextlib.suppress(RuntimeError):  # never started
        thread.join(seconds)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        raise AssertionError(f"thread {thread.name} does not end:\n{''.join(traceback.format_stack(frame))}")
