"""The supervisor over fake workers, as real processes: whatever happens, no worker and no segment stays."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_model import write_tiny_llama

from fastdeploy_rl.board import layout
from fastdeploy_rl.board.board import Board

DEADLINE_S = 30.0
HERE = Path(__file__).parent


class Engine:
    """One `supervised` process and what it said."""

    def __init__(self, settings: dict[str, Any], fault: str) -> None:
        self.settings = settings
        self.events: list[dict[str, Any]] = []
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "supervised.py"), json.dumps(settings)],
            stdout=subprocess.PIPE,
            bufsize=0,  # select sees what readline left, and a buffer would hide it
            env=dict(os.environ) | {"FAKE_WORKER": fault, "PYTHONPATH": str(HERE)},
        )

    def await_event(self, name: str) -> dict[str, Any]:
        """Reads on until `name` is said; fails at the end of the output."""
        while True:
            line = self._readline()
            if not line:
                pytest.fail(f"no {name!r}; it said {self.events} and ended with {self.child.wait(DEADLINE_S)}")
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == name:
                return self.events[-1]

    def _readline(self) -> bytes:
        assert self.child.stdout is not None
        if not select.select([self.child.stdout], [], [], DEADLINE_S)[0]:
            pytest.fail(f"silent for {DEADLINE_S} s after {self.events}")
        return self.child.stdout.readline()

    def end(self) -> int:
        code = self.child.wait(DEADLINE_S)
        assert self.child.stdout is not None
        self.events += [json.loads(line) for line in self.child.stdout]
        return code

    def workers(self) -> list[int]:
        text = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def segments(self) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.endswith(f".{self.settings['board_port']}")]

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(DEADLINE_S)
        if self.child.stdout is not None:
            self.child.stdout.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def settings(tmp_path: Path, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "num_ranks": 2,
        "channel": str(tmp_path / "channel"),
        "port": _free_port(),
        "board_port": _free_port(),
        "log_dir": str(tmp_path / "log"),
    }


@contextlib.contextmanager
def running(settings: dict[str, Any], fault: str = "") -> Iterator[Engine]:
    engine = Engine(settings, fault)
    try:
        yield engine
    finally:
        engine.close()


def test_interrupt_stops_everything_in_order(settings: dict[str, Any]) -> None:
    with running(settings) as engine:
        assert engine.await_event("ready")["weight_bytes"] == [1000, 1001]
        workers = engine.workers()
        assert len(workers) == 2
        assert engine.segments()
        answer = httpx.get(f"http://127.0.0.1:{settings['port']}/health")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, workers)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_stop_it_too(settings: dict[str, Any], kind: signal.Signals) -> None:
    with running(settings) as engine:
        engine.await_event("ready")
        workers = engine.workers()
        engine.child.send_signal(kind)
        assert engine.end() == 0
        assert_gone(engine, workers)


def test_interrupt_while_starting_leaves_nothing(settings: dict[str, Any]) -> None:
    with running(settings, "hang") as engine:
        engine.await_event("starting")
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert [event["event"] for event in engine.events] == ["starting"]
        assert_gone(engine, [])


def test_a_killed_worker_ends_an_engine_that_is_to_stop_then_and_is_named(settings: dict[str, Any]) -> None:
    with running(settings | {"on_worker_death": "stop"}) as engine:
        engine.await_event("ready")
        workers = engine.workers()
        os.kill(workers[1], signal.SIGKILL)
        assert engine.end() == 1
        error = engine.events[-1]
        assert error["kind"] == "PeerLostError"
        assert f"rank 1 (pid {workers[1]}) was killed by SIGKILL" in error["message"]
        assert_gone(engine, workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_started_again_and_its_log_goes_on(settings: dict[str, Any], rank: int) -> None:
    with running(settings) as engine:
        engine.await_event("ready")
        log = Path(settings["log_dir"]) / f"workerlog.{rank}"
        log.write_text("what it said before\n")
        workers = engine.workers()
        os.kill(workers[rank], signal.SIGKILL)
        lost = engine.await_event("rank_lost")
        assert lost["rank"] == rank
        assert f"rank {rank} (pid {workers[rank]}) was killed by SIGKILL" in lost["reason"]
        assert engine.await_event("rank_back")["rank"] == rank
        now = engine.workers()
        assert workers[1 - rank] in now
        assert workers[rank] not in now
        assert log.read_text().startswith("what it said before\n")
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, [*workers, *now])


def test_a_death_is_on_the_board_before_anybody_could_be_late(settings: dict[str, Any]) -> None:
    """The dead rank's bit is there when its successor starts, and gone when that is back."""
    with running(settings) as engine, board_of(engine) as board:
        install = layout.decision_word(7, layout.Decision.OPEN)
        board.store(layout.INSTALL_DECISION_OFFSET, install)
        os.kill(engine.workers()[1], signal.SIGKILL)
        engine.await_event("rank_lost")
        assert board.load(layout.INSTALL_DECISION_OFFSET) == layout.decision_word(7, layout.Decision.NO)
        assert board.generation == 2
        engine.await_event("rank_back")
        assert board.lost_ranks() == frozenset()
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0


def test_a_condemned_worker_is_killed_and_started_again_even_if_it_stands_still(settings: dict[str, Any]) -> None:
    with running(settings) as engine, board_of(engine) as board:
        workers = engine.workers()
        os.kill(workers[1], signal.SIGSTOP)
        board.condemn(1)
        assert f"rank 1 (pid {workers[1]}) was killed by SIGKILL" in engine.await_event("rank_lost")["reason"]
        engine.await_event("rank_back")
        assert board.condemned_ranks() == frozenset()
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert [event["event"] for event in engine.events].count("rank_lost") == 1
        assert_gone(engine, workers)


def test_a_worker_that_says_what_is_no_message_is_killed_and_started_again(settings: dict[str, Any]) -> None:
    with running(settings, "garble") as engine:
        engine.await_event("ready")
        os.kill(pid_of(engine, 1), signal.SIGUSR1)
        lost = engine.await_event("rank_lost")
        assert "rank 1: a message between supervisor and worker is malformed" in lost["reason"]
        engine.await_event("rank_back")
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0


def test_a_worker_that_dies_whenever_it_starts_again_ends_the_engine(settings: dict[str, Any]) -> None:
    with running(settings, "die again") as engine:
        engine.await_event("ready")
        os.kill(engine.workers()[1], signal.SIGKILL)
        assert engine.end() == 1
        message = engine.events[-1]["message"]
        assert "ended with exit code 7: about to die" in message
        assert "rank 1 died 2 times in a row before it was ready again" in message
        assert_gone(engine, [])


def test_workers_that_die_too_often_end_the_engine(settings: dict[str, Any]) -> None:
    with running(settings) as engine:
        engine.await_event("ready")
        for rank in (0, 1, 1):
            os.kill(pid_of(engine, rank), signal.SIGKILL)
            engine.await_event("rank_back")
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        assert engine.end() == 1
        assert "ranks died 4 times within 300 s" in engine.events[-1]["message"]
        assert_gone(engine, [])


def test_a_stop_while_a_worker_is_started_again_leaves_nothing(settings: dict[str, Any]) -> None:
    with running(settings) as engine:
        engine.await_event("ready")
        workers = engine.workers()
        os.kill(workers[0], signal.SIGKILL)
        engine.await_event("rank_lost")
        now = engine.workers()
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, [*workers, *now])


def test_a_worker_that_stands_still_is_killed_at_the_stop(settings: dict[str, Any]) -> None:
    with running(settings | {"stop_s": 0.2}) as engine:
        engine.await_event("ready")
        workers = engine.workers()
        os.kill(workers[1], signal.SIGSTOP)
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, workers)


def test_a_worker_that_cannot_start_gives_its_reason_and_exit_code(settings: dict[str, Any]) -> None:
    with running(settings, "fail") as engine:
        assert engine.end() == 2
        error = engine.events[-1]
        assert (error["kind"], error["message"]) == ("CheckpointError", "rank 1: model.safetensors: truncated")
        assert_gone(engine, [])


SERVE_FAKES = """
import functools, sys
from fastdeploy_rl.cli import main
from fastdeploy_rl.engines.embedded import supervisor
supervisor.ServeConfig = functools.partial(supervisor.ServeConfig, worker_module="fake_worker")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [("fail", 2, "rank 1: model.safetensors: truncated"), ("die", 1, "ended with exit code 7: about to die; see ")],
)
def test_the_command_line_tells_why_a_worker_failed_on_one_line(
    settings: dict[str, Any], tmp_path: Path, fault: str, code: int, reason: str
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", SERVE_FAKES, "serve", "--model", settings["model_dir"], "--json"),
            *("--tensor-parallel-size", "2", "--ipc-dir", settings["channel"], "--log-dir", settings["log_dir"]),
            *("--port", str(settings["port"]), "--engine-worker-queue-port", str(settings["board_port"])),
        ],
        env=dict(os.environ) | {"FAKE_WORKER": fault, "PYTHONPATH": str(HERE)},
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        text=True,
    )
    assert done.returncode == code
    assert done.stderr.startswith("fastdeploy-rl: error: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert [name for name in os.listdir("/dev/shm") if name.endswith(f".{settings['board_port']}")] == []


def test_a_worker_that_ends_without_a_word_is_told_by_its_log(settings: dict[str, Any]) -> None:
    with running(settings, "die") as engine:
        assert engine.end() == 1
        message = engine.events[-1]["message"]
        assert "rank 1" in message
        assert "ended with exit code 7: about to die; see " in message
        assert_gone(engine, [])


def test_a_stubborn_worker_is_killed_in_the_end(settings: dict[str, Any]) -> None:
    with running(settings | {"stop_s": 0.2}, "stubborn") as engine:
        engine.await_event("ready")
        workers = engine.workers()
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, workers)


def test_workers_die_with_a_killed_supervisor_and_the_next_engine_reclaims_what_it_left(
    settings: dict[str, Any],
) -> None:
    with running(settings) as engine:
        engine.await_event("ready")
        workers = [os.pidfd_open(pid) for pid in engine.workers()]
        engine.child.kill()
        for worker in workers:
            assert select.select([worker], [], [], DEADLINE_S)[0]
            os.close(worker)
        assert engine.segments()
    with running(settings) as engine:
        engine.await_event("ready")
        engine.child.send_signal(signal.SIGINT)
        assert engine.end() == 0
        assert_gone(engine, [])


def test_a_port_in_use_is_refused_before_anything_starts(settings: dict[str, Any]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(settings | {"port": taken.getsockname()[1]}) as engine,
    ):
        assert engine.end() == 2
        (error,) = engine.events
        assert "cannot listen on 127.0.0.1 port" in error["message"]
        assert_gone(engine, [])


def test_a_second_engine_at_the_same_board_port_leaves_the_first_alone(settings: dict[str, Any]) -> None:
    with running(settings) as first:
        first.await_event("ready")
        before = first.segments()
        with running(settings | {"port": _free_port(), "log_dir": settings["log_dir"] + "2"}) as second:
            assert second.end() == 2
            assert "belongs to a live engine" in second.events[-1]["message"]
        assert first.segments() == before
        assert first.child.poll() is None
        first.child.send_signal(signal.SIGINT)
        assert first.end() == 0
        assert_gone(first, [])


def test_a_model_that_does_not_split_is_refused_before_anything_starts(settings: dict[str, Any]) -> None:
    with running(settings | {"num_ranks": 3}) as engine:
        assert engine.end() == 2
        assert "does not split over 3 ranks" in engine.events[-1]["message"]
        assert_gone(engine, [])


def test_no_such_model_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    with running(settings | {"model_dir": str(tmp_path / "nowhere")}) as engine:
        assert engine.end() == 2
        assert "nowhere" in engine.events[-1]["message"]


@contextlib.contextmanager
def board_of(engine: Engine) -> Iterator[Board]:
    """When it is ready."""
    engine.await_event("ready")
    with contextlib.closing(Board.attach(engine.settings["board_port"])) as board:
        yield board


def pid_of(engine: Engine, rank: int) -> int:
    """The rank of a process stands in no list: it is the one whose log it writes."""
    log = f"workerlog.{rank}"
    return next(pid for pid in engine.workers() if os.readlink(f"/proc/{pid}/fd/1").endswith(log))


def assert_gone(engine: Engine, workers: list[int]) -> None:
    assert engine.segments() == []
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
