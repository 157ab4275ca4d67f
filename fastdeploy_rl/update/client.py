"""A client of an engine on this machine: claims a request slot
of its board, waits for the outcome, reads report and receipt.

Owns one claim at a time and the lock that shows the client is alive (a dead client's slot is freed by the engine).
Every wait has a deadline."""

import secrets
import time
from contextlib import ExitStack
from types import TracebackType

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import OutcomeRecord, RequestRecord, SlotState
from fastdeploy_rl.config import BOARD_GRACE_S, checked_deadline
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    EngineNotFoundError,
    FastDeployRLError,
    NotServingError,
    PeerLostError,
    RequestError,
    from_wire,
)
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, EngineStatus, Outcome, UpdateReport
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.update.requests import client_lock_path
from fastdeploy_rl.version import WeightVersion

_LOOK_AGAIN_NS = 1_000_000_000
"""While it waits, a client looks this often whether the engine is still alive."""


class BoardClient:
    """Use in a with statement. Not for several threads at once: make one each."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._token = secrets.randbits(60) | 1
        self._stack = ExitStack()
        self._open_board: Board | None = None

    def __enter__(self) -> "BoardClient":
        with ExitStack() as stack:
            board = Board.attach(self._port)
            stack.callback(board.close)
            try:
                stack.enter_context(OwnerLock(client_lock_path(board.run_dir, self._token)))
            except FileNotFoundError as error:
                raise EngineNotFoundError(f"port {self._port}: the engine is just stopping") from error
            self._open_board, self._stack = board, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open_board = None
        self._stack.close()

    @property
    def _board(self) -> Board:
        if self._open_board is None:
            raise EngineNotFoundError(f"port {self._port}: the client is not open; use it in a with statement")
        return self._open_board

    def update(
        self, version: WeightVersion | str | None = None, *, deadline_s: float = 30.0, force: bool = False
    ) -> UpdateReport:
        """Takes the version over (the newest when None) on all ranks, or raises why not; then nothing changed.

        `force` allows a version that goes back, and takes a version over again that is live already."""
        return self._ask(CommandKind.UPDATE, str(version or ""), deadline_s, force)

    def clear(self, *, deadline_s: float = 30.0) -> UpdateReport:
        """Ends requests in flight, frees weights and KV cache on all ranks."""
        return self._ask(CommandKind.CLEAR, "", deadline_s, False)

    def status(self) -> EngineStatus:
        if not self._board.is_owner_alive():
            raise EngineNotFoundError(f"port {self._port}: the engine is dead")
        return self._board.status()

    def receipt(self, *, recompute: bool = False, deadline_s: float = 30.0) -> Receipt:
        """The proof of what is live. `recompute` reads live memory
        again: ChecksumMismatchError names tensor and rank."""
        if not recompute:
            receipt = RankFiles(self._board.run_dir).read_receipt()
            if receipt is None:
                raise NotServingError(f"port {self._port}: no version is live: {self.status().reason}")
            return receipt
        report = self._ask(CommandKind.RECOMPUTE, "", deadline_s, False)
        if report.differing:
            places = ", ".join(f"{name} on rank {rank}" for name, rank in report.differing[:10])
            raise ChecksumMismatchError(
                f"{len(report.differing)} live tensors are not what the receipt of version {report.version} says: "
                f"{places}"
            )
        if report.receipt is None:
            raise PeerLostError(f"port {self._port}: the engine gave no receipt")
        return report.receipt

    def last_report(self) -> UpdateReport:
        """Of the command that ended last, whoever asked for it. RequestError where there was none yet."""
        done = self._board.status().commands_done
        if not done:
            raise RequestError(f"port {self._port}: there is no report yet: the engine has had no command")
        return RankFiles(self._board.run_dir).read_report(done)

    # --- one request -------------------------------------------------------------------------------

    def _ask(self, kind: CommandKind, version: str, deadline_s: float, force: bool) -> UpdateReport:
        deadline_ns = time.monotonic_ns() + int(checked_deadline(deadline_s) * 1e9)
        slot = self._claim(deadline_ns)
        offset = layout.request_offset(slot)
        try:
            record = RequestRecord(self._board.take_ticket(), kind, int(force), deadline_ns, version)
            self._board.write_plain(record, offset + 8)
            self._board.store(offset, layout.slot_word(self._token, SlotState.SUBMITTED))
            self._board.ring_doorbell()
            self._await_outcome(offset, kind, deadline_s, deadline_ns)
            outcome = self._board.read_plain(OutcomeRecord, offset + layout.OUTCOME_IN_SLOT)
        finally:
            self._let_go(offset)
        if outcome.outcome != Outcome.DONE:
            raise self._error(outcome)
        return RankFiles(self._board.run_dir).read_report(outcome.command)

    def _claim(self, deadline_ns: int) -> int:
        claimed: list[int] = []
        claim, answered_late = (
            layout.slot_word(self._token, state) for state in (SlotState.CLAIMED, SlotState.FINISHED)
        )

        def try_slots() -> bool:
            for slot in range(layout.NUM_REQUEST_SLOTS):
                offset = layout.request_offset(slot)
                for free in (SlotState.FREE, answered_late):
                    if self._board.exchange(offset, free, claim) == free:
                        claimed.append(slot)
                        return True
            return False

        if not self._board.wait_until(try_slots, deadline_ns):
            raise DeadlineExceededError(
                f"port {self._port}: all {layout.NUM_REQUEST_SLOTS} request slots are taken; try again"
            )
        return claimed[0]

    def _await_outcome(self, offset: int, kind: CommandKind, deadline_s: float, deadline_ns: int) -> None:
        finished = layout.slot_word(self._token, SlotState.FINISHED)
        last_ns = deadline_ns + int(BOARD_GRACE_S * 1e9)
        while not self._board.wait_until(
            lambda: self._board.load(offset) == finished, min(last_ns, time.monotonic_ns() + _LOOK_AGAIN_NS)
        ):
            if not self._board.is_owner_alive():
                raise PeerLostError(f"port {self._port}: the engine died during {kind.name.lower()}")
            if time.monotonic_ns() >= last_ns:
                raise DeadlineExceededError(
                    f"port {self._port}: no outcome of {kind.name.lower()} within {deadline_s} s; ranks: "
                    + ", ".join(f"{rank.rank} {rank.phase}" for rank in self._board.status().ranks)
                )

    def _let_go(self, offset: int) -> None:
        """A finished or unsubmitted slot is free again; one that still runs is freed by the engine when this client's
        lock is gone."""
        word = self._board.load(offset)
        if layout.slot_token(word) == self._token and layout.slot_state(word) in (
            SlotState.FINISHED,
            SlotState.CLAIMED,
        ):
            self._board.store(offset, SlotState.FREE)

    def _error(self, outcome: OutcomeRecord) -> FastDeployRLError:
        return from_wire(outcome.error, outcome.reason)
