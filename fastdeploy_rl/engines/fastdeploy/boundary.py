"""How ranks whose loop is another program's come to the same command at the same place of it: rank 0 calls over the
board, the others listen; and how they wait for each other on the way.

Owns the CallRecord and the meetings. Refuses to know what a command does, and the loop's other business. Invariant: a
rank that listens runs what it is called to, or learns that it missed it; a meeting that failed leaves nothing behind
for the meetings of later calls.
"""

import time

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import CallRecord
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, LifecycleError, PeerLostError

_LOOK_AT_LEADER_NS = 200_000_000
_RELEASE_ROUND = (1 << 64) - 1
_MAX_REASON_BYTES = 255
_MAX_MEETINGS = 256
"""Between two calls."""


class Boundary:
    """The calls of one engine, at one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._record = CallRecord(0, 0, 0)
        """Rank 0: called last; the others: heard last."""
        self._num_met = 0

    # --- rank 0 ------------------------------------------------------------------------------------

    def call(self, number: int, at_round: int = 0) -> None:
        """To the command `number`: at that round of the loop, or those who listen already."""
        self._write(number, at_round)

    def release(self, last_number: int, failure: FastDeployRLError | None = None) -> None:
        """Back to the loop: `last_number` was the last command that was called to, 0 for none. `failure`: what the
        caller of the engine is told, on every rank."""
        error = "" if failure is None else type(failure).__name__
        self._write(last_number, _RELEASE_ROUND, error, "" if failure is None else str(failure))

    def _write(self, number: int, at_round: int, error: str = "", reason: str = "") -> None:
        cut = reason.encode()[:_MAX_REASON_BYTES].decode("utf-8", "ignore")
        self._take(CallRecord(self._record.sequence + 1, number, at_round, error, cut))
        self._board.write(self._record, layout.CALL_OFFSET)

    def leave(self) -> None:
        """Rank 0 waits no longer for those whom it released."""
        self._board.store(layout.meeting_offset(self._rank), _left(self._record.sequence))

    # --- the others --------------------------------------------------------------------------------

    def number_at(self, at_round: int) -> int:
        """The command that rank 0 called to at this round of the loop; 0 for none. Cheap: asked at every round."""
        if not self._is_called():
            return 0
        record = self._board.read(CallRecord, layout.CALL_OFFSET)
        if record.round != at_round:
            return 0
        self._take(record)
        return record.number

    def skip_stale(self) -> None:
        """For a rank that is about to listen: a release that rank 0 waits no longer for is of a call that this rank
        never came to."""
        if self._is_called():
            record = self._board.read(CallRecord, layout.CALL_OFFSET)
            if self.is_release(record) and self._board.load(layout.meeting_offset(0)) == _left(record.sequence):
                self._take(record)

    def listen(self, deadline_ns: int | None) -> CallRecord:
        """The next call to those who listen. PeerLostError where rank 0 died; DeadlineExceededError."""
        begun = time.monotonic()
        while (record := self._next()) is None:
            now = time.monotonic_ns()
            if deadline_ns is not None and now >= deadline_ns:
                raise DeadlineExceededError.waiting_for("call of rank 0", since_s=begun, missing=[0])
            look = now + _LOOK_AT_LEADER_NS
            limit = look if deadline_ns is None else min(look, deadline_ns)
            if not self._board.wait_until(self._is_called, limit) and not self._board.is_owner_alive():
                raise PeerLostError("rank 0, which leads every command, is dead: this engine cannot go on")
        return record

    @staticmethod
    def is_release(record: CallRecord) -> bool:
        return record.round == _RELEASE_ROUND

    def _is_called(self) -> bool:
        return self._board.load(layout.CALL_OFFSET) != self._record.sequence  # one writer: it counts its records

    def _next(self) -> CallRecord | None:
        """What was not heard yet, for those who listen: what was for a round of the loop is none of it."""
        if not self._is_called():
            return None
        record = self._board.read(CallRecord, layout.CALL_OFFSET)
        self._take(record)
        return record if record.round == 0 or self.is_release(record) else None

    # --- all of them -------------------------------------------------------------------------------

    def _take(self, record: CallRecord) -> None:
        self._record, self._num_met = record, 0

    def meet(self, within_s: float) -> None:
        """Returns when every rank has come so far in what it was called to. DeadlineExceededError names who has not."""
        if self._board.num_ranks == 1:
            return
        if self._num_met + 2 >= _MAX_MEETINGS:
            raise LifecycleError(f"rank {self._rank}: no command meets {_MAX_MEETINGS} times")
        self._num_met += 1
        meeting = self._record.sequence * _MAX_MEETINGS + self._num_met
        self._board.store(layout.meeting_offset(self._rank), meeting)
        begun, deadline_ns = time.monotonic(), time.monotonic_ns() + int(within_s * 1e9)
        if not self._board.wait_until(lambda: not self._missing(meeting), deadline_ns):
            missing = self._missing(meeting)
            raise DeadlineExceededError.waiting_for("meeting of the ranks", since_s=begun, missing=missing)

    def _missing(self, meeting: int) -> list[int]:
        ranks = range(self._board.num_ranks)
        return [rank for rank in ranks if self._board.load(layout.meeting_offset(rank)) < meeting]


def _left(sequence: int) -> int:
    """What rank 0 shows when it has gone back to the loop after that call."""
    return sequence * _MAX_MEETINGS + _MAX_MEETINGS - 1
