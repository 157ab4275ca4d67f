"""The loop of one rank: requests, weight commands and forward passes, one after another.

Owns the order of things. Refuses to know how weights change and what a forward
pass computes. Invariant: every rank executes the same `StepMessage`s in the same
order, and a weight command runs between two forward passes, never beside one.
"""

import logging
import select
from typing import Protocol

import msgspec

from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.generation import EngineLoad
from fastdeploy_rl.engines.embedded.messages import Cancel, Start, Stop, Tokens, WorkerSocket
from fastdeploy_rl.engines.embedded.runner import EmbeddedRunner
from fastdeploy_rl.engines.embedded.scheduler import Step, TokenOutput, aborted
from fastdeploy_rl.errors import RequestError
from fastdeploy_rl.manager import DynamicWeightManager

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""An idle rank 0 still says something this often, so that the others' wait for it can have a deadline."""


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0 to all: run this weight command (0: none), else this
    forward pass (None: none), and whether to end afterwards."""

    command: int
    step: Step | None
    is_last: bool


class StepChannel(Protocol):
    """How a message gets from rank 0 to the others."""

    def broadcast_bytes(self, payload: bytes | None, root: int, *, timeout_s: float) -> bytes: ...


class Leader:
    """Rank 0: decides what comes next."""

    def __init__(
        self,
        runner: EmbeddedRunner,
        manager: DynamicWeightManager,
        channel: StepChannel | None,
        connection: WorkerSocket,
        *,
        deadlines: Deadlines,
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._channel = channel
        self._connection = connection
        self._deadlines = deadlines
        self._is_stopping = False
        self._refused: list[TokenOutput] = []
        self._told: EngineLoad | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._poller = select.poll()
        for fd in (connection.fileno(), manager.wake_fd):
            self._poller.register(fd, select.POLLIN)

    def run(self) -> None:
        """Until the supervisor says stop. PeerLostError when it is gone, DeadlineExceededError when a rank is."""
        while not self._is_stopping:
            self._take_messages()
            message = self._next_message()
            if message is None:
                continue
            if self._channel is not None:
                self._channel.broadcast_bytes(self._encoder.encode(message), 0, timeout_s=self._deadlines.step_s)
            self._perform(message)
            self._send_tokens()

    def _next_message(self) -> StepMessage | None:
        """What to do now; None where something arrived while there was nothing to do."""
        command = self._manager.poll()
        step = None if command or self._is_stopping else self._runner.scheduler.schedule()
        if command or step is not None or self._is_stopping:
            return StepMessage(command, step, self._is_stopping)
        self._send_tokens()
        has_news = bool(self._poller.poll(HEARTBEAT_S * 1000))
        return None if has_news else StepMessage(0, None, False)

    def _perform(self, message: StepMessage) -> None:
        if message.command:
            self._manager.run(message.command)
        elif message.step is not None:
            self._runner.accept(message.step, self._runner.execute(message.step))

    def _take_messages(self) -> None:
        for message in self._connection.receive():
            if isinstance(message, Start):
                self._submit(message)
            elif isinstance(message, Cancel):
                self._runner.scheduler.abort(message.request_id, "cancelled: nobody reads it any more")
            elif isinstance(message, Stop):
                self._is_stopping = True
                self._runner.abort_requests("the engine is stopping")

    def _submit(self, message: Start) -> None:
        reason = "" if self._manager.is_serving else "the engine does not serve now"
        try:
            if not reason:
                self._runner.scheduler.submit(message.request_id, message.request)
        except RequestError as error:
            reason = str(error)
        if reason:
            self._refused.append(TokenOutput(message.request_id, aborted(reason)))

    def _send_tokens(self) -> None:
        outputs = self._refused + self._runner.scheduler.take_outputs()
        self._refused = []
        load = self._runner.scheduler.load
        if outputs or load != self._told:
            tokens = Tokens([(output.request_id, output.token) for output in outputs], load)
            self._connection.send(tokens, timeout_s=self._deadlines.send_s)
            self._told = load


class Follower:
    """Every other rank: does what rank 0 says."""

    def __init__(
        self, runner: EmbeddedRunner, manager: DynamicWeightManager, channel: StepChannel, *, timeout_s: float
    ) -> None:
        self._runner = runner
        self._manager = manager
        self._channel = channel
        self._timeout_s = timeout_s
        self._decoder = msgspec.msgpack.Decoder(StepMessage)

    def run(self) -> None:
        """Until rank 0 says that it was the last step. DeadlineExceededError when rank 0 says nothing."""
        while True:
            message = self._decoder.decode(self._channel.broadcast_bytes(None, 0, timeout_s=self._timeout_s))
            if message.command:
                self._manager.run(message.command)
            elif message.step is not None:
                self._runner.execute(message.step)
            if message.is_last:
                return
