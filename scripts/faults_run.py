"""Lets something go wrong at every step of an update, on every rank, in every apply mode: the process is killed or
stopped, the step fails, memory is missing, a byte changes. Run it as `scripts/faults`.

    scripts/faults                            everything, in less than a quarter of an hour
    scripts/faults --only install --kind kill one step, one kind
    scripts/faults --runner numpy --sample    what the tests play: every two of step, rank, kind, mode meet

Exit code 1 when a case left the engine torn, or another outcome than is promised, or told the caller something untrue,
or kept somebody waiting beyond a deadline, or left something behind; 0 otherwise."""

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

from tests.faults.fault_cases import KINDS, MODES, STEPS, Case, all_cases, covering_sample
from tests.faults.fault_scene import FaultScene, Row, play_all
from tests.faults.numpy_scene import NumpyScene

JSON = Path("build/faults.json")
RUNNERS = ("numpy",)


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_faults") as folder:
        cases = _chosen(arguments)
        with Progress(len(cases)) as progress:
            for row in _play_numpy(cases, Path(folder)):
                rows.append(row)
                progress.show(row, len(rows))
    told = summary(rows, time.monotonic() - began)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(told, indent=1) + "\n")
    print(table(rows))
    print(", ".join(f"{name} {value}" for name, value in told.items() if name != "rows"))
    return int(bool(told["torn"] or told["failed"]) or not rows)


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    cases = covering_sample(all_cases()) if arguments.sample else all_cases()
    return [
        case
        for case in cases
        if case.step in (arguments.only or STEPS)
        and case.kind in (arguments.kind or KINDS)
        and case.mode in (arguments.mode or MODES)
    ]


def _play_numpy(cases: list[Case], folder: Path) -> Iterator[Row]:
    """The modes side by side: most of the time is spent waiting, for deadlines and for processes that start."""
    done: queue.SimpleQueue[Row | None] = queue.SimpleQueue()

    def play(mode: str) -> None:
        try:
            for row in play_all([case for case in cases if case.mode == mode], _numpy_scenes(folder / mode)):
                done.put(row)
        finally:
            done.put(None)

    with ThreadPoolExecutor(len(MODES)) as pool:
        playing = [pool.submit(play, mode) for mode in MODES]
        for _ in MODES:
            yield from iter(done.get, None)
        for future in playing:
            future.result()


def _numpy_scenes(folder: Path) -> Callable[[str], FaultScene]:
    """Each in a folder of its own."""

    def make(mode: str) -> FaultScene:
        folder.mkdir(exist_ok=True)
        return NumpyScene(mode, Path(tempfile.mkdtemp(dir=folder)))

    return make


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, values, what in (
        ("--only", STEPS, "step"),
        ("--kind", KINDS, "kind"),
        ("--mode", MODES, "apply mode"),
        ("--runner", RUNNERS, "runner"),
    ):
        parser.add_argument(option, action="append", choices=values, help=f"only this {what}; may be repeated")
    parser.add_argument("--sample", action="store_true", help="few cases, in which every two facts meet")
    parser.add_argument("--json", type=Path, default=JSON, help=f"where the figures go (default {JSON})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
