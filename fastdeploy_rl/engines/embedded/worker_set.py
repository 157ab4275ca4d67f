"""All workers of an engine: started, watched, started again where one dies, stopped.

Owns processes and sockets, and says of each death on the board at once, so that no rank waits for a dead one. Refuses
to know requests, weights and HTTP. Invariant: when `running` ends, however it came to that, no worker runs that the
kernel can end; a rank that dies before all were ready, or too often, ends the engine with the reason.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.collectives.shm import ShmCollectives
from fastdeploy_rl.engines.embedded.engine_client import WorkerLink
from fastdeploy_rl.engines.embedded.messages import SLOT_BYTES, Failed, FromWorker, Ready, Stop, Tokens, WorkerConfig
from fastdeploy_rl.engines.embedded.restart_budget import RestartBudget
from fastdeploy_rl.engines.embedded.worker_process import WorkerProcess
from fastdeploy_rl.errors import FastDeployRLError, PeerLostError, from_wire

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.2
"""While workers end, the operator's second signal is looked for this often."""
_CONDEMNED_PERIOD_S = 0.05
"""The board is asked this often which ranks are to be killed."""


class Watcher(Protocol):
    """Who hears of the workers, on the event loop."""

    def deliver(self, tokens: Tokens) -> None:
        """From rank 0."""
        ...

    def all_ready(self) -> None:
        """For the first time."""
        ...

    def rank_lost(self, rank: int, reason: str) -> None:
        """It died, and is being started again."""
        ...

    def rank_back(self, ready: Ready, link: WorkerLink) -> None:
        """Its successor has taken its seat, and is at the end of `link`."""
        ...

    def fail(self, error: Exception) -> None:
        """The engine cannot go on; the first reason counts."""
        ...


@dataclass
class _Seat:
    """One rank, by whichever process fills it now."""

    worker: WorkerProcess
    link: WorkerLink
    ready: Ready | None = None
    fault: FastDeployRLError | None = None
    begun: float = field(default_factory=time.monotonic)


class WorkerSet:
    """The workers of one engine. `budget` None: a death ends the engine."""

    def __init__(
        self,
        config: WorkerConfig,
        watcher: Watcher,
        board: Board,
        budget: RestartBudget | None,
        *,
        log_dir: Path,
        environ: Mapping[str, str],
        module: str,
    ) -> None:
        """`config`: of any rank; rank and socket are filled in."""
        self._config = config
        self._watcher = watcher
        self._board = board
        self._budget = budget
        self._log_dir = log_dir
        self._environ = environ
        self._module = module
        self._seats: list[_Seat] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._was_ready = False
        self._is_stopping = False
        self.is_hurried = False
        """Set by whoever cannot wait for an orderly end."""

    @property
    def leader_link(self) -> WorkerLink:
        """To the present rank 0."""
        return self._seats[0].link

    @property
    def ready(self) -> list[Ready]:
        """What the ranks said that are there, in rank order."""
        return [seat.ready for seat in self._seats if seat.ready is not None]

    @property
    def late_ranks(self) -> list[int]:
        """Those that are not there."""
        return [rank for rank, seat in enumerate(self._seats) if seat.ready is None]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts them all, and ends them all."""
        try:
            for rank in range(self._config.num_ranks):
                self._seats.append(self._fill_seat(rank, keeps_log=False))
            if self._budget is not None:
                self._keep(asyncio.create_task(self._kill_condemned()))
            yield
        finally:
            self._is_stopping = True
            await self._stop()
            await self._end_watches()
            for seat in self._seats:
                _give_back(seat)

    # --- one worker --------------------------------------------------------------------------------

    def _fill_seat(self, rank: int, *, keeps_log: bool) -> _Seat:
        worker = WorkerProcess.start(
            structs.replace(self._config, rank=rank),
            log_dir=self._log_dir,
            environ=self._environ,
            module=self._module,
            keeps_log=keeps_log,
        )
        seat = _Seat(worker, WorkerLink(worker.connection))
        self._keep(asyncio.create_task(self._watch(seat)))
        return seat

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._watches.add(task)
        task.add_done_callback(self._let_go)

    def _let_go(self, task: "asyncio.Task[None]") -> None:
        """Who cannot watch any more, or not start a worker again, ends the engine."""
        self._watches.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._watcher.fail(error if isinstance(error, FastDeployRLError) else PeerLostError(f"workers: {error!r}"))

    async def _watch(self, seat: _Seat) -> None:
        """One worker from its first message to its end."""
        listening = asyncio.create_task(self._listen(seat))
        await readable(seat.worker.pidfd)
        is_replaced = self._is_restarting
        if is_replaced:
            self._tell_death(seat.worker.rank)
        # What it said before it died explains its death better than its exit code.
        await asyncio.wait([listening], timeout=self._config.deadlines.last_words_s)
        if not listening.done():
            listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
        if not self._is_stopping:
            self._note_death(seat, is_replaced=is_replaced)

    async def _listen(self, seat: _Seat) -> None:
        """A worker whose words are no messages is not heard any more, so that it must go."""
        try:
            await seat.link.receive(partial(self._take, seat))
        except PeerLostError as garbled:
            seat.fault = PeerLostError(f"rank {seat.worker.rank}: {garbled}")
            seat.worker.kill()

    def _take(self, seat: _Seat, message: FromWorker) -> None:
        if isinstance(message, Tokens):
            self._watcher.deliver(message)
        elif isinstance(message, Failed):
            seat.fault = from_wire(message.kind, f"rank {message.rank}: {message.message}")
            if not self._is_restarting:
                self._watcher.fail(seat.fault)
        elif isinstance(message, Ready):
            self._note_ready(seat, message)

    def _note_ready(self, seat: _Seat, ready: Ready) -> None:
        seat.ready = ready
        if self._was_ready:
            # Since it was started: what it could measure itself begins when Paddle is there.
            ready = structs.replace(ready, seconds=time.monotonic() - seat.begun)
            _log.info("event=worker_back rank=%d pid=%d seconds=%.3f", ready.rank, seat.worker.pid, ready.seconds)
            self._watcher.rank_back(ready, seat.link)
        elif not self.late_ranks:
            self._was_ready = True
            self._watcher.all_ready()

    # --- deaths ------------------------------------------------------------------------------------

    @property
    def _is_restarting(self) -> bool:
        """Who dies now is started again, as a rule."""
        return self._budget is not None and self._was_ready and not self._is_stopping

    def _tell_death(self, rank: int) -> None:
        """First the board, so that no decision falls for the dead; then the ranks that wait for it in a meeting."""
        self._board.mark_lost(rank)
        generation = self._board.advance_generation()
        ShmCollectives.advance(self._config.collectives_segment, self._config.num_ranks, SLOT_BYTES, generation)

    def _note_death(self, seat: _Seat, *, is_replaced: bool) -> None:
        """Not `is_replaced`: the board was told of no death, as where all others became ready only since."""
        rank = seat.worker.rank
        error = seat.fault or PeerLostError(seat.worker.describe_end())
        if self._budget is None or not is_replaced:
            self._watcher.fail(error)
            return
        too_often = self._budget.note_death(rank, time.monotonic(), was_ready=seat.ready is not None)
        if too_often:
            self._watcher.fail(PeerLostError(f"{error}; {too_often}"))
            return
        _log.warning("event=worker_lost rank=%d pid=%d reason=%r", rank, seat.worker.pid, str(error))
        self._watcher.rank_lost(rank, str(error))
        self._replace(seat)

    def _replace(self, dead: _Seat) -> None:
        rank = dead.worker.rank
        fresh = self._seats[rank] = self._fill_seat(rank, keeps_log=True)
        _give_back(dead)
        asyncio.get_running_loop().call_later(self._config.deadlines.attach_s, self._kill_if_late, fresh)

    def _kill_if_late(self, seat: _Seat) -> None:
        if seat.ready is None and not self._is_stopping:
            seat.worker.kill()

    async def _kill_condemned(self) -> None:
        """Of whoever has not taken its seat yet the board speaks no more: its predecessor was meant."""
        while not self._is_stopping:
            for rank in self._board.condemned_ranks():
                if self._seats[rank].ready is not None:
                    self._seats[rank].worker.kill()
            await asyncio.sleep(_CONDEMNED_PERIOD_S)

    # --- the end -----------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """In order where all are there to follow, else by signals. Each wait has its deadline."""
        workers = [seat.worker for seat in self._seats]
        if self._was_ready and not self.late_ranks and all(worker.is_running for worker in workers):
            self.leader_link.send(Stop())
            await self._wait_ended(self._config.deadlines.stop_s)
        for signal_worker in (WorkerProcess.terminate, WorkerProcess.kill):
            for worker in workers:
                signal_worker(worker)
            await self._wait_ended(self._config.deadlines.terminate_s)

    async def _wait_ended(self, timeout_s: float) -> None:
        """Until every worker has ended, the time is over, or somebody lost patience."""
        workers = [seat.worker for seat in self._seats]
        ending = [asyncio.create_task(readable(worker.pidfd)) for worker in workers if worker.is_running]
        deadline = time.monotonic() + timeout_s
        while ending and time.monotonic() < deadline and not self.is_hurried:
            _, pending = await asyncio.wait(ending, timeout=min(_LOOK_AGAIN_S, timeout_s))
            ending = list(pending)
        for task in ending:
            task.cancel()

    async def _end_watches(self) -> None:
        """A worker that the kernel cannot end must not keep us: it dies with us as far as it can."""
        if self._watches:
            _, waiting = await asyncio.wait(self._watches, timeout=self._config.deadlines.stop_s)
            for watch in waiting:
                watch.cancel()


def _give_back(seat: _Seat) -> None:
    seat.link.close()
    seat.worker.release()


async def readable(fd: int) -> None:
    """Until `fd` can be read."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    own = os.dup(fd)  # two waiters of one descriptor would replace each other
    loop.add_reader(own, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(own)
        os.close(own)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
