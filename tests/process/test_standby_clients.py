"""Pause, resume, sleep and wake as clients give them: what stands on the board then, and a real engine's answers to
both controllers."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_rl import AsyncEngineController, EngineController, WeightPublisher
from fastdeploy_rl.board.board import Board
from fastdeploy_rl.command_options import CommandOptions
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import LifecycleError, PeerLostError
from fastdeploy_rl.lifecycle import Tag
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.client import BoardClient
from tests.process.answering import Answering, states
from tests.process.numpy_engine import NumpyEngine, free_port
from tests.process.test_update_numpy import MODEL, publish

SLEPT = CommandOptions("wait", on_timeout="abort", tags=frozenset({Tag.WEIGHT, Tag.GRAPH}), level=2)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create(free_port(), num_ranks=1)
    yield board
    board.close()


@pytest.mark.parametrize(
    ("call", "kind", "options"),
    [
        (lambda client: client.update(kv="keep", in_flight="abort"), "UPDATE", CommandOptions("abort", "keep")),
        (lambda client: client.clear(), "CLEAR", CommandOptions()),
        (lambda client: client.receipt(recompute=True), "RECOMPUTE", CommandOptions()),
        (lambda client: client.pause("keep"), "PAUSE", CommandOptions("keep")),
        (lambda client: client.resume(), "RESUME", CommandOptions()),
        (lambda client: client.sleep("weight,graph", level=2, mode="wait", on_timeout="abort"), "SLEEP", SLEPT),
        (lambda client: client.wake("kv_cache"), "WAKE", CommandOptions(tags=frozenset({Tag.KV_CACHE}))),
    ],
)
def test_the_board_carries_every_option(
    board: Board, call: Callable[[Any], Any], kind: str, options: CommandOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the client waits for the ranks to stop where requests had all of the deadline to end."""
    waits: list[int] = []

    def keep(client: BoardClient, offset: int, kind: CommandKind, decided_ns: int) -> None:
        waits.append(decided_ns)
        await_outcome(client, offset, kind, decided_ns)

    await_outcome = BoardClient._await_outcome
    monkeypatch.setattr(BoardClient, "_await_outcome", keep)
    with Answering(board) as engine, BoardClient(board.port) as client:
        engine.gate.set()
        if kind == "RECOMPUTE":
            with pytest.raises(PeerLostError, match="gave no receipt"):
                call(client)
        else:
            assert call(client).kind == kind.lower()
    (request,) = engine.requests
    assert (request.kind.name, request.options) == (kind, options)
    quiet_s = Deadlines.quiet_s if options.in_flight == "wait" else 0.0
    assert waits == [request.deadline_ns + int(quiet_s * 1e9)]
    assert states(board) == []


def test_both_controllers_pause_put_to_sleep_and_wake_a_real_engine(tmp_path: Path) -> None:
    def steer() -> None:
        with EngineController(engine.port) as controller:
            for mode in ("abort", "wait", "keep"):
                assert (controller.pause(mode).outcome, controller.is_paused()) == ("done", True)
                assert not controller.status().is_serving
                controller.resume()
                assert (controller.is_paused(), controller.status().is_serving) == (False, True)
            assert controller.sleep("weight").outcome == "done"
            before = controller.status()
            assert (before.asleep, before.residency["weight"]) == (["weight"], "offloaded")
            with pytest.raises(LifecycleError, match="wake it first"):
                controller.resume()
            assert controller.status().residency == before.residency
            assert controller.wake().version == str(published.version)
            assert controller.status().is_serving

    async def steer_awaiting() -> None:
        async with AsyncEngineController(engine.port) as controller:
            await controller.pause("keep")
            assert await controller.is_paused()
            assert (await controller.sleep(level=2)).kind == "sleep"
            publish(publisher, random_weights(MODEL, 2), 2)
            woken = await controller.wake(["kv_cache", "graph"])
            assert woken.outcome == "done"
            assert (await controller.status()).asleep == ["weight"]
            assert (await controller.wake(kv="rebuild")).receipt == await controller.receipt(recompute=True)
            assert not await controller.is_paused()

    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        published = publish(publisher, random_weights(MODEL, 1), 1)
        client.update(published.version)
        steer()
        assert engine.holds(random_weights(MODEL, 1))
        asyncio.run(asyncio.wait_for(steer_awaiting(), 60))
        assert engine.holds(random_weights(MODEL, 2))
