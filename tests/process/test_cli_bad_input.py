"""Bad input at the command line, as a user meets it: one clear line on stderr, exit code 2, and nothing left behind.

What needs no process of its own stands in tests/unit/test_cli.py;
what needs a running embedded engine in test_serve.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from served_model import write_tiny_llama

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.board.board import Board, board_name, engine_dir
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.publish.publisher import WeightPublisher
from tests.process.numpy_engine import NumpyEngine, free_port
from tests.process.private_shm import private_shm

CLI = (sys.executable, "-m", "fastdeploy_rl.cli")
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def refusal(*command: str, cwd: Path) -> str:
    """The one line that a verb complains with."""
    done = subprocess.run(command, capture_output=True, cwd=cwd, timeout=DEADLINE_S, check=False, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("fastdeploy-rl: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_stream_that_is_closed_is_no_obstacle(tmp_path: Path, closed: int) -> None:
    """As `>&-` closes it."""
    command = [*CLI, "snapshot", "--list", "--ipc-dir", str(tmp_path)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed != 1)


# --- serve -----------------------------------------------------------------------------------------


class Serve:
    """`serve` calls that are refused before anything was started."""

    def __init__(self, model: Path, place: Path) -> None:
        self._model = model
        self._place = place
        place.mkdir()
        self.board_port = free_port()

    def command(self, *options: str) -> list[str]:
        """Later options win over the ones that would work."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        return [
            *(*CLI, "serve", "--model", str(self._model), "--ipc-dir", str(self._place / "channel")),
            *("--port", str(port), "--engine-worker-queue-port", str(self.board_port), *options),
        ]

    def refusal(self, *options: str, prefix: Sequence[str] = ()) -> str:
        line = refusal(*prefix, *self.command(*options), cwd=self._place)
        assert not engine_dir(self.board_port).exists()
        assert [name for name in os.listdir("/dev/shm") if name.endswith(f".{self.board_port}")] == []
        assert not (self._place / "channel").exists()
        assert sorted(self._place.glob("log/workerlog.*")) == []
        return line


@pytest.fixture
def serve(model_dir: Path, tmp_path: Path) -> Serve:
    return Serve(model_dir, tmp_path / "place")


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    file = write_tiny_llama(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    line = Serve(file.parent, tmp_path / "place").refusal()
    assert f"{file}: truncated" in line


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "config.json").write_text("{")
    assert f"{model / 'config.json'}: not a JSON object" in Serve(model, tmp_path / "place").refusal()


def test_a_model_of_another_kind_is_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    line = Serve(model, tmp_path / "place").refusal()
    assert "model_type" in line
    assert "'mamba'" in line


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert str(model / "tokenizer.json") in Serve(model, tmp_path / "place").refusal()


def test_a_rank_count_that_does_not_divide_says_what_would(serve: Serve) -> None:
    line = serve.refusal("--tensor-parallel-size", "3")
    assert "does not split over 3 ranks" in line
    assert "num_key_value_heads 2" in line
    assert "--tensor-parallel-size can be 1, 2" in line


def test_more_tokens_than_positions_are_refused(serve: Serve) -> None:
    assert "the model has positions for 256 tokens" in serve.refusal("--max-model-len", "257")


def test_a_port_in_use_is_named(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1 port {port}" in serve.refusal("--port", port)


def test_a_host_that_is_not_this_machine_is_named(serve: Serve) -> None:
    assert "192.0.2.1" in serve.refusal("--host", "192.0.2.1")  # an address kept for documentation


def test_the_queue_port_of_a_live_engine_is_refused_and_that_engine_untouched(serve: Serve) -> None:
    board = Board.create(free_port(), num_ranks=1)
    try:
        line = serve.refusal("--engine-worker-queue-port", str(board.port))
        assert f"port {board.port} belongs to a live engine (pid {os.getpid()}" in line
        Board.attach(board.port).close()
        assert board.run_dir.is_dir()
    finally:
        board.close()


# --- no engine, or one that refuses ----------------------------------------------------------------


@contextmanager
def dead_engine(cwd: Path) -> Iterator[int]:
    """The port of an engine that was killed and left its board."""
    port = free_port()
    script = f"import os, signal; from fastdeploy_rl.board.board import Board; Board.create({port}, num_ranks=1)"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; os.kill(os.getpid(), {signal.SIGKILL.value})"], check=False
    )
    assert done.returncode == -signal.SIGKILL
    try:
        yield port
    finally:
        Board.create(port, num_ranks=1).close()  # reclaims what is there, and takes it away


ASKING = ["status", "update", "clear", "receipt", "history", "generate --prompt hello", "chat"]
"""Verbs that need an engine."""


@pytest.mark.parametrize("verb", ASKING)
def test_an_engine_that_was_killed_is_called_dead(verb: str, tmp_path: Path) -> None:
    with dead_engine(tmp_path) as port:
        line = refusal(*CLI, *verb.split(), "--engine", str(port), cwd=tmp_path)
        assert f"port {port}: the engine that made this board is dead" in line
        assert "fastdeploy-rl serve" in line
        assert (Path("/dev/shm") / board_name(port)).exists()  # not ours to remove


@pytest.mark.parametrize("verb", ["history", "generate --prompt hello", "chat"])
def test_no_engine_is_said_with_the_way_to_start_one(verb: str, tmp_path: Path) -> None:
    for address in (str(free_port()), "http://127.0.0.1:1"):
        line = refusal(*CLI, *verb.split(), "--engine", address, cwd=tmp_path)
        assert f"no engine at {'port ' if address.isdigit() else ''}{address}" in line
        assert "fastdeploy-rl serve" in line


def test_a_history_file_that_is_not_there_or_no_file_is_named(tmp_path: Path) -> None:
    assert f"no history file {tmp_path / 'none'}" in refusal(
        *CLI, "history", "--file", str(tmp_path / "none"), cwd=tmp_path
    )
    os.mkfifo(tmp_path / "pipe")
    assert str(tmp_path / "pipe") in refusal(*CLI, "history", "--file", str(tmp_path / "pipe"), cwd=tmp_path)


MODEL = NumpyModel((ParameterSpec("embed", "F32", (12, 5), 0), ParameterSpec("norm", "F32", (5,), None)))


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("numpy") / "channel"


@pytest.fixture(scope="module")
def engine(channel: Path) -> Iterator[NumpyEngine]:
    with NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine:
        yield engine
        assert engine.holds(random_weights(MODEL, 0))


def test_a_second_engine_on_the_port_of_one_that_serves_is_refused(engine: NumpyEngine, serve: Serve) -> None:
    line = serve.refusal("--engine-worker-queue-port", str(engine.port))
    assert f"port {engine.port} belongs to a live engine (pid {os.getpid()}" in line
    assert None not in engine.tokens()  # both ranks go on
    status = [*CLI, "status", "--engine", str(engine.port), "--json"]
    assert json.loads(subprocess.run(status, capture_output=True, check=True, timeout=DEADLINE_S).stdout)["is_serving"]


def test_an_update_before_any_trainer_came_names_the_channel(
    engine: NumpyEngine, channel: Path, tmp_path: Path
) -> None:
    line = refusal(*CLI, "update", "--engine", str(engine.port), cwd=tmp_path)
    assert f"no channel at {channel}" in line


@pytest.mark.parametrize("version", ["soon", "1.2.3", "1.-2", "01.2"])
def test_what_is_no_version_is_quoted(engine: NumpyEngine, channel: Path, version: str, tmp_path: Path) -> None:
    with WeightPublisher(channel) as publisher:
        publisher.publish(random_weights(MODEL, 1), step=1)
        assert version in refusal(*CLI, "update", version, "--engine", str(engine.port), cwd=tmp_path)


def test_a_version_that_is_not_there_is_refused_and_the_one_that_is_is_named(
    engine: NumpyEngine, channel: Path, tmp_path: Path
) -> None:
    with WeightPublisher(channel) as publisher:
        published = publisher.publish(random_weights(MODEL, 1), step=1)
        line = refusal(*CLI, "update", "77.1", "--engine", str(engine.port), cwd=tmp_path)
        assert "version 77.1 is not to be had" in line
        assert str(published.version) in line


# --- publish ---------------------------------------------------------------------------------------


def test_a_channel_with_a_live_publisher_is_refused_and_its_publication_stays(model_dir: Path, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    with WeightPublisher(channel) as publisher:
        publisher.publish(
            {"norm": random_weights(NumpyModel((ParameterSpec("a", "F32", (3,), None),)), 0)["a"]}, step=1
        )
        latest = (channel / "LATEST").read_bytes()
        line = refusal(*CLI, "publish", str(model_dir), "--step", "2", "--ipc-dir", str(channel), cwd=tmp_path)
        assert f"channel {channel} already has a live publisher (pid {os.getpid()}" in line
        assert (channel / "LATEST").read_bytes() == latest


def test_a_channel_that_others_could_write_to_is_refused(model_dir: Path, tmp_path: Path) -> None:
    channel = tmp_path / "channel"
    channel.mkdir()
    channel.chmod(0o777)
    line = refusal(*CLI, "publish", str(model_dir), "--step", "2", "--ipc-dir", str(channel), cwd=tmp_path)
    assert str(channel) in line
    assert list(channel.iterdir()) == []


# --- plan ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A manifest as a publisher wrote it."""
    with WeightPublisher(tmp_path_factory.mktemp("published") / "channel") as publisher:
        return manifests.encode(publisher.publish(random_weights(MODEL, 1), step=1).manifest)


def plan_refusal(manifest: Path, *options: str) -> str:
    return refusal(*CLI, "plan", str(manifest), "--tensor-parallel-size", "2", *options, cwd=manifest.parent)


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    line = plan_refusal(tmp_path / "manifest.json")
    assert str(tmp_path / "manifest.json") in line
    assert "name a manifest file or the directory of a channel" in line


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: b"[" * 100_000, "cannot be read"),
        (lambda data: data[:-1] + b',"more":1}', "more"),
        (lambda data: data.replace(b'"name":"norm"', b'"name":"embed"'), "embed"),
        (lambda data: data.replace(b'"name":"norm"', b'"name":"gone"'), "digests do not match"),
    ],
    ids=["truncated", "deep", "unknown field", "doubled name", "digest"],
)
def test_a_manifest_that_is_not_what_a_publisher_writes_is_refused_with_the_reason(
    manifest_bytes: bytes, spoil: Callable[[bytes], bytes], words: str, tmp_path: Path
) -> None:
    spoiled = spoil(manifest_bytes)
    assert spoiled != manifest_bytes
    path = tmp_path / "manifest.json"
    path.write_bytes(spoiled)
    line = plan_refusal(path)
    assert words in line
    assert len(line) < 2000
    assert path.read_bytes() == spoiled


def test_an_oversized_manifest_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # nothing of it is on the disk, and nothing beyond the limit may be read
    assert f"larger than {manifests.MAX_BYTES}" in plan_refusal(path)


def test_a_pipe_in_a_manifests_place_keeps_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert "neither a manifest file nor a channel" in plan_refusal(tmp_path / "manifest.json")


def test_a_directory_where_nothing_was_published_is_named(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    assert str(tmp_path / "channel") in plan_refusal(tmp_path / "channel")
    assert list((tmp_path / "channel").iterdir()) == []


def test_a_model_in_a_channels_place_is_told_as_one(model_dir: Path) -> None:
    assert "is a model: name a manifest file or a channel" in plan_refusal(model_dir)


def test_a_model_that_is_another_one_is_refused_with_the_names(
    manifest_bytes: bytes, model_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_bytes)
    assert "model.embed_tokens.weight" in plan_refusal(path, "--model", str(model_dir))
    line = plan_refusal(path, "--model", str(model_dir), "--tensor-parallel-size", "3")
    assert "does not split over 3 ranks" in line
    assert str(tmp_path / "none") in plan_refusal(path, "--model", str(tmp_path / "none"))


# --- no room in /dev/shm ---------------------------------------------------------------------------

ROOM_BYTES = 64 << 10


@pytest.fixture
def small_shm() -> list[str]:
    """A prefix that gives a command a /dev/shm of its own with ROOM_BYTES."""
    prefix = private_shm(ROOM_BYTES)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a /dev/shm of their own")
    return prefix


def bytes_needed_and_free(line: str) -> tuple[int, int]:
    needed, _, rest = line.partition("needs ")[2].partition(" bytes of /dev/shm, ")
    return int(needed), int(rest.partition(" are free")[0])


def test_no_room_to_publish_tells_bytes_needed_and_free(model_dir: Path, tmp_path: Path, small_shm: list[str]) -> None:
    channel = tmp_path / "channel"
    line = refusal(*small_shm, *CLI, "publish", str(model_dir), "--step", "1", "--ipc-dir", str(channel), cwd=tmp_path)
    needed, free = bytes_needed_and_free(line)
    assert needed >= 4 * 264 * 32  # the embedding alone
    assert free <= ROOM_BYTES < needed
    assert not (channel / "LATEST").exists()
    assert list(channel.glob("manifest-*")) == []


def test_no_room_to_serve_tells_bytes_needed_and_free(serve: Serve, small_shm: list[str]) -> None:
    needed, free = bytes_needed_and_free(serve.refusal(prefix=small_shm))
    assert free <= ROOM_BYTES < needed
