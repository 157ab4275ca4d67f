"""`history`: how an engine's commands ended."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy_rl.cli.options import (
    Verbs,
    add_engine,
    add_json,
    add_verb,
    client_key,
    megabytes,
    one_line,
    positive,
    print_json,
)

if TYPE_CHECKING:
    from fastdeploy_rl.report import HistoryEntry

_EXAMPLES = """\
  fastdeploy-rl history                                  # of the engine that runs
  fastdeploy-rl history --file log/history.jsonl         # of one that ended: `serve` keeps it beside its logs
  fastdeploy-rl history --engine http://127.0.0.1:8180 --limit 100 --json"""
_GAP = "  "
_MAX_REASON = 200


def add_parser(verbs: Verbs) -> None:
    parser = add_verb(verbs, "history", "show how the last commands ended", _EXAMPLES)
    add_engine(parser)
    parser.add_argument("--file", type=Path, default=None, metavar="PATH", help="a history file, instead of an engine")
    parser.add_argument(
        "--limit", type=positive, default=20, metavar="N", help="commands to show, the newest last (default 20)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    entries = _read(options)
    if options.json:
        print_json(entries)
    elif not entries:
        print("no command yet")
    else:
        _print_table(entries)
    return 0


def _read(options: argparse.Namespace) -> "list[HistoryEntry]":
    if options.file is not None:
        from fastdeploy_rl.errors import ConfigurationError
        from fastdeploy_rl.update.history import read_history

        if not options.file.exists():
            raise ConfigurationError(f"no history file {options.file}")
        return read_history(options.file, options.limit)
    from fastdeploy_rl.control.controller import EngineController

    with EngineController(options.engine, api_key=client_key(options)) as engine:
        return engine.history(options.limit)


_COLUMNS: "dict[str, Callable[[HistoryEntry], str]]" = {
    "when": lambda entry: entry.when,
    "command": lambda entry: str(entry.command),
    "kind": lambda entry: entry.kind,
    "outcome": lambda entry: entry.outcome,
    "version": lambda entry: _versions(entry),
    "seconds": lambda entry: f"{entry.seconds:.3f}",
    "stall": lambda entry: f"{entry.stall_seconds * 1e3:.1f} ms",
    "aliased": lambda entry: megabytes(entry.aliased_bytes),
    "copied": lambda entry: megabytes(entry.copied_bytes) + (f", rollback {entry.rollback}" if entry.rollback else ""),
    "reason": lambda entry: _shortened(one_line(entry.reason)),
}


def _print_table(entries: "list[HistoryEntry]") -> None:
    rows = [list(_COLUMNS), *([_on_one_line(show(entry)) for show in _COLUMNS.values()] for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _versions(entry: "HistoryEntry") -> str:
    from fastdeploy_rl.report import STANDBY_KINDS

    before, after = entry.previous_version or "none", entry.version or "none"
    is_same = entry.kind in STANDBY_KINDS and (entry.outcome != "done" or before == after)
    return before if is_same else f"{before} -> {after}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def _on_one_line(text: str) -> str:
    """A file's text must not steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
