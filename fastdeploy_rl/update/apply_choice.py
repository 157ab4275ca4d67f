"""Which way of taking weights over apply mode `auto` picks: the one that is expected to stall decoding least.

Owns the model of what each way costs, and the words that give its figures. Refuses to know where the facts come from
(apply_facts.py), and does nothing. Invariant: what memory, the source or missing checksums rule out is not chosen while
anything else is possible."""

from dataclasses import dataclass
from typing import Final, NamedTuple

from fastdeploy_rl.config import ALIAS, COPY, OFF
from fastdeploy_rl.sources.base import NOT_ASKED, NOT_IMMUTABLE

ARENA: Final = "arena"
"""A rebind to memory of the engine's own, filled while the engine serves."""

MARGIN_S: Final = 0.010
"""Stalls that differ by less are alike: within what a decode step takes, and the error of any such guess. Then
published memory is used in place, which copies nothing at all; next best is a rebind, which needs no way back."""
GUESSED_BYTES_PER_S: Final = 4e9
"""Until a rank has copied something: less than two cores copy with checksums on the machines we measured, so that the
guess errs towards a rebind."""
COPY_PASSES: Final = 2
"""In place, while nothing decodes: one pass that copies, one that reads back what it wrote."""
_MIN_MEASURED_BYTES: Final = 1 << 20

LENT = "the trainer has the memory that it lent back with the next update or clear"
NOTHING_TO_ALIAS = "no parameter can be used in place"
NOT_CHOSEN = "memory of the engine's own was expected to do better"
"""Of a parameter that could have been used in place; for reports."""


@dataclass
class CopySpeed:
    """How fast this rank copies and sums up, as measured at its last update; bytes per second."""

    bytes_per_s: float = GUESSED_BYTES_PER_S

    def note(self, num_bytes: int, seconds: float) -> None:
        """A pass over so many bytes took so long. Few bytes say more of the call than of the speed."""
        if num_bytes >= _MIN_MEASURED_BYTES and seconds > 0:
            self.bytes_per_s = num_bytes / seconds


@dataclass(frozen=True)
class ApplyFacts:
    """What one rank knows when it has to choose. Seconds are those of graph recapture for the addresses that a way
    would give; `*_needs`: bytes of memory that it would take and that the engine does not have yet.

    `why_no_alias`: published memory must not, or cannot, be used in place; empty where it can. `is_lent`: it is the
    trainer's own, who lent it to be used in place: no reason against it, but one that is named. `overwrites`: bytes of
    live parameters that a copy in place would fill; 0 where none can be overwritten: nothing is live, or it lies in
    published memory."""

    why_no_alias: str
    is_lent: bool
    overwrites: int
    has_checksums: bool
    rollback: str
    alias_recapture_s: float
    arena_recapture_s: float
    copy_bytes_per_s: float
    alias_needs: int
    arena_needs: int
    copy_needs: int
    free_bytes: int


class ApplyChoice(NamedTuple):
    """`applied`: ALIAS, ARENA or COPY; `reason`: why, in words and figures."""

    applied: str
    reason: str


class _Way(NamedTuple):
    """`shunned`: why only where nothing else is possible; `ruled_out`: why not at all."""

    applied: str
    stall_s: float
    needs: int
    cost: str
    shunned: str = ""
    ruled_out: str = ""


def why_no_alias(*, aliasable_bytes: int, is_immutable: bool, is_copied_unless_asked: bool) -> str:
    """Empty where `auto` may use a source's memory in place."""
    if not is_immutable:
        return NOT_IMMUTABLE
    if is_copied_unless_asked:
        return NOT_ASKED
    return "" if aliasable_bytes else NOTHING_TO_ALIAS


def choose(facts: ApplyFacts) -> ApplyChoice:
    """The smallest expected stall; of those alike, the one that comes first in `_ways`."""
    ways = _ways(facts)
    possible = [way for way in ways if not way.ruled_out]
    fitting = [way for way in possible if way.needs <= facts.free_bytes]
    chosen = _least([way for way in fitting if not way.shunned] or fitting or _smallest(possible))
    others = [_why_not(way, facts) for way in ways if way is not chosen]
    return ApplyChoice(chosen.applied, "; ".join([_why(chosen, facts), *others]))


def _ways(facts: ApplyFacts) -> list[_Way]:
    """Those that come first are taken where stalls are alike."""
    copy_s = COPY_PASSES * facts.overwrites / facts.copy_bytes_per_s
    return [
        _Way(
            ALIAS,
            facts.alias_recapture_s,
            facts.alias_needs,
            f"recapture {_ms(facts.alias_recapture_s)}, nothing copied" + (f", {LENT}" if facts.is_lent else ""),
            ruled_out=facts.why_no_alias,
        ),
        _Way(ARENA, facts.arena_recapture_s, facts.arena_needs, f"recapture {_ms(facts.arena_recapture_s)}"),
        _Way(
            COPY,
            copy_s,
            facts.copy_needs,
            f"{facts.overwrites} bytes copied and read back in about {_ms(copy_s)}, nothing recaptured",
            shunned="a rollback policy of off has no way back from it" if facts.rollback == OFF else "",
            ruled_out=_why_no_copy(facts),
        ),
    ]


def _why_no_copy(facts: ApplyFacts) -> str:
    if not facts.overwrites:
        return "no memory of the engine's own is live"
    return "" if facts.has_checksums else "it takes checksums to undo"


def _least(ways: list[_Way]) -> _Way:
    best = min(way.stall_s for way in ways)
    return next(way for way in ways if way.stall_s <= best + MARGIN_S)


def _smallest(ways: list[_Way]) -> list[_Way]:
    """Where nothing fits, the one that has the best chance."""
    return [min(ways, key=lambda way: way.needs)]


def _why(way: _Way, facts: ApplyFacts) -> str:
    short = f", {way.needs} bytes needed, {facts.free_bytes} free" if way.needs > facts.free_bytes else ""
    return f"{way.cost}{short}" + (f", though {way.shunned}" if way.shunned else "")


def _why_not(way: _Way, facts: ApplyFacts) -> str:
    if way.ruled_out:
        return f"no {way.applied}: {way.ruled_out}"
    if way.needs > facts.free_bytes:
        return f"no {way.applied}: it needs {way.needs} bytes, {facts.free_bytes} are free"
    if way.shunned:
        return f"no {way.applied}: {way.shunned}"
    return f"{way.applied} would stall about {_ms(way.stall_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
