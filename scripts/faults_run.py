"""Lets something go wrong at every step of an update, on every rank, in every apply mode: the process is killed or
stopped, the step fails, memory is missing, a byte changes. Run it as `scripts/faults`.

    scripts/faults                             everything, in less than a quarter of an hour
    scripts/faults --only install --kind kill  one step, one kind
    scripts/faults --runner numpy --sample     what the tests play

All cases are played on real processes of the numpy engine, and on the Paddle engine a sample, in which every two of
step, rank, kind, mode and what else makes a case meet. Exit code 1 when a case left the engine torn, had another
outcome than is promised, told the caller something untrue, kept somebody waiting beyond a deadline, or left something
behind; 0 otherwise."""

import argparse
import json
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cases and their judge are those of the tests

from faults_report import Progress, summary, table

from fastdeploy_rl.config import ROLLBACKS
from tests.faults.fault_cases import BASES, KINDS, MODES, SETTINGS, STEPS, Case, all_cases, covering_sample
from tests.faults.fault_scene import FaultScene, Row, play_all
from tests.faults.numpy_scene import NumpyScene
from tests.faults.served_scene import ServedScene, is_possible

SIDE_BY_SIDE = 2
JSON = Path("build/faults.json")
RUNNERS: dict[str, Callable[[tuple[str, str], Path], FaultScene]] = {"numpy": NumpyScene, "paddle": ServedScene}


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    chosen = {runner: _chosen(arguments, runner) for runner in arguments.runner or RUNNERS}
    rows: list[Row] = []
    total = sum(map(len, chosen.values()))
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_faults") as folder, Progress(total) as progress:
        for runner, cases in chosen.items():
            for row in _play(cases, RUNNERS[runner], Path(folder)):
                rows.append(row)
                progress.show(row, len(rows))
    told = summary(rows, time.monotonic() - began)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(table(rows))
    print(", ".join(f"{name} {value}" for name, value in told.items() if name != "rows"))
    return int(bool(told["torn"] or told["failed"]) or len(rows) < total)


def _chosen(arguments: argparse.Namespace, runner: str) -> list[Case]:
    cases = all_cases()
    if runner == "paddle":
        cases = covering_sample([case for case in cases if is_possible(case)])
    elif arguments.sample:
        cases = covering_sample(cases)
    return [
        case
        for case in cases
        if case.step in (arguments.only or STEPS)
        and case.kind in (arguments.kind or KINDS)
        and case.mode in (arguments.mode or MODES)
        and case.rollback in (arguments.rollback or ROLLBACKS)
        and case.base in (arguments.base or BASES)
    ]


def _play(cases: list[Case], make: Callable[[tuple[str, str], Path], FaultScene], folder: Path) -> Iterator[Row]:
    """Two engines side by side: most of the time is spent waiting, for deadlines and for processes that start."""
    done: queue.SimpleQueue[Row | None] = queue.SimpleQueue()

    def play(setting: tuple[str, str]) -> None:
        try:
            ours = [case for case in cases if case.setting == setting]
            for row in play_all(ours, lambda setting: make(setting, Path(tempfile.mkdtemp(dir=folder)))):
                done.put(row)
        finally:
            done.put(None)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        playing = [pool.submit(play, setting) for setting in SETTINGS]
        for _ in SETTINGS:
            yield from iter(done.get, None)
        for future in playing:
            future.result()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, values, what in (
        ("--only", STEPS, "step"),
        ("--kind", KINDS, "kind"),
        ("--mode", MODES, "apply mode"),
        ("--rollback", ROLLBACKS, "rollback"),
        ("--base", BASES, "state before the update"),
        ("--runner", tuple(RUNNERS), "runner"),
    ):
        parser.add_argument(option, action="append", choices=values, help=f"only this {what}; may be repeated")
    parser.add_argument("--sample", action="store_true", help="on the numpy engine too only few cases")
    parser.add_argument("--json", type=Path, default=JSON, help=f"where the figures go (default {JSON})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
