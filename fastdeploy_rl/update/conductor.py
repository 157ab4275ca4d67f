"""Rank 0 leads one command through all ranks: announce, votes, the two decisions, votes.

Owns the numbers of commands on the board and both proposals of YES. Refuses to know why a command is given and what
follows from its outcome. Invariant: no command is announced before every rank has finished the one before, or died.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question, is_against
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.errors import (
    DeadlineExceededError,
    FastDeployRLError,
    FencedError,
    PeerLostError,
    StepFailedError,
    from_wire,
)
from fastdeploy_rl.receipt import RankReceipt, Receipt
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.update.rank_files import FOLLOWED, RankFiles, RankPart, receipts_of
from fastdeploy_rl.version import WeightVersion

_log = logging.getLogger(__name__)

NO_OPTIONS = CommandOptions()
_CHANGING_NOTHING = (CommandKind.RECOMPUTE, CommandKind.PAUSE)
"""A rank that falls silent in one of these holds what it held."""

CheckStaged = Callable[[list[RankPart]], Receipt | None]
"""Makes a receipt of what the ranks staged, before anything is touched; or raises."""


@dataclass
class CommandOutcome:
    """How a command ended. `error` is what spoke against it; `parts` are the ranks' last words, in rank order, without
    those of the `lost`: these died on the way, and hold nothing; `checked` is the receipt that was checked before the
    install."""

    outcome: Outcome
    error: FastDeployRLError | None = None
    version: str = ""
    parts: list[RankPart] = field(default_factory=list)
    lost: frozenset[int] = frozenset()
    checked: Receipt | None = None
    receipt: Receipt | None = None
    differing: list[tuple[str, int]] = field(default_factory=list)

    @property
    def receipts(self) -> list[RankReceipt]:
        return receipts_of(self.parts)


class Conductor:
    """Used by one thread of rank 0. `files` is where ranks leave what does not fit on the board. `finish_s`: how much
    longer than a command's deadline ranks may take to follow a decision. `condemn` asks for the end of a rank that does
    not; None where nobody would start it again."""

    def __init__(
        self, rendezvous: BoardRendezvous, files: RankFiles, finish_s: float, condemn: Callable[[int], None] | None
    ) -> None:
        self._rendezvous = rendezvous
        self._files = files
        self._finish_ns = int(finish_s * 1e9)
        self._condemn = condemn
        self._unfinished = 0
        """The command that some living rank may not have finished yet; 0 for none."""
        self._announced_s = 0.0
        self.number = 0
        """Of the command that was announced last."""

    def take_over(self) -> None:
        """In the place of a rank 0 that died: goes on from its last command, when every living rank has finished that.
        What it left undecided is decided, so this takes them `finish_s` at most; who takes longer is condemned."""
        last = self._rendezvous.current()
        self.number, self._unfinished = self._rendezvous.last_number(), last.number
        if last.number:
            overdue = last._replace(deadline_ns=time.monotonic_ns())
            self._await_finished(overdue, frozenset(), may_condemn=True)

    def lead(
        self,
        kind: CommandKind,
        *,
        deadline_ns: int,
        version: WeightVersion | None = None,
        content_digest: str = "",
        options: CommandOptions = NO_OPTIONS,
        check_staged: CheckStaged | None = None,
        excused: frozenset[int] = frozenset(),
        must_follow: bool = False,
    ) -> CommandOutcome:
        """One command, to its end on every rank but the `excused`, which are dead. `must_follow`: a rank that stays
        silent is condemned, also where the command never touched a weight.

        DONE, REJECTED (every rank is where it was), both but for those `lost`; or FENCED where some living rank holds
        no whole version, or that cannot be known. Raises, having announced nothing, DeadlineExceededError while a rank
        is still inside an earlier command, PeerLostError while one is dead."""
        self._await_idle(deadline_ns, excused)
        command = self._announce(kind, deadline_ns, version, content_digest, options)
        checked: Receipt | None = None
        error = self._await_ballots(command, Ballot.STAGED, excused)
        if error is None and check_staged is not None:
            checked, error = self._check(command, check_staged)
        error = self._decide(command, Question.INSTALL, error)
        is_installed = error is None
        if is_installed:
            objection = self._await_ballots(command, Ballot.VERIFIED, excused)
            error = self._decide(command, Question.COMMIT, objection)
        outcome = CommandOutcome(Outcome.DONE if error is None else Outcome.REJECTED, error, checked=checked)
        can_tear = must_follow or (is_installed and kind not in _CHANGING_NOTHING)
        self._conclude(command, outcome, can_tear=can_tear, excused=excused)
        return outcome

    # --- one command -------------------------------------------------------------------------------

    def _await_idle(self, deadline_ns: int, excused: frozenset[int]) -> None:
        if self._unfinished:
            self._rendezvous.await_votes(self._unfinished, Ballot.FINISHED, deadline_ns, excused=excused)
            self._forget(self._unfinished)
        dead = self._rendezvous.lost_ranks() - excused
        if dead:
            raise PeerLostError(f"ranks {sorted(dead)} died and are not back; no command can be carried out")

    def _announce(
        self,
        kind: CommandKind,
        deadline_ns: int,
        version: WeightVersion | None,
        content_digest: str,
        options: CommandOptions,
    ) -> CommandRecord:
        self.number += 1
        self._unfinished, self._announced_s = self.number, time.monotonic()
        epoch, step = (version.epoch, version.step) if version else (0, 0)
        command = CommandRecord(self.number, kind, epoch, step, deadline_ns, content_digest, options.encode())
        _log.info("command=%d kind=%s version=%s event=announced", self.number, kind.name.lower(), version or "-")
        self._rendezvous.announce(command)
        return command

    def _await_ballots(
        self, command: CommandRecord, wanted: Ballot, excused: frozenset[int]
    ) -> FastDeployRLError | None:
        """What speaks against going on once every rank could have reached `wanted`."""
        try:
            records = self._rendezvous.await_votes(command.number, wanted, command.deadline_ns, excused=excused)
            lost = self._rendezvous.lost_ranks()
            return _first_objection(records, command.number, wanted, excused, lost, since_s=self._announced_s)
        except FastDeployRLError as silence:
            return silence

    def _check(
        self, command: CommandRecord, check_staged: CheckStaged
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
        return objection or self._why_no(command, question)

    def _why_no(self, command: CommandRecord, question: Question) -> FastDeployRLError:
        dead = sorted(self._rendezvous.lost_ranks())
        if dead:
            return PeerLostError(f"command {command.number}: ranks {dead} died before the decision to {question.value}")
        return DeadlineExceededError.waiting_for(
            f"decision to {question.value} of command {command.number}",
            since_s=self._announced_s,
            hint="a rank's deadline passed before",
        )

    def _conclude(
        self, command: CommandRecord, outcome: CommandOutcome, *, can_tear: bool, excused: frozenset[int]
    ) -> None:
        """Waits until every rank followed the decision, or died. One that is silent then may hold anything, if the
        command ever touched a weight; else it can only undo, whenever it comes back, and the next command waits for
        that."""
        try:
            self._await_finished(command, excused, may_condemn=can_tear)
        except PeerLostError:
            outcome.lost = self._rendezvous.lost_ranks() - excused
        except FastDeployRLError as silent:
            if can_tear:
                outcome.outcome = Outcome.FENCED
                outcome.error = FencedError(f"{silent}; it is not known what that rank holds")
            elif outcome.error is None and command.kind != CommandKind.PAUSE:  # what was quiet stays so
                outcome.outcome, outcome.error = Outcome.REJECTED, silent
            return
        self._read_parts(command, outcome, excused)
        if not outcome.lost:
            self._forget(command.number)
        fenced = next((part.fence_reason for part in outcome.parts if part.fence_reason), "")
        if fenced:
            outcome.outcome, outcome.error = Outcome.FENCED, FencedError(fenced)

    def _await_finished(self, command: CommandRecord, excused: frozenset[int], *, may_condemn: bool) -> None:
        last_ns = command.deadline_ns + self._finish_ns
        try:
            self._rendezvous.await_votes(command.number, Ballot.FINISHED, last_ns, excused=excused)
        except DeadlineExceededError as silent:
            if self._condemn is None or not may_condemn:
                raise
            _log.error("command=%d event=condemned reason=%r", command.number, str(silent))
            for rank in self._silent(command, spared=excused | self._rendezvous.lost_ranks()):
                self._condemn(rank)
            last_ns = time.monotonic_ns() + self._finish_ns
            self._rendezvous.await_votes(command.number, Ballot.FINISHED, last_ns, excused=excused)

    def _silent(self, command: CommandRecord, spared: frozenset[int]) -> list[int]:
        """Those that live and have not finished. `spared`: the dead, who are started again as it is; known before the
        records are read, so that none is condemned that came back meanwhile."""
        return [
            rank
            for rank, record in enumerate(self._rendezvous.records())
            if rank not in spared and (record.command, record.ballot) != (command.number, Ballot.FINISHED)
        ]

    def _read_parts(self, command: CommandRecord, outcome: CommandOutcome, excused: frozenset[int]) -> None:
        """A rank that is back already counts as lost too: it holds nothing of what it held during the command."""
        reborn = set()
        for rank in sorted(frozenset(range(self._rendezvous.num_ranks)) - outcome.lost - excused):
            try:
                part = self._files.read_part(rank, command.number)
            except StepFailedError as missing:
                part = self._unwritten_part(rank, command, outcome, missing)
            if part.is_reborn:
                reborn.add(rank)
            else:
                outcome.parts.append(part)
        outcome.lost |= reborn

    def _unwritten_part(
        self, rank: int, command: CommandRecord, outcome: CommandOutcome, missing: StepFailedError
    ) -> RankPart:
        """Of a rank whose disk was full: the board says that it followed. Where it took a version over, that is no
        proof of what it holds."""
        record = self._rendezvous.records()[rank]
        has_followed = (record.command, record.ballot, record.phase) == (command.number, Ballot.FINISHED, FOLLOWED)
        if has_followed and (outcome.outcome is Outcome.REJECTED or command.kind == CommandKind.CLEAR):
            return RankPart()
        return RankPart(fence_reason=f"rank {rank} left no word of what it holds: {missing}")

    def _forget(self, number: int) -> None:
        self._unfinished = 0
        self._files.remove_command(number)


def _first_objection(
    records: list[RankRecord],
    command: int,
    wanted: Ballot,
    excused: frozenset[int],
    lost: frozenset[int],
    *,
    since_s: float,
) -> FastDeployRLError | None:
    living = {rank: record for rank, record in enumerate(records) if rank not in excused}
    against = [rank for rank, record in living.items() if is_against(record, command)]
    if not against:
        return None
    for rank in against:
        if reason := records[rank].reason:
            names_itself = reason.startswith((f"rank {rank}:", f"rank {rank},"))
            return from_wire(records[rank].error, reason if names_itself else f"rank {rank}: {reason}")
    # Those saw another one die, or ran out of time themselves while they waited for the others.
    behind = [rank for rank, record in living.items() if record.command != command or record.ballot < wanted]
    if not lost.isdisjoint(behind):
        dead = sorted(lost.intersection(behind))
        return PeerLostError(f"command {command}: ranks {dead} died before they reached {wanted.name}")
    hint = "" if behind else f"ranks {against} did not wait for all"
    return DeadlineExceededError.waiting_for(
        f"vote {wanted.name} of command {command}", since_s=since_s, missing=behind, hint=hint
    )
