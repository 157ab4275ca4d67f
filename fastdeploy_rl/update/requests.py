"""Where requests for commands come from: a slot of the board, or the legacy word.

Owns the life of a request slot on the engine's side. Refuses to know what a command does. Invariant: a request is
finished once, and a slot goes back to its client, or is free when that is dead or gave it up.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Decision, OutcomeRecord, RequestRecord, SlotState
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import MAX_DEADLINE_S
from fastdeploy_rl.lifecycle import LegacyCommand
from fastdeploy_rl.memory.owner_lock import is_alive
from fastdeploy_rl.report import CommandKind, Outcome, UpdateReport
from fastdeploy_rl.update.engine_state import EngineState

_OF_CLIENTS = frozenset(CommandKind) - {CommandKind.RESTORE}
"""What may be asked for; RESTORE is the engine's own."""


class CommandRequest(Protocol):
    """What somebody asked for. `begin` before command `number` is announced for it, `commit` once that is committed and
    before another one is announced: a rank 0 that comes after knows by these what became of it. `finish` tells them,
    once."""

    kind: CommandKind
    version: str
    is_forced: bool
    deadline_ns: int
    options: CommandOptions
    wakes_all: bool
    """Whatever sleeps is woken: who asks knows nothing of sleep."""

    def begin(self, number: int) -> None: ...

    def commit(self) -> None: ...

    def finish(self, report: UpdateReport) -> None: ...


class LegacyRequest:
    """A value that a foreign process wrote into the status word."""

    def __init__(
        self, command: LegacyCommand, state: EngineState, deadline_ns: int, await_loops: Callable[[], None] | None
    ) -> None:
        """`await_loops`: returns when the ranks' loops have seen the word; it may read otherwise from then on."""
        self.kind = CommandKind.UPDATE if command is LegacyCommand.UPDATE else CommandKind.CLEAR
        self.version = ""
        self.is_forced = False
        self.deadline_ns = deadline_ns
        self.options = CommandOptions()
        self.wakes_all = True
        self._state = state
        self._await_loops = await_loops

    def begin(self, number: int) -> None:
        return None  # what stands in the word says it: it is taken again

    def commit(self) -> None:
        return None

    def finish(self, report: UpdateReport) -> None:
        if self._await_loops is not None:
            self._await_loops()
        self._state.end_legacy_command()


class RestoreRequest:
    """The engine's own wish, after a rank died: nobody waits for it."""

    def __init__(self, deadline_ns: int) -> None:
        self.kind = CommandKind.RESTORE
        self.version = ""
        self.is_forced = False
        self.deadline_ns = deadline_ns
        self.options = CommandOptions()
        self.wakes_all = False

    def begin(self, number: int) -> None:
        return None

    def commit(self) -> None:
        return None

    def finish(self, report: UpdateReport) -> None:
        return None


class BoardRequest:
    """A request in one of the board's slots; the client that claimed it waits for the outcome."""

    def __init__(self, board: Board, slot: int, token: int, record: RequestRecord) -> None:
        self.kind = CommandKind(record.kind)
        self.version = record.version
        self.is_forced = bool(record.is_forced)
        # One that is long over, absurd or spent in the queue, must not be so for the ranks' way back too.
        now = time.monotonic_ns()
        self.deadline_ns = max(now, min(record.deadline_ns, now + int(MAX_DEADLINE_S * 1e9)))
        self.options = CommandOptions.decode(record.options)
        self.wakes_all = False
        self._board = board
        self._slot = slot
        self._token = token

    def begin(self, number: int) -> None:
        self._board.store(self._fate_offset, layout.decision_word(number, Decision.OPEN))

    def commit(self) -> None:
        self._decide(Decision.YES)

    def took_effect(self, committed: int) -> bool:
        """In the place of a rank 0 that died, before anything is announced: whether this has what it asked for.
        `committed`: the number of the last command, if that one was committed, else 0."""
        fate = self._board.load(self._fate_offset)
        if layout.decision_in(fate) is Decision.OPEN:
            self._decide(Decision.YES if committed and layout.command_in(fate) == committed else Decision.NO)
        return layout.decision_in(self._board.load(self._fate_offset)) is Decision.YES

    def _decide(self, decision: Decision) -> None:
        number = layout.command_in(self._board.load(self._fate_offset))
        self._board.store(self._fate_offset, layout.decision_word(number, decision))

    @property
    def _fate_offset(self) -> int:
        return layout.request_offset(self._slot) + layout.FATE_IN_SLOT

    def finish(self, report: UpdateReport) -> None:
        offset = layout.request_offset(self._slot)
        outcome = OutcomeRecord(Outcome[report.outcome.upper()], report.command, report.error, report.reason)
        self._board.write_plain(outcome, offset + layout.OUTCOME_IN_SLOT)
        running, finished = (layout.slot_word(self._token, state) for state in (SlotState.RUNNING, SlotState.FINISHED))
        if self._board.exchange(offset, running, finished) != running:
            self._board.store(offset, SlotState.FREE)  # the client gave it up; nobody reads the outcome


def running_requests(board: Board) -> list[BoardRequest]:
    """What a rank 0 that died had taken and not finished. A slot whose client gave up, or that holds no request, is
    freed."""
    left = []
    for slot in range(layout.NUM_REQUEST_SLOTS):
        offset = layout.request_offset(slot)
        word = board.load(offset)
        if layout.is_in_state(word, SlotState.ABANDONED):
            board.exchange(offset, word, SlotState.FREE)
        elif layout.is_in_state(word, SlotState.RUNNING):
            record = board.read_plain(RequestRecord, offset + layout.REQUEST_IN_SLOT)
            if not _is_request(record):
                board.store(offset, SlotState.FREE)
                continue
            left.append(BoardRequest(board, slot, layout.slot_token(word), record))
    return left


def next_board_request(board: Board) -> BoardRequest | None:
    """The submitted request with the lowest ticket, now running. On the way, slots of dead clients and of those who
    write no request are freed."""
    while (oldest := _oldest_submitted(board)) is not None:
        slot, word = oldest
        request = _take(board, slot, word)
        if request is not None:
            return request
    return None


def _oldest_submitted(board: Board) -> tuple[int, int] | None:
    """Slot and state word of the request that comes next."""
    submitted = []
    for slot in range(layout.NUM_REQUEST_SLOTS):
        offset = layout.request_offset(slot)
        word = board.load(offset)
        if word == SlotState.FREE:
            continue
        lock = client_lock_path(board.run_dir, layout.slot_token(word))
        if not is_alive(lock):
            with contextlib.suppress(OSError):  # a directory there is nobody's lock, and in nobody's way
                lock.unlink()
            board.exchange(offset, word, SlotState.FREE)
        elif layout.is_in_state(word, SlotState.SUBMITTED):
            submitted.append((board.read_plain(RequestRecord, offset + layout.REQUEST_IN_SLOT).ticket, slot, word))
    return min(submitted)[1:] if submitted else None


def _take(board: Board, slot: int, word: int) -> BoardRequest | None:
    """None when its client withdrew it meanwhile, or wrote no request."""
    offset, token = layout.request_offset(slot), layout.slot_token(word)
    board.store(offset + layout.FATE_IN_SLOT, 0)  # that of the request before
    if board.exchange(offset, word, layout.slot_word(token, SlotState.RUNNING)) != word:
        return None
    # Read only now that its client cannot change it: it may have withdrawn the request we looked at and put another
    # one, with an equal word, in its place.
    record = board.read_plain(RequestRecord, offset + layout.REQUEST_IN_SLOT)
    if _is_request(record):
        return BoardRequest(board, slot, token, record)
    board.store(offset, SlotState.FREE)
    return None


def _is_request(record: RequestRecord) -> bool:
    """Another process may write anything there."""
    return record.kind in _OF_CLIENTS and CommandOptions.is_number(record.options)


def unread_commands(board: Board) -> set[int]:
    """Numbers of finished commands whose clients did not come for the outcome yet."""
    offsets = [layout.request_offset(slot) for slot in range(layout.NUM_REQUEST_SLOTS)]
    finished = [offset for offset in offsets if layout.is_in_state(board.load(offset), SlotState.FINISHED)]
    return {board.read_plain(OutcomeRecord, offset + layout.OUTCOME_IN_SLOT).command for offset in finished}


def client_lock_path(run_dir: Path, token: int) -> Path:
    """The file whose lock a client holds while it uses the board."""
    return run_dir / "clients" / f"{token:016x}.lock"
