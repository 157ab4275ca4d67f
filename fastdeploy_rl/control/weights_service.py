"""Weight commands for an event loop: every wait on the board happens in a thread, status apart from commands.

Owns the threads and the FastDeploy codes of the two legacy routes. Refuses to know what a command does. Invariant: a
command that waits never keeps a status from being read, and more than MAX_COMMANDS waiting ones are refused.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastdeploy_rl.config import Deadlines, checked_deadline
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    NotServingError,
    RequestError,
    StepFailedError,
)
from fastdeploy_rl.lifecycle import LegacyStatus, UpdatePhase
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, EngineStatus, HistoryEntry, UpdateReport
from fastdeploy_rl.update.client_commands import AwaitedCommands, ClientCommand, waking_update_command
from fastdeploy_rl.update.rank_files import KEPT_REPORTS

MAX_COMMANDS = 8

_ResultT = TypeVar("_ResultT")


class WeightsClient(Protocol):
    """Commands to an engine, blocking; the errors of the tree. One command at a time."""

    def carry_out(self, command: ClientCommand) -> UpdateReport: ...
    def receipt(self, *, recompute: bool = False, deadline_s: float) -> Receipt: ...


class EngineBoard(Protocol):
    """What the engine shows, read without waiting, and the way to a client for a command."""

    def status(self) -> EngineStatus: ...
    def read_report(self, command: int) -> UpdateReport: ...
    def read_history(self, limit: int) -> list[HistoryEntry]: ...
    def open_client(self) -> AbstractContextManager[WeightsClient]: ...


class LegacyAnswer(NamedTuple):
    """Code and text of FastDeploy's routes: 200 done or already so, 400 same transition running, 403 the opposite one
    running, 404 timed out, 409 rejected."""

    code: int
    message: str


class WeightsService(AwaitedCommands):
    """The commands of one engine; `close` gives the threads back. `has_checksums`: it checks what it takes over."""

    def __init__(self, board: EngineBoard, *, has_checksums: bool = True) -> None:
        self.has_checksums = has_checksums
        self._board = board
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="board-status")
        self._commanders = ThreadPoolExecutor(MAX_COMMANDS, thread_name_prefix="board-command")
        self._running: list[CommandKind] = []
        self._num_reported = 0
        self._counting = threading.Lock()

    async def status(self) -> EngineStatus:
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._board.status)

    async def check_serving(self) -> None:
        """NotServingError with the reason while the engine refuses requests."""
        _check_serving(await self.status())

    async def check_may_wait(self) -> None:
        """As `check_serving`, but for an engine that serves again when its present update is done."""
        status = await self.status()
        if status.update == UpdatePhase.IDLE.value or status.is_paused or status.asleep:
            _check_serving(status)

    async def carry_out(self, command: ClientCommand) -> UpdateReport:
        return await self._command(command.kind, lambda client: client.carry_out(command))

    async def receipt(self, *, recompute: bool, deadline_s: float) -> Receipt:
        checked_deadline(deadline_s)
        return await self._command(
            CommandKind.RECOMPUTE, lambda client: client.receipt(recompute=recompute, deadline_s=deadline_s)
        )

    async def legacy_clear(self) -> LegacyAnswer:
        """GET /clear_load_weight."""
        if answer := await self._legacy_refusal(CommandKind.CLEAR, LegacyStatus.CLEARED):
            return answer
        return await _legacy_outcome(self.clear(deadline_s=Deadlines.legacy_s), "cleared")

    async def legacy_update(self) -> LegacyAnswer:
        """GET /update_model_weight. An engine that serves and finds nothing published is "already so"."""
        if answer := await self._legacy_refusal(CommandKind.UPDATE, None):
            return answer
        was_serving = (await self.status()).is_serving
        try:
            return await _legacy_outcome(self.carry_out(waking_update_command(Deadlines.legacy_s)), "updated")
        except NoPublicationError as error:
            return LegacyAnswer(200, f"already updated: {error}") if was_serving else LegacyAnswer(409, str(error))

    async def _legacy_refusal(self, kind: CommandKind, settled: LegacyStatus | None) -> LegacyAnswer | None:
        status = await self.status()
        # While part of the engine sleeps the word tells of that, and not of a command.
        word = None if status.asleep else LegacyStatus[status.legacy_status]
        running = {CommandKind.UPDATE: LegacyStatus.UPDATING, CommandKind.CLEAR: LegacyStatus.CLEARING}
        for other, state in running.items():
            if other in self._running or word == state:
                same = other == kind
                return LegacyAnswer(
                    400 if same else 403, f"weights are {state.name.lower()} {'already' if same else 'now'}"
                )
        return LegacyAnswer(200, "already cleared") if settled is not None and word == settled else None

    async def _command(self, kind: CommandKind, call: Callable[[WeightsClient], _ResultT]) -> _ResultT:
        if len(self._running) >= MAX_COMMANDS:
            raise NotServingError(f"{MAX_COMMANDS} weight commands are waiting already; ask again when one is done")
        answer = asyncio.get_running_loop().run_in_executor(self._commanders, self._ask, call)
        self._running.append(kind)
        answer.add_done_callback(partial(self._note_end, kind))
        # Whoever asked may be gone before the command ends: it then still has its thread, and still counts.
        return await asyncio.shield(answer)

    def _note_end(self, kind: CommandKind, answer: "asyncio.Future[Any]") -> None:
        self._running.remove(kind)
        if not answer.cancelled():
            answer.exception()  # looked at: where nobody waits any more, nobody is to be told

    def _ask(self, call: Callable[[WeightsClient], _ResultT]) -> _ResultT:
        with self._board.open_client() as client:
            return call(client)

    async def last_report(self) -> UpdateReport:
        """Of the last command, whoever asked for it. RequestError before the first."""
        command = (await self.status()).commands_done
        if command < 1:
            raise RequestError("there is no report yet: the engine has had no weight command")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._board.read_report, command)

    async def history(self, limit: int) -> list[HistoryEntry]:
        """How the last commands ended, the newest last. RequestError for an impossible limit."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._board.read_history, limit)

    async def new_reports(self) -> list[UpdateReport]:
        """Of the commands since the last call; those that were dropped meanwhile are left out."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_new_reports)

    def _read_new_reports(self) -> list[UpdateReport]:
        done = self._board.status().commands_done
        with self._counting:  # two who ask at once share them out
            first, self._num_reported = self._num_reported + 1, max(done, self._num_reported)
        reports = []
        for command in range(max(first, done - KEPT_REPORTS), done + 1):
            with contextlib.suppress(StepFailedError):
                reports.append(self._board.read_report(command))
        return reports

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._commanders.shutdown(wait=False, cancel_futures=True)


def _check_serving(status: EngineStatus) -> None:
    if not status.is_serving:
        raise NotServingError(status.reason or f"the engine is {status.admission}")


async def _legacy_outcome(command: Awaitable[UpdateReport], done: str) -> LegacyAnswer:
    try:
        report = await command
    except NoPublicationError:
        raise
    except DeadlineExceededError as error:
        return LegacyAnswer(404, str(error))
    except FastDeployRLError as error:
        return LegacyAnswer(409, str(error))
    return LegacyAnswer(200, f"{done}: version {report.version or 'none'}")
