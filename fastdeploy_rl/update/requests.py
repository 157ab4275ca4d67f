"""Where requests for commands come from: a slot of the board, or the legacy word.

Owns the life of a request slot on the engine's side. Refuses to know what a command does. Invariant: a request is
finished once, and a slot goes back to its client, or is free when that is dead.
"""

from pathlib import Path
from typing import Protocol

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import OutcomeRecord, RequestRecord, SlotState
from fastdeploy_rl.lifecycle import LegacyCommand
from fastdeploy_rl.memory.owner_lock import is_alive
from fastdeploy_rl.report import CommandKind, Outcome, UpdateReport
from fastdeploy_rl.update.engine_state import EngineState


class CommandRequest(Protocol):
    """What somebody asked for. `finish` tells them, once."""

    kind: CommandKind
    version: str
    is_forced: bool
    deadline_ns: int

    def finish(self, report: UpdateReport) -> None: ...


class LegacyRequest:
    """A value that a foreign process wrote into the status word."""

    def __init__(self, command: LegacyCommand, state: EngineState, deadline_ns: int) -> None:
        self.kind = CommandKind.UPDATE if command is LegacyCommand.UPDATE else CommandKind.CLEAR
        self.version = ""
        self.is_forced = False
        self.deadline_ns = deadline_ns
        self._state = state

    def finish(self, report: UpdateReport) -> None:
        self._state.end_legacy_command()


class BoardRequest:
    """A request in one of the board's slots; the client that claimed it waits for the outcome."""

    def __init__(self, board: Board, slot: int, record: RequestRecord) -> None:
        self.kind = CommandKind(record.kind)
        self.version = record.version
        self.is_forced = bool(record.is_forced)
        self.deadline_ns = record.deadline_ns
        self._board = board
        self._slot = slot

    def finish(self, report: UpdateReport) -> None:
        offset = layout.request_offset(self._slot)
        outcome = OutcomeRecord(Outcome[report.outcome.upper()], report.command, report.error, report.reason)
        self._board.write_plain(outcome, offset + layout.OUTCOME_IN_SLOT)
        token = layout.slot_token(self._board.load(offset))
        self._board.store(offset, layout.slot_word(token, SlotState.FINISHED))


def next_board_request(board: Board) -> BoardRequest | None:
    """The submitted request with the lowest ticket, now running. On the way, slots of dead clients and of those who
    write no request are freed."""
    submitted = []
    for slot in range(layout.NUM_REQUEST_SLOTS):
        offset = layout.request_offset(slot)
        word = board.load(offset)
        if word == SlotState.FREE:
            continue
        if not is_alive(client_lock_path(board.run_dir, layout.slot_token(word))):
            board.exchange(offset, word, SlotState.FREE)
        elif layout.slot_state(word) is SlotState.SUBMITTED:
            record = board.read_plain(RequestRecord, offset + 8)
            if record.kind in set(CommandKind):
                submitted.append((record.ticket, slot, record, word))
            else:
                board.exchange(offset, word, SlotState.FREE)
    if not submitted:
        return None
    _, slot, record, word = min(submitted)
    board.store(layout.request_offset(slot), layout.slot_word(layout.slot_token(word), SlotState.RUNNING))
    return BoardRequest(board, slot, record)


def client_lock_path(run_dir: Path, token: int) -> Path:
    """The file whose lock a client holds while it uses the board."""
    return run_dir / "clients" / f"{token:016x}.lock"
