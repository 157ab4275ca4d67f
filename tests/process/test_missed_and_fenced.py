"""What follows when a rank comes too late, or can neither go on nor back."""

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_rl.board.board import Board
from fastdeploy_rl.board.legacy import LegacySignal
from fastdeploy_rl.control.client import HttpEngine
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    FencedError,
    ManifestError,
    NoPublicationError,
    NotServingError,
)
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, publish
from tests.process.threaded_engine import ThreadedEngine


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # bounded by the deadline above


class BehindEngine(ThreadedEngine):
    """Its ranks hear of each boundary of the command before once more, and then of the one that is due."""

    def _loop(self) -> None:
        while not self._is_over.is_set():
            select.select([self.managers[0].wake_fd], [], [], 0.05)
            due = self.managers[0].poll()
            for number in (due - 1, due) if due else ():
                for rank in [self._pool.submit(manager.run, number) for manager in self.managers]:
                    rank.result()


def test_a_boundary_of_a_command_that_is_over_takes_nothing_from_the_next_one(tmp_path: Path):
    """As where a rank was stopped between hearing of a boundary and coming to it."""
    sources = [IpcSource(SourceConfig(tmp_path)) for _ in range(2)]
    with (
        BehindEngine(MODEL, sources) as engine,
        WeightPublisher(tmp_path) as publisher,
        BoardClient(engine.port) as client,
    ):
        for seed in (1, 2):
            publish(publisher, random_weights(MODEL, seed), seed)
            assert client.update(deadline_s=5.0).outcome == "done"
            assert engine.holds(random_weights(MODEL, seed))


@pytest.mark.parametrize("late_rank", [0, 2])
def test_a_boundary_after_the_deadline_undoes_and_the_engine_goes_on(tmp_path: Path, late_rank: int):
    """A forward pass outlasts the update's deadline: it is rejected, nothing changed, and the next update works."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        assert engine.ask(late_rank, "busy 1.5") == "begun"
        with pytest.raises(
            DeadlineExceededError,
            match=r"no decode boundary|no vote VERIFIED",
        ):
            client.update(deadline_s=0.5)
        assert engine.read(late_rank) == "done"
        assert engine.holds(random_weights(MODEL, 0))
        wait_until(lambda: {rank.phase for rank in client.status().ranks} == {"idle"})
        assert client.status().version == "0.0"
        assert client.update().outcome == "done"
        assert engine.holds(random_weights(MODEL, 1))


def test_a_rank_that_can_go_neither_on_nor_back_fences_the_engine(tmp_path: Path):
    """Rank 1 fails to bind the new weights and the old ones: every rank drops everything, requests are refused, there
    is no receipt; once it is mended the next update recovers."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert engine.ask(1, "refuse bind") == "refusing"
        with pytest.raises(FencedError, match="rank 1 could not undo"):
            client.update()
        wait_until(lambda: client.status().legacy_status == "CLEARED")
        status = client.status()
        assert (status.admission, status.version) == ("fenced", "")
        assert "rank 1 could not undo" in status.reason
        assert engine.tokens() == [None] * 3
        with pytest.raises(NotServingError):
            client.receipt()
        assert engine.ask(1, "mend bind") == "mended"
        report = client.update()
        assert engine.holds(random_weights(MODEL, 2))
        assert client.status().is_serving
        assert client.receipt(recompute=True) == report.receipt


def test_recompute_that_is_late_fences_nothing(tmp_path: Path):
    """It only reads: the engine serves on, and the next command waits for the rank that is behind."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        assert engine.ask(1, "busy 1") == "begun"
        with pytest.raises(DeadlineExceededError):
            client.receipt(recompute=True, deadline_s=0.3)
        assert client.status().is_serving
        assert engine.read(1) == "done"
        client.receipt(recompute=True)
        assert engine.holds(random_weights(MODEL, 1))


def test_a_full_run_directory_changes_no_outcome(tmp_path: Path):
    """Reports and receipts cannot be written: the update is done all the same, and no old receipt stays to lie."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        for name in ("report.1.json.new", "receipt.json.new"):
            (engine.board.run_dir / name).mkdir()
        publish(publisher, random_weights(MODEL, 1), 1)
        report = client.update()
        assert (report.outcome, report.receipt) == ("done", None)
        assert "report.1.json" in report.reason
        assert client.status().version == "1.1"
        assert engine.holds(random_weights(MODEL, 1))
        with pytest.raises(NotServingError):
            client.receipt()
        (engine.board.run_dir / "receipt.json.new").rmdir()
        publish(publisher, random_weights(MODEL, 2), 2)
        assert client.update().receipt == client.receipt()


def test_another_runtime_directory_finds_the_same_engine(tmp_path: Path):
    """Client and second engine have another XDG_RUNTIME_DIR: one finds the engine alive, the other leaves it alone."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    script = (
        "import sys\n"
        "from fastdeploy_rl.board.board import Board\n"
        "from fastdeploy_rl.errors import ConfigurationError\n"
        "from fastdeploy_rl.update.client import BoardClient\n"
        "port = int(sys.argv[1])\n"
        "with BoardClient(port) as client: print(client.status().admission)\n"
        "try: Board.create(port, num_ranks=1)\n"
        "except ConfigurationError as error: print(error)\n"
    )
    with NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine:
        done = subprocess.run(
            [sys.executable, "-c", script, str(engine.port)],
            env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.splitlines()[0] == "serving", done.stderr
        assert "belongs to a live engine" in done.stdout
        assert engine.holds(random_weights(MODEL, 0))


def test_the_directory_of_engines_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that starts before any trainer makes the directory so that a trainer accepts it."""
    monkeypatch.setattr("fastdeploy_rl.board.board.runtime_dir", lambda: tmp_path / "run" / "fastdeploy_rl")
    board = Board.create(9, num_ranks=1)
    try:
        with WeightPublisher(tmp_path / "run" / "fastdeploy_rl"):
            pass
    finally:
        board.close()
    (tmp_path / "run" / "fastdeploy_rl").chmod(0o755)
    with pytest.raises(ConfigurationError, match="open to other users"):
        Board.create(9, num_ranks=1)


def test_channel_made_anew_under_a_live_engine_is_followed(tmp_path: Path):
    """Somebody removed the channel's directory; the next trainer publishes into a new one of the same name."""
    channel = tmp_path / "channel"
    with NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine, BoardClient(engine.port) as client:
        with WeightPublisher(channel) as publisher:
            publish(publisher, random_weights(MODEL, 1), 1)
            client.update()
        subprocess.run(["rm", "-rf", str(channel)], check=True)
        with WeightPublisher(channel) as publisher:
            publish(publisher, random_weights(MODEL, 2), 2)
            client.update()
            assert engine.holds(random_weights(MODEL, 2))
            client.receipt(recompute=True)


def test_a_mismatch_that_recompute_found_does_not_hide(tmp_path: Path):
    """After a flipped byte the same publication is taken over again only by force; then the receipt holds again."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1, apply_mode="copy") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        address = engine.ask(0, "address norm")
        with open(f"/proc/{engine.workers[0].pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(b"\xff")
        with pytest.raises(ChecksumMismatchError, match="norm on rank 0"):
            client.receipt(recompute=True)
        client.update(force=True)
        assert engine.holds(random_weights(MODEL, 1))
        client.receipt(recompute=True)


def test_a_rank_that_is_silent_while_staging_only_rejects(tmp_path: Path):
    """Nothing was touched, so nothing can be torn: the engine keeps its weights; once the rank is back all goes on."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        publish(publisher, random_weights(MODEL, 2), 2)
        os.kill(engine.workers[1].pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceededError, match=r"\[1\]"):
                client.update(deadline_s=0.3)
            assert client.status().is_serving
            assert client.status().version == "1.1"
            with pytest.raises(DeadlineExceededError):
                client.clear(deadline_s=0.2)  # that rank is still inside the command before
            assert client.status().is_serving
        finally:
            os.kill(engine.workers[1].pid, signal.SIGCONT)
        assert client.update(deadline_s=20).outcome == "done"
        assert engine.holds(random_weights(MODEL, 2))


@pytest.mark.parametrize("place", ["manifest", "segment"])
def test_a_pipe_in_a_files_place_stops_nothing(tmp_path: Path, place: str):
    """Opening one would wait for good: it is refused at once, and the engine takes the next publication."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        published = publish(publisher, random_weights(MODEL, 1), 1)
        if place == "manifest":
            path = next((tmp_path / "channel").glob("manifest-*.json"))
        else:
            path = Path("/dev/shm") / published.manifest.segments[0].locator
        kept = path.with_name(f"{path.name}.kept")
        path.rename(kept)
        os.mkfifo(path, 0o600)
        with pytest.raises((ManifestError, NoPublicationError), match=r"no regular file|no shared-memory segment"):
            client.update(deadline_s=5)
        kept.replace(path)
        assert client.update().outcome == "done"
        assert engine.holds(random_weights(MODEL, 1))


@pytest.mark.parametrize("deadline_s", [0, -1, math.nan, math.inf, 1e10, "5", None])
def test_a_deadline_that_is_none_is_the_callers_error(tmp_path: Path, deadline_s: object):
    """Whichever way a client takes: one error of the tree, and no command was given."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine,
        BoardClient(engine.port) as client,
        LegacySignal(engine.port) as signal_word,
    ):
        for ask in (client.update, client.clear, signal_word.request_update, HttpEngine("http://127.0.0.1:1").update):
            with pytest.raises(ConfigurationError, match="deadline_s must be a number of seconds"):
                ask(deadline_s=deadline_s)
        assert client.status().commands_done == 0


def test_a_cold_start_of_empty_split_tensors(tmp_path: Path):
    """Nothing to read, wherever the zero stands."""
    model = NumpyModel(
        (
            ParameterSpec("rows", "F32", (0, 3), 1),
            ParameterSpec("columns", "F32", (3, 0), 0),
            ParameterSpec("full", "F32", (3,), 0),
        )
    )
    with NumpyEngine(model, channel=tmp_path / "channel") as engine, BoardClient(engine.port) as client:
        assert client.receipt() == client.receipt(recompute=True)
        assert engine.holds(random_weights(model, 0))
