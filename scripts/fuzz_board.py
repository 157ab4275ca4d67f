"""What is fuzzed in shared memory: the board, request slots, decisions, and FastDeploy's status words."""

import contextlib
import json
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

from fuzz_inputs import patches, several
from fuzz_targets import BrokenPromiseError, Reader, Target, in_turn, patched

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision, RankRecord, SlotState, StatusRecord
from fastdeploy_rl.board.legacy import WEIGHTS_WORD, StatusWord
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.errors import DeadlineExceededError
from fastdeploy_rl.lifecycle import LegacyCommand, LegacyStatus
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.report import Outcome, UpdateReport
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.committed import committed_version
from fastdeploy_rl.update.engine_state import EngineState
from fastdeploy_rl.update.requests import client_lock_path, next_board_request, running_requests, unread_commands

_NUM_RANKS = 2
_TOKEN = 5
"""Of a client that lives: slots that name it are not swept out."""
_LOCKED = [(StatusRecord, layout.STATUS_OFFSET), (CommandRecord, layout.COMMAND_OFFSET)] + [
    (RankRecord, layout.rank_offset(rank)) for rank in range(_NUM_RANKS)
]
_MOMENT_S = 0.001
_REPORT = UpdateReport(1, "update", "rejected", "1.1", "", 0.0, 0.0, [], "StepFailedError", "no")


@contextmanager
def _board() -> Iterator[Board]:
    """In a runtime directory of its own; the port is a name only, and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="fastdeploy_rl_fuzz.") as directory, ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", XDG_RUNTIME_DIR=directory))
        board = Board.create(60000 + random.SystemRandom().randrange(500), num_ranks=_NUM_RANKS)
        stack.callback(board.close)
        yield board


@contextmanager
def _board_reader() -> Iterator[Reader]:
    """Everything that anybody reads on a board: a client, an onlooker, rank 0 and another rank."""
    with _board() as board, OwnerLock(client_lock_path(board.run_dir, _TOKEN)):
        BoardRendezvous(board, 0).announce(CommandRecord(1, 1, 1, 1, 0, ""))
        pristine = bytes(memoryview(board.mapping))

        def read(data: bytes) -> None:
            hostile = patched(data, pristine)[: len(pristine)]
            try:
                _store(board, hostile)
                _look_at_records(board)
                _store(board, _signed(hostile))
                in_turn(
                    lambda: _look(board.port),
                    lambda: _use_client(board.port),
                    lambda: _serve(board),
                    lambda: _decide(board),
                    lambda: _take_over(board),
                )
            finally:
                _store(board, pristine)

        yield read


def _store(board: Board, data: bytes) -> None:
    with memoryview(board.mapping) as view:
        view[: len(data)] = data


def _signed(data: bytes) -> bytes:
    """With the checksums that their writers would give: what a hostile writer writes is no accident."""
    changed = bytearray(data)
    for record, offset in _LOCKED:
        (counter,) = struct.unpack_from("<Q", changed, offset)
        start = offset + layout.copy_offset(record, counter)
        stop = start + layout.CHECKSUM_BYTES + layout.record_bytes(record)
        changed[start:stop] = layout.with_checksum(bytes(changed[start + layout.CHECKSUM_BYTES : stop]))
    return bytes(changed)


def _look_at_records(board: Board) -> None:
    """As they are, with checksums that do not hold."""
    for record, offset in _LOCKED:
        with contextlib.suppress(DeadlineExceededError):
            board.read(record, offset, _MOMENT_S)


def _look(port: int) -> None:
    board = Board.attach(port)
    try:
        str(board.status())
        if not 1 <= board.num_ranks <= layout.MAX_RANKS:
            raise BrokenPromiseError(f"a board of {board.num_ranks} ranks was taken")
    finally:
        board._segment.close()


def _use_client(port: int) -> None:
    client = BoardClient(port)
    client._token = _TOKEN + 2
    with client:
        slots = map(layout.request_offset, range(layout.NUM_REQUEST_SLOTS))
        letting_go = (partial(client._let_go, slot) for slot in slots)
        in_turn(client.status, client._claimants, client.last_report, client.history, client.receipt, *letting_go)


def _serve(board: Board) -> None:
    """As rank 0, which took the place of another: every request there is, each refused; no slot may be left in its
    way."""
    unread_commands(board)
    for request in running_requests(board):
        request.took_effect(1)
        request.finish(_REPORT)
    for _ in range(layout.NUM_REQUEST_SLOTS + 1):
        request = next_board_request(board)
        if request is None:
            return
        request.finish(_REPORT)
    raise BrokenPromiseError("there are more requests than slots")


def _decide(board: Board) -> None:
    rendezvous = BoardRendezvous(board, 1)
    command = rendezvous.current()
    rendezvous.last_number(), rendezvous.lost_ranks(), board.condemned_ranks(), board.generation
    rendezvous.await_command(command.number, 0)
    in_turn(
        *(partial(rendezvous.decided, question, command.number) for question in Question),
        *(partial(rendezvous.await_decision, question, command.number, 0) for question in Question),
        *(partial(rendezvous.decide_once, question, command.number, Decision.NO) for question in Question),
        *(partial(rendezvous.await_votes, command.number, ballot, 0) for ballot in Ballot),
    )


def _take_over(board: Board) -> None:
    """As a rank 0 that was started again: it goes on from what the one before it wrote."""
    committed = committed_version(board, "ipc")
    state = EngineState(board)
    try:
        state.take_over(board.read(StatusRecord, layout.STATUS_OFFSET), committed)
        number = BoardRendezvous(board, 0).last_number() + 1
        state.take_legacy_command()
        state.count_command(number)
        BoardRendezvous(board, 0).announce(CommandRecord(number, 1, 1, 1, 0, ""))
    finally:
        state.close()


@contextmanager
def _legacy_reader() -> Iterator[Reader]:
    """Each four bytes are stored into the weights' word, as a foreign process would; rank 0 answers."""
    with _board() as board:
        state = EngineState(board)
        state.start_cleared()
        word = StatusWord(WEIGHTS_WORD, board.port)

        def read(data: bytes) -> None:
            for (value,) in struct.iter_unpack("<i", data[: len(data) // 4 * 4]):
                word.store(value)
                command = state.take_legacy_command()
                if (command is not None) != (value in set(LegacyCommand) and value != LegacyStatus.CLEARED):
                    raise BrokenPromiseError(f"{value} was taken for {command}")
                state.end_legacy_command()
                if word.load() != LegacyStatus.CLEARED:
                    raise BrokenPromiseError(f"after {value} the word of a cleared engine reads {word.load()}")

        try:
            yield read
        finally:
            word.close()
            state.close()


_SLOTS = [layout.request_offset(slot) for slot in (0, 1, layout.NUM_REQUEST_SLOTS - 1)]
_HEADER_WORDS = [*range(0, 0x58, 8), layout.RUN_DIR_OFFSET]
_BOARD_WORDS = [
    *_HEADER_WORDS,
    layout.INSTALL_DECISION_OFFSET,
    layout.COMMIT_DECISION_OFFSET,
    *(offset + 8 * word for _, offset in _LOCKED for word in range(24)),
    *(offset + layout.copy_offset(r, 1) + 4 + 8 * word for r, offset in _LOCKED for word in range(24)),
    *(offset + layout.copy_offset(r, 0) + 4 + 8 * word for r, offset in _LOCKED for word in range(24)),
    *(slot + 8 * word for slot in _SLOTS for word in range(6)),
    *(slot + layout.FATE_IN_SLOT for slot in _SLOTS),
    *(slot + layout.OUTCOME_IN_SLOT + 8 * word for slot in _SLOTS for word in range(4)),
]
_BOARD_TEXTS = [layout.RUN_DIR_OFFSET, *(slot + 0x28 for slot in _SLOTS), *(offset + 0x28 for _, offset in _LOCKED)]


def _requests(seed: random.Random) -> bytes:
    """Slots of clients that live, in any state, with any request in them."""
    found = []
    for slot in seed.sample(_SLOTS, seed.randrange(1, len(_SLOTS) + 1)):
        token = seed.choice((_TOKEN, _TOKEN, _TOKEN + 2, 1))
        state = seed.choice((*SlotState, SlotState.SUBMITTED, SlotState.SUBMITTED, 6, 7))
        fields = [seed.choice((0, 1, 2, 3, 4, 2**63, 2**64 - 1, seed.getrandbits(64))) for _ in range(4)]
        fields[1] = seed.choice((1, 2, 3, fields[1]))
        text = seed.choice((b"", b"1.1", b"\xff" * 64, b"a\0b", b"../x", b"9" * 64))
        found.append([slot, (struct.pack("<Q", token << 3 | state) + struct.pack("<4Q", *fields) + text).hex()])
        outcome = struct.pack("<QQ", seed.choice((*Outcome, 0, 77)), seed.getrandbits(64)) + seed.randbytes(80)
        found.append([slot + layout.OUTCOME_IN_SLOT, outcome.hex()])
    return json.dumps(found).encode()


def _words(seed: random.Random) -> bytes:
    values = (seed.choice((seed.randrange(-3, 4), seed.randrange(-(2**31), 2**31))) for _ in range(20))
    return struct.pack("<20i", *values)


BOARD_TARGETS = [
    Target("board", patches(_BOARD_WORDS, _BOARD_TEXTS, layout.board_bytes(_NUM_RANKS)), _board_reader),
    Target("requests", several(_requests), _board_reader),
    Target("legacy", several(_words), _legacy_reader),
]
