"""More clients than the board has slots, slow ones, and ones that vanish: each live one gets its own outcome."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import RequestRecord, SlotState
from fastdeploy_rl.errors import DeadlineExceededError, PeerLostError
from fastdeploy_rl.report import CommandKind, UpdateReport
from fastdeploy_rl.testing import Sequencer
from fastdeploy_rl.update import requests
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.rank_files import KEPT_REPORTS
from fastdeploy_rl.update.requests import next_board_request
from tests.process.answering import Answering, await_states, soon, states
from tests.process.numpy_engine import free_port

CLIENT = str(Path(__file__).with_name("board_client.py"))
SLOTS = layout.NUM_REQUEST_SLOTS


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


@contextmanager
def client_process(board: Board, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, CLIENT, str(board.port), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process


def test_sixteen_clients_at_once_get_their_own_outcomes_and_the_seventeenth_is_told(board: Board):
    """All slots are taken while the engine is busy; nobody's outcome goes to anyone else, nothing is asked twice."""
    with Answering(board) as engine, ExitStack() as stack, BoardClient(board.port) as late:
        clients = [stack.enter_context(client_process(board, "ask", f"{n}", "10")) for n in range(SLOTS)]
        await_states(board, lambda taken: len(taken) == SLOTS)
        with pytest.raises(DeadlineExceededError, match=r"all 16 request slots are taken \(.*pid [0-9]+") as told:
            late.update("99.9", deadline_s=0.05)
        assert all(f"pid {client.pid}" in str(told.value) for client in clients)
        engine.gate.set()
        assert [client.stdout.read() for client in clients] == ["ok\n"] * SLOTS
        assert late.update("99.1", deadline_s=20).version == "99.1"
        assert sorted(engine.answered) == sorted([f"{n}.{i}" for n in range(SLOTS) for i in range(10)] + ["99.1"])
        assert states(board) == []


def test_killed_clients_leave_free_slots_wherever_they_were(board: Board):
    """SIGKILL with a slot claimed, submitted, and finished but unread: the slots are free, a request that was not begun
    is not carried out, and the locks of the dead are gone."""
    points = ["finished", "submitted", "claimed"]
    with Answering(board) as engine, Sequencer.create(points) as order, ExitStack() as stack:
        engine.gate.set()
        victims = [stack.enter_context(client_process(board, "stop", point, order.name)) for point in points]
        order.await_end()
        await_states(board, lambda taken: taken == [SlotState.CLAIMED, SlotState.FINISHED, SlotState.FINISHED])
        for victim in victims:
            victim.kill()
            victim.wait(10)
        board.ring_doorbell()
        await_states(board, lambda taken: taken == [])
        assert list((board.run_dir / "clients").iterdir()) == []
        with BoardClient(board.port) as client:
            assert client.update("7.7").version == "7.7"


def test_a_request_of_a_client_that_died_before_it_was_begun_is_not_carried_out(board: Board):
    with Sequencer.create(["submitted"]) as order:
        with client_process(board, "stop", "submitted", order.name) as victim:
            order.await_end()
            assert states(board) == [SlotState.SUBMITTED]
            victim.kill()
        assert next_board_request(board) is None
        assert states(board) == []


def test_a_client_killed_while_its_command_runs_frees_its_slot_for_others_only(board: Board):
    """Its command ends, nobody reads the outcome, and the next client in that slot gets its own."""
    with Answering(board) as engine, Sequencer.create(["submitted"]) as order, BoardClient(board.port) as client:
        with client_process(board, "stop", "submitted", order.name) as victim:
            assert engine.begun.wait(20)
            order.await_end()
            assert states(board) == [SlotState.RUNNING]
            victim.kill()
        engine.gate.set()
        board.ring_doorbell()
        await_states(board, lambda taken: taken == [])
        assert client.update("3.3", deadline_s=20).version == "3.3"
        assert engine.answered == ["1.1", "3.3"]


def test_a_slow_client_finds_its_outcome_and_report_however_late_it_comes(board: Board):
    """It stands still with its outcome unread while far more commands go by than reports are kept."""
    with Answering(board) as engine, Sequencer.create(["submitted"]) as order, BoardClient(board.port) as client:
        engine.gate.set()
        with client_process(board, "stop", "submitted", order.name) as slow:
            order.await_end()
            await_states(board, lambda taken: taken == [SlotState.FINISHED])
            for number in range(KEPT_REPORTS + 10):
                assert client.update(f"5.{number}").version == f"5.{number}"
            slow.send_signal(signal.SIGUSR1)
            assert slow.stdout.read() == "1.1\n"
        assert states(board) == []
        client.update("6.6")
        assert not (board.run_dir / "report.1.json").exists()


def submit(client: BoardClient, board: Board, version: str) -> int:
    """What a call of the client does before it waits; returns the slot's offset."""
    offset = layout.request_offset(client._claim(soon()))
    record = RequestRecord(board.take_ticket(), CommandKind.UPDATE, 0, soon(), version)
    board.write_plain(record, offset + 8)
    board.store(offset, client._word(SlotState.SUBMITTED))
    return offset


def test_a_request_replaced_under_the_engines_eyes_is_the_one_that_is_carried_out(board: Board):
    """Same client, same slot, equal state word: between the engine's look and its claim the request became another."""
    with BoardClient(board.port) as client:
        offset = submit(client, board, "1.1")
        seen = requests._oldest_submitted(board)
        client._let_go(offset)
        assert submit(client, board, "2.2") == offset
        request = requests._take(board, *seen)
        assert request.version == "2.2"
        client._let_go(offset)
        assert states(board) == [SlotState.ABANDONED]
        request.finish(UpdateReport(1, "update", "done", "2.2", "", 0.0, 0.0, []))
        assert states(board) == []


def test_a_request_withdrawn_under_the_engines_eyes_is_not_carried_out(board: Board):
    with BoardClient(board.port) as client, BoardClient(board.port) as other:
        offset = submit(client, board, "1.1")
        seen = requests._oldest_submitted(board)
        client._let_go(offset)
        assert submit(other, board, "3.3") == offset
        assert requests._take(board, *seen) is None
        assert next_board_request(board).version == "3.3"
        other._let_go(offset)


def test_a_slot_without_a_request_in_it_is_freed(board: Board):
    with BoardClient(board.port) as client:
        offset = layout.request_offset(client._claim(soon()))
        board.write_plain(RequestRecord(1, 77, 0, 0, ""), offset + 8)
        board.store(offset, client._word(SlotState.SUBMITTED))
        assert next_board_request(board) is None
        assert states(board) == []


def test_a_slot_whose_word_is_in_no_state_stops_nobody(board: Board):
    """It stays taken while its client lives; others are served."""
    with BoardClient(board.port) as other:
        with BoardClient(board.port) as client:
            offset = layout.request_offset(client._claim(soon()))
            board.store(offset, client._token << 3 | 7)
            submitted = submit(other, board, "2.2")
            request = next_board_request(board)
            assert request is not None
            assert request.version == "2.2"
            assert board.load(offset) != SlotState.FREE
        assert next_board_request(board) is None
        assert board.load(offset) == SlotState.FREE
        request.finish(UpdateReport(1, "update", "done", "2.2", "", 0.0, 0.0, []))
        other._let_go(submitted)


def test_an_absurd_deadline_in_a_slot_is_cut_to_a_day(board: Board):
    with BoardClient(board.port) as client:
        offset = layout.request_offset(client._claim(soon()))
        board.write_plain(RequestRecord(1, CommandKind.CLEAR, 0, 2**63 - 1, ""), offset + 8)
        board.store(offset, client._word(SlotState.SUBMITTED))
        assert next_board_request(board).deadline_ns <= soon(86_400)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_call_that_is_given_up_gives_its_slot_back(board: Board, is_begun: bool):
    """Not begun: withdrawn at once and never carried out. Begun: the engine frees the slot when it is done."""
    with BoardClient(board.port) as client, BoardClient(board.port) as other:
        failures: list[Exception] = []
        waiting = threading.Thread(target=lambda: failures.append(failure_of(lambda: client.update("1.1"))))
        waiting.start()
        await_states(board, lambda taken: taken == [SlotState.SUBMITTED])
        request = next_board_request(board) if is_begun else None
        client.abandon()
        waiting.join(10)
        assert isinstance(failures[0], DeadlineExceededError)
        assert "gave up waiting for the outcome of update" in str(failures[0])
        assert states(board) == ([SlotState.ABANDONED] if is_begun else [])
        if request is not None:
            request.finish(UpdateReport(1, "update", "done", "1.1", "", 0.0, 0.0, []))
        assert next_board_request(board) is None
        assert other._claim(soon(0.01)) == 0
        other._let_go(layout.request_offset(0))


def test_a_call_that_was_given_up_before_it_began_asks_for_nothing(board: Board):
    tickets = board.load(layout.TICKET_OFFSET)
    with BoardClient(board.port) as client:
        client.abandon()
        with pytest.raises(DeadlineExceededError, match="gave up waiting for a request slot"):
            client.update("1.1")
    assert (states(board), board.load(layout.TICKET_OFFSET)) == ([], tickets)


def failure_of(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_whoever_waits_for_a_slot_of_a_dying_engine_is_told():
    """All slots are taken when the engine is killed: the wait ends long before its deadline."""
    port = free_port()
    script = (
        f"from fastdeploy_rl.board.board import Board; Board.create({port}, num_ranks=1); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        engine.stdout.readline()
        with BoardClient(port) as client, BoardClient(port) as late:
            for _ in range(SLOTS):
                client._claim(soon())
            engine.kill()
            engine.wait(10)
            with pytest.raises(PeerLostError, match="engine died while this waited for a request slot"):
                late.update(deadline_s=60)
    Board.create(port, num_ranks=1).close()
