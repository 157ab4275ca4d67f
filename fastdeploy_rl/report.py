"""What is told about an update and about an engine: plain records, the same over the board, HTTP, logs and files.

Every update ends in one UpdateReport, whatever its outcome. All times are seconds, all sizes bytes.
"""

import enum

import msgspec

from fastdeploy_rl.receipt import Receipt


class CommandKind(enum.IntEnum):
    """What a command asks of all ranks; the value stands on the board."""

    UPDATE = 1
    CLEAR = 2
    RECOMPUTE = 3


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


class RankReport(msgspec.Struct, frozen=True):
    """One rank's part. `stall_seconds`: from drain to the end of the commit, while no token could be made.
    `not_aliased` maps a parameter that was copied to the reason."""

    rank: int
    steps: list[StepReport]
    stall_seconds: float = 0.0
    apply_mode: str = ""
    aliased_bytes: int = 0
    copied_bytes: int = 0
    not_aliased: dict[str, str] = {}
    error: str = ""


class UpdateReport(msgspec.Struct, frozen=True):
    """The story of one command. `reason` is empty when `outcome` is "done"; `receipt` is there after a done update;
    `stall_seconds` is that of the rank that stalled longest."""

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

    @property
    def aliased_bytes(self) -> int:
        return sum(rank.aliased_bytes for rank in self.ranks)

    @property
    def copied_bytes(self) -> int:
        return sum(rank.copied_bytes for rank in self.ranks)


class RankStatus(msgspec.Struct, frozen=True):
    """One rank as the board shows it. `pid` is for messages only: it means nothing across containers."""

    rank: int
    pid: int
    phase: str
    command: int
    version: str
    heartbeat_age_s: float
    error: str = ""


class EngineStatus(msgspec.Struct, frozen=True):
    """The engine as the board shows it. `answer` is what admission says now: "serve", or the reason to refuse."""

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
