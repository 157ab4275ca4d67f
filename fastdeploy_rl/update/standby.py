"""Rank 0 leads the engine into and out of pauses and sleep: admission first, then every rank, then what is shown.

Owns what closes admission and what opens it again. Refuses to know what a rank does (standby_commands.py) and where
weights come from: what was dropped is brought by an update. Invariant: admission is closed before a rank is asked for
anything, and a command that comes to nothing leaves it as it was.
"""

import time

from fastdeploy_rl.board.rendezvous import BoardRendezvous
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import KEEP, OFFLOAD_LEVEL, WAIT
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError, LifecycleError
from fastdeploy_rl.lifecycle import Residency, Tag
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.update.chronicle import Chronicle
from fastdeploy_rl.update.conductor import CommandOutcome, Conductor
from fastdeploy_rl.update.engine_state import EngineState
from fastdeploy_rl.update.requests import CommandRequest


class Standby:
    """Used by the coordinator's thread. `quiet_s`: how much longer than requests in flight may take, where they are
    waited for, ranks may take to stop."""

    def __init__(
        self,
        state: EngineState,
        conductor: Conductor,
        chronicle: Chronicle,
        rendezvous: BoardRendezvous,
        *,
        quiet_s: float,
    ) -> None:
        self._state = state
        self._conductor = conductor
        self._chronicle = chronicle
        self._rendezvous = rendezvous
        self._quiet_ns = int(quiet_s * 1e9)

    def deadline_ns(self, request: CommandRequest) -> int:
        """Of the command that carries it out: where requests in flight are waited for, these have the time that was
        asked for."""
        return request.deadline_ns + (self._quiet_ns if request.options.in_flight == WAIT else 0)

    def pause(self, request: CommandRequest) -> CommandOutcome:
        """An engine that does not serve anyway is quiet; what it kept of requests may be left to end all the same."""
        outcome = CommandOutcome(Outcome.DONE)
        may_hold_requests = not self._state.is_fenced and request.options.in_flight != KEEP
        if self._state.is_serving or may_hold_requests:
            outcome = self.lead_closed(request, request.options)
        if outcome.outcome is Outcome.DONE:
            self._state.hold()
            request.commit()
        outcome.version = self._state.live_version
        return outcome

    def resume(self, request: CommandRequest) -> CommandOutcome:
        """LifecycleError where something else than a pause keeps requests out."""
        state = self._state
        if state.is_fenced:
            raise LifecycleError("a fenced engine cannot be resumed: no complete version is live; update it")
        away = [tag.value for tag in Tag if state.lifecycle.residency(tag) is not Residency.RESIDENT]
        if away:
            how = "wake it" if state.asleep else "update it"
            raise LifecycleError(f"an engine without {', '.join(away)} cannot be resumed: {how} first")
        if time.monotonic_ns() >= request.deadline_ns:
            raise DeadlineExceededError("the deadline passed while another command was carried out; nothing changed")
        state.let_go()
        request.commit()
        return CommandOutcome(Outcome.DONE, version=state.live_version)

    def sleep(self, request: CommandRequest) -> CommandOutcome:
        tags, level = request.options.tags or frozenset(Tag), request.options.level or OFFLOAD_LEVEL
        options = request.options._replace(tags=tags, level=level)
        outcome = self.lead_closed(request, options)
        if outcome.outcome is Outcome.DONE:
            self._state.sleep(tags, level, self._conductor.number)
            if not self._state.source:
                self._chronicle.forget_receipt()
        outcome.version = self._state.live_version
        return outcome

    def wake(self, request: CommandRequest) -> CommandOutcome:
        """Of what the ranks can bring themselves."""
        state = self._state
        if state.is_fenced:
            raise LifecycleError("a fenced engine cannot be woken: no complete version is live; update it")
        woken = request.options.tags or frozenset(Tag)
        brought = frozenset(tag for tag in self._due(woken) if state.lifecycle.residency(tag) is not Residency.RESIDENT)
        outcome = CommandOutcome(Outcome.DONE)
        if brought:
            request.begin(self._conductor.number + 1)
            options = request.options._replace(tags=brought, woken=woken, ends_pause=True)
            outcome = self._conductor.lead(CommandKind.WAKE, deadline_ns=request.deadline_ns, options=options)
        if outcome.outcome is Outcome.DONE:
            state.wake(woken, brought, self._conductor.number)
            request.commit()
        outcome.version = state.live_version
        return outcome

    def _due(self, woken: frozenset[Tag]) -> frozenset[Tag]:
        """What is awake when these are. What was cleared, and sleeps not, is for an update to bring, with all that goes
        along."""
        if self._state.lifecycle.weight is not Residency.DROPPED:
            return self._state.due(woken)
        return frozenset() if Tag.WEIGHT not in self._state.asleep else self._state.due(woken) - {Tag.GRAPH}

    def lead_closed(self, request: CommandRequest, options: CommandOptions) -> CommandOutcome:
        """The command, after admission was closed; opened again where it came to nothing."""
        was_serving = self._state.is_serving
        self._state.pause()
        self._state.drain(was_serving and options.in_flight == WAIT)
        request.begin(self._conductor.number + 1)
        try:
            outcome = self._conductor.lead(request.kind, deadline_ns=self.deadline_ns(request), options=options)
        except FastDeployRLError as error:
            outcome = CommandOutcome(Outcome.REJECTED, error)
        finally:
            self._state.drain(False)
        if outcome.outcome is Outcome.DONE:
            request.commit()
        elif outcome.outcome is Outcome.REJECTED and was_serving and not self._rendezvous.lost_ranks():
            self._state.resume()
        return outcome
