"""Where the ranks of an engine meet when they share no memory: on a store of counters and values over the network.

Owns the keys, what stands in them, and how a decision is taken with an atomic addition alone. Refuses to know whose
store it is: `collectives.paddle.PaddleStore` is one over Paddle's TCPStore. Invariant: a decision is what was proposed
*first*, and nobody follows one before it is written down where all others read it.

The store has no compare-and-swap, no way to remove a key, and no wait with a deadline of ours. So a decision word is
one counter made of four small counts. Who proposes adds one to YES or NO; the sum that comes back tells what was there
before, and so whether this proposal came first or which one did. Whoever learns it that way adds one to WAS_YES or
WAS_NO before acting on it. Everybody else reads it from the word: proposals of one kind alone tell the decision, and
so does any WAS. A word with both kinds of proposals and no WAS says nothing; then at least two ranks stand still, or
are dead, between their two additions, and what they know is known to nobody else: whoever waits ends with an error.

Keys of commands are used in turn, so that the store does not grow with the commands."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.board.rendezvous import Question, Tally
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.errors import DeadlineExceededError, LifecycleError, StepFailedError

_log = logging.getLogger(__name__)

POLL_S = 0.002
"""How often a waiter asks the store whether its bell rang: one small question each time."""
_LOOK_AGAIN_NS = 200_000_000
"""A waiter looks at its condition this often even if no bell rings: a writer may die between value and bell."""
COMMAND_SLOTS = 64
"""The keys of a command are used again after so many commands; by then no rank is still busy with it."""
MAX_VALUE_BYTES = 16_384
"""Longer values are none of ours."""

_COUNT_BITS = 15
"""Of each of the four counts in a decision word; more than all ranks can add up to."""
_YES, _NO, _WAS_YES, _WAS_NO = (1 << _COUNT_BITS * index for index in range(4))
_PROPOSED = {Decision.YES: _YES, Decision.NO: _NO}
_WAS = {Decision.YES: _WAS_YES, Decision.NO: _WAS_NO}
_NO_COMMAND = CommandRecord(0, 0, 0, 0, 0, "")
_NEVER: Callable[[], bool] = lambda: False  # noqa: E731 - as in the Protocol
_T = TypeVar("_T")


class Store(Protocol):
    """What it takes: counters and values of one server that handles one request after the other. Every call ends within
    `Deadlines.store_s`; PeerLostError where the server did not answer, and at every call from then on."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, atomically, and returns the sum. A key that is not there counts as 0; adding 0 reads."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """May return before the server has it; the next answer says that it has. `b"0"` resets a counter."""
        ...

    def get(self, key: str) -> bytes:
        """Only of a key that was set."""
        ...


@dataclass(frozen=True)
class HostClock:
    """CLOCK_MONOTONIC, and whose: two with the same `identity` show the same time."""

    identity: str
    now_ns: Callable[[], int] = time.monotonic_ns

    @classmethod
    def here(cls) -> "HostClock":
        """That of this boot of this machine (and of this time namespace)."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(f"{boot} {os.readlink('/proc/self/ns/time')}")


class StoreRendezvous:
    """One rank's seat at the store, for a `Rendezvous`. `engine` is a name that no other engine at this store has, nor
    had in an earlier life. The store stays the caller's."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        *,
        engine: str,
        clock: HostClock | None = None,
        store_s: float = Deadlines.store_s,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._prefix = f"fastdeploy_rl/{engine}/"
        self._clock = clock or HostClock.here()
        self._store_ns = int(store_s * 1e9)
        self._publishing = threading.Lock()
        self._own = layout.fresh_rank(os.getpid())
        self._announced = _NO_COMMAND
        self._present: set[int] = set()

    # --- commands ----------------------------------------------------------------------------------

    def announce(self, command: CommandRecord) -> None:
        for question in Question:
            self._store.set(self._decision_key(question, command.number), b"0")
        remaining_ns = command.deadline_ns - self._clock.now_ns()
        self._store.set(self._command_key(command.number), _encode((command, remaining_ns, self._clock.identity)))
        self._store.add(self._key("command"), command.number - self._number())
        self._ring()

    def current(self) -> CommandRecord:
        """The command announced last. Its deadline is on this host's clock: the same instant where the command comes
        from this host, else as much time from its arrival here as it had when it was announced."""
        number = self._number()
        if number != self._announced.number:
            self._announced = self._read_command(number)
        return self._announced

    def _number(self) -> int:
        return self._store.add(self._key("command"), 0)

    def _read_command(self, number: int) -> CommandRecord:
        value = self._store.get(self._command_key(number))
        arrived_ns = self._clock.now_ns()
        found = _decode(value, tuple[CommandRecord, int, str])
        if found is None or found[0].number < number:
            raise StepFailedError(f"command {number} cannot be read at the store: rank 0 did not write what is there")
        command, remaining_ns, host = found
        return command if host == self._clock.identity else command._replace(deadline_ns=arrived_ns + remaining_ns)

    def await_command(
        self, after: int, deadline_ns: int, *, is_wanted: Callable[[], bool] = _NEVER
    ) -> CommandRecord | None:
        self._wait_until(lambda: self._number() > after, deadline_ns, is_wanted)
        command = self.current()
        return command if command.number > after else None

    # --- votes -------------------------------------------------------------------------------------

    def vote(self, command: int, ballot: Ballot, *, phase: str = "", error: str = "", reason: str = "") -> None:
        with self._publishing:
            self._own = self._own._replace(command=command, ballot=ballot, phase=phase, error=error, reason=reason)
            # Cut as on a board. Heartbeats do not travel: another host could not read that clock.
            self._store.set(self._rank_key(self.rank), _encode(layout.unpack(RankRecord, layout.pack(self._own))))
            self._store.add(self._key(f"rank.{self.rank}.present"), 1)
            self._ring()

    def await_votes(
        self, command: int, wanted: Ballot, deadline_ns: int, *, excused: frozenset[int] = frozenset()
    ) -> list[RankRecord]:
        begun = time.monotonic()
        tally = Tally(command, wanted, excused)
        is_settled = self._wait_until(lambda: tally.is_settled(self.records(), self.lost_ranks()), deadline_ns)
        records = self.records()
        tally.check(records, self.lost_ranks(), is_settled, since_s=begun)
        return records

    def records(self) -> list[RankRecord]:
        """Every rank's; one that nobody wrote, or that cannot be read, is that of a silent rank."""
        return [self._read_rank(rank) for rank in range(self.num_ranks)]

    def _read_rank(self, rank: int) -> RankRecord:
        if rank not in self._present:
            if not self._store.add(self._key(f"rank.{rank}.present"), 0):
                return layout.UNREADABLE_RANK
            self._present.add(rank)
        return _decode(self._store.get(self._rank_key(rank)), RankRecord) or layout.UNREADABLE_RANK

    # --- the dead ----------------------------------------------------------------------------------

    def lost_ranks(self) -> frozenset[int]:
        return frozenset(rank for rank in range(self.num_ranks) if self._store.add(self._lost_key(rank), 0))

    def mark_lost(self, rank: int) -> None:
        self._store.add(self._lost_key(rank), 1)
        with suppress(LifecycleError):  # another command has begun since: whoever leads it sees the mark
            number = self._number()
            if number:
                for question in Question:
                    self._propose(question, number, Decision.NO)
        self._ring()

    def mark_back(self) -> None:
        self._store.set(self._lost_key(self.rank), b"0")
        self._ring()

    # --- decisions ---------------------------------------------------------------------------------

    def decide_once(self, question: Question, command: int, proposal: Decision) -> Decision:
        """As the Protocol says. DeadlineExceededError where nobody can tell any more which of two came first."""
        decision = self._propose(question, command, proposal)
        return self._await_word(question, command) if decision is Decision.OPEN else decision

    def _propose(self, question: Question, command: int, proposal: Decision) -> Decision:
        """OPEN where YES and NO were proposed before, and nobody has written down yet which came first."""
        word = self._read_word(question, command)
        if word:
            return _outcome(word)
        key = self._decision_key(question, command)
        before = self._store.add(key, _PROPOSED[proposal]) - _PROPOSED[proposal]
        decision = _outcome(before) if before else proposal
        if decision is not Decision.OPEN:
            self._store.add(key, _WAS[decision])
        self._ring()
        return decision

    def decided(self, question: Question, command: int) -> Decision:
        return _outcome(self._read_word(question, command))

    def await_decision(self, question: Question, command: int, deadline_ns: int) -> Decision:
        if self._wait_until(lambda: self.decided(question, command) is not Decision.OPEN, deadline_ns):
            return self.decided(question, command)
        return self.decide_once(question, command, Decision.NO)

    def _await_word(self, question: Question, command: int) -> Decision:
        begun = time.monotonic()
        deadline_ns = self._clock.now_ns() + self._store_ns
        if not self._wait_until(lambda: self.decided(question, command) is not Decision.OPEN, deadline_ns):
            raise DeadlineExceededError.waiting_for(
                f"word which of YES and NO was first, at {question.value} of command {command}",
                since_s=begun,
                hint="the ranks that know are silent; follow neither, and start the engine again",
            )
        return self.decided(question, command)

    def _read_word(self, question: Question, command: int) -> int:
        word = self._store.add(self._decision_key(question, command), 0)
        number = self._number()  # after the word: if it is still this command, so was the word
        if number != command:
            raise LifecycleError(f"{question.value} of command {command}: the store is at command {number} already")
        return word

    # --- keys, and waiting for them ----------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _rank_key(self, rank: int) -> str:
        return self._key(f"rank.{rank}")

    def _lost_key(self, rank: int) -> str:
        return self._key(f"rank.{rank}.lost")

    def _command_key(self, number: int) -> str:
        return self._key(f"command.{number % COMMAND_SLOTS}")

    def _decision_key(self, question: Question, number: int) -> str:
        return self._key(f"{question.value}.{number % COMMAND_SLOTS}")

    def _ring(self) -> None:
        """After everything that somebody may wait for. Its answer says that the store has it all."""
        self._store.add(self._key("bell"), 1)

    def _wait_until(self, is_met: Callable[[], bool], deadline_ns: int, is_wanted: Callable[[], bool] = _NEVER) -> bool:
        while True:
            heard = self._store.add(self._key("bell"), 0)
            if is_wanted() or is_met():
                return True
            now_ns = self._clock.now_ns()
            if now_ns >= deadline_ns:
                return False
            self._listen(heard, min(deadline_ns, now_ns + _LOOK_AGAIN_NS), is_wanted)

    def _listen(self, heard: int, until_ns: int, is_wanted: Callable[[], bool]) -> None:
        while not is_wanted() and self._store.add(self._key("bell"), 0) == heard:
            remaining_s = (until_ns - self._clock.now_ns()) / 1e9
            if remaining_s <= 0:
                return
            time.sleep(min(POLL_S, remaining_s))


def _outcome(word: int) -> Decision:
    """What a decision word says: OPEN where nothing was proposed, or both and nobody wrote down which came first."""
    yes, no, was_yes, was_no = (word // one % (1 << _COUNT_BITS) for one in (_YES, _NO, _WAS_YES, _WAS_NO))
    if was_yes or (yes and not no and not was_no):
        return Decision.YES
    return Decision.NO if was_no or (no and not yes) else Decision.OPEN


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _decode(value: bytes, kind: type[_T]) -> _T | None:
    """None where the bytes are not one."""
    if len(value) <= MAX_VALUE_BYTES:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(value, type=kind)
    _log.warning("event=unreadable_value bytes=%d", len(value))
    return None
