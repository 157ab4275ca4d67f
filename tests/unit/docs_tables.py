"""Tables of the docs that repeat what the code says, made from the code: `python tests/unit/docs_tables.py` writes
them into the pages; with the JSON file of `scripts/bench` as argument it prints the table of figures.

A page marks each with `<!-- NAME: made by tests/unit/docs_tables.py -->` and `<!-- end -->`; test_docs.py holds pages
to them. What only a human can say about a field stands here beside its name.
"""

import enum
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from fastdeploy_rl import lifecycle
from fastdeploy_rl.board import layout
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.engines.fastdeploy import settings
from fastdeploy_rl.lifecycle import STALLED_PHASES, UPDATE_TRANSITIONS, UpdateEvent, UpdatePhase
from fastdeploy_rl.publish import leases
from fastdeploy_rl.report import CommandKind, Outcome
from fastdeploy_rl.sources import rsync_config

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(<!-- (\w+): made by tests/unit/docs_tables\.py -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


# --- the board -------------------------------------------------------------------------------------

_HEADER_FIELDS = {
    "MAGIC_OFFSET": ("u64", "the bytes `FDRLBRD1`; stored last, so that whoever reads them finds the rest"),
    "ABI_OFFSET": ("u64", "version of this layout"),
    "NUM_RANKS_OFFSET": ("u64", "ranks of the engine"),
    "NONCE_OFFSET": ("u64", "random; tells an engine from its successor at the same port"),
    "PORT_OFFSET": ("u64", "the port in the board's name"),
    "DOORBELL_OFFSET": ("i32", "futex: rung by clients and by the watcher of the status word; rank 0 waits on it"),
    "BELL_OFFSET": ("i32", "futex: rung after every store that somebody may wait for"),
    "GENERATION_OFFSET": ("u64", "1 at first; whoever starts a rank again counts up: its collectives are of that one"),
    "LOST_OFFSET": ("u64", "a bit for each rank that died and is not back"),
    "CONDEMNED_OFFSET": ("u64", "a bit for each rank that follows no decision, and is to be killed"),
    "TICKET_OFFSET": ("u64", "counts requests; their order is the order of their tickets"),
    "RUN_DIR_OFFSET": ("text", "the run directory; its owner's lock is that path with `.lock` behind"),
}
_AREAS = {
    "STATUS_OFFSET": ("StatusRecord", "rank 0"),
    "COMMAND_OFFSET": ("CommandRecord", "rank 0"),
    "INSTALL_DECISION_OFFSET": ("u64: the decision `install`", "whoever decides first, once a command"),
    "COMMIT_DECISION_OFFSET": ("u64: the decision `commit`", "whoever decides first, once a command"),
    "CALL_OFFSET": ("CallRecord: what ranks without collectives of ours run next", "rank 0"),
    "MEETINGS_OFFSET": ("u64 for each rank: the last meeting between such calls that it came to", "that rank"),
    "ATTENDING_OFFSET": ("u64 for each rank: where its loop stands to the status word", "that rank"),
    "REQUESTS_OFFSET": ("request slots, one behind the other", "a client each, and rank 0 the outcome"),
    "RANKS_OFFSET": ("one RankRecord a rank, one behind the other", "that rank"),
}
_NOT_OFFSETS = {"OUTCOME_IN_SLOT"}


def board_header() -> str:
    rows = [(f"{getattr(layout, name):#x}", kind, what) for name, (kind, what) in _HEADER_FIELDS.items()]
    return table(("offset", "type", "what"), rows)


def board_areas() -> str:
    rows = [(f"{getattr(layout, name):#x}", what, who) for name, (what, who) in _AREAS.items()]
    return table(("offset", "what", "written by"), rows)


def missing_offsets() -> list[str]:
    """Offsets of the layout that no table tells of."""
    names = {name for name in vars(layout) if name.endswith("_OFFSET")}
    return sorted(names - set(_HEADER_FIELDS) - set(_AREAS) - _NOT_OFFSETS)


def board_records() -> str:
    return "\n".join(f"**{record.__name__}**\n\n{_fields(record, text)}" for record, text in layout._FORMATS.items())


_START_IN_SLOT = {layout.RequestRecord: layout.COUNTER_BYTES, layout.OutcomeRecord: layout.OUTCOME_IN_SLOT}
"""The others stand in copies, behind their checksums."""


def _fields(record: type, text: str) -> str:
    start = _START_IN_SLOT.get(record, layout.CHECKSUM_BYTES)
    names: Sequence[str] = record._fields  # type: ignore[attr-defined]
    rows, offset = [], start
    for name, (kind, size) in zip(names, _members(text), strict=True):
        rows.append((f"+{offset:#x}", kind, f"`{name}`"))
        offset += size
    if offset - start != layout.record_bytes(record):
        raise ValueError(f"{record.__name__}: {offset - start} bytes, not {layout.record_bytes(record)}")
    return table(("offset", "type", "field"), rows)


def _members(text: str) -> Iterator[tuple[str, int]]:
    for size, letter in re.findall(r"(\d*)([sqQ])", text):
        yield (f"text, {size} bytes", int(size)) if letter == "s" else ({"q": "i64", "Q": "u64"}[letter], 8)


def board_numbers() -> str:
    kinds: list[type[enum.IntEnum]] = [
        CommandKind,
        Outcome,
        layout.Decision,
        layout.SlotState,
        layout.Ballot,
        lifecycle.LegacyStatus,
    ]
    rows = [(f"`{kind.__name__}`", ", ".join(f"{value.value} {value.name}" for value in kind)) for kind in kinds]
    return table(("what", "numbers"), rows)


# --- the lease table -------------------------------------------------------------------------------


def lease_table() -> str:
    row = f"{leases._HEADER_BYTES} + {leases._ROW_BYTES} x arena"
    rows = [
        ("0", "u64", f"the bytes `{leases._MAGIC.to_bytes(8, 'little').decode()}`"),
        ("8", "u64", f"version of this layout: {leases._ABI}"),
        (leases._BELL, "i32", "futex: rung when a lease is released"),
        (f"row = {row}", "u64", "generation: even: contents stand; odd: being written, or the trainer's own"),
        (
            f"row + {leases._SLOTS}",
            f"{leases.NUM_SLOTS} x (u64, u64)",
            "token of a holder (0: free), and when it came (ms)",
        ),
        (f"row + {leases._SEGMENT}", f"text, {leases._SEGMENT_BYTES} bytes", "name of the segment; empty: none"),
        (f"row + {leases._VERSION}", f"text, {leases._VERSION_BYTES} bytes", "version that it holds, for messages"),
    ]
    size = f"{leases.NUM_ARENAS} rows; the whole file has {leases._TABLE_BYTES} bytes.\n"
    return table(("offset", "type", "what"), rows) + "\n" + size


# --- the lifecycle, in one picture -----------------------------------------------------------------


def lifecycle_outline() -> str:
    """The way of an update that goes well, and the ways of admission and residency."""
    lines = [
        "```",
        *_update_lines(),
        "",
        *_ways("admission", lifecycle.ADMISSION_TRANSITIONS),
        "",
        *_ways("residency", lifecycle.RESIDENCY_TRANSITIONS),
        "```",
        "",
    ]
    return "\n".join(lines)


def _update_lines() -> list[str]:
    phase, served, stalled = UpdatePhase.IDLE, ["idle"], []
    while True:
        (event,) = [event for event in UPDATE_TRANSITIONS[phase] if event is not UpdateEvent.UNDO]
        phase = UPDATE_TRANSITIONS[phase][event]
        if phase is UpdatePhase.IDLE:
            break
        (stalled if phase in STALLED_PHASES else served).append(phase.value)
    undoable = [phase.value for phase, events in UPDATE_TRANSITIONS.items() if UpdateEvent.UNDO in events]
    return [
        "update      " + " -> ".join(served) + "              it serves",
        "              -> " + " -> ".join(stalled[:3]),
        "              -> " + " -> ".join(stalled[3:]) + " -> idle        nothing is decoded",
        f"            undone from {undoable[0]} to {undoable[-1]}, on every rank: -> undoing -> idle",
    ]


def _ways(name: str, table: Mapping[Any, Mapping[Any, Any]]) -> list[str]:
    """Where each state leads."""
    ways = [
        f"{state.value} -> {' | '.join(after.value for after in events.values())}"
        for state, events in table.items()
        if events
    ]
    return [(name if index == 0 else "").ljust(12) + way for index, way in enumerate(ways)]


# --- metrics ---------------------------------------------------------------------------------------


def metrics() -> str:
    found = [metric for metric in vars(EngineMetrics()).values() if isinstance(metric, MetricWrapperBase)]
    rows = []
    for metric in found:
        (told,) = metric.describe()
        name = told.name + ("_total" if told.type == "counter" else "")
        rows.append(
            (f"`{name}`", told.type, ", ".join(f"`{label}`" for label in metric._labelnames), told.documentation)
        )
    return table(("metric", "type", "labels", "what"), sorted(rows))


# --- what --rsync-config may say -------------------------------------------------------------------


def rsync_options() -> str:
    rows, shown = [], ""
    for option in rsync_config.options():
        name = f"`{option.transport}`" if option.transport != shown else ""
        shown = option.transport
        rows.append((name, f"`{option.key}`", f"`{option.default}`", option.bounds, option.description))
    return table(("transport", "key", "default", "bounds", "what"), rows)


# --- what the plugin for FastDeploy may be told ------------------------------------------------------------------


def fastdeploy_options() -> str:
    rows = [(f"`{option.key}`", f"`{option.default}`", option.description) for option in settings.options()]
    return table(("key", "default", "what"), rows)


# --- pages -----------------------------------------------------------------------------------------

TABLES: Mapping[str, Callable[[], str]] = {
    "board_header": board_header,
    "board_areas": board_areas,
    "board_records": board_records,
    "board_numbers": board_numbers,
    "lease_table": lease_table,
    "lifecycle_outline": lifecycle_outline,
    "metrics": metrics,
    "rsync_options": rsync_options,
    "fastdeploy_options": fastdeploy_options,
}


def filled(page: str) -> str:
    """A page's text with every marked table as the code says it now."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


def names_in(page: str) -> set[str]:
    """The tables that a page has."""
    return {match[2] for match in _BLOCK.finditer(page)}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def figures(bench: Path) -> str:
    """What `scripts/bench --json` measured, as the table of benchmarks.md."""
    told = json.loads(bench.read_text())
    rows = [
        (
            row["name"],
            f"{row['value']:.4g} {row['unit']}",
            f"{row['limit']}: {row['limit_value']:.4g} {row['unit']}",
            f"{row['ratio']:.2f}",
            row["target"],
        )
        for row in told["rows"]
    ]
    machine = ", ".join(f"{name} {value}" for name, value in told["machine"].items())
    return table(("what", "measured", "limit", "ratio", "target"), rows) + f"\n{machine}\n"


def write_pages() -> None:
    for path in pages():
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)} written", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(figures(Path(sys.argv[1])), end="")
    else:
        write_pages()
