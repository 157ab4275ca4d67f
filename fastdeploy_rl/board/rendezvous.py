"""Where the ranks of an engine meet: commands, ballots and decisions that are taken once.

Each command has two decisions, `install` and `commit`. A decision word leaves OPEN exactly once, by compare-and-swap:
rank 0 proposes YES when every rank voted for it, anyone whose deadline ran out proposes NO, and all follow what they
then read. Knows nothing of weights. `BoardRendezvous` meets on the board of one host."""

import enum
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import AGAINST, Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError


class Question(enum.Enum):
    """What is decided; the value says it in messages."""

    INSTALL = "install"
    COMMIT = "commit"


_OFFSETS = {Question.INSTALL: layout.INSTALL_DECISION_OFFSET, Question.COMMIT: layout.COMMIT_DECISION_OFFSET}


class Rendezvous(Protocol):
    """Seam between the ranks of an engine and the place they meet
    at. All deadlines are absolute CLOCK_MONOTONIC nanoseconds."""

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

    def await_votes(self, command: int, wanted: Ballot, deadline_ns: int) -> list[RankRecord]:
        """Blocks until each rank reached `wanted`, or one voted against; returns every rank's record.

        DeadlineExceededError names the ranks that were silent."""
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
        self._own = RankRecord(
            pid=os.getpid(), command=0, ballot=Ballot.NONE, heartbeat_ns=0, phase="", version="", error="", reason=""
        )

    # --- commands ----------------------------------------------------------------------------------

    def announce(self, command: CommandRecord) -> None:
        for offset in _OFFSETS.values():
            self._board.store(offset, layout.decision_word(command.number, Decision.OPEN))
        self._board.write(command, layout.COMMAND_OFFSET)

    def current(self) -> CommandRecord:
        return self._board.read(CommandRecord, layout.COMMAND_OFFSET)

    def await_command(
        self, after: int, deadline_ns: int, *, is_wanted: Callable[[], bool] = lambda: False
    ) -> CommandRecord | None:
        self._board.wait_until(lambda: is_wanted() or self.current().number > after, deadline_ns)
        command = self.current()
        return command if command.number > after else None

    # --- votes -------------------------------------------------------------------------------------

    def vote(self, command: int, ballot: Ballot, *, phase: str = "", error: str = "", reason: str = "") -> None:
        self._publish(command=command, ballot=ballot, phase=phase, error=error, reason=reason)

    def show(self, *, phase: str | None = None, version: str | None = None) -> None:
        """For onlookers: what this rank does now and which version it holds; doubles as its heartbeat."""
        shown = {"phase": phase, "version": version}
        self._publish(**{field: value for field, value in shown.items() if value is not None})

    def _publish(self, **changed: object) -> None:
        with self._publishing:
            self._own = self._own._replace(heartbeat_ns=time.monotonic_ns(), **changed)  # type: ignore[arg-type]
            self._board.write(self._own, layout.rank_offset(self.rank))

    def await_votes(self, command: int, wanted: Ballot, deadline_ns: int) -> list[RankRecord]:
        if not self._board.wait_until(lambda: _is_settled(self._records(), command, wanted), deadline_ns):
            silent = [rank for rank, record in enumerate(self._records()) if not _has_reached(record, command, wanted)]
            raise DeadlineExceededError(
                f"command {command}: ranks {silent} did not reach {wanted.name} before the deadline"
            )
        return self._records()

    def await_ranks(self, is_ready: Callable[[RankRecord], bool], what: str, deadline_ns: int) -> None:
        """Blocks until `is_ready` holds for every rank's record.
        DeadlineExceededError names `what` and the missing ranks."""
        if not self._board.wait_until(lambda: all(map(is_ready, self._records())), deadline_ns):
            missing = [rank for rank, record in enumerate(self._records()) if not is_ready(record)]
            raise DeadlineExceededError(
                f"{what}: ranks {missing} were missing when the deadline passed; see their logs"
            )

    def _records(self) -> list[RankRecord]:
        return [self._board.read_rank(rank) for rank in range(self.num_ranks)]

    # --- decisions ---------------------------------------------------------------------------------

    def decide_once(self, question: Question, command: int, proposal: Decision) -> Decision:
        self._board.exchange(
            _OFFSETS[question], layout.decision_word(command, Decision.OPEN), layout.decision_word(command, proposal)
        )
        return self.decided(question, command)

    def decided(self, question: Question, command: int) -> Decision:
        word = self._board.load(_OFFSETS[question])
        if word >> 2 != command:
            raise LifecycleError(f"{question.value} of command {command}: the board is at command {word >> 2} already")
        return Decision(word & 3)

    def await_decision(self, question: Question, command: int, deadline_ns: int) -> Decision:
        if self._board.wait_until(lambda: self.decided(question, command) is not Decision.OPEN, deadline_ns):
            return self.decided(question, command)
        return self.decide_once(question, command, Decision.NO)


def _has_reached(record: RankRecord, command: int, wanted: Ballot) -> bool:
    if record.command != command:
        return False
    return record.ballot == wanted if wanted is Ballot.FINISHED else wanted <= record.ballot < Ballot.FINISHED


def _is_settled(records: list[RankRecord], command: int, wanted: Ballot) -> bool:
    """One rank that is against it, or ended without it, settles every question but who has finished."""
    if wanted is not Ballot.FINISHED and any(is_against(record, command) for record in records):
        return True
    return all(_has_reached(record, command, wanted) for record in records)


def is_against(record: RankRecord, command: int) -> bool:
    """That rank will not go on with the command."""
    return record.command == command and record.ballot in (*AGAINST, Ballot.FINISHED)
