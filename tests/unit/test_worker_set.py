"""Who notices which death of a worker, where the order of things is all that counts: no process is started."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_rl.engines.embedded import worker_set
from fastdeploy_rl.engines.embedded.messages import FromWorker, Ready
from fastdeploy_rl.engines.embedded.restart_budget import RestartBudget
from fastdeploy_rl.engines.embedded.worker_set import WorkerSet, _Seat
from fastdeploy_rl.errors import PeerLostError

DEADLINE_S = 20.0


class Listener:
    """A Watcher that remembers what it heard."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def rank_back(self, ready: Ready, link: object) -> None:
        self.heard.append(ready)

    def all_ready(self) -> None:
        self.heard.append("all ready")

    def fail(self, error: Exception) -> None:
        self.heard.append(error)


def test_a_rank_that_died_before_all_were_ready_ends_the_engine_though_they_are_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody told the board of its death, so that a successor would take its own start for the first."""
    listener = Listener()

    async def play() -> None:
        config: Any = SimpleNamespace(deadlines=SimpleNamespace(last_words_s=DEADLINE_S))
        watcher: Any = listener
        nowhere: Any = None
        workers = WorkerSet(
            config, watcher, nowhere, RestartBudget(), log_dir=Path("log"), environ={}, module="nobody starts it"
        )
        is_death_seen = asyncio.Event()

        async def at_once(pidfd: int) -> None:
            is_death_seen.set()

        async def last_words(deliver: Callable[[FromWorker], None]) -> None:
            while not workers._was_ready:
                await asyncio.sleep(0)

        monkeypatch.setattr(worker_set, "readable", at_once)
        dead: Any = SimpleNamespace(rank=1, pid=1, pidfd=-1, describe_end=lambda: "rank 1 ended")
        link: Any = SimpleNamespace(receive=last_words)
        late: Any = SimpleNamespace(rank=0)
        workers._seats = [_Seat(late, link), _Seat(dead, link, ready=Ready(1, 0, 0.0))]
        watching = asyncio.create_task(workers._watch(workers._seats[1]))
        await asyncio.wait_for(is_death_seen.wait(), DEADLINE_S)
        assert listener.heard == []
        workers._note_ready(workers._seats[0], Ready(0, 0, 0.0))
        await asyncio.wait_for(watching, DEADLINE_S)

    asyncio.run(play())
    ready, error = listener.heard
    assert ready == "all ready"
    assert isinstance(error, PeerLostError)
    assert str(error) == "rank 1 ended"


def test_a_rank_is_back_after_the_time_since_its_start_whatever_it_measured_itself() -> None:
    listener, nobody = Listener(), SimpleNamespace(rank=0, pid=1)
    watcher: Any = listener
    anything: Any = nobody
    workers = WorkerSet(
        anything, watcher, anything, RestartBudget(), log_dir=Path("log"), environ={}, module="nobody starts it"
    )
    workers._was_ready = True
    workers._note_ready(_Seat(anything, anything, begun=time.monotonic() - 3.0), Ready(0, 0, 0.027))
    (ready,) = listener.heard
    assert isinstance(ready, Ready)
    assert ready.seconds >= 3.0
