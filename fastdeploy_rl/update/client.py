"""A client of an engine on this machine: claims a request slot of its board, waits for the outcome, reads report and
receipt.

Owns one claim at a time and the lock that shows the client is alive (a dead client's slot is freed by the engine).
Invariant: however a call ends, its slot is free again, or the engine frees it when the command that it carries out
ends. Every wait has a deadline."""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import HISTORY, Board
from fastdeploy_rl.board.layout import OutcomeRecord, RequestRecord, SlotState
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    DeadlineExceededError,
    EngineNotFoundError,
    NotServingError,
    PeerLostError,
    RequestError,
    StepFailedError,
    from_wire,
)
from fastdeploy_rl.memory.owner_lock import OwnerLock, owner_of
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import CommandKind, EngineStatus, HistoryEntry, Outcome, RankStatus, UpdateReport
from fastdeploy_rl.update.client_commands import BlockingCommands, ClientCommand
from fastdeploy_rl.update.history import DEFAULT_LIMIT, read_history
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.update.requests import client_lock_path

_LOOK_AGAIN_NS = 1_000_000_000
"""While it waits, a client looks this often whether the engine is still alive."""


class BoardClient(BlockingCommands):
    """Use in a with statement. Not for several threads at once (but for `abandon`): make one each."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._token = secrets.randbits(60) | 1
        self._opening = threading.Lock()
        self._is_abandoned = False
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
            with self._opening:
                self._open_board, self._stack = board, stack.pop_all()
                if self._is_abandoned:
                    board.abandon_waits()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._opening:
            self._open_board = None
        self._stack.close()

    def abandon(self) -> None:
        """From any thread: a call that waits here, now or later, ends at once with a DeadlineExceededError. A request
        that the engine did not begin is withdrawn; one that it carries out goes on, and the engine frees its slot."""
        with self._opening:
            self._is_abandoned = True
            if self._open_board is not None:
                self._open_board.abandon_waits()

    @property
    def _board(self) -> Board:
        if self._open_board is None:
            raise EngineNotFoundError(f"port {self._port}: the client is not open; use it in a with statement")
        return self._open_board

    def status(self) -> EngineStatus:
        self._check_alive()
        return self._board.status()

    def receipt(self, *, recompute: bool = False, deadline_s: float = Deadlines.recompute_s) -> Receipt:
        """The proof of what is live. `recompute` reads live memory again: ChecksumMismatchError names tensor and
        rank."""
        if not recompute:
            self._check_alive()
            receipt = RankFiles(self._board.run_dir).read_receipt()
            if receipt is None:
                status = self.status()
                why = (
                    "checksums are off (--no-checksums)"
                    if status.is_serving
                    else f"no version is live: {status.reason}"
                )
                raise NotServingError(f"port {self._port}: there is no receipt: {why}")
            return receipt
        report = self.carry_out(ClientCommand(CommandKind.RECOMPUTE, deadline_s))
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

    def history(self, limit: int = DEFAULT_LIMIT) -> list[HistoryEntry]:
        """The last `limit` commands, also of earlier engines that kept theirs in the same place; the newest is last."""
        return read_history(self._board.run_dir / HISTORY, limit)

    def _check_alive(self) -> None:
        """What a dead engine left on its board and in its run directory is true no longer."""
        if not self._board.is_owner_alive():
            raise EngineNotFoundError(f"port {self._port}: the engine is dead; start one with `fastdeploy-rl serve`")

    # --- one request -------------------------------------------------------------------------------

    def carry_out(self, command: ClientCommand) -> UpdateReport:
        deadline_ns = time.monotonic_ns() + int(command.deadline_s * 1e9)
        offset = layout.request_offset(self._claim(deadline_ns))
        try:
            record = self._record(command, deadline_ns)
            self._board.write_plain(record, offset + layout.REQUEST_IN_SLOT)
            self._board.store(offset, self._word(SlotState.SUBMITTED))
            self._board.ring_doorbell()
            self._await_outcome(offset, command.kind, deadline_ns + int(command.quiet_s * 1e9))
            outcome = self._board.read_plain(OutcomeRecord, offset + layout.OUTCOME_IN_SLOT)
            if outcome.outcome != Outcome.DONE:
                raise from_wire(outcome.error, outcome.reason)
            # Before the slot is free: until then the engine keeps the report, however slow this client is.
            return self._read_report(record, outcome.command)
        finally:
            self._let_go(offset)

    def _record(self, command: ClientCommand, deadline_ns: int) -> RequestRecord:
        options = command.options.encode()
        ticket = self._board.take_ticket()
        return RequestRecord(ticket, command.kind, int(command.is_forced), deadline_ns, command.version, options)

    def _read_report(self, asked: RequestRecord, command: int) -> UpdateReport:
        """Of what was done as `asked`. A report that the engine had no room to store makes that no failure: then this
        tells no more than what is known without."""
        try:
            return RankFiles(self._board.run_dir).read_report(command)
        except StepFailedError as missing:
            version = asked.version if "." in asked.version else ""
            kind = CommandKind(asked.kind).name.lower()
            return UpdateReport(command, kind, "done", version, "", 0.0, 0.0, [], reason=f"done, but {missing}")

    def _word(self, state: SlotState) -> int:
        return layout.slot_word(self._token, state)

    def _claim(self, deadline_ns: int) -> int:
        what = "a request slot"
        begun = time.monotonic()
        self._check_wanted(what)
        claimed: list[int] = []

        def try_slots() -> bool:
            for slot in range(layout.NUM_REQUEST_SLOTS):
                offset = layout.request_offset(slot)
                if self._board.exchange(offset, SlotState.FREE, self._word(SlotState.CLAIMED)) == SlotState.FREE:
                    claimed.append(slot)
                    return True
            return False

        if not self._wait(try_slots, deadline_ns, what):
            raise DeadlineExceededError.waiting_for(
                f"free place for a request at port {self._port}",
                since_s=begun,
                hint=f"all {layout.NUM_REQUEST_SLOTS} request slots are taken ({self._claimants()}); try again",
            )
        return claimed[0]

    def _claimants(self) -> str:
        """Who holds the slots now, for a message."""
        words = [self._board.load(layout.request_offset(slot)) for slot in range(layout.NUM_REQUEST_SLOTS)]
        locks = [client_lock_path(self._board.run_dir, layout.slot_token(word)) for word in words if word]
        pids = Counter(owner.pid if (owner := owner_of(lock)) else "unknown" for lock in locks)
        return ", ".join(f"pid {pid}" + (f" x {count}" if count > 1 else "") for pid, count in pids.items())

    def _await_outcome(self, offset: int, kind: CommandKind, decided_ns: int) -> None:
        begun = time.monotonic()
        finished = self._word(SlotState.FINISHED)
        what = f"the outcome of {kind.name.lower()}"
        last_ns = decided_ns + int(Deadlines.outcome_s * 1e9)
        is_told = self._wait(lambda: self._board.load(offset) == finished, last_ns, what)
        if not is_told and self._board.lost_ranks():
            # The outcome is decided; a rank that is just started again will tell it.
            last_ns += int(Deadlines.rejoin_s * 1e9)
            is_told = self._wait(lambda: self._board.load(offset) == finished, last_ns, what)
        if not is_told:
            seen = ", ".join(map(_last_seen, self._board.status().ranks))
            raise DeadlineExceededError.waiting_for(
                f"outcome of {kind.name.lower()} at port {self._port}", since_s=begun, hint=f"ranks: {seen}"
            )

    def _wait(self, condition: Callable[[], bool], last_ns: int, what: str) -> bool:
        """Blocks until `condition()` holds; False when `last_ns` came first. PeerLostError when the engine dies."""
        while not self._board.wait_until(condition, min(last_ns, time.monotonic_ns() + _LOOK_AGAIN_NS)):
            self._check_wanted(what)
            if not self._board.is_owner_alive():
                raise PeerLostError(f"port {self._port}: the engine died while this waited for {what}")
            if time.monotonic_ns() >= last_ns:
                return False
        return True

    def _check_wanted(self, what: str) -> None:
        if self._is_abandoned:
            raise DeadlineExceededError(f"port {self._port}: its caller gave up waiting for {what}")

    def _let_go(self, offset: int) -> None:
        """The slot is free again; one whose command runs is handed over to the engine, which frees it at the end."""
        word = self._board.load(offset)
        while layout.slot_token(word) == self._token:
            is_running = layout.is_in_state(word, SlotState.RUNNING)
            found = self._board.exchange(
                offset, word, self._word(SlotState.ABANDONED) if is_running else SlotState.FREE
            )
            if found == word:
                return
            word = found


def _last_seen(rank: RankStatus) -> str:
    """For a message: the rank that stands still is the one that was not heard for long."""
    heard = "never heard" if rank.heartbeat_age_s is None else f"heard {rank.heartbeat_age_s:.1f} s ago"
    return f"{rank.rank} {rank.phase}, {heard}"
