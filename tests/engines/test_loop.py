"""The loop of a rank without a model: what it leaves off when a meeting fails, and when it goes on."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.generation import EngineLoad, GenerationRequest, SamplingOptions
from fastdeploy_rl.engines.embedded.loop import Follower, Leader, StepMessage
from fastdeploy_rl.engines.embedded.messages import (
    Cancel,
    FrameDecoder,
    FromWorker,
    Start,
    Stop,
    ToWorker,
    WorkerSocket,
    encode,
)
from fastdeploy_rl.engines.embedded.page_allocator import PageAllocator
from fastdeploy_rl.engines.embedded.sampler import SampledToken
from fastdeploy_rl.engines.embedded.scheduler import Scheduler, SchedulerLimits, Step
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, PeerLostError

NUM_PAGES = 8
REQUEST = GenerationRequest([1, 2, 3], 4, SamplingOptions(), ignore_eos=True)
ANSWER_S = 20.0


class Peers:
    """Collectives of two ranks whose meetings fail as `failures` say, one after the other."""

    num_ranks = 2
    generation = 1

    def __init__(self, *failures: FastDeployRLError | None) -> None:
        self.failures = list(failures)
        self.met: list[StepMessage] = []

    def broadcast_bytes(self, payload: bytes | None, root: int, *, timeout_s: float) -> bytes:
        self.fail()
        told = payload if payload is not None else msgspec.msgpack.encode(StepMessage(0, None, True))
        self.met.append(msgspec.msgpack.decode(told, type=StepMessage))
        return told

    def fail(self) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure


class Model:
    """Its forward pass is a meeting as well. Every token is 7."""

    def __init__(self, peers: Peers) -> None:
        limits = SchedulerLimits(max_num_seqs=2, max_model_len=32, max_step_tokens=8, vocab_size=9, eos_token_ids=())
        self.scheduler = Scheduler(limits, PageAllocator(NUM_PAGES))
        self._peers = peers

    def execute(self, step: Step) -> None:
        self._peers.fail()

    def accept(self, step: Step, logits: None) -> None:
        self.scheduler.accept(step, lambda item, row: SampledToken(7, None), "1.1")

    @property
    def engine_load(self) -> EngineLoad:
        return self.scheduler.load

    def abort_requests(self, reason: str) -> None:
        self.scheduler.abort_all(reason)


class Manager:
    """Of a rank whose engine starts ranks again, or does not. It is whole, and settled, when it was asked so often."""

    def __init__(
        self,
        wake_fd: int = -1,
        *,
        whole_after: int = 0,
        settled_after: int = 0,
        drained_after: int = 0,
        is_restarted: bool = True,
        commands: Sequence[int] = (),
    ) -> None:
        """Each of `commands` is found by one `poll` (0: none); to run one brings version 1.2."""
        self.wake_fd = wake_fd
        self._commands = list(commands)
        self._drained_after = drained_after
        self.live_version = self.newest_version = "1.1"
        self.condemned: frozenset[int] = frozenset()
        self.num_rejoined = 0
        self._whole_after, self._settled_after = whole_after, settled_after
        self._is_restarted = is_restarted

    def poll(self) -> int:
        return self._commands.pop(0) if self._commands else 0

    def run(self, number: int) -> None:
        self.live_version = self.newest_version = "1.2"

    @property
    def is_draining(self) -> bool:
        self._drained_after -= 1
        return self._drained_after >= 0

    def is_whole(self) -> bool:
        self._whole_after -= 1
        return self._whole_after < 0

    @property
    def is_settling(self) -> bool:
        self._settled_after -= 1
        return self._settled_after >= 0

    @property
    def is_admitting(self) -> bool:
        return self._settled_after < 0

    def condemn(self, silent: DeadlineExceededError) -> None:
        if not self._is_restarted:
            raise silent
        self.condemned |= silent.missing

    def rejoin(self, peers: Peers) -> None:
        self.num_rejoined += 1

    def await_living(self) -> None:
        return None


class Rank0:
    """A leader that was sent a request, over the other end of its socket."""

    def __init__(
        self,
        supervisor: socket.socket,
        connection: WorkerSocket,
        manager: Manager,
        peers: Peers,
        request: GenerationRequest,
    ) -> None:
        self.manager, self.peers, self.model = manager, peers, Model(peers)
        self._supervisor = supervisor
        self._leader = Leader(self.model, manager, peers, connection, deadlines=Deadlines())  # type: ignore[arg-type]
        self.tell(Start("1", request))

    def tell(self, message: ToWorker) -> None:
        self._supervisor.sendall(encode(message))

    def run_until_refused(self) -> list[tuple[int, str]]:
        """Stopped when it has said something of a request, which is returned."""

        def await_said() -> list[tuple[int, str]]:
            try:
                while not (said := self.said()):
                    pass
                return said
            finally:
                self.tell(Stop())

        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(await_said)
            self._leader.run()
            return said.result()

    def run(self, until: str = "1") -> list[Step]:
        """Until the request has ended; the forward passes that were told to the other rank."""
        accept = self.model.accept

        def accept_and_stop(step: Step, logits: None) -> None:
            accept(step, logits)
            if self.model.scheduler.find(until) is None:
                self.tell(Stop())

        self.model.accept = accept_and_stop  # type: ignore[method-assign]
        self._leader.run()
        return [message.step for message in self.peers.met if message.step is not None]

    def said(self) -> list[tuple[int, str]]:
        """Tokens and errors that the supervisor was told."""
        messages = FrameDecoder(FromWorker).feed(self._supervisor.recv(1 << 16))
        return [(token.token_id, token.error) for message in messages for _, token in message.tokens]


@pytest.fixture
def rank_0() -> Iterator[Callable[..., Rank0]]:
    with ExitStack() as stack:
        ends = [*socket.socketpair(), *socket.socketpair()]
        for end in ends:
            stack.callback(end.close)
        supervisor, worker, wake, _ = ends
        supervisor.settimeout(ANSWER_S)

        def make(*failures: FastDeployRLError | None, request: GenerationRequest = REQUEST, **options: Any) -> Rank0:
            manager = Manager(wake.fileno(), **options)
            return Rank0(supervisor, WorkerSocket(worker), manager, Peers(*failures), request)

        yield make


FINE = None
LOST = PeerLostError("a rank was lost")


def silent(*ranks: int) -> DeadlineExceededError:
    error = DeadlineExceededError("no meeting")
    error.missing = frozenset(ranks)
    return error


def test_a_forward_pass_that_failed_is_computed_again_from_the_first_token(rank_0: Callable[..., Rank0]) -> None:
    """Each pass is told in a meeting and computed in another: the second pass fails while it is computed."""
    leader = rank_0(FINE, FINE, FINE, LOST)
    first, second, again, *_ = leader.run()
    assert (first.slices[0].token_ids, first.slices[0].start) == ([1, 2, 3], 0)
    assert (second.slices[0].token_ids, second.slices[0].start) == ([7], 3)
    assert (again.slices[0].token_ids, again.slices[0].start) == ([1, 2, 3, 7], 0)
    assert again.new_pages == again.slices[0].pages
    assert leader.said() == [(7, "")] * 4
    assert leader.manager.num_rejoined == 1
    assert leader.model.scheduler.load.num_free_pages == NUM_PAGES


def test_a_pass_that_could_not_be_told_is_told_again(rank_0: Callable[..., Rank0]) -> None:
    leader = rank_0(LOST, LOST)
    assert [step.slices[0].token_ids for step in leader.run()] == [[1, 2, 3], [7], [7], [7]]
    assert leader.said() == [(7, "")] * 4
    assert leader.manager.num_rejoined == 2


def test_ranks_that_are_silent_in_a_meeting_are_condemned_and_met_again(rank_0: Callable[..., Rank0]) -> None:
    leader = rank_0(FINE, silent(1))
    leader.run()
    assert leader.said() == [(7, "")] * 4
    assert leader.manager.condemned == {1}
    assert leader.manager.num_rejoined == 1


def test_where_nobody_starts_ranks_again_a_silent_one_ends_the_loop(rank_0: Callable[..., Rank0]) -> None:
    leader = rank_0(FINE, silent(1), is_restarted=False)
    with pytest.raises(DeadlineExceededError, match="no meeting"):
        leader.run()
    assert leader.manager.num_rejoined == 0


def test_nothing_is_computed_while_ranks_hold_different_weights(rank_0: Callable[..., Rank0]) -> None:
    """The others hear of rank 0 all the same."""
    leader = rank_0(whole_after=3)
    leader.run()
    assert [message.step is None for message in leader.peers.met[:4]] == [True, True, True, False]
    assert leader.said() == [(7, "")] * 4


def test_a_request_to_an_engine_that_takes_over_is_not_refused_before_that_is_settled(
    rank_0: Callable[..., Rank0],
) -> None:
    leader = rank_0(settled_after=2)
    leader.run()
    assert leader.said() == [(7, "")] * 4


def test_a_request_begins_when_a_command_brought_the_version_that_it_waits_for(rank_0: Callable[..., Rank0]) -> None:
    request = msgspec.structs.replace(REQUEST, min_version="1.2", version_wait_s=60.0)
    leader = rank_0(request=request, commands=[7])
    leader.run()
    assert leader.said() == [(7, "")] * 4
    assert [message.command for message in leader.peers.met[:2]] == [7, 0]
    assert leader.manager.live_version == "1.2"


def test_a_request_whose_version_does_not_come_is_refused_when_its_time_is_over(rank_0: Callable[..., Rank0]) -> None:
    """Nothing else wakes the loop."""
    leader = rank_0(request=msgspec.structs.replace(REQUEST, min_version="1.2", version_wait_s=0.05))
    reason = "version 1.1 is live, and the request wants 1.2 or newer; waited 0.05 s"
    assert leader.run_until_refused() == [(-1, reason)]
    assert [message.step for message in leader.peers.met if message.step] == []


def test_a_request_that_still_waits_is_told_that_the_engine_stops(rank_0: Callable[..., Rank0]) -> None:
    leader = rank_0(request=msgspec.structs.replace(REQUEST, min_version="1.2", version_wait_s=60.0))
    leader.tell(Stop())
    leader.run()
    assert leader.said() == [(-1, "the engine is stopping")]


def test_a_request_that_was_cancelled_while_it_waited_never_begins(rank_0: Callable[..., Rank0]) -> None:
    request = msgspec.structs.replace(REQUEST, min_version="1.2", version_wait_s=60.0)
    leader = rank_0(request=request, commands=[7])
    leader.tell(Cancel("1"))
    leader.tell(Start("2", REQUEST))
    leader.run(until="2")
    assert [message.step.slices[0].request_id for message in leader.peers.met if message.step] == ["2"] * 4


def test_no_new_request_begins_while_a_command_waits_for_those_that_have(rank_0: Callable[..., Rank0]) -> None:
    leader = rank_0(drained_after=3)
    leader.run()
    assert [message.step is None for message in leader.peers.met[:4]] == [True, True, True, False]
    assert leader.said() == [(7, "")] * 4


def test_the_other_ranks_leave_off_and_meet_again_too() -> None:
    peers, manager = Peers(LOST, silent(0)), Manager()
    Follower(Model(peers), manager, peers, timeout_s=1.0).run()  # type: ignore[arg-type]
    assert manager.num_rejoined == 2
    assert manager.condemned == {0}
    assert [message.is_last for message in peers.met] == [True]
