"""A weight source that breaks on request: any WeightSource, with scripted faults call by call.

    source = FaultySource(IpcSource(config), stage=[None, Corrupt(offset=7)], resolve=[Delay(gate)])

Here the second `stage` gives bytes with one flipped, and the first `resolve` waits for `gate.set()`. Owns the script.
Refuses to know how bytes come. Invariant: a call without a scripted fault is the inner source's, so that what has no
faults left passes the conformance suite of sources."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    NoPublicationError,
    SegmentError,
)
from fastdeploy_rl.plan.plan import Plan, PlannedParameter
from fastdeploy_rl.sources.base import ResolvedPublication, StagedSource, WeightSource
from fastdeploy_rl.version import WeightVersion

_METHODS = ("resolve", "stage", "release", "trim", "close")
_MAX_DELAY_S = 30.0


@dataclass(frozen=True)
class Fail:
    """The call raises `error` and does nothing else."""

    error: Exception


@dataclass(frozen=True, eq=False)
class Delay:
    """The call stands still until `gate` is set: at most to its own deadline (DeadlineExceededError), or 30 s where it
    has none. `begun` is set when it stands."""

    gate: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Corrupt:
    """`stage` only: the bytes are a copy of the published ones in which the byte at `offset` of that segment has one
    bit turned around. As immutable as the inner source's."""

    segment: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Vanish:
    """From this call on there is no publication: `resolve` and `stage` raise NoPublicationError until `restore`."""


Fault = Fail | Delay | Corrupt | Vanish


class FaultySource:
    """`faults`: for each of resolve, stage, release, trim and close what goes wrong at its first, second ... call,
    None for nothing. Owns the inner source: `close` closes it."""

    def __init__(self, inner: WeightSource, **faults: Iterable[Fault | None]) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._script: dict[str, deque[Fault | None]] = {method: deque() for method in _METHODS}
        self._has_vanished = False
        self.num_calls = dict.fromkeys(_METHODS, 0)
        for method, scripted in faults.items():
            self.then(method, *scripted)

    def then(self, method: str, *faults: Fault | None) -> None:
        """Appends to the script of `method`. ConfigurationError for a fault that the method cannot have."""
        if method not in self._script:
            raise ConfigurationError(f"a source has no {method!r}; it has {', '.join(_METHODS)}")
        if method != "stage" and any(isinstance(fault, Corrupt) for fault in faults):
            raise ConfigurationError(f"only stage can be corrupted, not {method}")
        self._script[method].extend(faults)

    def restore(self) -> None:
        """Ends a Vanish."""
        self._has_vanished = False

    # --- WeightSource ------------------------------------------------------------------------------

    def resolve(self, version: WeightVersion | None, *, deadline_ns: int) -> ResolvedPublication:
        self._begin("resolve", deadline_ns)
        self._check_there()
        return self._inner.resolve(version, deadline_ns=deadline_ns)

    def stage(self, resolved: ResolvedPublication, plan: Plan, *, deadline_ns: int) -> StagedSource:
        fault = self._begin("stage", deadline_ns)
        self._check_there()
        staged = self._inner.stage(resolved, plan, deadline_ns=deadline_ns)
        corrupt = fault if isinstance(fault, Corrupt) else None
        return FaultyStaged(staged, corrupt, self._begin_release, deadline_ns)

    def newest_version(self, *, deadline_ns: int) -> WeightVersion | None:
        return self._inner.newest_version(deadline_ns=deadline_ns)

    def current_epoch(self, *, deadline_ns: int) -> int:
        return self._inner.current_epoch(deadline_ns=deadline_ns)

    def discredit(self, resolved: ResolvedPublication) -> None:
        self._inner.discredit(resolved)

    def trim(self) -> None:
        self._begin("trim")
        self._inner.trim()

    def close(self) -> None:
        self._begin("close")
        self._inner.close()

    # --- the script --------------------------------------------------------------------------------

    def _begin_release(self) -> None:
        self._begin("release")

    def _begin(self, method: str, deadline_ns: int | None = None) -> Fault | None:
        """Carries out what is scripted for this call, up to where the inner source takes over."""
        with self._lock:
            self.num_calls[method] += 1
            fault = self._script[method].popleft() if self._script[method] else None
        if isinstance(fault, Fail):
            raise fault.error
        if isinstance(fault, Delay):
            _stand_still(fault, method, deadline_ns)
        if isinstance(fault, Vanish):
            self._has_vanished = True
        return fault

    def _check_there(self) -> None:
        if self._has_vanished:
            raise NoPublicationError("the publication vanished, as the script says")


class FaultyStaged:
    """What a FaultySource staged."""

    def __init__(
        self, inner: StagedSource, corrupt: Corrupt | None, begin_release: Callable[[], None], deadline_ns: int
    ) -> None:
        self._inner = inner
        self._begin_release = begin_release
        self._copy: tuple[Mapping, ...] | None = None
        if corrupt is not None:
            try:
                for _ in inner.arrivals(deadline_ns=deadline_ns):
                    pass  # all must be there before a copy of it can be wrong in one place only
                self._copy = _corrupted(inner.segments, corrupt)
            except BaseException:
                inner.release()
                raise

    @property
    def segments(self) -> tuple[Mapping, ...]:
        return self._inner.segments if self._copy is None else self._copy

    @property
    def plan(self) -> Plan:
        return self._inner.plan

    @property
    def is_immutable(self) -> bool:
        return self._inner.is_immutable

    @property
    def is_copied_unless_asked(self) -> bool:
        return self._inner.is_copied_unless_asked

    def arrivals(self, *, deadline_ns: int) -> Iterator[Sequence[PlannedParameter]]:
        return self._inner.arrivals(deadline_ns=deadline_ns) if self._copy is None else iter([self.plan.everything])

    def bring_in(self, planned: Sequence[PlannedParameter]) -> None:
        self._inner.bring_in(planned)

    def is_vouched(self) -> bool:
        return self._inner.is_vouched()

    def release(self) -> None:
        self._begin_release()
        for mapping in self._copy or ():
            try:
                mapping.close()
            except BufferError as error:
                raise SegmentError(f"a corrupted copy is still in use: {mapping.num_exports} views") from error
        if self._copy is not None:
            self._copy = ()
        self._inner.release()


def _stand_still(fault: Delay, method: str, deadline_ns: int | None) -> None:
    fault.begun.set()
    left_s = _MAX_DELAY_S if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
    if not fault.gate.wait(left_s):
        raise DeadlineExceededError(f"{method} stood still until its deadline, as the script says")


def _corrupted(segments: tuple[Mapping, ...], corrupt: Corrupt) -> tuple[Mapping, ...]:
    if not 0 <= corrupt.segment < len(segments) or not 0 <= corrupt.offset < segments[corrupt.segment].num_bytes:
        raise ConfigurationError(f"there is no byte {corrupt.offset} of segment {corrupt.segment} to corrupt")
    return tuple(
        _copied(segment, corrupt.offset if index == corrupt.segment else -1) for index, segment in enumerate(segments)
    )


def _copied(segment: Mapping, flipped: int) -> Mapping:
    """A read-only mapping of the same bytes, one bit of the byte at `flipped` (if any) turned around."""
    fd = os.memfd_create("fastdeploy_rl_corrupted", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, segment.num_bytes)
        copy = Mapping.map_fd(fd, segment.num_bytes, True)
        with memoryview(copy) as target, memoryview(segment) as source:
            target[:] = source
            if flipped >= 0:
                target[flipped] ^= 1
        copy.close()
        return Mapping.map_fd(fd, segment.num_bytes, False)
    finally:
        os.close(fd)
