"""The rendezvous on a store of counters: the common suite over a store in memory and over Paddle's TCPStore, and every
way in which three ranks can race for a decision, or stop on the way to it."""

import itertools
import random
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
from rendezvous_suite import RendezvousSuite, at_once, command, in_s, soon

from fastdeploy_rl.board.layout import Ballot, Decision, RankRecord
from fastdeploy_rl.board.rendezvous import Question
from fastdeploy_rl.board.store_rendezvous import COMMAND_SLOTS, MAX_VALUE_BYTES, HostClock, Store, StoreRendezvous
from fastdeploy_rl.collectives.paddle import PaddleStore
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, PeerLostError, StepFailedError

YES, NO, OPEN = Decision.YES, Decision.NO, Decision.OPEN


class MemoryStore:
    """As Paddle's server behaves, in this process. Asking for a key that was never set would hang there: an error."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._handling = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._handling:
            total = int(self.values.get(key, b"0")) + amount
            assert -(2**63) <= total < 2**63
            self.values[key] = b"%d" % total
            return total

    def set(self, key: str, value: bytes) -> None:
        with self._handling:
            self.values[key] = value

    def get(self, key: str) -> bytes:
        with self._handling:
            return self.values[key]


def seats_at(stores: Sequence[Store], store_s: float = 5.0) -> list[StoreRendezvous]:
    engine = secrets.token_hex(4)
    return [StoreRendezvous(store, rank, 3, engine=engine, store_s=store_s) for rank, store in enumerate(stores)]


class TestOverMemory(RendezvousSuite):
    @pytest.fixture
    def seats(self) -> list[StoreRendezvous]:
        return seats_at([MemoryStore()] * 3)


def free_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def paddle_stores() -> Iterator[list[PaddleStore]]:
    """A server and three clients, as ranks have."""
    with ExitStack() as stack:
        port = free_tcp_port()
        stack.enter_context(PaddleStore.serve("127.0.0.1", port))
        yield [stack.enter_context(PaddleStore.connect("127.0.0.1", port)) for _ in range(3)]


class TestOverPaddle(RendezvousSuite):
    @pytest.fixture
    def seats(self, paddle_stores: list[PaddleStore]) -> list[StoreRendezvous]:
        return seats_at(paddle_stores)


# --- a decision, in every order -----------------------------------------------------------------------


class Stopped(BaseException):
    """The rank stands still for good; nothing may catch it."""


class ScheduledStore:
    """A store at which ranks take turns as a schedule says: each request waits for its rank to be called. A rank whose
    number of requests is up stops before the next."""

    def __init__(self, store: MemoryStore, schedule: Sequence[int], limits: Sequence[int]) -> None:
        self._store = store
        self._schedule = list(schedule)
        self._left = list(limits)
        self._turning = threading.Condition()
        self._gone: set[int] = set()

    def seat(self, rank: int) -> "_Turn":
        return _Turn(self, rank)

    def request(self, rank: int, act: Callable[[MemoryStore], int]) -> int:
        with self._turning:
            if not self._left[rank]:
                raise Stopped
            self._left[rank] -= 1
            assert self._turning.wait_for(lambda: self._next() in (rank, None), 30)
            if self._schedule:
                self._schedule.pop(0)
            self._turning.notify_all()
            return act(self._store)

    def leave(self, rank: int) -> None:
        with self._turning:
            self._gone.add(rank)
            self._turning.notify_all()

    def _next(self) -> int | None:
        """Whose turn it is; None when the schedule is over."""
        while self._schedule and self._schedule[0] in self._gone:
            self._schedule.pop(0)
        return self._schedule[0] if self._schedule else None


class _Turn:
    def __init__(self, shared: ScheduledStore, rank: int) -> None:
        self._shared = shared
        self._rank = rank

    def add(self, key: str, amount: int) -> int:
        return self._shared.request(self._rank, lambda store: store.add(key, amount))

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError("nobody decides by overwriting")

    def get(self, key: str) -> bytes:
        raise AssertionError("a decision is in its word")


ENOUGH = 10_000


def race(
    proposals: Sequence[Decision], schedule: Sequence[int], limits: Sequence[int], store_s: float = 5.0
) -> list[Decision | type[BaseException]]:
    """What each rank that proposes gets; the error where it gets none."""
    store = MemoryStore()
    StoreRendezvous(store, 0, 3, engine="e").announce(command(1))
    shared = ScheduledStore(store, schedule, limits)

    def propose(rank: int) -> Decision | type[BaseException]:
        seat = StoreRendezvous(shared.seat(rank), rank, 3, engine="e", store_s=store_s)
        try:
            return seat.decide_once(Question.COMMIT, 1, proposals[rank])
        except (Stopped, DeadlineExceededError) as error:
            return type(error)
        finally:
            shared.leave(rank)

    with ThreadPoolExecutor(len(proposals)) as pool:
        return list(pool.map(propose, range(len(proposals))))


REQUESTS = 5
"""Of a rank that proposes: the word, the command's number, its proposal, what it learnt, the bell."""


@pytest.mark.parametrize("proposals", [(YES, NO), (NO, YES), (YES, YES)])
def test_two_ranks_agree_in_every_order_of_their_requests(proposals: tuple[Decision, ...]) -> None:
    for first in itertools.combinations(range(2 * REQUESTS), REQUESTS):
        schedule = [0 if turn in first else 1 for turn in range(2 * REQUESTS)]
        answers = race(proposals, schedule, [ENOUGH] * 2)
        assert answers in ([YES, YES], [NO, NO]), schedule
        assert answers[0] in proposals


def test_three_ranks_agree_in_whatever_order_and_with_whichever_of_them_stopped() -> None:
    """One stops at a random request, two go on, in a random order; what the stopped one learnt is what they follow."""
    chance = random.Random(4)
    seen = set()
    for _ in range(600):
        proposals = [chance.choice((YES, NO)) for _ in range(3)]
        schedule = [rank for rank in range(3) for _ in range(REQUESTS)]
        chance.shuffle(schedule)
        limits = [ENOUGH] * 3
        limits[victim := chance.randrange(3)] = chance.choice((*range(REQUESTS + 1), ENOUGH))
        answers = race(proposals, schedule, limits)
        agreed = {answer for rank, answer in enumerate(answers) if rank != victim}
        assert len(agreed) == 1, (proposals, schedule, limits, answers)
        assert agreed < {YES, NO}
        assert answers[victim] in (Stopped, *agreed)
        seen.add((answers[victim], *agreed))
    assert seen == {(Stopped, YES), (Stopped, NO), (YES, YES), (NO, NO)}


def test_what_only_the_dead_knew_is_an_error_and_no_guess() -> None:
    """Two ranks stop between their two additions, after one proposed YES and the other NO: the third may not choose."""
    schedule = [0, 0, 1, 1, 0, 1]
    assert race((YES, NO, NO), schedule, [3, 3, ENOUGH], store_s=0.02) == [Stopped, Stopped, DeadlineExceededError]
    assert race((YES, NO, NO), schedule, [4, 3, ENOUGH]) == [Stopped, Stopped, YES]


# --- what only this one has ---------------------------------------------------------------------------


def test_the_store_does_not_grow_with_the_commands() -> None:
    """Keys are used in turn; what was decided by their former commands is forgotten."""
    store = MemoryStore()
    seats = seats_at([store] * 3)
    sizes = []
    for number in range(1, 10_001):
        seats[0].announce(command(number))
        for seat in seats:
            seat.vote(number, Ballot.STAGED)
        proposal = chosen_at(number)
        assert seats[2].decided(Question.INSTALL, number) is OPEN
        assert [seat.decide_once(Question.INSTALL, number, proposal) for seat in seats] == [proposal] * 3
        if number in (COMMAND_SLOTS, 10_000):
            sizes.append((len(store.values), max(map(len, store.values.values())) < 512))
    assert sizes[0] == sizes[1] == (len(store.values), True)


def chosen_at(number: int) -> Decision:
    """Another one than at the command whose keys this one takes over."""
    return YES if number // COMMAND_SLOTS % 2 else NO


def test_a_later_proposal_leaves_no_trace() -> None:
    store = MemoryStore()
    seats = seats_at([store] * 3)
    seats[0].announce(command(1))
    seats[0].decide_once(Question.COMMIT, 1, YES)
    before = dict(store.values)
    assert seats[1].decide_once(Question.COMMIT, 1, NO) is YES
    assert store.values == before


def test_a_deadline_arrives_as_remaining_time_on_a_host_with_another_clock() -> None:
    """One hour ahead, one behind; and the same instant where the clock is the same."""
    store = MemoryStore()
    times = {"a": 5_000, "b": 3_600_000_005_000, "c": 17}
    rank0, rank1, neighbour, rank2 = (
        StoreRendezvous(store, rank, 3, engine="e", clock=HostClock(host, lambda host=host: times[host]))
        for rank, host in ((0, "a"), (1, "b"), (1, "a"), (2, "c"))
    )
    announced = command(1)._replace(deadline_ns=5_000 + 700)
    rank0.announce(announced)
    times["a"] += 50
    assert neighbour.current() == announced
    assert rank1.current() == announced._replace(deadline_ns=3_600_000_005_700)
    assert rank2.current() == announced._replace(deadline_ns=717)
    times["b"] += 300
    assert rank1.current().deadline_ns == 3_600_000_005_700  # asking again moves no deadline


def test_this_host_has_one_clock() -> None:
    assert HostClock.here() == HostClock.here()


OVERSIZED = RankRecord(1, 1, 1, Ballot.STAGED, 0, "", "", "", "x" * MAX_VALUE_BYTES)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode(OVERSIZED)])
def test_a_vote_that_cannot_be_read_is_silence(garbage: bytes) -> None:
    store = MemoryStore()
    seats = seats_at([store] * 3)
    for seat in seats:
        seat.vote(1, Ballot.STAGED)
    (key,) = (key for key in store.values if key.endswith("rank.1"))
    vote, store.values[key] = store.values[key], garbage
    with pytest.raises(DeadlineExceededError, match=r"ranks \[1\]"):
        seats[0].await_votes(1, Ballot.STAGED, at_once())
    store.values[key] = vote
    assert len(seats[0].await_votes(1, Ballot.STAGED, at_once())) == 3


def test_a_command_that_cannot_be_read_is_an_error_and_not_another_command() -> None:
    store = MemoryStore()
    seats = seats_at([store] * 3)
    seats[0].announce(command(1))
    (key,) = (key for key in store.values if key.endswith("command.1"))
    written, store.values[key] = store.values[key], b"\x93\x01\x02\x03"
    with pytest.raises(StepFailedError, match="command 1 cannot be read"):
        seats[1].await_command(0, soon())
    store.values[key] = written
    assert seats[1].await_command(0, soon()) == command(1)


def test_text_is_cut_as_on_a_board() -> None:
    seats = seats_at([MemoryStore()] * 3)
    seats[1].vote(1, Ballot.REFUSED, phase="p" * 100, error="E" * 100, reason="é" * 5000)
    record = seats[0].records()[1]
    assert (record.phase, record.error, record.reason) == ("p" * 16, "E" * 64, "é" * 1024)


# --- Paddle's store -----------------------------------------------------------------------------------


def test_any_bytes_come_back_from_paddles_store(paddle_stores: list[PaddleStore]) -> None:
    value = bytes(range(256)) * 8
    paddle_stores[0].set("bytes", value)
    assert paddle_stores[0].add("none", 0) == 0  # the server has what was sent before
    assert [store.get("bytes") for store in paddle_stores] == [value] * 3


def test_threads_share_a_client(paddle_stores: list[PaddleStore]) -> None:
    store = paddle_stores[0]
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda _: store.add("threads", 1), range(800)))
    assert sorted(sums) == list(range(1, 801))


@pytest.mark.parametrize("sent", [b"\0\0", b"\0\0\0\0" + b"\xff" * 8, b"\xff" * 64], ids=["half", "huge", "garbage"])
def test_a_client_that_stops_inside_a_request_keeps_nobody(paddle_stores: list[PaddleStore], sent: bytes) -> None:
    """So does one that speaks nonsense."""
    host, port = paddle_stores[0].address.split(":")
    before = paddle_stores[1].add("others", 0)
    with socket.create_connection((host, int(port)), timeout=5) as stranger:
        stranger.sendall(sent)
        assert [store.add("others", 1) for store in paddle_stores] == [before + 1, before + 2, before + 3]


def test_an_answer_that_does_not_come_in_time_ends_the_client(paddle_stores: list[PaddleStore]) -> None:
    """A late answer must never be taken for that to the next question. Others go on."""
    host, port = paddle_stores[0].address.split(":")
    with PaddleStore.connect(host, int(port), store_s=0.1) as store:
        with pytest.raises(PeerLostError, match=r"did not answer within 0\.1 s"):
            store.get("never set")
        paddle_stores[0].set("never set", b"late")
        with pytest.raises(PeerLostError, match="start the engine again"):
            store.add("counter", 1)
    assert paddle_stores[0].add("counter", 0) == 0


def test_a_closed_store_says_so() -> None:
    with PaddleStore.serve("127.0.0.1", free_tcp_port()) as store:
        store.add("a", 1)
    with pytest.raises(PeerLostError, match="was closed here"):
        store.add("a", 1)


def test_ranks_hear_that_the_server_is_gone() -> None:
    port = free_tcp_port()
    server = PaddleStore.serve("127.0.0.1", port)
    with PaddleStore.connect("127.0.0.1", port) as store:
        seat = StoreRendezvous(store, 1, 3, engine="e")
        server.close()
        with pytest.raises(PeerLostError, match=f"127.0.0.1:{port} did not answer"):
            seat.await_command(0, soon())


def test_a_taken_port_is_refused_before_paddle_ends_the_process(paddle_stores: list[PaddleStore]) -> None:
    port = int(paddle_stores[0].address.split(":")[1])
    with pytest.raises(ConfigurationError, match=f"port {port} cannot be served"):
        PaddleStore.serve("127.0.0.1", port)
    assert paddle_stores[0].add("after", 1) == 1


def test_nobody_waits_longer_than_asked_for_a_server() -> None:
    port = free_tcp_port()
    with pytest.raises(DeadlineExceededError, match=f"no store at 127.0.0.1:{port} after"):
        PaddleStore.connect("127.0.0.1", port, within_s=0.1)


def test_a_decision_that_nobody_takes_ends_at_the_deadline() -> None:
    seats = seats_at([MemoryStore()] * 3)
    seats[0].announce(command(1))
    assert seats[1].await_decision(Question.COMMIT, 1, in_s(0.05)) is NO
    assert seats[1].decided(Question.INSTALL, 1) is OPEN
