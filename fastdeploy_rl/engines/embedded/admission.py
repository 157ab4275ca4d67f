"""Which requests may join the engine: rank 0's door, between those that have arrived and the scheduler.

Owns requests that wait for a version of the weights, and until when. Refuses to know how requests are computed and how
versions come about. Invariant: each request that arrived begins on a version that it takes, is refused with the
reason, or is cancelled, once; none waits for its version for longer than its `version_wait_s`, but for an engine of
which is not yet known whether it will serve.

A request that arrives while the door is closed is refused. One that waits for a version already goes on waiting: the
update that brings it closes the door in passing. It is let in when the door is open and the version is there.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fastdeploy_rl.control.generation import MAX_VERSION_WAIT_S, GenerationRequest
from fastdeploy_rl.engines.embedded.messages import Start
from fastdeploy_rl.errors import RequestError, VersionFormatError
from fastdeploy_rl.version import WeightVersion

CLOSED = "the engine does not serve now"


class Door(Protocol):
    """What the weight manager says of the engine, on rank 0."""

    @property
    def is_admitting(self) -> bool: ...

    @property
    def is_settling(self) -> bool:
        """Whether it will serve is not known yet."""
        ...

    @property
    def live_version(self) -> str:
        """As text; empty while none is."""
        ...

    @property
    def newest_version(self) -> str:
        """The newest published one, as text; empty where that is not known."""
        ...


class Line(Protocol):
    """The scheduler: requests that were let in, and have not begun, can be called back."""

    def has_yet_to_begin(self, request_id: str) -> bool:
        """False also for one that has ended."""
        ...

    def recall(self, request_id: str) -> None:
        """Of one that has yet to begin: it is not there any more."""
        ...


class Wanted(NamedTuple):
    """Versions that a request may begin on: `least` or newer (None: any), and at most `max_staleness` steps behind the
    newest published one (None: however far)."""

    least: WeightVersion | None
    max_staleness: int | None

    @property
    def is_anything(self) -> bool:
        return self.least is None and self.max_staleness is None

    def shortfall(self, live: WeightVersion, newest: WeightVersion | None) -> str:
        """Why it may not begin on `live`; empty where it may. An older epoch is behind by more steps than any number;
        where the newest version is not known, none is behind it."""
        if self.least is not None and live < self.least:
            return f"version {live} is live, and the request wants {self.least} or newer"
        if self.max_staleness is None or newest is None or newest <= live:
            return ""
        behind = newest.step - live.step if newest.epoch == live.epoch else math.inf
        if behind <= self.max_staleness:
            return ""
        distance = f"{behind} steps" if newest.epoch == live.epoch else "an epoch"
        return (
            f"version {live} is live, {distance} behind {newest}, the newest that was published, "
            f"and the request takes at most {self.max_staleness} steps"
        )


@dataclass(frozen=True)
class _Held:
    """Waits for a version until `expiry_s`, by the clock of the door."""

    start: Start
    wanted: Wanted
    expiry_s: float


class Refusal(NamedTuple):
    request_id: str
    reason: str


class Verdicts(NamedTuple):
    """What became of requests since the last look: in the order in which they came."""

    admitted: list[Start]
    refused: list[Refusal]


class AdmissionQueue:
    """Not thread-safe; all calls come from the engine's loop."""

    def __init__(self, door: Door, line: Line, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._door = door
        self._line = line
        self._clock = clock
        self._arrived: dict[str, tuple[Start, float]] = {}
        self._held: dict[str, _Held] = {}
        self._let_in: dict[str, _Held] = {}
        """Those that wait for their turn, and want no version but some."""

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._held)

    @property
    def is_looking_out(self) -> bool:
        """Something may change for a request without a command or a message: ask again soon."""
        return bool(self._arrived) or bool(self._held and not self._door.is_admitting)

    def arrive(self, start: Start) -> None:
        self._arrived[start.request_id] = (start, self._clock())

    def cancel(self, request_id: str) -> bool:
        """False for a request that is not here: it is with the scheduler, or has ended."""
        is_here = request_id in self._arrived or request_id in self._held
        self._arrived.pop(request_id, None)
        self._held.pop(request_id, None)
        return is_here

    def seconds_to_expiry(self) -> float | None:
        """Until a request has waited for long enough; None where none waits for a version."""
        if not self._held or self._door.is_settling:
            return None
        return max(0.0, min(held.expiry_s for held in self._held.values()) - self._clock())

    def refuse_all(self, reason: str) -> list[Refusal]:
        """Nobody waits afterwards."""
        refused = [Refusal(request_id, reason) for request_id in (*self._held, *self._arrived)]
        self._held.clear()
        self._arrived.clear()
        return refused

    def look(self) -> Verdicts:
        """Lets in and refuses whom it can now; whoever must wait does so, also who was let in when another version was
        live."""
        verdicts = Verdicts([], [])
        if not self._door.is_settling:
            self._hear(verdicts)
            self._look_at_let_in()
            self._look_at_held(verdicts)
        return verdicts

    def _hear(self, verdicts: Verdicts) -> None:
        arrived, self._arrived = self._arrived, {}
        for request_id, (start, since_s) in arrived.items():
            try:
                self._held[request_id] = self._checked(start, since_s)
            except RequestError as error:
                verdicts.refused.append(Refusal(request_id, str(error)))

    def _checked(self, start: Start, since_s: float) -> _Held:
        request = start.request
        if not self._door.is_admitting:
            raise RequestError(CLOSED)
        if not 0 <= request.version_wait_s <= MAX_VERSION_WAIT_S:
            raise RequestError(
                f"weight_version_wait_s must be 0 to {MAX_VERSION_WAIT_S:.0f} seconds, got {request.version_wait_s}"
            )
        wanted = _wanted(request, self._live(), self._newest())
        return _Held(start, wanted, since_s + request.version_wait_s)

    def _look_at_let_in(self) -> None:
        self._let_in = {key: held for key, held in self._let_in.items() if self._line.has_yet_to_begin(key)}
        live, newest = self._live(), self._newest()
        if live is None or not self._door.is_admitting:
            return  # nobody's turn comes
        for request_id, held in list(self._let_in.items()):
            if held.wanted.shortfall(live, newest):
                self._line.recall(request_id)
                self._held[request_id] = self._let_in.pop(request_id)

    def _look_at_held(self, verdicts: Verdicts) -> None:
        now_s, live, newest = self._clock(), self._live(), self._newest()
        for request_id, held in list(self._held.items()):
            reason = self._obstacle(held, live, newest)
            if reason and now_s < held.expiry_s:
                continue
            del self._held[request_id]
            if reason:
                waited = (
                    f"; waited {held.start.request.version_wait_s:g} s" if held.start.request.version_wait_s else ""
                )
                verdicts.refused.append(Refusal(request_id, reason + waited))
            else:
                verdicts.admitted.append(held.start)
                if not held.wanted.is_anything:
                    self._let_in[request_id] = held

    def _obstacle(self, held: _Held, live: WeightVersion | None, newest: WeightVersion | None) -> str:
        if live is None or not self._door.is_admitting:
            return CLOSED
        return held.wanted.shortfall(live, newest)

    def _live(self) -> WeightVersion | None:
        return _parsed(self._door.live_version)

    def _newest(self) -> WeightVersion | None:
        return _parsed(self._door.newest_version)


def _parsed(text: str) -> WeightVersion | None:
    return WeightVersion.parse(text) if text else None


def _wanted(request: GenerationRequest, live: WeightVersion | None, newest: WeightVersion | None) -> Wanted:
    """A plain step is one of the newest epoch that is known when the request arrives, as where an update names one.
    RequestError for text that is no version."""
    try:
        epoch = max((version.epoch for version in (live, newest) if version is not None), default=None)
        least = WeightVersion.parse(request.min_version, current_epoch=epoch) if request.min_version else None
    except VersionFormatError as error:
        raise RequestError(f"min_weight_version: {error}") from error
    return Wanted(least, request.max_staleness)
