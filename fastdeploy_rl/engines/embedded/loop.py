"""The loop of one rank: requests, weight commands and forward passes, one after another.

Owns the order of things. Refuses to know how weights change and what a forward pass computes. Invariant: every rank
executes the same `StepMessage`s in the same order, and a weight command runs between two forward passes, never beside
one.

Where a rank died, or is silent for too long, the others leave what they are at, meet its successor in a new generation
of the collectives, and begin at the top again: whatever was to be computed is computed once more, when every rank holds
the served version.
"""

import logging
import select
from collections.abc import Sequence

import msgspec

from fastdeploy_rl.collectives.base import Collectives
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.generation import EngineLoad, aborted
from fastdeploy_rl.engines.embedded.admission import AdmissionQueue, Refusal
from fastdeploy_rl.engines.embedded.messages import Cancel, Start, Stop, Tokens, WorkerSocket
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.engines.embedded.scheduler import Step, TokenOutput
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError, RequestError
from fastdeploy_rl.manager import DynamicWeightManager

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""An idle rank 0 still says something this often, so that the others' wait for it can have a deadline."""
_LOOK_AGAIN_S = 0.02
"""Requests that wait for a rank to come back, or for weights, are looked at this often."""
_STOPPING = "the engine is stopping"


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 to all: run this weight command (0: none), else this forward pass (None: none), and whether to end
    afterwards."""

    command: int
    step: Step | None
    is_last: bool


def meet_again(
    manager: DynamicWeightManager, collectives: Collectives, error: PeerLostError | DeadlineExceededError
) -> None:
    """After a meeting that failed because a rank died or was silent: this rank's place among the living and the
    successor. Raises where nobody starts ranks again."""
    if isinstance(error, DeadlineExceededError):
        manager.condemn(error)
    _log.warning("event=left_off reason=%r", str(error))
    manager.rejoin(collectives)
    manager.await_living()
    _log.info("event=rejoined generation=%d", collectives.generation)


class Leader:
    """Rank 0: decides what comes next."""

    def __init__(
        self,
        runner: EmbeddedRunner,
        manager: DynamicWeightManager,
        collectives: Collectives,
        connection: WorkerSocket,
        *,
        deadlines: Deadlines,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._collectives = collectives
        self._connection = connection
        self._deadlines = deadlines
        self._is_stopping = False
        self._admission = AdmissionQueue(manager, runner.scheduler)
        self._refused: list[TokenOutput] = []
        self._told: EngineLoad | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = select.poll()
        for fd in (connection.fileno(), manager.wake_fd):
            self._poller.register(fd, select.POLLIN)

    def run(self) -> None:
        """Until the supervisor says stop. PeerLostError when it is gone. A rank that is lost, or silent for `step_s`,
        is met again; DeadlineExceededError where nobody starts it again."""
        while not self._is_stopping:
            self._take_messages()
            self._let_in()
            message = self._next_message()
            if message is None:
                continue
            try:
                self._carry_out(message)
            except (PeerLostError, DeadlineExceededError) as error:
                self._leave_off(error)
            self._send_tokens()

    def _next_message(self) -> StepMessage | None:
        """What to do now; None where something arrived while there was nothing to do."""
        command = self._manager.poll()
        step = None if command or self._is_stopping else self._next_step()
        if command or step is not None or self._is_stopping:
            return StepMessage(command, step, self._is_stopping)
        self._send_tokens()
        has_news = bool(self._poller.poll(self._idle_s() * 1000))
        return None if has_news else StepMessage(0, None, False)

    def _next_step(self) -> Step | None:
        """None also where a rank is missing, or holds other weights than this one, or none: requests wait then."""
        if not self._manager.is_whole():
            return None
        return self._runner.scheduler.schedule(begins_new=not self._manager.is_draining)

    def _idle_s(self) -> float:
        """How long to wait for news while nothing can be computed."""
        scheduler = self._runner.scheduler
        is_looking_out = self._admission.is_looking_out or scheduler.num_running or scheduler.num_waiting
        expiry_s = self._admission.seconds_to_expiry()
        period_s = _LOOK_AGAIN_S if is_looking_out else HEARTBEAT_S
        return period_s if expiry_s is None else min(period_s, expiry_s)

    def _carry_out(self, message: StepMessage) -> None:
        if self._collectives.num_ranks > 1:
            self._collectives.broadcast_bytes(self._encoder.encode(message), 0, timeout_s=self._deadlines.step_s)
        if message.command:
            self._manager.run(message.command)
        elif message.step is not None:
            self._runner.accept(message.step, self._runner.execute(message.step))

    def _leave_off(self, error: PeerLostError | DeadlineExceededError) -> None:
        """Of a step that did not come to its end nothing is kept: its requests give their pages back and wait."""
        self._runner.scheduler.preempt_all()
        if not self._is_stopping:
            meet_again(self._manager, self._collectives, error)

    def _take_messages(self) -> None:
        for message in self._connection.receive():
            if isinstance(message, Start):
                self._admission.arrive(message)
            elif isinstance(message, Cancel):
                self._cancel(message.request_id)
            elif isinstance(message, Stop):
                self._is_stopping = True
        if self._is_stopping:
            self._runner.abort_requests(_STOPPING)
            self._refuse(self._admission.refuse_all(_STOPPING))

    def _let_in(self) -> None:
        admitted, refused = self._admission.look()
        self._refuse(refused)
        for start in admitted:
            try:
                self._runner.scheduler.submit(start.request_id, start.request)
            except RequestError as error:
                self._refuse([Refusal(start.request_id, str(error))])

    def _refuse(self, refused: Sequence[Refusal]) -> None:
        self._refused += [TokenOutput(request_id, aborted(reason)) for request_id, reason in refused]

    def _cancel(self, request_id: str) -> None:
        if not self._admission.cancel(request_id):
            self._runner.scheduler.abort(request_id, "cancelled: nobody reads it any more")

    def _send_tokens(self) -> None:
        outputs = self._refused + self._runner.scheduler.take_outputs()
        self._refused = []
        load = self._runner.engine_load
        load = msgspec.structs.replace(load, num_waiting=load.num_waiting + self._admission.num_waiting)
        if outputs or load != self._told:
            tokens = Tokens([(output.request_id, output.token) for output in outputs], load)
            self._connection.send(tokens, timeout_s=self._deadlines.send_s)
            self._told = load


class Follower:
    """Every other rank: does what rank 0 says."""

    def __init__(
        self, runner: EmbeddedRunner, manager: DynamicWeightManager, collectives: Collectives, *, timeout_s: float
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._collectives = collectives
        self._timeout_s = timeout_s
        self._decoder = msgspec.msgpack.Decoder(StepMessage)

    def run(self) -> None:
        """Until rank 0 says that it was the last step. A rank that is lost, or silent for so long that it counts as
        lost, is met again; DeadlineExceededError where nobody starts it again."""
        is_last = False
        while not is_last:
            try:
                is_last = self._follow()
            except (PeerLostError, DeadlineExceededError) as error:
                meet_again(self._manager, self._collectives, error)

    def _follow(self) -> bool:
        message = self._decoder.decode(self._collectives.broadcast_bytes(None, 0, timeout_s=self._timeout_s))
        if message.command:
            self._manager.run(message.command)
        elif message.step is not None:
            self._runner.execute(message.step)
        return message.is_last
