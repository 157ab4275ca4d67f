"""Breaks one law after another in a copy of this tree, and shows that the tests notice each. Run it as
`scripts/mutants`.

    scripts/mutants                          all of them, in less than a quarter of an hour
    scripts/mutants no_vote verify_skipped   two of them
    scripts/mutants --list                   their names, and the laws they break
    scripts/mutants --jobs 1                 one after another

First the tests that are to notice are run once on the unbroken copy, where all of them must pass. Then each mutant is
planted by itself and its tests are run up to the first that fails.

Exit code 1 when a mutant survived, 2 when nothing could be shown of one: its text does not stand in the tree any more,
what it makes of it is no program, or pytest did not come as far as a test; 0 otherwise."""

import argparse
import json
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # a helper of the tests is used

from mutants_list import MUTANTS, Mutant
from mutants_tree import Copy, MutantsError, Verdict

ROOT = Path(__file__).parents[1]
_JOBS = 2
JSON = Path("build/mutants.json")
_UNBROKEN_TEST_S = 120.0
_LEAST_TEST_S, _TIMES_SLOWER = 10.0, 3.0
"""A test that hangs is ended after so much longer than the slowest of the selection took on the unbroken copy."""


class Row(NamedTuple):
    mutant: Mutant
    verdict: Verdict | None
    error: str = ""

    @property
    def outcome(self) -> str:
        if self.verdict is None:
            return "error"
        return "killed" if self.verdict.is_killed else "SURVIVED"


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.list:
        print("\n".join(f"{mutant.name:32}{mutant.law}" for mutant in MUTANTS))
        return 0
    mutants = [mutant for mutant in MUTANTS if not arguments.names or mutant.name in arguments.names]
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: nothing is left behind
    try:
        rows = _play(mutants, arguments.jobs)
    except MutantsError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    told = _summary(rows, time.monotonic() - begun)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(_table(rows))
    print(", ".join(f"{name} {value}" for name, value in told.items() if name != "rows"))
    return 2 if told["errors"] else int(bool(told["survived"]))


def _play(mutants: Sequence[Mutant], num_jobs: int) -> list[Row]:
    """Each job has a copy of its own; most of the time is spent waiting for processes."""
    with ExitStack() as stack:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for _ in range(num_jobs):
            free.put(stack.enter_context(Copy(ROOT)))
        pool = stack.enter_context(ThreadPoolExecutor(num_jobs))
        stack.callback(pool.shutdown, cancel_futures=True)
        took = _run_unbroken(pool, free, list(dict.fromkeys(test for mutant in mutants for test in mutant.tests)))
        playing = [pool.submit(_play_one, free, mutant, _patience_s(mutant, took)) for mutant in mutants]
        for number, future in enumerate(as_completed(playing), 1):
            row = future.result()
            _say(f"{number}/{len(mutants)} {row.mutant.name}: {row.outcome} {row.error or _how(row.verdict)}")
        return [future.result() for future in playing]


def _run_unbroken(pool: ThreadPoolExecutor, free: "queue.SimpleQueue[Copy]", tests: Sequence[str]) -> dict[str, float]:
    """Seconds that each test took."""
    began, num_jobs = time.monotonic(), free.qsize()
    shares = [share for number in range(num_jobs) if (share := tests[number::num_jobs])]
    took: dict[str, float] = {}
    for verdict in pool.map(lambda share: _with_copy(free, lambda copy: copy.run(share, _UNBROKEN_TEST_S)), shares):
        if verdict.is_killed:
            raise MutantsError(f"{verdict.killed_by} fails though nothing is broken: {verdict.reason}")
        took |= verdict.test_seconds
    _say(f"{len(took)} tests pass on the unbroken copy in {time.monotonic() - began:.1f} s")
    return took


def _play_one(free: "queue.SimpleQueue[Copy]", mutant: Mutant, test_s: float) -> Row:
    def play(copy: Copy) -> Verdict:
        with copy.planted(mutant.breaks):
            return copy.run(mutant.tests, test_s)

    try:
        return Row(mutant, _with_copy(free, play))
    except MutantsError as error:
        return Row(mutant, None, str(error))


def _with_copy(free: "queue.SimpleQueue[Copy]", act: Callable[[Copy], Verdict]) -> Verdict:
    copy = free.get(timeout=_UNBROKEN_TEST_S)  # there is one for each job
    try:
        return act(copy)
    finally:
        free.put(copy)


def _patience_s(mutant: Mutant, unbroken: dict[str, float]) -> float:
    took = [seconds for test, seconds in unbroken.items() if test.startswith(mutant.tests)]
    return _LEAST_TEST_S + _TIMES_SLOWER * max(took, default=0.0)


def _how(verdict: Verdict | None) -> str:
    return f"in {verdict.seconds:.1f} s {verdict.killed_by}".rstrip() if verdict is not None else ""


def _say(text: str) -> None:
    print(f"mutants: {text}", file=sys.stderr, flush=True)


def _summary(rows: Sequence[Row], seconds: float) -> dict[str, object]:
    outcomes = [row.outcome for row in rows]
    return {
        "mutants": len(rows),
        "killed": outcomes.count("killed"),
        "survived": outcomes.count("SURVIVED"),
        "errors": outcomes.count("error"),
        "seconds": round(seconds, 1),
        "rows": [_as_json(row) for row in rows],
    }


def _as_json(row: Row) -> dict[str, object]:
    verdict = row.verdict or Verdict("", "", 0.0, {})
    return {
        "mutant": row.mutant.name,
        "law": row.mutant.law,
        "files": [each.file for each in row.mutant.breaks],
        "tests": row.mutant.tests,
        "outcome": row.outcome.lower(),
        "killed_by": verdict.killed_by,
        "reason": verdict.reason or row.error,
        "seconds": round(verdict.seconds, 2),
    }


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        verdict = row.verdict or Verdict("", "", 0.0, {})
        lines.append(f"{row.outcome:9}{verdict.seconds:6.1f} s  {row.mutant.name:32}{row.mutant.law}")
        by = verdict.killed_by or row.error.partition("\n")[0] or f"passed: {' '.join(row.mutant.tests)}"
        by += " (hung)" if "Timeout" in verdict.reason else ""
        lines.append(f"{'':19}{by}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these", choices=[*names, []])
    parser.add_argument("--list", action="store_true", help="names and laws; plants nothing")
    parser.add_argument("--jobs", type=int, default=_JOBS, help=f"how many at once (default {_JOBS})")
    parser.add_argument("--json", type=Path, default=JSON, help=f"where the figures go (default {JSON})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
