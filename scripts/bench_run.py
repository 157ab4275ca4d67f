"""Runs every benchmark, prints the rows as a table and writes them as JSON. Run it through `scripts/bench`.

    scripts/bench                          everything, as a table
    scripts/bench --json build/bench.json  the same, and as JSON
    scripts/bench --only decode            one group; --help lists them

Exit code 0 also where a target is missed: a figure is a fact about a machine. `--strict` makes it 1.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from bench_board import board_rows
from bench_decode import decode_rows
from bench_laws import law_rows
from bench_lifecycle import lifecycle_rows
from bench_manager import manager_rows
from bench_memory import memory_rows
from bench_native import native_rows
from bench_row import Row
from bench_rsync import rsync_rows
from bench_snapshot import snapshot_rows
from bench_updates import update_rows
from bench_words import word_rows
from rich.console import Console
from rich.table import Table

from fastdeploy_rl import _native

GROUPS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "native": lambda arguments: native_rows(arguments.runs),
    "laws": lambda arguments: law_rows(arguments.runs),
    "update": lambda arguments: update_rows(arguments.runs),
    "rsync": lambda arguments: rsync_rows(arguments.runs, arguments.torch),
    "snapshot": lambda arguments: snapshot_rows(arguments.runs, arguments.snapshot_dir),
    "wake-up": lambda arguments: word_rows(),
    "board": lambda arguments: board_rows(),
    "memory": lambda arguments: memory_rows(),
    "decode": lambda arguments: decode_rows(arguments.model, arguments.runs),
    "manager": lambda arguments: manager_rows(arguments.model, arguments.runs),
    "lifecycle": lambda arguments: lifecycle_rows(arguments.model, arguments.runs),
}


def main() -> int:
    arguments = _parser().parse_args()
    console = Console(stderr=True)
    rows: list[Row] = []
    for name, measure in GROUPS.items():
        if arguments.only in ("", name):
            with console.status(f"measuring: {name}"):
                rows += measure(arguments)
    Console().print(_table(rows))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [row.as_json() for row in rows], "machine": machine()}, indent=1))
    return int(arguments.strict and not all(row.is_met for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face directory of the real model; `scripts/bench` names scripts/make_model's",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--runs", type=int, default=7, choices=range(5, 1000), metavar="N", help="runs a median is of")
    parser.add_argument("--only", default="", choices=list(GROUPS), help="one group of rows")
    parser.add_argument(
        "--torch",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has torch and numpy, for the row beside gloo; default: the one that runs the benchmark",
    )
    parser.add_argument(
        "--snapshot-dir",
        type=Path,
        metavar="DIR",
        help="where snapshots are written for a while, 4 GB; default: where temporary files lie",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a target is missed")
    return parser


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernels": _native.CPU_LEVEL,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def _table(rows: list[Row]) -> Table:
    table = Table(
        "what", "measured", "limit", "ratio", "target", "met", title="medians; limits measured in the same run"
    )
    for row in rows:
        verdict = "[green]yes[/]" if row.is_met else "[bold red]no[/]"
        measured, limit = f"{row.value:.4g} {row.unit}", f"{row.limit}: {row.limit_value:.4g} {row.unit}"
        table.add_row(row.name, measured, limit, f"{row.ratio:.2f}", row.target, verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
