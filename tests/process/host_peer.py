"""One host of an engine that spans two: `python host_peer.py PORT CLOCK AHEAD_NS RANK...`. Obeys JSON lines.

It stands in for that host's supervisor: starts its ranks (as forks, since importing Paddle takes seconds), sees them
die, and marks them lost. Hosts share nothing but the store at PORT; CLOCK names this one's clock, which is AHEAD_NS
ahead of what the kernel says.

    {"do": "serve"}    starts a process that serves the store                       -> {"server": pid}
    {"do": "meet"}     connects to the store, once                                  -> {"met": true}
    {"do": "command", "number": 7, "deadline_s": 0.3, "plot": "orderly" | "race", "victim": rank, "point": "...",
     "kind": "kill" | "stop"}
                       its ranks carry the command out. Each says what it follows    -> {"rank": 0, "install": "YES"}
                       and, where it cannot tell,                                    -> {"rank": 0, "error": "..."}
                       and when all have ended, or stand still                       -> {"over": 7, "stopped": [ranks]}
                       one of them has come to its point                            -> {"standing": rank}
    {"do": "resume"}   the one that stands still goes on, to its end                 -> {"resumed": true}
    {"do": "end"}      the same, by SIGKILL                                         -> {"ended": true}
    {"do": "back"}     its ranks are no longer marked lost                           -> {"back": true}

Orderly, rank 0 proposes what the votes say and the others follow; in a race, all propose at once, rank 0 YES and the
others NO. The points of a rank: `install.called`, `install.voted`, `install.proposed` (right behind the addition that
proposes), `install.decided`, and the same of `commit`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import paddle.base.core  # noqa: F401 - before the forks

from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision
from fastdeploy_rl.board.rendezvous import Question
from fastdeploy_rl.board.store_rendezvous import HostClock, Store, StoreRendezvous
from fastdeploy_rl.collectives.paddle import PaddleStore
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, PeerLostError

NUM_RANKS = 3
STORE_S = 0.5
BALLOTS = {Question.INSTALL: Ballot.STAGED, Question.COMMIT: Ballot.VERIFIED}
LIFE_S = 30
"""A rank that hangs is ended by an alarm."""

PORT = int(sys.argv[1])
CLOCK = HostClock(sys.argv[2], lambda ahead_ns=int(sys.argv[3]): time.monotonic_ns() + ahead_ns)
RANKS = [int(text) for text in sys.argv[4:]]


def say(**line: object) -> None:
    os.write(1, (json.dumps(line) + "\n").encode())  # in one piece: others write there too


def connect() -> PaddleStore:
    return PaddleStore.connect("127.0.0.1", PORT, within_s=20, store_s=STORE_S)


def seat_at(store: Store, rank: int) -> StoreRendezvous:
    return StoreRendezvous(store, rank, NUM_RANKS, engine="e", clock=CLOCK, store_s=STORE_S)


class WatchedStore:
    """Tells when a decision word was added to: the first time is this rank's proposal."""

    def __init__(self, store: Store, reach: Callable[[str], None]) -> None:
        self._store = store
        self._reach = reach
        self.set = store.set
        self.get = store.get

    def add(self, key: str, amount: int) -> int:
        total = self._store.add(key, amount)
        name = key.split("/")[-1].split(".")[0]
        if amount and name in ("install", "commit"):
            self._reach(f"{name}.proposed")
        return total


def carry_out(rank: int, order: dict[str, Any]) -> None:
    reached = set()

    def reach(point: str) -> None:
        is_first = point not in reached
        reached.add(point)
        if is_first and (rank, point) == (order.get("victim"), order.get("point")):
            os.kill(os.getpid(), signal.SIGKILL if order["kind"] == "kill" else signal.SIGSTOP)

    seat = seat_at(WatchedStore(connect(), reach), rank)
    number = order["number"]
    if rank == 0:
        deadline_ns = CLOCK.now_ns() + int(order["deadline_s"] * 1e9)
        seat.announce(CommandRecord(number, 1, 1, number, deadline_ns, ""))
    command = seat.await_command(number - 1, CLOCK.now_ns() + 20 * 10**9)
    for question, ballot in BALLOTS.items():
        reach(f"{question.value}.called")
        seat.vote(number, ballot)
        reach(f"{question.value}.voted")
        decision = (_race if order["plot"] == "race" else _decide)(seat, question, command)
        say(rank=rank, **{question.value: decision.name})
        reach(f"{question.value}.decided")
        if decision is Decision.NO:
            break
    seat.vote(number, Ballot.FINISHED)


def _decide(seat: StoreRendezvous, question: Question, command: CommandRecord) -> Decision:
    if seat.rank:
        return seat.await_decision(question, command.number, command.deadline_ns)
    return seat.decide_once(question, command.number, _counted(seat, question, command))


def _race(seat: StoreRendezvous, question: Question, command: CommandRecord) -> Decision:
    proposal = _counted(seat, question, command)
    return seat.decide_once(question, command.number, Decision.NO if seat.rank else proposal)


def _counted(seat: StoreRendezvous, question: Question, command: CommandRecord) -> Decision:
    try:
        seat.await_votes(command.number, BALLOTS[question], command.deadline_ns)
    except (PeerLostError, DeadlineExceededError):
        return Decision.NO
    return Decision.YES


def fork(act: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    signal.alarm(LIFE_S)
    try:
        act()
        os._exit(0)
    finally:
        os._exit(1)


def rank_process(rank: int, order: dict[str, Any]) -> None:
    try:
        carry_out(rank, order)
    except FastDeployRLError as error:
        say(rank=rank, error=type(error).__name__)


def serve() -> None:
    with PaddleStore.serve("127.0.0.1", PORT):
        signal.alarm(0)
        say(server=os.getpid())
        signal.pause()


class Host:
    def __init__(self) -> None:
        self._server: int | None = None
        self._stopped: dict[int, int] = {}

    def serve(self, order: dict[str, Any]) -> None:
        self._server = fork(serve)

    def meet(self, order: dict[str, Any]) -> None:
        self._store = connect()
        say(met=True)

    def command(self, order: dict[str, Any]) -> None:
        running = {fork(lambda rank=rank: rank_process(rank, order)): rank for rank in RANKS}
        while running:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            rank = running.pop(pid, None)
            if pid == self._server:
                self._server = pid if os.WIFSTOPPED(status) else None
            elif rank is not None and os.WIFSTOPPED(status):
                self._stopped[pid] = rank
                say(standing=rank)
            elif rank is not None and status:
                seat_at(self._store, rank).mark_lost(rank)
        say(over=order["number"], stopped=list(self._stopped.values()))

    def resume(self, order: dict[str, Any]) -> None:
        self._end_stopped(signal.SIGCONT)
        say(resumed=True)

    def end(self, order: dict[str, Any]) -> None:
        self._end_stopped(signal.SIGKILL)
        say(ended=True)

    def back(self, order: dict[str, Any]) -> None:
        for rank in RANKS:
            seat_at(self._store, rank).mark_back()
        say(back=True)

    def close(self) -> None:
        self._end_stopped(signal.SIGKILL)
        if self._server is not None:
            os.kill(self._server, signal.SIGKILL)

    def _end_stopped(self, number: signal.Signals) -> None:
        for pid in self._stopped:
            os.kill(pid, number)
            os.waitpid(pid, 0)
        self._stopped.clear()


def main() -> None:
    host = Host()
    try:
        for line in sys.stdin:
            order = json.loads(line)
            getattr(host, order["do"])(order)
    finally:
        host.close()


if __name__ == "__main__":
    main()
