"""The bytes of the board `fastdeploy_rl_board.{port}`: offsets, records and words. Nothing here touches memory.

    0x0000  header        magic, abi, num_ranks, nonce, port, the two bells, the ticket counter, run directory
    0x1000  status        one sequence-locked record, written by rank 0 alone: what the engine is doing and serving
    0x2000  command       one sequence-locked record, written by rank 0 alone, and the two decision words
    0x3000  requests      16 slots of 0x1000 bytes: a state word claimed by compare-and-swap, a request, an outcome
    0x13000 ranks         one sequence-locked record of 0x1000 bytes for each rank, written by that rank alone

Little-endian. A sequence-locked record is a u64 counter (odd while its writer writes) and the fields behind it. Text
is UTF-8, cut to its field, NUL-padded. The native core offers words and futexes only and knows none of this, so this
file is the one place that does."""

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeVar

MAGIC = int.from_bytes(b"FDRLBRD1", "little")
ABI = 2
MAX_RANKS = 16
NUM_REQUEST_SLOTS = 16
RECORD_BYTES = 0x1000

MAGIC_OFFSET = 0x00
ABI_OFFSET = 0x08
NUM_RANKS_OFFSET = 0x10
NONCE_OFFSET = 0x18
PORT_OFFSET = 0x20
DOORBELL_OFFSET = 0x28
"""i32: rung by clients and by the watcher of the legacy word; rank 0's coordinator waits on it."""
BELL_OFFSET = 0x30
"""i32: rung after every store that somebody of the engine, or a client, may wait for."""
TICKET_OFFSET = 0x38
"""u64: counts requests; their order is the order of their tickets."""
RUN_DIR_OFFSET = 0x100
RUN_DIR_BYTES = 0x400

STATUS_OFFSET = 0x1000
COMMAND_OFFSET = 0x2000
INSTALL_DECISION_OFFSET = 0x2800
COMMIT_DECISION_OFFSET = 0x2808
REQUESTS_OFFSET = 0x3000
OUTCOME_IN_SLOT = 0x400
RANKS_OFFSET = REQUESTS_OFFSET + NUM_REQUEST_SLOTS * RECORD_BYTES


def board_bytes(num_ranks: int) -> int:
    """Size of a board for that many ranks."""
    return RANKS_OFFSET + num_ranks * RECORD_BYTES


def request_offset(slot: int) -> int:
    return REQUESTS_OFFSET + slot * RECORD_BYTES


def rank_offset(rank: int) -> int:
    return RANKS_OFFSET + rank * RECORD_BYTES


class Decision(enum.IntEnum):
    """Low two bits of a decision word; the command number stands above them."""

    OPEN = 0
    YES = 1
    NO = 2


def decision_word(command: int, decision: Decision) -> int:
    return command << 2 | decision


class SlotState(enum.IntEnum):
    """Low three bits of a request slot's state word; the client's token stands above them. A free slot is 0.

    The client moves FREE -> CLAIMED -> SUBMITTED, the engine SUBMITTED -> RUNNING -> FINISHED. A client that gives up
    withdraws what is not RUNNING yet (-> FREE) and abandons what is; the engine frees an ABANDONED slot at the end.
    Every move is a compare-and-swap of the whole word, so that it fails where another one was first."""

    FREE = 0
    CLAIMED = 1
    SUBMITTED = 2
    RUNNING = 3
    FINISHED = 4
    ABANDONED = 5


def slot_word(token: int, state: SlotState) -> int:
    return token << 3 | state


def slot_state(word: int) -> SlotState:
    return SlotState(word & 7)


def is_in_state(word: int, state: SlotState) -> bool:
    """As `slot_state`, for a word that may hold anything: who wrote it is another process."""
    return word & 7 == state


def slot_token(word: int) -> int:
    return word >> 3


class Ballot(enum.IntEnum):
    """How far a rank has come with the command it acknowledges. Grows; a rank that REFUSED to go on to STAGED or
    FAILED to become VERIFIED next is FINISHED."""

    NONE = 0
    STARTED = 1
    STAGED = 2
    REFUSED = 3
    VERIFIED = 4
    FAILED = 5
    FINISHED = 6
    """The rank follows the outcome: committed, or undone; its part of the report is written."""


AGAINST = frozenset({Ballot.REFUSED, Ballot.FAILED})


class StatusRecord(NamedTuple):
    admission: str
    update: str
    version: str
    content_digest: str
    legacy_status: int
    is_serving: int
    commands_done: int
    reason: str


class CommandRecord(NamedTuple):
    """`number` grows by one; epoch, step and digest are zero for commands
    that concern no version; `deadline_ns` is CLOCK_MONOTONIC."""

    number: int
    kind: int
    epoch: int
    step: int
    deadline_ns: int
    content_digest: str


class RequestRecord(NamedTuple):
    """`version` is empty for "the newest"; `is_forced` allows a version that goes back."""

    ticket: int
    kind: int
    is_forced: int
    deadline_ns: int
    version: str


class OutcomeRecord(NamedTuple):
    outcome: int
    command: int
    error: str
    reason: str


class RankRecord(NamedTuple):
    pid: int
    command: int
    ballot: int
    heartbeat_ns: int
    phase: str
    version: str
    error: str
    reason: str


_FORMATS: dict[type, str] = {
    StatusRecord: "16s16s64s64sqqQ1024s",
    CommandRecord: "QQQQq64s",
    RequestRecord: "QQQq64s",
    OutcomeRecord: "QQ64s2048s",
    RankRecord: "QQQq16s64s64s2048s",
}
_STRUCTS = {record: struct.Struct("<" + fields) for record, fields in _FORMATS.items()}


def record_bytes(record: type) -> int:
    return _STRUCTS[record].size


def pack(record: NamedTuple) -> bytes:
    """The record's bytes; text longer than its field is cut at a character boundary."""
    layout = _STRUCTS[type(record)]
    return layout.pack(*(_cut(value) if isinstance(value, str) else value for value in record))


def _cut(text: str, limit: int = 2048) -> bytes:
    return text.encode("utf-8", "replace")[:limit]


Record = TypeVar("Record", bound=NamedTuple)


def unpack(record: type[Record], data: bytes) -> Record:
    """The record that `data` holds. A character cut in half by the field's end is dropped."""
    values = _STRUCTS[record].unpack(data)
    texts = (value.rstrip(b"\0").decode("utf-8", "ignore") if isinstance(value, bytes) else value for value in values)
    make: Callable[..., Record] = record
    return make(*texts)
