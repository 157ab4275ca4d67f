"""Rank 0 leads one command through all ranks: announce, votes, the two decisions, votes.

Owns the numbers of commands on the board and both proposals of YES. Refuses to know why a command is given and what
follows from its outcome. Invariant: no command is announced before every rank has finished the one before.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question, is_against
from fastdeploy_rl.config import FINISH_GRACE_S
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, FencedError, from_wire
from fastdeploy_rl.receipt import RankReceipt, Receipt
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.update.rank_files import RankFiles, RankPart
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)


@dataclass
class CommandOutcome:
    """How a command ended. `error` is what spoke against it; `parts` are the ranks' last words, in rank order;
    `checked` is the receipt that was checked before the install."""

    outcome: Outcome
    error: FastDeployRLError | None = None
    version: str = ""
    parts: list[RankPart] = field(default_factory=list)
    checked: Receipt | None = None
    receipt: Receipt | None = None
    differing: list[tuple[str, int]] = field(default_factory=list)

    @property
    def receipts(self) -> list[RankReceipt]:
        return [part.receipt for part in self.parts if part.receipt is not None]


class Conductor:
    """Used by one thread of rank 0. `files` is where ranks leave what does not fit on the board."""

    def __init__(self, rendezvous: BoardRendezvous, files: RankFiles) -> None:
        self._rendezvous = rendezvous
        self._files = files
        self._number = 0
        self._unfinished = 0

    def lead(
        self,
        kind: CommandKind,
        *,
        deadline_ns: int,
        version: WeightVersion | None = None,
        content_digest: str = "",
        check_staged: Callable[[list[RankReceipt]], Receipt] | None = None,
    ) -> CommandOutcome:
        """One command, to its end on every rank. `check_staged` makes a receipt of what the ranks staged, or raises.

        DONE, REJECTED (every rank is where it was), or FENCED where that cannot be known of some rank. Raises
        DeadlineExceededError, having announced nothing, while a rank is still inside an earlier command."""
        self._await_idle(deadline_ns)
        command = self._announce(kind, deadline_ns, version, content_digest)
        checked: Receipt | None = None
        error = self._await_ballots(command, Ballot.STAGED)
        if error is None and check_staged is not None:
            checked, error = self._check(command, check_staged)
        error = self._decide(command, Question.INSTALL, error)
        is_installed = error is None
        if is_installed:
            error = self._decide(command, Question.COMMIT, self._await_ballots(command, Ballot.VERIFIED))
        outcome = CommandOutcome(Outcome.DONE if error is None else Outcome.REJECTED, error, checked=checked)
        self._conclude(command, outcome, can_tear=is_installed and kind is not CommandKind.RECOMPUTE)
        return outcome

    # --- one command -------------------------------------------------------------------------------

    def _await_idle(self, deadline_ns: int) -> None:
        if self._unfinished:
            self._rendezvous.await_votes(self._unfinished, Ballot.FINISHED, deadline_ns)
            self._forget(self._unfinished)

    def _announce(
        self, kind: CommandKind, deadline_ns: int, version: WeightVersion | None, content_digest: str
    ) -> CommandRecord:
        self._number += 1
        self._unfinished = self._number
        epoch, step = (version.epoch, version.step) if version else (0, 0)
        command = CommandRecord(self._number, kind, epoch, step, deadline_ns, content_digest)
        _log.info("command=%d kind=%s version=%s event=announced", self._number, kind.name.lower(), version or "-")
        self._rendezvous.announce(command)
        return command

    def _await_ballots(self, command: CommandRecord, wanted: Ballot) -> FastDeployRLError | None:
        """What speaks against going on once every rank could have reached `wanted`."""
        try:
            records = self._rendezvous.await_votes(command.number, wanted, command.deadline_ns)
            return _first_objection(records, command.number, wanted)
        except FastDeployRLError as silence:
            return silence

    def _check(
        self, command: CommandRecord, check_staged: Callable[[list[RankReceipt]], Receipt]
    ) -> tuple[Receipt | None, FastDeployRLError | None]:
        try:
            ranks = range(self._rendezvous.num_ranks)
            return check_staged([self._files.read_staged(rank, command.number) for rank in ranks]), None
        except FastDeployRLError as wrong:
            return None, wrong

    def _decide(
        self, command: CommandRecord, question: Question, objection: FastDeployRLError | None
    ) -> FastDeployRLError | None:
        """Proposes YES where nothing speaks against it; returns why all ranks follow a NO, if they do."""
        proposal = Decision.YES if objection is None else Decision.NO
        if self._rendezvous.decide_once(question, command.number, proposal) is Decision.YES:
            return None
        return objection or DeadlineExceededError(f"a rank's deadline passed before the decision to {question.value}")

    def _conclude(self, command: CommandRecord, outcome: CommandOutcome, *, can_tear: bool) -> None:
        """Waits until every rank followed the decision. One that is silent then may hold anything, if the command ever
        touched a weight; else it can only undo, whenever it comes back, and the next command waits for that."""
        try:
            last_ns = command.deadline_ns + int(FINISH_GRACE_S * 1e9)
            self._rendezvous.await_votes(command.number, Ballot.FINISHED, last_ns)
            outcome.parts = self._files.read_parts(self._rendezvous.num_ranks, command.number)
        except FastDeployRLError as lost:
            if can_tear:
                outcome.outcome = Outcome.FENCED
                outcome.error = FencedError(f"{lost}; it is not known what that rank holds")
            elif outcome.error is None:
                outcome.outcome, outcome.error = Outcome.REJECTED, lost
            return
        self._forget(command.number)
        fenced = next((part.fence_reason for part in outcome.parts if part.fence_reason), "")
        if fenced:
            outcome.outcome, outcome.error = Outcome.FENCED, FencedError(fenced)

    def _forget(self, number: int) -> None:
        self._unfinished = 0
        self._files.remove_command(number)


def _first_objection(records: list[RankRecord], command: int, wanted: Ballot) -> FastDeployRLError | None:
    against = [rank for rank, record in enumerate(records) if is_against(record, command)]
    if not against:
        return None
    for rank in against:
        if records[rank].reason:
            return from_wire(records[rank].error, f"rank {rank}: {records[rank].reason}")
    # Those ran out of time themselves while they waited for the others.
    behind = [rank for rank, record in enumerate(records) if record.command != command or record.ballot < wanted]
    return DeadlineExceededError(f"command {command}: ranks {behind} did not reach {wanted.name} before the deadline")
