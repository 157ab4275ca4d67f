"""Who wants something of the engine: clients of the board, a trainer, a foreign process that writes the status word.

Owns what each of them was promised or told. Each is an actor: it may die at any of its stores."""

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_rl import _native
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ChannelBusyError, FastDeployRLError
from fastdeploy_rl.lifecycle import LegacyStatus
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.publish.leases import NUM_ARENAS
from fastdeploy_rl.publish.publication import PublishStep
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.testing.step_faults import flip
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.requests import client_lock_path
from tests.model.actors import Actor, ActorDiedError, ActorLock, CrashingBoard, join
from tests.model.engine import MODEL

_AXES = {spec.name: spec.shard_axis for spec in MODEL.specs}


class ActorClient(BoardClient):
    """A client of the board that may die."""

    def __init__(self, port: int, actor: Actor) -> None:
        super().__init__(port)
        self._actor = actor

    def __enter__(self) -> "ActorClient":
        with ExitStack() as stack:
            board = CrashingBoard.attach_for(self._port, self._actor)
            stack.callback(board.close)
            lock = ActorLock(client_lock_path(board.run_dir, self._token), self._actor)
            self._actor.locks = lambda: [lock]
            stack.enter_context(lock)
            self._open_board, self._stack = board, stack.pop_all()
        return self


@dataclass
class Request:
    """One command of one client, asked by a thread of its own. `report` or `error`: what the client was told; neither
    where it died."""

    port: int
    kind: str
    version: str = ""
    deadline_s: float = 3.0
    is_forced: bool = False
    actor: Actor = field(default_factory=lambda: Actor("client"))
    report: UpdateReport | None = None
    error: FastDeployRLError | None = None
    surprise: BaseException | None = None

    def start(self) -> "Request":
        self.thread = threading.Thread(target=self._ask, name=f"model-client-{self.kind}", daemon=True)
        self.thread.start()
        return self

    def _ask(self) -> None:
        self._client = ActorClient(self.port, self.actor)
        try:
            with self._client as client:
                self._ask_as(client)
        except FastDeployRLError as error:
            self.error = error
        except ActorDiedError:
            raise
        except BaseException as surprise:
            self.surprise = surprise

    def _ask_as(self, client: BoardClient) -> None:
        if self.kind == "update":
            self.report = client.update(self.version or None, deadline_s=self.deadline_s, force=self.is_forced)
        elif self.kind == "clear":
            self.report = client.clear(deadline_s=self.deadline_s)
        else:
            client.receipt(recompute=True, deadline_s=self.deadline_s)
            self.report = client.last_report()

    @property
    def is_over(self) -> bool:
        return self.actor.is_dead or not self.thread.is_alive()

    @property
    def told(self) -> str:
        """`done`, the name of an error, or what else became of it."""
        if self.actor.is_dead:
            return "died"
        if self.surprise is not None:
            return f"surprise {self.surprise!r}"
        if self.error is not None:
            return type(self.error).__name__
        return "done" if self.report is not None else "waiting"

    def bury(self) -> None:
        board = self._client._open_board
        if self.actor.is_dead and board is not None:
            board.forsake()  # before its thread goes on, and closes it
        self.actor.bury()
        join(self.thread)


def as_the_engine(name: str, shape: tuple[int, ...]) -> TensorRule:
    return TensorRule(name, _AXES.get(name))


def weights_of(seed: int) -> dict[str, np.ndarray]:
    return random_weights(MODEL, seed)


@dataclass
class Publishing:
    """One publication by one trainer; `version` is known before it is announced."""

    version: str
    seed: int
    is_good: bool
    error: BaseException | None = None
    is_done: bool = False


class Trainer:
    """The live publisher of a channel, and what it announced: version -> seed of its weights."""

    def __init__(self, channel: Path) -> None:
        self.channel = channel
        self.seeds: dict[str, int] = {"0.0": 0}
        self.bad: set[str] = set()
        self.step = 0
        self._is_flipping = False
        self.dead: list[tuple[Actor, WeightPublisher, threading.Thread]] = []
        self.actor = Actor("trainer")
        self.publisher: WeightPublisher | None = None

    def start(self) -> None:
        """A new epoch."""
        self.actor = Actor("trainer", self._locks)
        self.publisher = WeightPublisher(self.channel, deadline_s=2.0, observer=self)
        self.publisher.start()
        self.step = 0

    def _locks(self) -> list[OwnerLock]:
        return [self.publisher._opened._lock]

    def begin(self, step: PublishStep) -> None:
        self.actor.store(f"begin of {step.name}")

    def end(self, step: PublishStep) -> None:
        if step.name == "seal" and self._is_flipping:
            self._flip()
        self.actor.store(f"end of {step.name}")

    def _flip(self) -> None:
        """A bit of what was just sealed, after it was summed up."""
        table = self.publisher._opened._table
        rows = [row for row in range(NUM_ARENAS) if table.version(row) == f"{self.publisher.epoch}.{self.step}"]
        flip(f"/dev/shm/{table.segment(rows[0])}", 0)

    @property
    def is_alive(self) -> bool:
        return self.publisher is not None and not self.actor.is_dead

    def publish(self, seed: int, *, harm: str = "") -> Publishing:
        """`harm`: what is wrong with it, so that the engine must refuse it. Returns when it is announced, refused, or
        its trainer has died in it."""
        self.step += 1
        version = f"{self.publisher.epoch}.{self.step}"
        weights = weights_of(seed)
        if harm == "missing":
            del weights["norm"]
        elif harm == "shape":
            weights["norm"] = np.zeros(7, np.float32)
        self._is_flipping = harm == "flip"
        publishing = Publishing(version, seed, not harm)
        self.seeds[version] = seed
        if harm:
            self.bad.add(version)
        thread = threading.Thread(target=self._publish, args=(publishing, weights), name="model-trainer", daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while thread.is_alive() and not self.actor.is_dead and time.monotonic() < deadline:
            thread.join(0.005)
        if self.actor.is_dead:
            self.dead.append((self.actor, self.publisher, thread))
        return publishing

    def _publish(self, publishing: Publishing, weights: dict[str, Any]) -> None:
        try:
            self.publisher.publish(weights, step=self.step, convention=as_the_engine)
            publishing.is_done = True
        except ActorDiedError:
            raise
        except BaseException as error:
            publishing.error = error

    def kill(self) -> None:
        """Between two publications."""
        self.actor.kill()
        self.dead.append((self.actor, self.publisher, threading.Thread()))

    def is_second_refused(self) -> bool:
        second = WeightPublisher(self.channel)
        try:
            second.start()
        except ChannelBusyError:
            return True
        second.close(keep=True)
        return False

    def close(self) -> None:
        if self.is_alive:
            self.publisher.close()

    def bury(self) -> None:
        """When the channel is empty and was judged."""
        for actor, publisher, thread in self.dead:
            actor.bury()
            join(thread)
            opened = publisher._opened
            opened.shelf.close()
            opened._table.close()


class Foreigner:
    """A process that knows the status word alone: stores that wake nobody. `last`: the value written last that was no
    repetition of what stood there, and how many commands of its kind had ended before."""

    def __init__(self, port: int) -> None:
        self._word = StatusWord(WEIGHTS_WORD, port)
        self._port = port
        self.last: tuple[int, int] | None = None
        self.has_updated = False

    def write(self, value: int) -> None:
        """What the engine shows, or is carrying out, is not to be told from a store of the same value: it coalesces."""
        before, is_shown = self.num_ended(value), self._shown() == value
        self.has_updated = self.has_updated or value == LegacyStatus.UPDATING
        found = self._word.load()
        while found != value:
            met = _native.compare_exchange_i32(self._word.mapping, 0, found, value)
            if met == found:
                self.last = None if is_shown else (value, before)
                return
            found = met

    def _shown(self) -> int:
        with BoardClient(self._port) as client:
            return LegacyStatus[client.status().legacy_status]

    def num_ended(self, value: int) -> int:
        kind = {LegacyStatus.UPDATING: "update", LegacyStatus.CLEARING: "clear"}.get(value)
        with BoardClient(self._port) as client:
            return sum(entry.kind == kind for entry in client.history(10_000))

    def is_answered(self) -> bool:
        """What was written last was carried out, or rejected; noise has no answer."""
        if self.last is None or self.last[0] not in (LegacyStatus.UPDATING, LegacyStatus.CLEARING):
            return True
        return self.num_ended(self.last[0]) > self.last[1]

    def close(self) -> None:
        self._word.close()
