"""The board between processes: records, slots, decisions, and what the dead leave behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import HISTORY, Board, board_name, engine_dir
from fastdeploy_rl.board.layout import Ballot, CommandRecord, Decision, RankRecord
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineNotFoundError,
    LifecycleError,
    StepFailedError,
)
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import HistoryEntry, UpdateReport, history_entry
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.history import append_history, read_history
from fastdeploy_rl.update.rank_files import RankFiles
from fastdeploy_rl.update.requests import next_board_request
from tests.process.numpy_engine import free_port

PYTHON = [sys.executable, "-c"]


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=3)
    yield board
    board.close()


def soon(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


RANK = RankRecord(1, 1, 0, 0, 0, "ready", "", "", "")


def command(number: int) -> CommandRecord:
    return CommandRecord(number, kind=1, epoch=2, step=3, deadline_ns=soon(), content_digest="ab" * 32)


def test_records_come_back_as_they_were_written(board: Board):
    """Every field, cut text included: a character that does not fit whole is dropped whole."""
    record = RankRecord(7, 2, 8, Ballot.STAGED, 9, "staging", "1.2", "CoverageError", "é" * 2000)
    board.write(record, layout.rank_offset(1))
    found = board.read_rank(1)
    assert found == record._replace(reason="é" * 1024)
    assert board.read_rank(0).reason == board.read_rank(2).reason == ""


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 9, 500, 2000])
def test_a_writer_that_dies_inside_a_write_leaves_the_record_before_it(board: Board, num_bytes: int):
    """However far it came: the copy that it filled is not the one that holds. The next writer goes on."""
    offset = layout.rank_offset(0)
    former = RANK._replace(phase="former")
    board.write(former, offset)
    counter = board.load(offset)
    start = offset + layout.copy_offset(RankRecord, counter + 1)
    fresh = layout.with_checksum(layout.pack(RANK._replace(phase="fresh", reason="x" * 2048)))
    with memoryview(board.mapping) as view:
        view[start : start + num_bytes] = fresh[:num_bytes]
    assert board.read_rank(0) == former
    board.write(RANK, offset)
    assert board.read_rank(0) == RANK


@pytest.mark.parametrize("place", [0, 7, 8, 9, 60, 120, 500])
def test_a_flipped_bit_in_a_record_is_no_other_record(board: Board, place: int):
    """In the checksum or in a field: the rank counts as silent, until it writes again."""
    offset = layout.rank_offset(0)
    board.write(RANK, offset)
    at = offset + layout.copy_offset(RankRecord, board.load(offset)) + place
    with memoryview(board.mapping) as view:
        view[at] ^= 0x10
    assert board.read_rank(0) == layout.UNREADABLE_RANK
    with pytest.raises(DeadlineExceededError, match="another process wrote there"):
        board.read(RankRecord, offset, 0.01)
    board.write(RANK, offset)
    board.write(RANK, offset)
    assert board.read_rank(0) == RANK


def test_a_flipped_bit_in_the_counter_gives_the_record_before_at_worst(board: Board):
    offset = layout.rank_offset(0)
    former = RANK._replace(phase="former")
    board.write(former, offset)
    board.write(RANK, offset)
    for bit in range(64):
        counter = board.load(offset)
        _native.store_u64(board.mapping, offset, counter ^ 1 << bit)
        assert board.read_rank(0) in (RANK, former)
        _native.store_u64(board.mapping, offset, counter)


def test_a_lost_rank_is_known_to_all_and_what_is_undecided_is_decided_no(board: Board):
    rendezvous = BoardRendezvous(board, 0)
    rendezvous.announce(command(1))
    assert rendezvous.decide_once(Question.INSTALL, 1, Decision.YES) is Decision.YES
    board.mark_lost(2)
    assert board.lost_ranks() == {2}
    assert [rank.phase for rank in board.status().ranks] == ["starting", "starting", "lost"]
    assert rendezvous.decided(Question.INSTALL, 1) is Decision.YES
    assert rendezvous.decided(Question.COMMIT, 1) is Decision.NO
    board.condemn(2)
    assert board.condemned_ranks() == {2}
    BoardRendezvous(board, 2).mark_back()
    assert board.lost_ranks() == board.condemned_ranks() == frozenset()
    assert (board.generation, board.advance_generation(), board.generation) == (1, 2, 2)


def test_readers_never_see_half_a_record(board: Board):
    """A writer in another process alternates two records; each read is one of them, whole."""
    script = f"""
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board import layout
board = Board.attach({board.port})
a = layout.RankRecord(1, 1, 1, 1, 1, "a" * 16, "a" * 64, "a" * 64, "a" * 2048)
b = layout.RankRecord(2, 2, 2, 2, 2, "b" * 16, "b" * 64, "b" * 64, "b" * 2048)
print("go", flush=True)
for _ in range(20000):
    board.write(a, layout.rank_offset(0)); board.write(b, layout.rank_offset(0))
board.close()
"""
    with subprocess.Popen([*PYTHON, script], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "go\n"
        seen = set()
        while writer.poll() is None:
            record = board.read_rank(0)
            kinds = {record.pid, record.command, record.ballot, record.heartbeat_ns}
            letters = set(record.phase + record.version + record.error + record.reason)
            assert (kinds, letters) in [({1}, {"a"}), ({2}, {"b"}), ({0}, set())]
            seen |= letters
    assert writer.returncode == 0
    assert seen == {"a", "b"}


def test_a_decision_is_taken_once_however_many_propose(board: Board):
    """Processes race YES against NO; all read the same answer, and a later proposal changes nothing."""
    rendezvous = BoardRendezvous(board, 0)
    script = f"""
import sys
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import Decision
from fastdeploy_rl.board.rendezvous import BoardRendezvous, Question
board = Board.attach({board.port})
meeting = BoardRendezvous(board, int(sys.argv[1]))
proposal = Decision.YES if sys.argv[1] == "1" else Decision.NO
for number in range(1, 101):
    while meeting.await_command(number - 1, __import__("time").monotonic_ns() + 10**10) is None: pass
    print(meeting.decide_once(Question.COMMIT, number, proposal).name, flush=True)
board.close()
"""
    racers = [subprocess.Popen([*PYTHON, script, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (1, 2)]
    outcomes = []
    for number in range(1, 101):
        rendezvous.announce(command(number))
        answers = {racer.stdout.readline().strip() for racer in racers}
        assert len(answers) == 1
        decided = rendezvous.decided(Question.COMMIT, number)
        assert answers == {decided.name}
        assert rendezvous.decide_once(Question.COMMIT, number, Decision.YES) is decided
        assert rendezvous.decided(Question.INSTALL, number) is Decision.OPEN
        outcomes.append(decided)
    for racer in racers:
        racer.stdout.close()
        assert racer.wait(10) == 0


def test_whose_deadline_passes_proposes_no(board: Board):
    rendezvous = BoardRendezvous(board, 0)
    rendezvous.announce(command(1))
    assert rendezvous.await_decision(Question.INSTALL, 1, soon(0.01)) is Decision.NO
    assert rendezvous.decide_once(Question.INSTALL, 1, Decision.YES) is Decision.NO


def test_a_stale_question_is_refused(board: Board):
    """Whoever missed a command cannot decide it any more."""
    rendezvous = BoardRendezvous(board, 0)
    rendezvous.announce(command(1))
    rendezvous.announce(command(2))
    with pytest.raises(LifecycleError, match="command 2 already"):
        rendezvous.decide_once(Question.COMMIT, 1, Decision.YES)
    assert rendezvous.decided(Question.COMMIT, 2) is Decision.OPEN


def test_silent_ranks_are_named(board: Board):
    ranks = [BoardRendezvous(board, rank) for rank in range(3)]
    ranks[0].vote(1, Ballot.STAGED)
    ranks[2].vote(1, Ballot.STARTED)
    with pytest.raises(DeadlineExceededError, match=r"no vote STAGED .*ranks \[1, 2\] missing"):
        ranks[0].await_votes(1, Ballot.STAGED, soon(0.02))
    ranks[1].vote(1, Ballot.REFUSED, error="CoverageError", reason="no such tensor")
    records = ranks[0].await_votes(1, Ballot.STAGED, soon(0.02))  # one is against: nobody needs to wait for rank 2
    assert records[1].reason == "no such tensor"


def test_a_live_engine_keeps_its_port(board: Board):
    """A second engine is refused and touches nothing."""
    board.write(RANK, layout.rank_offset(0))
    with pytest.raises(
        ConfigurationError, match=rf"port {board.port} belongs to a live engine \(pid {os.getpid()}, since"
    ):
        Board.create(board.port, num_ranks=1)
    assert board.read_rank(0).phase == "ready"
    assert BoardClient(board.port).__enter__().__exit__(None, None, None) is None


def test_what_a_killed_engine_left_is_reclaimed(caplog: pytest.LogCaptureFixture):
    """SIGKILL leaves everything; clients see a dead engine; the next start begins clean and says what it removed."""
    port = free_port()
    script = f"""
import os, signal
from fastdeploy_rl.board.board import Board
Board.create({port}, num_ranks=2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.Popen([*PYTHON, script])
    assert killed.wait(30) == -9
    SharedSegment.attach(board_name(port)).close()
    with pytest.raises(EngineNotFoundError, match="is dead"):
        Board.attach(port)
    board = Board.create(port, num_ranks=1)
    assert board.num_ranks == 1
    assert board.reclaimed.owner.pid == killed.pid
    assert {board_name(port), f"model_weights_status.{port}"} <= set(board.reclaimed.names)
    assert f"event=reclaimed leftovers='of a dead engine (pid {killed.pid}, since" in caplog.text
    board.close()
    assert not engine_dir(port).exists()
    with closing(Board.create(port, num_ranks=1)) as board:
        assert board.reclaimed is None


def test_a_history_outlives_the_engine_where_it_was_given_a_place(tmp_path: Path):
    """The run directory leads to it, and goes."""
    board = Board.create(free_port(), num_ranks=1, history=tmp_path / "history.jsonl")
    append_history(board.run_dir / HISTORY, entry(1))
    with BoardClient(board.port) as client:
        assert client.history() == [entry(1)]
    board.close()
    assert read_history(tmp_path / "history.jsonl") == [entry(1)]


def test_what_a_dead_engine_proved_is_no_receipt(board: Board):
    RankFiles(board.run_dir).write_receipt(receipt := Receipt("1.1", "ipc", "c0", {"w": "0" * 64}, {"w": ["0" * 64]}))
    with BoardClient(board.port) as client:
        assert client.receipt() == receipt
        board._lock.release()  # as its death does
        for ask in (client.receipt, client.status):
            with pytest.raises(EngineNotFoundError, match="the engine is dead"):
                ask()


def entry(command: int) -> HistoryEntry:
    return history_entry(UpdateReport(command, "clear", "done", "", "1.1", 0.1, 0.1, []), 8182, 0.0)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 10, b"[]", b'{"command": "x"}'])
def test_a_malformed_report_is_an_error_that_names_the_file(board: Board, content: bytes):
    (board.run_dir / "report.1.json").write_bytes(content)
    with pytest.raises(StepFailedError, match=r"report\.1\.json .*cannot be read"):
        RankFiles(board.run_dir).read_report(1)


def test_an_oversized_report_is_not_taken_into_memory(board: Board, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastdeploy_rl.update.rank_files._MAX_BYTES", 1000)
    (board.run_dir / "report.1.json").write_bytes(b" " * 1001)
    with pytest.raises(StepFailedError, match="larger than 1000 bytes"):
        RankFiles(board.run_dir).read_report(1)


def test_the_slot_of_a_dead_client_is_free_again(board: Board):
    """A client that is killed while its request runs does not keep its slot; living claims stay."""
    script = f"""
import os, signal
from fastdeploy_rl.update.client import BoardClient
client = BoardClient({board.port}).__enter__()
for _ in range(15):
    client._claim(0)
print("claimed", flush=True)
signal.pause()
"""
    with BoardClient(board.port) as client, subprocess.Popen([*PYTHON, script], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"claimed\n"
        slot = client._claim(soon(0.01))
        with pytest.raises(DeadlineExceededError, match="all 16 request slots are taken"):
            client._claim(soon(0.01))
        other.kill()
        other.wait(10)
        assert next_board_request(board) is None
        words = [board.load(layout.request_offset(number)) for number in range(layout.NUM_REQUEST_SLOTS)]
        assert [number for number, word in enumerate(words) if word] == [slot]
