"""How the faults came out: a line while they are played, a table, and the figures for a file. Plays none."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from tests.faults.fault_cases import KINDS, STEPS
from tests.faults.fault_judge import TORN
from tests.faults.fault_scene import Row

TOLD_EVERY_S = 10.0


class Progress:
    """A line on standard error: rewritten on a terminal, a new one now and then elsewhere. What failed is told at once.
    Use in a with statement."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def show(self, row: Row, num_done: int) -> None:
        for failure in row.failures:
            self._clear()
            print(f"FAILED {row.runner} {row.case}: {failure}", file=sys.stderr, flush=True)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._told < TOLD_EVERY_S:
            return
        self._told = now
        left_s = (now - self._began) * (self._total - num_done) / num_done
        text = f"faults: {num_done}/{self._total}, {row.runner} {row.case}: {row.outcome}, {left_s:.0f} s left"
        self._clear()
        print(text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clear()


def summary(rows: Sequence[Row], seconds: float) -> dict[str, object]:
    """For the file. `torn`: engines that held neither one whole version nor nothing; `failed`: cases of which anything
    was not as it must be."""
    outcomes = Counter(row.outcome for row in rows)
    return {
        "torn": outcomes[TORN],
        "failed": sum(bool(row.failures) for row in rows),
        "cases": len(rows),
        **{outcome: outcomes[outcome] for outcome in sorted(outcomes) if outcome != TORN},
        "seconds": round(seconds, 1),
        "slowest_recovery_seconds": round(max((row.recovered_s for row in rows), default=0.0), 2),
        "rows": [_as_json(row) for row in rows],
    }


def _as_json(row: Row) -> dict[str, object]:
    case = row.case
    return {
        "step": case.step,
        "rank": case.rank,
        "kind": case.kind,
        "mode": case.mode,
        "rollback": case.rollback,
        "base": case.base,
        "runner": row.runner,
        "outcome": row.outcome,
        "seconds": round(row.seconds, 3),
        "when": case.when,
        "what": case.what,
        "told": row.told,
        "told_seconds": round(row.told_s, 3),
        "recovery_seconds": round(row.recovered_s, 3),
        "failures": row.failures,
    }


def table(rows: Sequence[Row]) -> str:
    """For each runner a line for each step and a column for each kind: how many cases had which outcome."""
    lines: list[list[str]] = []
    for runner in dict.fromkeys(row.runner for row in rows):
        lines.append([runner, *KINDS])
        for step in STEPS:
            ours = [row for row in rows if (row.runner, row.case.step) == (runner, step)]
            if ours:
                lines.append([step, *(_cell([row for row in ours if row.case.kind == kind]) for kind in KINDS)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(rows: Sequence[Row]) -> str:
    """The usual outcome first."""
    return (
        ", ".join(f"{number} {outcome}" for outcome, number in Counter(row.outcome for row in rows).most_common())
        or "-"
    )
