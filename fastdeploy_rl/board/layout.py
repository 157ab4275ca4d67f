"""The bytes of the board `fastdeploy_rl_board.{port}`: offsets, records and words. Nothing here touches memory.

    0x0000  header        magic, abi, num_ranks, nonce, port, the two bells, the ticket counter, run directory; the
                          generation of the ranks, which of them are lost, and which are condemned
    0x1000  status        one record, written by rank 0 alone: what the engine is doing and serving
    0x2000  command       one record, written by rank 0 alone, and the two decision words
    0x3000  requests      16 slots of 0x1000 bytes: a state word claimed by compare-and-swap, a request, an outcome
    0x13000 ranks         one record in 0x2000 bytes for each rank, written by that rank alone

Little-endian. A record is a u64 counter and two copies, each the CRC-32 of its fields as a u64 and the fields. The
counter's lowest bit names the copy that holds; a writer fills the other one and counts up. So a writer that dies leaves
the former record whole, and one flipped bit makes no vote. Text is UTF-8, cut to its field, NUL-padded. The native core
offers words and futexes only and knows none of this, so this file is the one place that does."""

import codecs
import enum
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from fastdeploy_rl.errors import SegmentError

MAGIC = int.from_bytes(b"FDRLBRD1", "little")
ABI = 6
MAX_RANKS = 16
NUM_REQUEST_SLOTS = 16
RECORD_BYTES = 0x1000
RANK_BYTES = 0x2000

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
GENERATION_OFFSET = 0x40
"""u64, 1 at first: counts up whenever a rank that died is started again; collectives are of one generation."""
LOST_OFFSET = 0x48
"""u64, a bit for each rank that died and is not back: set by whoever saw it die, cleared by the rank in its place."""
CONDEMNED_OFFSET = 0x50
"""u64, a bit for each rank that is silent and in the way: set by a rank, cleared by the rank in its place."""
RUN_DIR_OFFSET = 0x100
RUN_DIR_BYTES = 0x400
COUNTER_BYTES = CHECKSUM_BYTES = 8

STATUS_OFFSET = 0x1000
COMMAND_OFFSET = 0x2000
INSTALL_DECISION_OFFSET = 0x2800
COMMIT_DECISION_OFFSET = 0x2808
CALL_OFFSET = 0x2C00
"""Where ranks have no collectives of ours to tell each other what to run: a CallRecord, which rank 0 alone writes."""
MEETINGS_OFFSET = 0x2F00
"""u64, one for each rank, which that rank alone writes: the last meeting between calls of rank 0 that it came to."""
ATTENDING_OFFSET = 0x2F80
"""u64, one for each rank, which that rank alone writes: 1 while its loop stands still for the status word; 2 and 3
while FastDeploy's loop looks there for NORMAL and for CLEARED; 0 when it has gone on."""
REQUESTS_OFFSET = 0x3000
REQUEST_IN_SLOT = 0x8
FATE_IN_SLOT = 0x200
"""u64, as a decision word: the command that carries the request out, and whether it was committed. 0 before there is
one. Rank 0 alone writes it, so that its successor knows, whatever commands came after."""
OUTCOME_IN_SLOT = 0x400
RANKS_OFFSET = REQUESTS_OFFSET + NUM_REQUEST_SLOTS * RECORD_BYTES


def board_bytes(num_ranks: int) -> int:
    """Size of a board for that many ranks."""
    return RANKS_OFFSET + num_ranks * RANK_BYTES


def request_offset(slot: int) -> int:
    return REQUESTS_OFFSET + slot * RECORD_BYTES


def meeting_offset(rank: int) -> int:
    return MEETINGS_OFFSET + rank * 8


def attending_offset(rank: int) -> int:
    return ATTENDING_OFFSET + rank * 8


def rank_offset(rank: int) -> int:
    return RANKS_OFFSET + rank * RANK_BYTES


class Decision(enum.IntEnum):
    """Low two bits of a decision word; the command number stands above them."""

    OPEN = 0
    YES = 1
    NO = 2


def decision_word(command: int, decision: Decision) -> int:
    return (command << 2 | decision) % 2**64  # a number that leaves no room for it was never counted to


def command_in(word: int) -> int:
    """The number of the command that a decision word is about."""
    return word >> 2


def decision_in(word: int) -> Decision:
    """What nobody decides (both bits set: another process wrote there) is NO to all who read it."""
    return Decision(word & 3) if word & 3 in set(Decision) else Decision.NO


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


def is_in_state(word: int, state: SlotState) -> bool:
    """Also for a word that holds no state: who wrote it is another process."""
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

FOREIGN = 2
"""Of a StatusRecord's `shown`; no value that the engine puts into the legacy word."""


class StatusRecord(NamedTuple):
    """`version`: what is served now, empty while nothing is. `last_version` stays when it is not served any more;
    `content_digest` and `source` (where its bytes came from) do so while ranks hold it, and are empty where none is
    whole. `command`: the number of the last command whose outcome is told here; `pending`: the legacy command that is
    being carried out, 0 for none. The word is to read `legacy_status`; `shown`: what rank 0 left in it last (where the
    two differ it was about to put the one in the other's place), or FOREIGN where another process has stored since.
    `weight`, `kv_cache`, `graph`: lifecycle.Residency of each tag; `asleep`: a bit for each tag, in the order of
    lifecycle.Tag, that is asleep until somebody wakes it; `is_held`: paused until somebody resumes it. `live_since_ns`:
    since 1970, when the live version was committed, brought by `apply_mode`; `newest_version`: published, as far as the
    engine knows."""

    admission: str
    update: str
    version: str
    last_version: str
    content_digest: str
    source: str
    legacy_status: int
    pending: int
    shown: int
    is_serving: int
    commands_done: int
    command: int
    reason: str
    weight: str = ""
    kv_cache: str = ""
    graph: str = ""
    asleep: int = 0
    is_held: int = 0
    live_since_ns: int = 0
    apply_mode: str = ""
    has_receipt: int = 0
    newest_version: str = ""


class CommandRecord(NamedTuple):
    """`number` grows by one; epoch, step and digest are zero for commands that concern no version; `deadline_ns` is
    CLOCK_MONOTONIC; `options`: CommandOptions, encoded."""

    number: int
    kind: int
    epoch: int
    step: int
    deadline_ns: int
    content_digest: str
    options: int = 0


class CallRecord(NamedTuple):
    """Rank 0's word to the others: `sequence` grows by one with each; `number`: the command whose stalled part is to be
    run, 0 to go on with the engine's loop; `round`: of the loop, at which they are to listen, 0 for those who listen
    already; `error` and `reason`: of what they listened for, where that was refused."""

    sequence: int
    number: int
    round: int
    error: str = ""
    reason: str = ""


class RequestRecord(NamedTuple):
    """`version` is empty for "the newest"; `is_forced` allows a version that goes back; `options`: CommandOptions,
    encoded."""

    ticket: int
    kind: int
    is_forced: int
    deadline_ns: int
    version: str
    options: int = 0


class OutcomeRecord(NamedTuple):
    outcome: int
    command: int
    error: str
    reason: str


class RankRecord(NamedTuple):
    """`incarnation`: the generation in which this process started."""

    pid: int
    incarnation: int
    command: int
    ballot: int
    heartbeat_ns: int
    phase: str
    version: str
    error: str
    reason: str


_FORMATS: dict[type, str] = {
    StatusRecord: "16s16s64s64s64s32sqqqqQQ1024s16s16s16sQQq16sQ64s",
    CommandRecord: "QQQQq64sQ",
    CallRecord: "QQQ64s256s",
    RequestRecord: "QQQq64sQ",
    OutcomeRecord: "QQ64s2048s",
    RankRecord: "QQQQq16s64s64s2048s",
}
_STRUCTS = {record: struct.Struct("<" + fields) for record, fields in _FORMATS.items()}


def record_bytes(record: type) -> int:
    return _STRUCTS[record].size


def fresh_rank(pid: int, incarnation: int = 0) -> RankRecord:
    """Of a rank that has said nothing yet."""
    return RankRecord(pid, incarnation, 0, Ballot.NONE, 0, "", "", "", "")


UNREADABLE_RANK = fresh_rank(0)._replace(phase="unreadable")
"""What a rank's slot says while nothing that the rank wrote can be read there: the same as silence."""


def copy_offset(record: type, counter: int) -> int:
    """Where in a record the copy stands that holds at this value of its counter."""
    size = CHECKSUM_BYTES + record_bytes(record)
    return COUNTER_BYTES + (counter & 1) * (size + -size % 8)


def with_checksum(data: bytes) -> bytes:
    """A copy's bytes."""
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") + data


def checked(copy: bytes) -> bytes | None:
    """The fields of a copy; None where it is not what a writer wrote. One that was never written reads as zeros."""
    data = copy[CHECKSUM_BYTES:]
    is_whole = int.from_bytes(copy[:CHECKSUM_BYTES], "little") == zlib.crc32(data)
    return data if is_whole or not any(copy) else None


def ranks_in(mask: int) -> frozenset[int]:
    """The ranks whose bits are set in a word of the header."""
    return frozenset(rank for rank in range(MAX_RANKS) if mask >> rank & 1)


def pack(record: NamedTuple) -> bytes:
    """The record's bytes; text longer than its field is cut. SegmentError for a number that leaves its field: one
    counted on from what another process wrote on the board."""
    fields = (value.encode("utf-8", "replace") if isinstance(value, str) else value for value in record)
    try:
        return _STRUCTS[type(record)].pack(*fields)
    except struct.error as error:
        raise SegmentError(f"{type(record).__name__} {str(record)[:500]}: {error}; start the engine again") from error


Record = TypeVar("Record", bound=NamedTuple)


def unpack(record: type[Record], data: bytes) -> Record:
    """The record that `data` holds. A character cut in half by the field's end is dropped; what is no UTF-8 stays to
    be seen as U+FFFD: a version of noise must not read as none."""
    values = _STRUCTS[record].unpack(data)
    texts = (_text(value) if isinstance(value, bytes) else value for value in values)
    make: Callable[..., Record] = record
    return make(*texts)


def _text(field: bytes) -> str:
    text = field.rstrip(b"\0")
    if text.isascii():  # nearly all: an incremental decoder costs as much as the rest of a record
        return text.decode("ascii")
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text, False)
