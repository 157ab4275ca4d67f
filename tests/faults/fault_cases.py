"""What can go wrong at a step of an update, as data, and what the engine promises then.

The cases come from the product's own list of steps. Knows no process."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from fastdeploy_rl.config import KEEP, OFF, REFETCH
from fastdeploy_rl.testing.step_faults import Act, When
from fastdeploy_rl.update.steps import STAGING_STEPS, STALLING_STEPS

STAGING = tuple(step.name for step in STAGING_STEPS)
STEPS = (*STAGING, *(step.name for step in STALLING_STEPS))
COMMIT = STEPS[-1]
ENDS: tuple[When, ...] = ("begin", "end")
KINDS = ("kill", "stall", "raise", "no_memory", "corrupt")
MODES = ("alias", "copy")
SETTINGS = (("alias", KEEP), ("copy", KEEP), ("copy", REFETCH), ("copy", OFF))
"""Apply mode and rollback: an engine each. A rebind leaves the old weights where they are, whatever the rollback is."""
BASES = ("live", "cleared")
"""What stands before the update: a version is live, or nothing is."""
NUM_RANKS = 3

_SOURCE, _STAGED, _PARAMETER, _RECORD, _COUNTER = "source", "staged", "parameter", "record", "counter"
_PLAIN = {
    "kill": {"begin": Act.KILL, "end": Act.KILL},
    "stall": {"begin": Act.STOP, "end": Act.STOP},
    "raise": {"begin": Act.RAISE, "end": Act.RAISE},
    "no_memory": {"begin": Act.OUT_OF_MEMORY, "end": Act.OUT_OF_DISK},
}


class Case(NamedTuple):
    """`what` is hit: of `corrupt` a byte of the source, of what was staged in the rank's own memory, of the live
    parameter, of the rank's record on the board, or of that one's counter; else nothing."""

    step: str
    when: When
    rank: int
    kind: str
    mode: str
    rollback: str
    base: str
    act: Act
    what: str = ""

    def __str__(self) -> str:
        held = self.rollback if self.rollback != KEEP else ""
        facts = [self.mode, held, self.base, self.kind, self.what, self.step, self.when, f"rank{self.rank}"]
        return "-".join(filter(None, facts))

    @property
    def setting(self) -> tuple[str, str]:
        return self.mode, self.rollback

    @property
    def hits_bytes(self) -> bool:
        """Of weights, published or live."""
        return self.what in (_SOURCE, _STAGED, _PARAMETER)

    @property
    def is_lasting(self) -> bool:
        """A step that is tried again fails again."""
        return self.kind in ("raise", "no_memory") and self.when == "end"


def all_cases(num_ranks: int = NUM_RANKS) -> list[Case]:
    """Both ends of every step, on every rank, of every kind, in every mode, with every rollback, from every base. One
    that is cleared has nothing to go back to."""
    return [
        case
        for (mode, rollback), base, rank in product(SETTINGS, BASES, range(num_ranks))
        if base == "live" or rollback == KEEP
        for case in _of_rank(mode, rollback, base, rank)
    ]


def _of_rank(mode: str, rollback: str, base: str, rank: int) -> Iterator[Case]:
    setting = (mode, rollback, base)
    for step, when in product(STEPS, ENDS):
        for kind, acts in _PLAIN.items():
            yield Case(step, when, rank, kind, *setting, acts[when])
        act, what = (Act.FLIP_RECORD, _RECORD) if when == "begin" else (Act.FLIP_COUNTER, _COUNTER)
        yield Case(step, when, rank, "corrupt", *setting, act, what)
    for when in ENDS:
        yield Case("stage", when, rank, "corrupt", *setting, Act.FLIP_FILE, _SOURCE)
    if (mode, base) != ("copy", "live"):  # else nothing is staged: what is published goes into the parameters
        yield Case("stage", "end", rank, "corrupt", *setting, Act.FLIP_STAGED, _STAGED)
    # In alias mode the live parameter is the published byte.
    act = Act.FLIP_FILE if mode == "alias" else Act.FLIP_PARAMETER
    for step, when in _BETWEEN_INSTALL_AND_VERIFY:
        yield Case(step, when, rank, "corrupt", *setting, act, _PARAMETER)


_BETWEEN_INSTALL_AND_VERIFY: tuple[tuple[str, When], ...] = (("install", "end"), ("verify", "begin"))


def promised(case: Case) -> tuple[str, ...]:
    """The outcomes that an update which the fault hits may have, while nothing else goes wrong."""
    is_late = case.step == COMMIT
    if case.kind in ("kill", "stall"):
        return ("new",) if is_late else _undone(case)
    if case.kind in ("raise", "no_memory"):
        return ("fenced" if case.is_lasting else "new",) if is_late else _undone(case)
    if not case.hits_bytes or _is_read_already(case):
        return ("new",)
    return ("fenced",) if is_found_after_the_commit(case) else _undone(case)


def _undone(case: Case) -> tuple[str, ...]:
    """Without a way back it depends on whether some rank has begun to install; each does so on its own."""
    if case.base == "cleared":
        return ("cleared",)
    if case.rollback == OFF and case.step not in STAGING:
        return ("fenced", "old")
    is_found_by_install = case.what == _SOURCE and case.when == "end"
    return ("fenced",) if case.rollback == OFF and is_found_by_install else ("old",)


def _is_read_already(case: Case) -> bool:
    """The rank has its own copy of the byte by then."""
    is_source_copied = case.mode == "copy" and case.base == "cleared" and case.what == _SOURCE
    return is_source_copied and case.when == "end"


def is_found_after_the_commit(case: Case) -> bool:
    """What a rebind makes live was read when it was staged, and is read once more soon after the commit; what was
    copied is read back at once."""
    is_read_while_staged = (case.step, case.when) == ("stage", "begin")
    return case.hits_bytes and case.mode == "alias" and not is_read_while_staged


def covering_sample(cases: list[Case]) -> list[Case]:
    """Few cases in which every two facts (step, rank, kind, mode, end, what is hit) occur together that do so in
    `cases`; those that have as much to add are taken from the kinds, modes and ranks that were taken least."""
    wanted = {pair for case in cases for pair in _pairs(case)}
    sample: list[Case] = []
    taken: Counter[tuple[str, object]] = Counter()
    while wanted:
        best = max(cases, key=lambda case: (len(_pairs(case) & wanted), -sum(taken[fact] for fact in _crowds(case))))
        wanted -= _pairs(best)
        taken.update(_crowds(best))
        sample.append(best)
    return sorted(sample, key=lambda case: case.setting)


def _crowds(case: Case) -> tuple[tuple[str, object], ...]:
    return (case.kind, case.mode), (case.kind, case.rank)


def _pairs(case: Case) -> frozenset[tuple[tuple[str, object], ...]]:
    facts: list[tuple[str, object]] = [("step", case.step), ("rank", case.rank), ("mode", case.mode)]
    facts += [("when", case.when), ("kind", case.kind), ("what", case.what), ("base", case.base)]
    facts += [("rollback", case.rollback)]
    return frozenset((a, b) for index, a in enumerate(facts) for b in facts[index + 1 :])
