"""Where the ranks of an engine meet: commands, ballots and decisions that are taken once.

Each command has two decisions, `install` and `commit`. A decision word leaves OPEN exactly once, by compare-and-swap:
rank 0 proposes YES when every rank voted for it, anyone whose deadline ran out or who saw a rank die proposes NO, and
all follow what they then read. Knows nothing of weights. `BoardRendezvous` meets on the board of one host."""

import enum
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import AGAINST, Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, PeerLostError


class Question(enum.Enum):
    """What is decided; the value says it in messages."""

    INSTALL = "install"
    COMMIT = "commit"


_OFFSETS = {Question.INSTALL: layout.INSTALL_DECISION_OFFSET, Question.COMMIT: layout.COMMIT_DECISION_OFFSET}


class Rendezvous(Protocol):
    """Seam between the ranks of an engine and the place they meet at. All deadlines are absolute CLOCK_MONOTONIC
    nanoseconds."""

    rank: int
    num_ranks: int

    def announce(self, command: CommandRecord) -> None:
        """Rank 0: makes `command` the current one, with both decisions open."""
        ...

    def current(self) -> CommandRecord:
        """The command announced last; number 0 when there was none."""
        ...

    def await_command(
        self, after: int, deadline_ns: int, *, is_wanted: Callable[[], bool] = lambda: False
    ) -> CommandRecord | None:
        """Blocks until a command with a number above `after` is announced; None when the deadline passed, or
        `is_wanted` turned true, first."""
        ...

    def vote(self, command: int, ballot: Ballot, *, phase: str = "", error: str = "", reason: str = "") -> None:
        """This rank's stand on `command`, with the error's class name and text where it refuses."""
        ...

    def await_votes(
        self, command: int, wanted: Ballot, deadline_ns: int, *, excused: frozenset[int] = frozenset()
    ) -> list[RankRecord]:
        """Blocks until each rank but the `excused` reached `wanted`, or one voted against; returns every rank's record.

        PeerLostError names the ranks that died before they came that far: at once, but where FINISHED is wanted, when
        all others have finished. DeadlineExceededError names the ranks that were silent."""
        ...

    def lost_ranks(self) -> frozenset[int]:
        """Those that died and are not back."""
        ...

    def mark_lost(self, rank: int) -> None:
        """For whoever saw that rank die: decides NO wherever the present command is undecided, and tells who waits."""
        ...

    def mark_back(self) -> None:
        """For a rank that takes the place of a lost one, when it has said where it stands."""
        ...

    def decide_once(self, question: Question, command: int, proposal: Decision) -> Decision:
        """Proposes; returns the one decision that all ranks follow."""
        ...

    def decided(self, question: Question, command: int) -> Decision:
        """The decision now, OPEN when there is none yet."""
        ...

    def await_decision(self, question: Question, command: int, deadline_ns: int) -> Decision:
        """Blocks until decided; proposes NO when the deadline passes first."""
        ...


class BoardRendezvous:
    """One rank's seat at the board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.num_ranks = board.num_ranks
        self._board = board
        self._publishing = threading.Lock()
        self._own = layout.fresh_rank(os.getpid(), board.generation)

    # --- commands ----------------------------------------------------------------------------------

    def announce(self, command: CommandRecord) -> None:
        for offset in _OFFSETS.values():
            self._board.store(offset, layout.decision_word(command.number, Decision.OPEN))
        self._board.write(command, layout.COMMAND_OFFSET)

    def current(self) -> CommandRecord:
        return self._board.read(CommandRecord, layout.COMMAND_OFFSET)

    def last_number(self) -> int:
        """As `current().number`, or that of a command in whose announcement rank 0 died."""
        return max(
            self.current().number, *(layout.command_in(self._board.load(offset)) for offset in _OFFSETS.values())
        )

    def await_command(
        self, after: int, deadline_ns: int, *, is_wanted: Callable[[], bool] = lambda: False
    ) -> CommandRecord | None:
        self._board.wait_until(lambda: is_wanted() or self.current().number > after, deadline_ns)
        command = self.current()
        return command if command.number > after else None

    # --- votes -------------------------------------------------------------------------------------

    def vote(self, command: int, ballot: Ballot, *, phase: str = "", error: str = "", reason: str = "") -> None:
        self._publish(command=command, ballot=ballot, phase=phase, error=error, reason=reason)

    @property
    def own(self) -> RankRecord:
        """What this rank wrote last."""
        return self._own

    def show(self, *, phase: str | None = None, version: str | None = None, reason: str | None = None) -> None:
        """For onlookers: what this rank does now and which version it holds; doubles as its heartbeat."""
        shown = {"phase": phase, "version": version, "reason": reason}
        self._publish(**{field: value for field, value in shown.items() if value is not None})

    def _publish(self, **changed: object) -> None:
        with self._publishing:
            self._own = self._own._replace(heartbeat_ns=time.monotonic_ns(), **changed)  # type: ignore[arg-type]
            self._board.write(self._own, layout.rank_offset(self.rank))

    def await_votes(
        self, command: int, wanted: Ballot, deadline_ns: int, *, excused: frozenset[int] = frozenset()
    ) -> list[RankRecord]:
        begun = time.monotonic()
        tally = Tally(command, wanted, excused)
        records: list[RankRecord] = []
        lost: frozenset[int] = frozenset()

        def is_settled() -> bool:
            nonlocal records, lost
            records, lost = self.records(), self.lost_ranks()
            return tally.is_settled(records, lost)

        # What was seen together is judged together: a rank that comes back meanwhile changes nothing of it.
        is_in_time = self._board.wait_until(is_settled, deadline_ns)
        tally.check(records, lost, is_in_time, since_s=begun)
        return records

    def lost_ranks(self) -> frozenset[int]:
        return self._board.lost_ranks()

    def mark_lost(self, rank: int) -> None:
        self._board.mark_lost(rank)

    def mark_back(self) -> None:
        self._board.mark_back(self.rank)

    def await_ranks(self, is_ready: Callable[[RankRecord], bool], what: str, deadline_ns: int) -> None:
        """Blocks until `is_ready` holds for every rank's record, and none is lost. DeadlineExceededError names `what`
        and the missing ranks."""
        begun = time.monotonic()

        def missing() -> list[int]:
            lost = self.lost_ranks()
            return [rank for rank, record in enumerate(self.records()) if rank in lost or not is_ready(record)]

        if not self._board.wait_until(lambda: not missing(), deadline_ns):
            raise DeadlineExceededError.waiting_for(what, since_s=begun, missing=missing(), hint="see their logs")

    def records(self) -> list[RankRecord]:
        return [self._board.read_rank(rank) for rank in range(self.num_ranks)]

    # --- decisions ---------------------------------------------------------------------------------

    def decide_once(self, question: Question, command: int, proposal: Decision) -> Decision:
        self._board.exchange(
            _OFFSETS[question], layout.decision_word(command, Decision.OPEN), layout.decision_word(command, proposal)
        )
        return self.decided(question, command)

    def decided(self, question: Question, command: int) -> Decision:
        word = self._board.load(_OFFSETS[question])
        if (now := layout.command_in(word)) != command:
            raise LifecycleError(f"{question.value} of command {command}: the board is at command {now} already")
        return layout.decision_in(word)

    def await_decision(self, question: Question, command: int, deadline_ns: int) -> Decision:
        if self._board.wait_until(lambda: self.decided(question, command) is not Decision.OPEN, deadline_ns):
            return self.decided(question, command)
        return self.decide_once(question, command, Decision.NO)


@dataclass(frozen=True)
class Tally:
    """How far the ranks are with `command`. One that is against it, or ended without it, settles every question but who
    has finished; one that died settles it too, but for who has finished, where the others are waited for."""

    command: int
    wanted: Ballot
    excused: frozenset[int]

    def is_settled(self, records: list[RankRecord], lost: frozenset[int]) -> bool:
        missing = self.missing(records)
        if self.wanted is Ballot.FINISHED:
            return lost.issuperset(missing)
        return not missing or not lost.isdisjoint(missing) or self.is_refused(records)

    def check(self, records: list[RankRecord], lost: frozenset[int], is_settled: bool, *, since_s: float) -> None:
        """Raises what `Rendezvous.await_votes` does, after a wait that began at `since_s` of time.monotonic()."""
        missing = frozenset(self.missing(records))
        if not is_settled:
            raise DeadlineExceededError.waiting_for(
                f"vote {self.wanted.name} of command {self.command}", since_s=since_s, missing=missing
            )
        if (dead := sorted(missing & lost)) and not self.is_refused(records):
            raise PeerLostError(f"command {self.command}: ranks {dead} died before they reached {self.wanted.name}")

    def missing(self, records: list[RankRecord]) -> list[int]:
        return [
            rank for rank, record in enumerate(records) if rank not in self.excused and not self._has_reached(record)
        ]

    def is_refused(self, records: list[RankRecord]) -> bool:
        if self.wanted is Ballot.FINISHED:
            return False
        return any(is_against(r, self.command) for rank, r in enumerate(records) if rank not in self.excused)

    def _has_reached(self, record: RankRecord) -> bool:
        if record.command != self.command:
            return False
        is_last = self.wanted is Ballot.FINISHED
        return record.ballot == self.wanted if is_last else self.wanted <= record.ballot < Ballot.FINISHED


def is_against(record: RankRecord, command: int) -> bool:
    """That rank will not go on with the command."""
    return record.command == command and record.ballot in (*AGAINST, Ballot.FINISHED)
