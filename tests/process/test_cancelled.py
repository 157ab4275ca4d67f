"""A command whose deadline has passed is cancelled for good: whatever stood still then and goes on now, no weight of
any rank changes behind the back of a caller who was told that it had not worked."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.cli import main
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.control.completions import CompletionService
from fastdeploy_rl.control.http_app import EngineFace, make_app
from fastdeploy_rl.control.metrics import EngineMetrics
from fastdeploy_rl.control.weights_service import WeightsService
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import DeadlineExceededError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import EngineStatus
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

NUM_RANKS = 3
MODEL = NumpyModel((ParameterSpec("up", "F32", (6, 9), 1), ParameterSpec("norm", "F32", (5,), None)))
SHORT_S, LONG_S = 0.3, 20.0


class Scene(NamedTuple):
    """An engine on a version that was published before the latest one, which nobody took over."""

    engine: NumpyEngine
    publisher: WeightPublisher
    client: BoardClient
    live: dict[str, np.ndarray]
    newest: dict[str, np.ndarray]
    before: EngineStatus

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Every thread of it, before anything is asked: one that still ran could vote."""
        pid = self.engine.workers[rank].pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def check_nothing_changed(self) -> None:
        """Asked with a command of its own: all ranks carry commands out one after another, so that nothing of an
        earlier one is left to come when it has ended."""
        receipt = self.client.receipt(recompute=True, deadline_s=LONG_S)
        status = self.client.status()
        assert (status.version, receipt.version) == (self.before.version, self.before.version)
        assert status.content_digest == receipt.content_digest == self.before.content_digest
        assert (status.is_serving, status.legacy_status) == (True, "NORMAL")
        assert self.engine.holds(self.live)
        assert {rank.version for rank in status.ranks} == {self.before.version}

    def check_goes_on(self) -> None:
        report = self.client.update(deadline_s=LONG_S)
        assert report.outcome == "done"
        assert self.engine.holds(self.newest)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyEngine]:
    """Bytes go into the parameters' own memory: what came too late would be written over what is live."""
    deadlines = Deadlines(attach_s=LONG_S, finish_s=SHORT_S)
    channel = tmp_path_factory.mktemp("cancelled") / "channel"
    with NumpyEngine(MODEL, channel=channel, num_ranks=NUM_RANKS, apply_mode="copy", deadlines=deadlines) as engine:
        yield engine


@pytest.fixture(scope="module")
def steps() -> Iterator[int]:
    return iter(range(1, 1000))


@pytest.fixture
def scene(engine: NumpyEngine, steps: Iterator[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(Deadlines, "outcome_s", 1.0)  # of clients: rank 0 may be what stands still
    channel = Path(engine._config["channel"])
    with WeightPublisher(channel) as publisher, BoardClient(engine.port) as client:
        live, newest = (random_weights(MODEL, next(steps)) for _ in range(2))
        publisher.publish(live, step=next(steps))
        client.update(deadline_s=LONG_S)
        assert engine.holds(live)
        publisher.publish(newest, step=next(steps))
        yield Scene(engine, publisher, client, live, newest, client.status())


RANKS = pytest.mark.parametrize("rank", range(NUM_RANKS))


@RANKS
def test_an_update_that_timed_out_never_comes_to_pass(scene: Scene, rank: int) -> None:
    with scene.stopped(rank), pytest.raises(DeadlineExceededError):
        scene.client.update(deadline_s=SHORT_S)
    scene.check_nothing_changed()
    scene.check_goes_on()


@RANKS
def test_a_clear_that_timed_out_never_comes_to_pass(scene: Scene, rank: int) -> None:
    with scene.stopped(rank), pytest.raises(DeadlineExceededError):
        scene.client.clear(deadline_s=SHORT_S)
    scene.check_nothing_changed()
    scene.check_goes_on()


@pytest.mark.parametrize("command", [BoardClient.update, BoardClient.clear])
def test_a_command_that_comes_too_late_is_not_begun(scene: Scene, command: Callable[..., object]) -> None:
    """Its deadline has passed before the engine reads it."""
    with pytest.raises(DeadlineExceededError):
        command(scene.client, deadline_s=1e-6)
    scene.check_nothing_changed()
    scene.check_goes_on()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_callers_asked_for_while_a_rank_stood_still_never_comes_to_pass(scene: Scene, rank: int) -> None:
    """One of them at a time is carried out; the others wait for a command that does not end."""
    with scene.stopped(rank), BoardClient(scene.engine.port) as other:
        for command in (scene.client.update, other.clear, other.update):
            with pytest.raises(DeadlineExceededError):
                command(deadline_s=SHORT_S)
    scene.check_nothing_changed()
    scene.check_goes_on()


@RANKS
def test_a_long_forward_pass_is_no_death_and_its_update_is_cancelled(scene: Scene, rank: int) -> None:
    pids = [worker.pid for worker in scene.engine.workers]
    assert scene.engine.ask(rank, "busy 0.7") == "begun"
    with pytest.raises(DeadlineExceededError):
        scene.client.update(deadline_s=SHORT_S)
    assert scene.engine.read(rank) == "done"
    scene.check_nothing_changed()
    assert [worker.pid for worker in scene.engine.workers if worker.poll() is None] == pids
    scene.check_goes_on()


@pytest.mark.parametrize("verb", [["update"], ["clear"], ["receipt", "--recompute"]], ids=" ".join)
def test_a_verb_that_timed_out_says_so_in_one_line_and_changed_nothing(
    scene: Scene, verb: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with scene.stopped(1):
        code = main([*verb, "--engine", str(scene.engine.port), "--deadline", str(SHORT_S)])
    told = capfd.readouterr()
    assert (code, told.out, told.err.count("\n")) == (1, "", 1)
    assert told.err.startswith("fastdeploy-rl: error: ")
    assert "ranks [1]" in told.err
    scene.check_nothing_changed()


def test_an_update_that_timed_out_over_http_never_comes_to_pass(scene: Scene) -> None:
    with closing(Board.attach(scene.engine.port)) as board:
        weights = WeightsService(_OnBoard(board))
        app = make_app(EngineFace(CompletionService(None, None, None, "none"), weights, EngineMetrics()))

        async def update() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
                return await http.post("/v1/weights/update", json={"deadline_s": SHORT_S})

        with scene.stopped(1):
            answer = asyncio.run(update())
        weights.close()
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "DeadlineExceededError"
    assert "ranks [1]" in answer.json()["error"]["message"]
    scene.check_nothing_changed()


class _OnBoard:
    """What an engine's HTTP side asks of its board."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def status(self) -> EngineStatus:
        return self._board.status()

    def open_client(self) -> BoardClient:
        return BoardClient(self._board.port)
