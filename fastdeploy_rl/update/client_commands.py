"""What a client may ask of an engine: the commands as values, and the methods that make them.

Owns the methods of all clients, over the board and over HTTP, blocking and not: one definition each. Refuses to know
how a command gets to the engine. Invariant: a ClientCommand that exists is one that an engine understands.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastdeploy_rl.command_options import CommandOptions, tags_of
from fastdeploy_rl.config import ABORT, IN_FLIGHT, KEEP, REFUSE, SLEEP_LEVELS, WAIT, Deadlines, checked_deadline
from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.report import CommandKind, EngineStatus, UpdateReport
from fastdeploy_rl.version import WeightVersion

Tags = str | Sequence[str] | None
"""Words of lifecycle.Tag, or one text with commas between them; None means all."""


@dataclass(frozen=True)
class ClientCommand:
    """`version` and `is_forced`: of an update. ConfigurationError for a deadline or an option that cannot be."""

    kind: CommandKind
    deadline_s: float
    options: CommandOptions = field(default_factory=CommandOptions)
    version: str = ""
    is_forced: bool = False

    def __post_init__(self) -> None:
        checked_deadline(self.deadline_s)
        self.options.checked()

    @property
    def quiet_s(self) -> float:
        """What the engine may need after the deadline: where requests in flight have all of it to end, the ranks stop
        only then."""
        return Deadlines.quiet_s if self.options.in_flight == WAIT else 0.0


def update_command(
    version: WeightVersion | str | None, deadline_s: float, force: bool, kv: str | None, in_flight: str | None
) -> ClientCommand:
    options = CommandOptions(KEEP if in_flight is None else in_flight, "" if kv is None else kv)
    return ClientCommand(CommandKind.UPDATE, deadline_s, options, str(version or ""), force)


def waking_update_command(deadline_s: float) -> ClientCommand:
    """To the newest version, for whoever knows nothing of sleep: it brings all that sleeps as well."""
    return ClientCommand(CommandKind.UPDATE, deadline_s, CommandOptions(tags=frozenset(Tag)))


def pause_command(mode: str, on_timeout: str, deadline_s: float) -> ClientCommand:
    _check("mode", mode, IN_FLIGHT)
    return ClientCommand(CommandKind.PAUSE, deadline_s, CommandOptions(mode, on_timeout=on_timeout))


def sleep_command(tags: Tags, level: int, mode: str, on_timeout: str, deadline_s: float) -> ClientCommand:
    _check("mode", mode, IN_FLIGHT)
    _check("level", level, SLEEP_LEVELS)
    options = CommandOptions(mode, on_timeout=on_timeout, tags=_tags(tags), level=level)
    return ClientCommand(CommandKind.SLEEP, deadline_s, options)


def wake_command(tags: Tags, deadline_s: float, kv: str | None) -> ClientCommand:
    options = CommandOptions(kv="" if kv is None else kv, tags=_tags(tags))
    return ClientCommand(CommandKind.WAKE, deadline_s, options)


def _check(what: str, word: object, words: Sequence[object]) -> None:
    """As CommandOptions does, but by the name that its caller knows it by. 1.0 and True are no level."""
    if word not in words or type(word) is not type(words[0]):
        raise ConfigurationError(f"{what} must be one of {', '.join(map(str, words))}, got {word!r:.40}")


def _tags(tags: Tags) -> frozenset[Tag]:
    return tags_of(tags if tags is None or isinstance(tags, str) else list(tags))


_ReportT = TypeVar("_ReportT")


class EngineCommands(ABC, Generic[_ReportT]):
    """The commands of an engine. Each is carried out on all ranks or on none, and answers with its report.

    All raise the error that the engine raised, and then nothing has changed there, except after a FencedError: no
    complete version is known to be live then. DeadlineExceededError where `deadline_s` (seconds) was too short,
    ConfigurationError for a word that is none; both before anything changed. NotServingError, EngineNotFoundError and
    PeerLostError tell of an engine that cannot, is not there, or died."""

    @abstractmethod
    def carry_out(self, command: ClientCommand) -> _ReportT:
        """What all methods come down to."""

    def update(
        self,
        version: WeightVersion | str | None = None,
        *,
        deadline_s: float = Deadlines.update_s,
        force: bool = False,
        kv: str | None = None,
        in_flight: str | None = None,
    ) -> _ReportT:
        """All ranks take `version` (the newest published one when None) over; returns the report with its receipt.

        Otherwise it raises why not, and every rank is bitwise where it was: CoverageError, ChecksumMismatchError,
        VersionRegressError, NoPublicationError for the trainer to mend, DeadlineExceededError, EngineError. `force`
        allows a version that goes back, and takes over again one that is live already.

        `kv`: "rebuild" drops the KV cache and requests in flight compute theirs anew, "keep" lets them go on with what
        they have (nobody else hits it); None is the engine's own (`--kv-on-update`). `in_flight`: "keep" (None too)
        stops requests between two tokens and goes on afterwards; "wait" lets them come to their end first; "abort" ends
        them at the commit with what they have, so that an update that is rejected aborts nobody. A paused engine stays
        paused. Where tags sleep, the weights come back all the same, and the engine serves when it is woken."""
        return self.carry_out(update_command(version, deadline_s, force, kv, in_flight))

    def clear(self, *, deadline_s: float = Deadlines.clear_s) -> _ReportT:
        """Ends the requests in flight and frees weights and KV cache on every rank; returns when they are freed.
        `update` brings all of it back."""
        return self.carry_out(ClientCommand(CommandKind.CLEAR, deadline_s))

    def pause(self, mode: str = ABORT, *, on_timeout: str = REFUSE, deadline_s: float = Deadlines.pause_s) -> _ReportT:
        """Closes admission, then makes every rank quiet; returns when no rank computes. Memory stays. New requests get
        503 until `resume`, or until a `wake` that leaves nothing asleep.

        `mode`, for requests in flight: "abort" ends them with what they have (finish reason "abort"), "wait" lets them
        come to their end, "keep" stops them between two tokens with their KV; they go on at `resume`, also across an
        update. `wait` has `deadline_s` for it; then `on_timeout` "refuse" raises DeadlineExceededError, and the engine
        serves as before with no request lost, while "abort" ends the rest. An engine that is paused stays so."""
        return self.carry_out(pause_command(mode, on_timeout, deadline_s))

    def resume(self, *, deadline_s: float = Deadlines.pause_s) -> _ReportT:
        """Opens admission after a `pause`, and requests that were kept go on. LifecycleError while tags are asleep, or
        no weights are there: `wake` or `update` first. An engine that is not paused stays as it is."""
        return self.carry_out(ClientCommand(CommandKind.RESUME, deadline_s))

    def sleep(
        self,
        tags: Tags = None,
        *,
        level: int = 1,
        mode: str = ABORT,
        on_timeout: str = REFUSE,
        deadline_s: float = Deadlines.pause_s,
    ) -> _ReportT:
        """Gives the memory of `tags` ("weight", "kv_cache", "graph"; all when None) back to the machine on every rank.
        Until all that sleeps is awake again, requests get 503.

        `level` 1 keeps the weights in host memory, which no rank maps; 2 drops them, and they come back from the
        channel. KV cache and graphs are always dropped. `mode` and `on_timeout` are those of `pause`, with the same
        DeadlineExceededError; a request that was kept computes its KV anew where that was dropped. Tags that sleep
        already stay asleep; weights in host memory are dropped when `level` is 2."""
        return self.carry_out(sleep_command(tags, level, mode, on_timeout, deadline_s))

    def wake(self, tags: Tags = None, *, deadline_s: float = Deadlines.update_s, kv: str | None = None) -> _ReportT:
        """Brings `tags` (all when None) back on every rank. When nothing is asleep any more the engine serves, also
        where it was paused.

        Weights from host memory are checked against the sums of what was live; weights that were dropped come from the
        channel as an update to the newest version, with an update's errors, and `kv` as there. Tags that are awake stay
        as they are."""
        return self.carry_out(wake_command(tags, deadline_s, kv))


class BlockingCommands(EngineCommands[UpdateReport]):
    """Each method blocks, `deadline_s` at most (and a little, for the answer)."""

    @abstractmethod
    def status(self) -> EngineStatus:
        """What the engine is and does now."""

    def is_paused(self) -> bool:
        """Somebody paused it and nobody resumed it yet. That it sleeps is told by `status().asleep`."""
        return self.status().is_paused


class AwaitedCommands(EngineCommands[Coroutine[Any, Any, UpdateReport]]):
    """Each method is awaited; several may run at once."""

    @abstractmethod
    async def status(self) -> EngineStatus:
        """As BlockingCommands has it."""

    async def is_paused(self) -> bool:
        """As BlockingCommands has it."""
        return (await self.status()).is_paused
