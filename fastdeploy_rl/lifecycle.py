"""The life of an engine, in three small tables, and what the world sees of it.

    admission   may a request come in?          starting, serving, paused, fenced, stopped
    update      which step is an update at?     idle, resolving, ... committing, undoing
    residency   where is the memory of a tag?   resident, offloaded, dropped (for weight, kv_cache and graph each)

The laws:

1. A state changes only by an event of its table; any other event raises LifecycleError and changes nothing.
2. Not every combination of states may exist: one that may not breaks a *named* rule (`RULES`), and an event that would
   lead there is illegal too.
3. An update can be undone from every step before `committing`, which is entered once the commit word reads YES; after
   that it can only finish.
4. The legacy word and the answer to a request are pure functions of these states (and of a pending legacy command).

This file refuses to know who sends events, and why. `python -m fastdeploy_rl.lifecycle` prints the diagram of the docs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

from fastdeploy_rl.errors import LifecycleError


class Admission(Enum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    FENCED = "fenced"
    STOPPED = "stopped"


class AdmissionEvent(Enum):
    """LOAD: a complete version is live, for the first time or again after a fence. FENCE: none is. PAUSE after a fence:
    one is, or all is dropped and asleep, and no request may come in yet."""

    LOAD = "load"
    PAUSE = "pause"
    RESUME = "resume"
    FENCE = "fence"
    STOP = "stop"


class UpdatePhase(Enum):
    IDLE = "idle"
    RESOLVING = "resolving"
    STAGING = "staging"
    VOTING = "voting"
    DRAINING = "draining"
    INSTALLING = "installing"
    VERIFYING = "verifying"
    REBUILDING = "rebuilding"
    RECAPTURING = "recapturing"
    COMMITTING = "committing"
    UNDOING = "undoing"


class UpdateEvent(Enum):
    """Named after the step that begins; FINISH after COMMIT, UNDO and UNDONE around the way back."""

    RESOLVE = "resolve"
    STAGE = "stage"
    VOTE = "vote"
    DRAIN = "drain"
    INSTALL = "install"
    VERIFY = "verify"
    REBUILD = "rebuild"
    RECAPTURE = "recapture"
    COMMIT = "commit"
    FINISH = "finish"
    UNDO = "undo"
    UNDONE = "undone"


class Residency(Enum):
    RESIDENT = "resident"
    OFFLOADED = "offloaded"
    DROPPED = "dropped"


class ResidencyEvent(Enum):
    OFFLOAD = "offload"
    LOAD = "load"
    DROP = "drop"


class Tag(Enum):
    """What an engine's memory is for. An engine without graphs
    moves its GRAPH tag all the same: there is nothing to free."""

    WEIGHT = "weight"
    KV_CACHE = "kv_cache"
    GRAPH = "graph"


class TagEvent(NamedTuple):
    """A residency event, and whose."""

    tag: Tag
    event: ResidencyEvent


ADMISSION_TRANSITIONS: Final[Mapping[Admission, Mapping[AdmissionEvent, Admission]]] = {
    Admission.STARTING: {
        AdmissionEvent.LOAD: Admission.SERVING,
        AdmissionEvent.PAUSE: Admission.PAUSED,
        AdmissionEvent.FENCE: Admission.FENCED,
        AdmissionEvent.STOP: Admission.STOPPED,
    },
    Admission.SERVING: {
        AdmissionEvent.PAUSE: Admission.PAUSED,
        AdmissionEvent.FENCE: Admission.FENCED,
        AdmissionEvent.STOP: Admission.STOPPED,
    },
    Admission.PAUSED: {
        AdmissionEvent.RESUME: Admission.SERVING,
        AdmissionEvent.FENCE: Admission.FENCED,
        AdmissionEvent.STOP: Admission.STOPPED,
    },
    Admission.FENCED: {
        AdmissionEvent.LOAD: Admission.SERVING,
        AdmissionEvent.PAUSE: Admission.PAUSED,
        AdmissionEvent.STOP: Admission.STOPPED,
    },
    Admission.STOPPED: {},
}

UPDATE_TRANSITIONS: Final[Mapping[UpdatePhase, Mapping[UpdateEvent, UpdatePhase]]] = {
    UpdatePhase.IDLE: {UpdateEvent.RESOLVE: UpdatePhase.RESOLVING},
    UpdatePhase.RESOLVING: {UpdateEvent.STAGE: UpdatePhase.STAGING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.STAGING: {UpdateEvent.VOTE: UpdatePhase.VOTING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.VOTING: {UpdateEvent.DRAIN: UpdatePhase.DRAINING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.DRAINING: {UpdateEvent.INSTALL: UpdatePhase.INSTALLING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.INSTALLING: {UpdateEvent.VERIFY: UpdatePhase.VERIFYING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.VERIFYING: {UpdateEvent.REBUILD: UpdatePhase.REBUILDING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.REBUILDING: {UpdateEvent.RECAPTURE: UpdatePhase.RECAPTURING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.RECAPTURING: {UpdateEvent.COMMIT: UpdatePhase.COMMITTING, UpdateEvent.UNDO: UpdatePhase.UNDOING},
    UpdatePhase.COMMITTING: {UpdateEvent.FINISH: UpdatePhase.IDLE},
    UpdatePhase.UNDOING: {UpdateEvent.UNDONE: UpdatePhase.IDLE},
}

RESIDENCY_TRANSITIONS: Final[Mapping[Residency, Mapping[ResidencyEvent, Residency]]] = {
    Residency.RESIDENT: {ResidencyEvent.OFFLOAD: Residency.OFFLOADED, ResidencyEvent.DROP: Residency.DROPPED},
    Residency.OFFLOADED: {ResidencyEvent.LOAD: Residency.RESIDENT, ResidencyEvent.DROP: Residency.DROPPED},
    Residency.DROPPED: {ResidencyEvent.LOAD: Residency.RESIDENT},
}

TRANSITIONS: Final[Mapping[Any, Mapping[Any, Any]]] = {
    **ADMISSION_TRANSITIONS,
    **UPDATE_TRANSITIONS,
    **RESIDENCY_TRANSITIONS,
}
"""All three; states and events of different tables are never equal."""

STALLED_PHASES: Final = frozenset(UpdatePhase) - {
    UpdatePhase.IDLE,
    UpdatePhase.RESOLVING,
    UpdatePhase.STAGING,
    UpdatePhase.VOTING,
}
"""While an update is here, no forward pass runs: requests come in and wait. UNDOING is among them, since what is being
undone may be an install."""

State = TypeVar("State", Admission, UpdatePhase, Residency)


def step(state: State, event: AdmissionEvent | UpdateEvent | ResidencyEvent) -> State:
    """The state after `event`. Raises LifecycleError that names what would be legal."""
    events = TRANSITIONS[state]
    if event not in events:
        legal = ", ".join(known.value for known in events) or "nothing"
        raise LifecycleError(f"{event.value} is illegal while {state.value}; legal: {legal}")
    after: State = events[event]
    return after


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """Where one engine is, in all three tables."""

    admission: Admission = Admission.STARTING
    update: UpdatePhase = UpdatePhase.IDLE
    weight: Residency = Residency.DROPPED
    kv_cache: Residency = Residency.DROPPED
    graph: Residency = Residency.DROPPED

    def residency(self, tag: Tag) -> Residency:
        """Of one tag."""
        return {Tag.WEIGHT: self.weight, Tag.KV_CACHE: self.kv_cache, Tag.GRAPH: self.graph}[tag]

    @property
    def residencies(self) -> tuple[Residency, Residency, Residency]:
        """Of weight, kv_cache and graph."""
        return self.weight, self.kv_cache, self.graph

    def after(self, event: AdmissionEvent | UpdateEvent | TagEvent) -> "Lifecycle":
        """The lifecycle after one event. Raises LifecycleError where the event is illegal here or leads to a
        combination that breaks a rule; it names the rule."""
        after = self._stepped(event)
        rule = broken_rule(after)
        if rule is not None:
            name = f"{event.event.value} {event.tag.value}" if isinstance(event, TagEvent) else event.value
            raise LifecycleError(f"{name} is illegal while {self}: it breaks {rule.name} ({rule.text})")
        return after

    def _stepped(self, event: AdmissionEvent | UpdateEvent | TagEvent) -> "Lifecycle":
        if isinstance(event, AdmissionEvent):
            return replace(self, admission=step(self.admission, event))
        if isinstance(event, UpdateEvent):
            return replace(self, update=step(self.update, event))
        residency = step(self.residency(event.tag), event.event)
        if event.tag is Tag.WEIGHT:
            return replace(self, weight=residency)
        return replace(self, kv_cache=residency) if event.tag is Tag.KV_CACHE else replace(self, graph=residency)

    def __str__(self) -> str:
        places = " ".join(f"{tag.value}={self.residency(tag).value}" for tag in Tag)
        return f"{self.admission.value} update={self.update.value} {places}"


class Rule(NamedTuple):
    """A law about combinations: `is_kept(lifecycle)`."""

    name: str
    text: str
    is_kept: Callable[[Lifecycle], bool]


def _has_verified_weights(lifecycle: Lifecycle) -> bool:
    done = {UpdatePhase.VERIFYING, UpdatePhase.REBUILDING, UpdatePhase.RECAPTURING, UpdatePhase.COMMITTING}
    return lifecycle.update not in done or lifecycle.weight is Residency.RESIDENT


def _serves_from_memory(lifecycle: Lifecycle) -> bool:
    if lifecycle.admission is not Admission.SERVING:
        return True
    rebuilt = {UpdatePhase.INSTALLING, UpdatePhase.VERIFYING, UpdatePhase.REBUILDING, UpdatePhase.RECAPTURING}
    if lifecycle.update in rebuilt | {UpdatePhase.UNDOING}:
        return lifecycle.weight is Residency.RESIDENT
    return set(lifecycle.residencies) == {Residency.RESIDENT}


def _is_graph_backed(lifecycle: Lifecycle) -> bool:
    return lifecycle.graph is not Residency.RESIDENT or Residency.DROPPED not in (lifecycle.weight, lifecycle.kv_cache)


def _starts_plainly(lifecycle: Lifecycle) -> bool:
    return lifecycle.admission is not Admission.STARTING or Residency.OFFLOADED not in lifecycle.residencies


def _updates_while_alive(lifecycle: Lifecycle) -> bool:
    outside = lifecycle.admission in (Admission.STARTING, Admission.STOPPED)
    return not outside or lifecycle.update is UpdatePhase.IDLE


RULES: Final = (
    Rule(
        "update_only_while_alive", "an engine that starts or has stopped is not inside an update", _updates_while_alive
    ),
    Rule("start_has_nothing_offloaded", "what was never loaded cannot be offloaded", _starts_plainly),
    Rule(
        "graph_needs_its_memory", "a graph does not outlive the weights and cache it was captured on", _is_graph_backed
    ),
    Rule(
        "verified_weights_are_resident", "weights stay where they were verified until the commit", _has_verified_weights
    ),
    Rule(
        "serving_needs_memory",
        "a serving engine holds weights, cache and graphs; only a stalled update rebuilds the last two",
        _serves_from_memory,
    ),
)


def broken_rule(lifecycle: Lifecycle) -> Rule | None:
    """The first rule that this combination breaks; None where it is legal."""
    return next((rule for rule in RULES if not rule.is_kept(lifecycle)), None)


class LegacyStatus(IntEnum):
    """What FastDeploy's `model_weights_status` word says."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


class LegacyCommand(IntEnum):
    """What a foreign process writes into that word."""

    UPDATE = 1
    CLEAR = -1


def legacy_word(lifecycle: Lifecycle, pending: LegacyCommand | None) -> LegacyStatus:
    """What the word must read.

    While a legacy command is pending it keeps the requested value. Else CLEARED means that weights *and* KV cache are
    freed, UPDATING that a complete version is on its way (a stalled update, a start, a fence that is still dropping
    memory), NORMAL all the rest. So before both are dropped the word tells nothing of sleep, like FastDeploy's own: a
    value that is a command as well must not stand there for long, or that command could not be given.
    """
    if pending is not None:
        return LegacyStatus(pending.value)
    if lifecycle.update in STALLED_PHASES or lifecycle.admission is Admission.STARTING:
        return LegacyStatus.UPDATING
    if lifecycle.admission is Admission.FENCED:
        dropped = set(lifecycle.residencies) == {Residency.DROPPED}
        return LegacyStatus.CLEARED if dropped else LegacyStatus.UPDATING
    is_freed = lifecycle.weight is lifecycle.kv_cache is Residency.DROPPED
    return LegacyStatus.CLEARED if is_freed else LegacyStatus.NORMAL


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets: it is served, or refused with 503 and the reason."""

    is_served: bool
    reason: str = ""

    @property
    def http_status(self) -> int:
        return 200 if self.is_served else 503


def answer_at_admission(lifecycle: Lifecycle) -> Answer:
    """Requests that come in while an update stalls a serving engine are served: they wait for the commit."""
    if lifecycle.admission is Admission.SERVING:
        return Answer(is_served=True)
    if lifecycle.admission is Admission.PAUSED:
        return Answer(is_served=False, reason=_why_paused(lifecycle))
    reasons = {
        Admission.STARTING: "the engine is starting",
        Admission.FENCED: "the engine is fenced: no complete version of the weights is live; update it",
        Admission.STOPPED: "the engine has stopped",
    }
    return Answer(is_served=False, reason=reasons[lifecycle.admission])


def _why_paused(lifecycle: Lifecycle) -> str:
    if lifecycle.weight is Residency.DROPPED:
        return "the engine is cleared: its weights are not loaded; update it"
    if set(lifecycle.residencies) == {Residency.RESIDENT}:
        return "the engine is paused; resume it"
    return "the engine is asleep: part of its memory is given away"


def mermaid() -> str:
    """The three tables as one state diagram."""
    tables: tuple[tuple[str, Mapping[Any, Mapping[Any, Any]]], ...] = (
        ("admission", ADMISSION_TRANSITIONS),
        ("update", UPDATE_TRANSITIONS),
        ("residency", RESIDENCY_TRANSITIONS),
    )
    return "\n".join(chain(["stateDiagram-v2"], *(_diagram(name, table) for name, table in tables)))


def _diagram(name: str, table: Mapping[Any, Mapping[Any, Any]]) -> Iterator[str]:
    yield f"    state {name} {{"
    yield f"        [*] --> {next(iter(table)).value}"
    for state, events in table.items():
        for event, after in events.items():
            yield f"        {state.value} --> {after.value}: {event.value}"
    yield "    }"


if __name__ == "__main__":
    print(mermaid())
