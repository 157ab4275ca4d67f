"""What is written about commands: reports, the history, the receipt of what is live.

Owns the order in which that is stored, and who is told last: whoever asked. Refuses to know why a command ended as it
did. Invariant: there is a receipt exactly while a version is live and proved; a full disk changes no outcome, it is
only told less."""

import logging
import time
from collections.abc import Callable

from msgspec import structs

from fastdeploy_rl.board.board import HISTORY, Board
from fastdeploy_rl.errors import FastDeployRLError, wire_text
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import Outcome, UpdateReport, history_entry
from fastdeploy_rl.update.conductor import CommandOutcome
from fastdeploy_rl.update.engine_state import EngineState
from fastdeploy_rl.update.history import append_history
from fastdeploy_rl.update.rank_files import RankFiles, RankPart
from fastdeploy_rl.update.requests import CommandRequest, unread_commands
from fastdeploy_rl.update.transaction import as_step_failure

_log = logging.getLogger(__name__)


class Chronicle:
    """Of one engine; used by the coordinator's thread."""

    def __init__(self, board: Board, files: RankFiles, state: EngineState) -> None:
        self.receipt: Receipt | None = None
        """Of what is live; None while nothing is."""
        self._board = board
        self._files = files
        self._state = state

    def keep_receipt(self, receipt: Receipt) -> None:
        """That of a version that just became live."""
        self.receipt = receipt
        self._state.note_receipt(True)
        if not _try_to_store(lambda: self._files.write_receipt(receipt), "receipt"):
            self._files.remove_receipt()

    def forget_receipt(self) -> None:
        self.receipt = None
        self._state.note_receipt(False)
        self._files.remove_receipt()

    def tell_staged(self, request: CommandRequest, version: str, parts: list[RankPart]) -> None:
        """The report as far as it is known before anything is touched: which way back is open, and what is held for
        it."""
        outcome = CommandOutcome(Outcome.REJECTED, version=version, parts=parts)
        staged = structs.replace(self._report(request, self._state.live_version, outcome, 0.0), outcome="staged")
        _try_to_store(lambda: self._files.write_report(staged), "report")

    def tell(
        self, request: CommandRequest, previous: str, outcome: CommandOutcome, seconds: float, command: int
    ) -> None:
        """`previous`: the version that was live before; `command`: the number of the last command on the board."""
        report = self._report(request, previous, outcome, seconds)
        unread = unread_commands(self._board)
        _try_to_store(lambda: self._files.write_report(report, unread), "report")
        entry = history_entry(report, self._board.port, time.time())
        _try_to_store(lambda: append_history(self._board.run_dir / HISTORY, entry), "history")
        self._state.count_command(command)
        _log_report(report)
        request.finish(report)

    def _report(self, request: CommandRequest, previous: str, outcome: CommandOutcome, seconds: float) -> UpdateReport:
        ranks = [part.report for part in outcome.parts if part.report is not None]
        return UpdateReport(
            command=self._state.commands_done + 1,
            kind=request.kind.name.lower(),
            outcome=outcome.outcome.name.lower(),
            version=outcome.version,
            previous_version=previous,
            seconds=seconds,
            stall_seconds=max((rank.stall_seconds for rank in ranks), default=0.0),
            ranks=ranks,
            error=type(outcome.error).__name__ if outcome.error else "",
            reason=wire_text(outcome.error) if outcome.error else "",
            receipt=outcome.receipt,
            differing=outcome.differing,
        )


def _try_to_store(write: Callable[[], None], what: str) -> bool:
    try:
        with as_step_failure(what, 0):
            write()
    except FastDeployRLError as error:
        _log.error("event=not_stored what=%s reason=%r", what, str(error))
        return False
    return True


def _log_report(report: UpdateReport) -> None:
    _log.info(
        "request=%d kind=%s outcome=%s version=%s previous=%s seconds=%.4f stall_seconds=%.4f "
        "aliased_bytes=%d copied_bytes=%d reason=%r",
        report.command,
        report.kind,
        report.outcome,
        report.version or "-",
        report.previous_version or "-",
        report.seconds,
        report.stall_seconds,
        report.aliased_bytes,
        report.copied_bytes,
        report.reason,
    )
