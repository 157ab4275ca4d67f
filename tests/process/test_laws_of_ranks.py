"""Laws that several ranks keep together, each looked at in the moment in which it could be broken."""

import json
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import DeadlineExceededError, FencedError, NoSpaceError, PeerLostError, StepFailedError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.testing.faulty_source import Fail, FaultySource
from fastdeploy_rl.testing.step_faults import flip
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.requests import next_board_request, running_requests
from tests.process.answering import await_states, soon
from tests.process.numpy_engine import NumpyEngine, free_port
from tests.process.test_rank_death import check_whole, kill, scene
from tests.process.test_update_numpy import MODEL, publish
from tests.process.threaded_engine import ThreadedEngine


def await_that(engine: NumpyEngine, condition: Callable[[], bool]) -> None:
    assert engine.board.wait_until(condition, soon(15)), engine.board.status()


def test_cleared_is_not_shown_while_one_rank_has_not_freed_its_memory(tmp_path: Path):
    """Whoever clears, by the word or the board: rank 2 is inside a long forward pass."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
        LegacySignal(engine.port) as signal,
        ThreadPoolExecutor(1) as pool,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        for clear in (lambda: signal.request_clear(20), lambda: client.clear(deadline_s=20)):
            client.update()
            assert engine.ask(2, "busy 0.7") == "begun"
            clearing = pool.submit(clear)
            shown = set()
            while not select.select([engine.workers[2].stdout], [], [], 0.001)[0]:
                shown |= {signal._word.load(), client.status().legacy_status}
            assert shown.isdisjoint({-2, "CLEARED"})
            assert engine.read(2) == "done"
            clearing.result(20)
            assert (signal._word.load(), engine.tokens()) == (-2, [None] * 3)


def test_a_fenced_rank_drops_everything_before_it_says_that_it_has_finished(tmp_path: Path):
    """It does not wait for the clear that follows: that may never come through. The order of its runner's calls says
    so."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        assert engine.ask(1, "refuse bind") == "refusing"
        with pytest.raises(FencedError, match="rank 1 could not undo"):
            client.update()
        await_that(engine, lambda: client.status().legacy_status == "CLEARED")
        calls = engine.ask(1, "calls")
        fenced, cleared = calls.index("abort the engine is fenced"), calls.index("abort the engine was cleared")
        dropped = ["drop_graphs", "drop_kv_cache", "unbind"]
        assert calls[fenced:cleared] == ["abort the engine is fenced", *dropped, "drain"]
        assert engine.tokens() == [None] * 2


def test_memory_that_changes_between_verify_and_commit_is_found_after_it_and_fences(tmp_path: Path):
    """An aliased parameter is not read while requests wait, but soon afterwards."""
    with (
        NumpyEngine(
            MODEL, channel=tmp_path / "channel", apply_mode="alias", module="fastdeploy_rl.testing.faulty_worker"
        ) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        manifest = publish(publisher, random_weights(MODEL, 1), 1).manifest
        part = next(tensor for tensor in manifest.tensors if tensor.name == "norm").parts[0]
        place = {"target": f"/dev/shm/{manifest.segments[part.segment].locator}", "offset": part.offset}
        fault = {"act": "flip_file", "step": "verify", "when": "end", **place}
        assert engine.ask(1, f"fault {json.dumps(fault)}") == "armed"
        client.update()
        await_that(engine, lambda: client.status().legacy_status == "CLEARED")
        status = client.status()
        assert (status.admission, status.version) == ("fenced", "")
        assert "do not hold the bytes that were staged, first norm" in status.reason
        assert engine.tokens() == [None] * 3
        publish(publisher, random_weights(MODEL, 2), 2)
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


def test_what_was_found_torn_is_found_again_where_a_command_covered_that(tmp_path: Path, monkeypatch):
    """A rank that takes a command shows what it does with that instead, and rank 0 may not have looked before."""
    sources = [IpcSource(SourceConfig(tmp_path / "channel")) for _ in range(2)]
    with (
        WeightPublisher(tmp_path / "channel") as publisher,
        ThreadedEngine(MODEL, sources, "alias") as engine,
        BoardClient(engine.port) as client,
    ):
        manifest = publish(publisher, random_weights(MODEL, 1), 1).manifest
        client.update()
        manager, covered = engine.managers[1], []
        declare_torn = manager._declare_torn

        def cover_first(reason: str) -> None:
            covered.append(reason)
            declare_torn(reason) if len(covered) > 1 else manager._rendezvous.show(phase="idle")

        monkeypatch.setattr(manager, "_declare_torn", cover_first)
        part = next(tensor for tensor in manifest.tensors if tensor.name == "norm").parts[0]
        flip(f"/dev/shm/{manifest.segments[part.segment].locator}", part.offset)
        for rank in (0, 1):
            engine.managers[rank]._state.live.is_read_back = rank == 0
        assert engine.board.wait_until(lambda: client.status().legacy_status == "CLEARED", soon(15)), covered
        assert "rank 1" in client.status().reason
        assert len(covered) == 2


def test_a_rank_that_comes_back_with_other_weights_than_it_left_fences(tmp_path: Path):
    """The checkpoint was replaced under the engine: version 0.0 of one rank is not that of the others."""
    with scene(tmp_path) as (engine, publisher, client):
        engine._config["seed"] = 7
        kill(engine, 1)
        await_that(engine, lambda: client.status().legacy_status == "CLEARED")
        assert client.status().admission == "fenced"
        assert "the ranks do not hold version 0.0 as it was committed" in client.status().reason
        assert engine.tokens() == [None] * 3
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")


def test_a_request_that_was_begun_by_a_rank_0_that_died_is_found_by_the_next_one():
    """Its client still waits, and is told once; what was not begun yet is not among them."""
    board = Board.create(free_port(), num_ranks=1)
    try:
        with ThreadPoolExecutor(2) as pool, BoardClient(board.port) as first, BoardClient(board.port) as second:
            asked = pool.submit(first.update, "1.2", deadline_s=20)
            await_states(board, lambda taken: taken == [SlotState.SUBMITTED])
            assert next_board_request(board).version == "1.2"
            later = pool.submit(second.update, "1.3", deadline_s=20)
            await_states(board, lambda taken: taken == [SlotState.SUBMITTED, SlotState.RUNNING])
            left = running_requests(board)
            assert [request.version for request in left] == ["1.2"]
            lost = UpdateReport(1, "update", "rejected", "1.2", "", 0.0, 0.0, [], "PeerLostError", "rank 0 died")
            left[0].finish(lost)
            with pytest.raises(PeerLostError, match="rank 0 died"):
                asked.result(20)
            next_board_request(board).finish(lost)
            with pytest.raises(PeerLostError):
                later.result(20)
    finally:
        board.close()


def test_requests_are_carried_out_in_the_order_in_which_they_were_asked_for():
    """Whichever slots they lie in: the last one has the first slot."""
    board = Board.create(free_port(), num_ranks=1)
    done = UpdateReport(1, "update", "rejected", "", "", 0.0, 0.0, [], "PeerLostError", "over")
    try:
        with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
            clients = [stack.enter_context(BoardClient(board.port)) for _ in range(3)]
            asked = []
            for number in (0, 1):
                asked.append(pool.submit(clients[number].update, f"1.{number}", deadline_s=20))
                await_states(board, lambda taken, n=number: taken == [SlotState.SUBMITTED] * (n + 1))
            first = next_board_request(board)
            first.finish(done)
            await_states(board, lambda taken: taken == [SlotState.SUBMITTED])
            asked.append(pool.submit(clients[2].update, "1.2", deadline_s=20))
            await_states(board, lambda taken: taken == [SlotState.SUBMITTED] * 2)
            order = [first.version]
            while (request := next_board_request(board)) is not None:
                order.append(request.version)
                request.finish(done)
            assert order == ["1.0", "1.1", "1.2"]
            for future in asked:
                with pytest.raises(PeerLostError, match="over"):
                    future.result(20)
    finally:
        board.close()


def restarted_faulty_engine(tmp_path: Path) -> NumpyEngine:
    """Three ranks that fail on request, and are started again where they die."""
    return NumpyEngine(
        MODEL,
        channel=tmp_path / "channel",
        is_restarted_on_death=True,
        deadlines=Deadlines(update_s=5.0, attach_s=20.0, rejoin_s=10.0, finish_s=0.3),
        module="fastdeploy_rl.testing.faulty_worker",
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_stands_still_inside_the_install_is_ended_and_comes_back(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
):
    """Nobody wakes it: what it holds is not known, so it is killed and started anew; of rank 0 the next one sees to
    that. The update never comes to pass."""
    monkeypatch.setattr(Deadlines, "outcome_s", 1.0)  # of the client
    with (
        restarted_faulty_engine(tmp_path) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(rank, f"fault {json.dumps({'act': 'stop', 'step': 'install', 'when': 'end'})}") == "armed"
        with pytest.raises((DeadlineExceededError, PeerLostError)):
            client.update(deadline_s=0.5)
        await_that(engine, lambda: len(engine.deaths) == 1 and client.status().is_serving)
        assert engine.deaths == [rank]
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_an_update_that_one_rank_refuses_stalls_none(tmp_path: Path, apply_mode: str):
    """Nothing was decided to be installed: no runner hears of it."""
    sources = [FaultySource(IpcSource(SourceConfig(tmp_path / "channel"))) for _ in range(3)]
    with (
        ThreadedEngine(MODEL, sources, apply_mode) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        calls = [list(runner.calls) for runner in engine.runners]
        publish(publisher, random_weights(MODEL, 2), 2)
        sources[1].then("stage", Fail(NoSpaceError("no room")))
        with pytest.raises(NoSpaceError, match="rank 1: no room"):
            client.update(deadline_s=1.0)
        assert [runner.calls for runner in engine.runners] == calls
        assert engine.holds(random_weights(MODEL, 1))


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_every_rank_goes_back_when_one_fails_after_all_have_installed(tmp_path: Path, apply_mode: str):
    with (
        NumpyEngine(
            MODEL, channel=tmp_path / "channel", apply_mode=apply_mode, module="fastdeploy_rl.testing.faulty_worker"
        ) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(1, f"fault {json.dumps({'act': 'raise', 'step': 'verify', 'when': 'end'})}") == "armed"
        with pytest.raises(StepFailedError, match="rank 1, verify"):
            client.update()
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_dies_right_after_the_commit_word_is_brought_forward(tmp_path: Path, rank: int):
    """The word alone says so; whoever asked is told what it says, also where rank 0 died before it could tell."""
    with (
        restarted_faulty_engine(tmp_path) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(rank, f"fault {json.dumps({'act': 'kill', 'step': 'commit', 'when': 'begin'})}") == "armed"
        report = client.update(deadline_s=20)
        assert (report.outcome, report.version) == ("done", "1.2")
        # Of every rank: what was told is that all of them hold it.
        assert {len(of_ranks) for of_ranks in report.receipt.live.values()} == {3}
        await_that(engine, lambda: len(engine.deaths) == 1 and client.status().is_serving)
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")
