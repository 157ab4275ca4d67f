"""What is told about an update and about an engine: plain records, the same over the board, HTTP, logs and files.

Every update ends in one UpdateReport, whatever its outcome. All times are seconds, all sizes bytes.
"""

import enum
from datetime import datetime, timezone

import msgspec

from fastdeploy_rl.receipt import Receipt


class CommandKind(enum.IntEnum):
    """What a command asks of all ranks; the value stands on the board."""

    UPDATE = 1
    CLEAR = 2
    RECOMPUTE = 3
    RESTORE = 4
    """The engine's own, after a rank died: every rank holds the committed version again."""
    PAUSE = 5
    RESUME = 6
    SLEEP = 7
    WAKE = 8


STANDBY_KINDS = frozenset(
    kind.name.lower() for kind in (CommandKind.PAUSE, CommandKind.RESUME, CommandKind.SLEEP, CommandKind.WAKE)
)
"""Kinds of commands that leave the version what it is, but for weights that were dropped."""


class Outcome(enum.IntEnum):
    """How a command ended; the value stands on the board."""

    DONE = 1
    REJECTED = 2
    FENCED = 3


class StepReport(msgspec.Struct, frozen=True):
    """One named step on one rank."""

    step: str
    seconds: float
    num_bytes: int = 0


KV_KEPT, KV_REBUILT, KV_LOST = "kept", "rebuilt", "lost"


class RankReport(msgspec.Struct, frozen=True):
    """One rank's part. `stall_seconds`: from drain to the end of the commit, while no token could be made.
    `apply_mode` is the one asked for; `not_aliased` maps a parameter that was copied
    although it asks to alias to the reason. `rollback`: the one of config.ROLLBACKS in force, known before anything is
    touched; `rollback_bytes`: the engine's own memory held for it; `rollback_reason`: why another than asked for.
    `kv`: "kept" or "rebuilt" where an update took the cache along, "lost" where an undo left it empty.
    `applied`: how the weights were taken over, "alias", "arena" (a rebind to the engine's own memory) or "copy", and
    `applied_reason` why that one. `graphs_captured`: that had to be captured anew."""

    rank: int
    steps: list[StepReport]
    stall_seconds: float = 0.0
    apply_mode: str = ""
    aliased_bytes: int = 0
    copied_bytes: int = 0
    not_aliased: dict[str, str] = {}
    rollback: str = ""
    rollback_bytes: int = 0
    rollback_reason: str = ""
    kv: str = ""
    error: str = ""
    applied: str = ""
    applied_reason: str = ""
    graphs_captured: int = 0


class UpdateReport(msgspec.Struct, frozen=True):
    """The story of one command. `reason` is empty when `outcome` is "done", and `receipt` is there after a done update,
    unless the engine had no room to store this; `stall_seconds` is that of the rank that stalled longest."""

    command: int
    kind: str
    outcome: str
    version: str
    previous_version: str
    seconds: float
    stall_seconds: float
    ranks: list[RankReport]
    error: str = ""
    reason: str = ""
    receipt: Receipt | None = None
    differing: list[tuple[str, int]] = []

    def __str__(self) -> str:
        """One line: its fields name every tensor on every rank."""
        is_moved = self.kind not in STANDBY_KINDS or self.aliased_bytes or self.copied_bytes
        parts = (
            f"{self.kind} {self.outcome}",
            self.versions,
            f"{self.seconds:.3f} s",
            f"{self.stall_seconds * 1e3:.1f} ms of it without decoding" if self.stalls else "",
            f"{self.aliased_bytes} bytes aliased, {self.copied_bytes} copied" if is_moved else "",
            f"rollback {self.rollback}" if self.rollback else "",
            f"KV cache {self.kv}" if self.kv else "",
            f"{self.graphs_captured} graphs captured" if self.graphs_captured else "",
        )
        why = f": {self.reason.splitlines()[0]}" if self.reason else ""
        return ", ".join(part for part in parts if part) + why

    @property
    def versions(self) -> str:
        """What is live, as words: of a pause that is no news, while an update tells what was before. May be empty."""
        before, after = self.previous_version, self.version
        if self.kind not in STANDBY_KINDS:
            return f"version {after or 'none'} (was {before or 'none'})"
        was = f" (was {before})" if before and after and before != after else ""
        return f"version {after or before}{was}" if after or before else ""

    @property
    def stalls(self) -> bool:
        """The ranks stood still for a time and went on; after a pause or a sleep they do not."""
        return self.kind not in STANDBY_KINDS

    @property
    def aliased_bytes(self) -> int:
        return sum(rank.aliased_bytes for rank in self.ranks)

    @property
    def copied_bytes(self) -> int:
        return sum(rank.copied_bytes for rank in self.ranks)

    @property
    def apply_mode(self) -> str:
        """That of the ranks, which share one; empty where the command had none."""
        return next((rank.apply_mode for rank in self.ranks), "")

    @property
    def rollback(self) -> str:
        """How the ranks could go back, where that is more than leaving the old weights in place: the policies in force
        and what of the engine's own memory they take."""
        policies = sorted({rank.rollback for rank in self.ranks if rank.rollback not in ("", "keep")})
        held = sum(rank.rollback_bytes for rank in self.ranks)
        return " and ".join(policies + ([f"keep ({held} bytes)"] if held else []))

    @property
    def rollback_reason(self) -> str:
        """The first rank's reason for another policy than asked for, if it cost something."""
        return next((rank.rollback_reason for rank in self.ranks if rank.rollback_bytes and rank.rollback_reason), "")

    @property
    def kv(self) -> str:
        """What became of the KV cache on the rank where most of it is gone: "lost", "rebuilt" or "kept"."""
        found = {rank.kv for rank in self.ranks}
        return next((word for word in (KV_LOST, KV_REBUILT, KV_KEPT) if word in found), "")

    @property
    def graphs_captured(self) -> int:
        """Anew, over all ranks."""
        return sum(rank.graphs_captured for rank in self.ranks)

    @property
    def applied(self) -> str:
        """How the weights were taken over, where the ranks say so: "alias", "arena" or "copy", or several; and why."""
        ways: dict[str, str] = {}
        for rank in self.ranks:
            if rank.applied:
                ways[rank.applied] = ways.get(rank.applied) or rank.applied_reason
        return "; ".join(f"{way}: {reason}" if reason else way for way, reason in sorted(ways.items()))

    @property
    def not_aliased(self) -> dict[str, list[str]]:
        """Reason -> the parameters that were copied for it on some rank, by name; the most frequent reason first."""
        names: dict[str, set[str]] = {}
        for rank in self.ranks:
            for name, reason in rank.not_aliased.items():
                names.setdefault(reason, set()).add(name)
        return {reason: sorted(names[reason]) for reason in sorted(names, key=lambda reason: -len(names[reason]))}


MAX_HISTORY_TEXT = 2048
MAX_HISTORY_REASONS = 8


class HistoryEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of an engine's history: a report without its maps of single tensors. `when`: UTC, ISO 8601, when the
    command ended; `steps`: seconds of each step on the rank that took longest for it; `not_aliased`: reason -> number
    of parameters copied for it (the 8 most frequent reasons)."""

    when: str
    port: int
    command: int
    kind: str
    outcome: str
    version: str
    previous_version: str
    seconds: float
    stall_seconds: float
    num_ranks: int = 0
    apply_mode: str = ""
    aliased_bytes: int = 0
    copied_bytes: int = 0
    not_aliased: dict[str, int] = {}
    rollback: str = ""
    steps: dict[str, float] = {}
    content_digest: str = ""
    num_differing: int = 0
    error: str = ""
    reason: str = ""


def utc_text(seconds: float) -> str:
    """`seconds` since 1970 as ISO 8601, in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def history_entry(report: UpdateReport, port: int, now_s: float) -> HistoryEntry:
    """What of `report` is kept; `now_s`: seconds since 1970. Bounded, whatever the report holds."""
    reasons = list(report.not_aliased.items())[:MAX_HISTORY_REASONS]
    return HistoryEntry(
        when=utc_text(now_s),
        port=port,
        command=report.command,
        kind=report.kind,
        outcome=report.outcome,
        version=report.version,
        previous_version=report.previous_version,
        seconds=report.seconds,
        stall_seconds=report.stall_seconds,
        num_ranks=len(report.ranks),
        apply_mode=report.apply_mode,
        aliased_bytes=report.aliased_bytes,
        copied_bytes=report.copied_bytes,
        not_aliased={reason: len(names) for reason, names in reasons},
        rollback=report.rollback,
        steps=_slowest_steps(report.ranks),
        content_digest=report.receipt.content_digest if report.receipt else "",
        num_differing=len(report.differing),
        error=report.error,
        reason=report.reason[:MAX_HISTORY_TEXT],
    )


def _slowest_steps(ranks: list[RankReport]) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for step in (step for rank in ranks for step in rank.steps):
        slowest[step.step] = max(slowest.get(step.step, 0.0), step.seconds)
    return slowest


LOST_PHASE = "lost"
"""Of a rank whose process died and whose successor has not taken its seat yet; its other fields are the dead one's."""


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the board shows it. `pid` is for messages only: it means nothing across containers.
    `heartbeat_age_s`: None before its first sign of life."""

    rank: int
    pid: int
    phase: str
    command: int
    version: str
    heartbeat_age_s: float | None
    error: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """The engine as the board shows it. `reason`: why it refuses requests, empty while `is_serving`. `residency`: each
    tag of lifecycle.Tag and whether its memory is "resident", "offloaded" or "dropped"; `asleep`: the tags that
    somebody put to sleep and did not wake yet. `is_paused`: somebody paused it and did not resume it yet.
    `live_since`: UTC, ISO 8601, when the live version was committed; `source` and `apply_mode`: the strategy (or
    "checkpoint") and the mode that brought it; `receipt_digest`: the content digest that its receipt proves, empty
    where there is none. `newest_version`: the newest published one that the engine knows of."""

    port: int
    admission: str
    update: str
    version: str
    content_digest: str
    legacy_status: str
    is_serving: bool
    reason: str
    commands_done: int
    ranks: list[RankStatus]
    residency: dict[str, str] = {}
    asleep: list[str] = []
    is_paused: bool = False
    live_since: str = ""
    source: str = ""
    apply_mode: str = ""
    receipt_digest: str = ""
    newest_version: str = ""
