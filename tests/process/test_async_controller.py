"""AsyncEngineController over the board: the loop goes on while calls wait, a cancelled one leaves no slot claimed."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl import AsyncEngineController
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import (
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    EngineNotFoundError,
    NoPublicationError,
)
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.answering import Answering, await_states, states
from tests.process.numpy_engine import NumpyEngine, free_port
from tests.process.test_update_numpy import MODEL, publish


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


def run(act: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(act, 60))


async def until_states(board: Board, *wanted: SlotState) -> None:
    await asyncio.to_thread(await_states, board, lambda taken: taken == list(wanted))


def test_a_real_engine_is_steered_as_by_the_blocking_twin(tmp_path: Path) -> None:
    """Every method; errors are those of the tree and change nothing."""

    async def steer() -> None:
        async with AsyncEngineController(engine.port) as controller:
            with pytest.raises(NoPublicationError):
                await controller.update()
            published = publish(publisher, random_weights(MODEL, 1), 1)
            report = await controller.update(published.version)
            assert report.receipt == await controller.receipt() == await controller.receipt(recompute=True)
            assert (await controller.status()).version == str(published.version)
            publish(publisher, {"norm": random_weights(MODEL, 2)["norm"]}, 2)
            with pytest.raises(CoverageError):
                await controller.update()
            assert engine.holds(random_weights(MODEL, 1))
            assert (await controller.clear()).outcome == "done"
            kinds = [(entry.kind, entry.outcome) for entry in await controller.history()]
            assert kinds == [
                ("update", "rejected"),
                ("update", "done"),
                ("recompute", "done"),
                ("update", "rejected"),
                ("clear", "done"),
            ]
            assert await controller.history(1) == (await controller.history())[-1:]

    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
    ):
        run(steer())


def test_other_calls_go_on_while_one_waits(board: Board) -> None:
    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            waiting = asyncio.create_task(controller.update("1.1"))
            await until_states(board, SlotState.RUNNING)
            assert (await controller.status()).port == board.port
            assert not waiting.done()
            engine.gate.set()
            others = await asyncio.gather(*(controller.update(f"2.{number}") for number in range(8)))
            assert [report.version for report in others] == [f"2.{number}" for number in range(8)]
            assert (await waiting).version == "1.1"

    with Answering(board) as engine:
        run(steer())
    assert states(board) == []


def test_cancelling_before_the_engine_begins_withdraws_the_request(board: Board) -> None:
    """The slot is free when the cancelled call returns, and the command never happens."""

    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            running = asyncio.create_task(controller.update("1.1"))
            await until_states(board, SlotState.RUNNING)
            waiting = asyncio.create_task(controller.update("2.2"))
            await until_states(board, SlotState.SUBMITTED, SlotState.RUNNING)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert states(board) == [SlotState.RUNNING]
            engine.gate.set()
            assert (await running).version == "1.1"
            assert (await controller.update("3.3")).version == "3.3"

    with Answering(board) as engine:
        run(steer())
    assert engine.answered == ["1.1", "3.3"]


def test_cancelling_while_all_slots_are_taken_ends_the_wait_and_takes_none(board: Board) -> None:
    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            waiting = asyncio.create_task(controller.update("1.1"))
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    with BoardClient(board.port) as client:
        taken = [client._claim(time.monotonic_ns() + 10**9) for _ in range(layout.NUM_REQUEST_SLOTS)]
        run(steer())
        assert states(board) == [SlotState.CLAIMED] * layout.NUM_REQUEST_SLOTS
        for slot in taken:
            client._let_go(layout.request_offset(slot))
    assert states(board) == []


def test_cancelling_while_the_command_runs_hands_the_slot_over(board: Board) -> None:
    """The command goes on at the engine; the slot is free when it ends, and the next call gets its own outcome."""

    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            running = asyncio.create_task(controller.update("1.1"))
            await until_states(board, SlotState.RUNNING)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(running, 0.01)
            assert states(board) == [SlotState.ABANDONED]
            engine.gate.set()
            await until_states(board)
            assert (await controller.update("2.2")).version == "2.2"

    with Answering(board) as engine:
        run(steer())
    assert engine.answered == ["1.1", "2.2"]


def test_leaving_the_controller_gives_up_what_still_waits(board: Board) -> None:
    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            running = asyncio.create_task(controller.update("1.1"))
            await until_states(board, SlotState.RUNNING)
        with pytest.raises(DeadlineExceededError, match="gave up"):
            await running
        assert states(board) == [SlotState.ABANDONED]

    with Answering(board):
        run(steer())
    assert states(board) == []


def test_no_engine_and_no_with_are_errors() -> None:
    async def steer() -> None:
        with pytest.raises(EngineNotFoundError, match="no engine at port 1"):
            async with AsyncEngineController(1):
                pass
        with pytest.raises(ConfigurationError, match="async with"):
            await AsyncEngineController(1).status()
        with pytest.raises(ConfigurationError, match="not an engine's URL"):
            async with AsyncEngineController("8182"):
                pass

    run(steer())


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), 1e9, True])
def test_impossible_deadlines_are_refused_before_a_slot_is_claimed(board: Board, deadline_s: float) -> None:
    async def steer() -> None:
        async with AsyncEngineController(board.port) as controller:
            for call in (controller.update, controller.clear):
                with pytest.raises(ConfigurationError, match="deadline_s must be"):
                    await call(deadline_s=deadline_s)

    run(steer())
    assert states(board) == []
