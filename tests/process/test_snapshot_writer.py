"""SnapshotWriter beside a trainer: what it holds, what it leaves, and what its death at any point leaves."""

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from full_disk_peer import NUM_BYTES
from private_shm import private_shm
from safetensors import deserialize
from snapshot_peer import DEADLINE_S, NEW_IS_THERE, POINTS

from fastdeploy_rl import SnapshotWriter, WeightPublisher, WeightVersion
from fastdeploy_rl.cli import main
from fastdeploy_rl.errors import (
    ChannelBusyError,
    ChecksumMismatchError,
    ConfigurationError,
    DeadlineExceededError,
    LifecycleError,
    NoPublicationError,
    NoSpaceError,
    SegmentError,
    VersionRegressError,
)
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.publish.publisher import Shard
from fastdeploy_rl.publish.snapshot_directory import SnapshotDirectory

HERE = Path(__file__).parent


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


def weights(seed: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(50).astype(np.float32) for name in ("a", "b", "c")}


def on_disk(channel: Path) -> dict[str, dict[str, bytes]]:
    """Version -> tensor -> bytes, of all snapshots that are whole, read without the product's mappings."""
    directory = SnapshotDirectory(channel)
    found = [directory.read(entry) for entry in directory.entries()]
    return {str(each.version): tensors_in(each.manifest, each.path) for each in found if each is not None}


def tensors_in(manifest: Manifest, path: Path) -> dict[str, bytes]:
    files = [(path / segment.locator).read_bytes() for segment in manifest.segments]
    return {
        tensor.name: files[tensor.parts[0].segment][tensor.parts[0].offset :][: tensor.num_bytes]
        for tensor in manifest.tensors
    }


def bytes_of(seed: int) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in weights(seed).items()}


def names_in(channel: Path) -> list[str]:
    return sorted(os.listdir(channel / "snapshots"))


class Gate:
    """An `on_progress` that holds the writing up until it is opened."""

    def __init__(self) -> None:
        self._is_reached = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self._is_reached.set()
        assert self._is_open.wait(DEADLINE_S)

    def wait_reached(self) -> None:
        assert self._is_reached.wait(DEADLINE_S)

    def open(self) -> None:
        self._is_open.set()


# --- beside a trainer ------------------------------------------------------------------------------


def test_a_trainer_goes_on_while_a_version_is_written(channel: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        snapshots.write(publisher.publish(weights(1), step=1), on_progress=gate)
        gate.wait_reached()
        with caplog.at_level(logging.WARNING):
            for step in range(2, 6):
                snapshots.write(publisher.publish(weights(step), step=step, deadline_s=5))
        assert [text.split()[:2] for text in caplog.messages] == [
            [f"snapshot=1.{step}", "event=given_up"] for step in (2, 3, 4)
        ]
        with pytest.raises(DeadlineExceededError, match=r"no snapshot of version 1\.1"):
            snapshots.wait(0.01)
        assert snapshots.latest is None
        gate.open()
        latest = snapshots.wait(DEADLINE_S)
        assert latest is not None
        assert latest.version == WeightVersion(1, 5)
    assert on_disk(channel) == {"1.1": bytes_of(1), "1.5": bytes_of(5)}


def test_leaving_the_with_finishes_what_was_given(channel: Path) -> None:
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        for step in (1, 2):
            snapshots.write(publisher.publish(weights(step), step=step))
    assert on_disk(channel)["1.2"] == bytes_of(2)
    assert "LOCK" not in names_in(channel)


def test_an_error_in_the_with_gives_up_what_is_not_written(channel: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with WeightPublisher(channel, max_arenas=2) as publisher:
        with pytest.raises(ZeroDivisionError), opened_by_the_log(gate):
            _write_two_and_fail(publisher, SnapshotWriter(channel, shard_bytes=200), gate)
        for step in (3, 4, 5):
            publisher.publish(weights(step), step=step, deadline_s=0.05)  # no lease is left
    assert [text.split()[:2] for text in caplog.messages] == [
        [f"snapshot=1.{step}", "event=given_up"] for step in (2, 1)
    ]
    assert names_in(channel) == []


def _write_two_and_fail(publisher: WeightPublisher, writer: SnapshotWriter, gate: Gate) -> None:
    with writer as snapshots:
        snapshots.write(publisher.publish(weights(1), step=1), on_progress=gate)
        gate.wait_reached()
        snapshots.write(publisher.publish(weights(2), step=2))
        raise ZeroDivisionError


@contextmanager
def opened_by_the_log(gate: Gate) -> Iterator[None]:
    """At the next warning: that the version which waits is given up, so that the running one will be, too."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: gate.open()  # type: ignore[method-assign]
    logger = logging.getLogger("fastdeploy_rl.publish.snapshot_writer")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def test_borrowed_memory_is_not_given_back_before_it_is_written(channel: Path) -> None:
    gate = Gate()
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        memory = publisher.allocate({"w": ("F32", (100,))})
        memory["w"][:] = 1
        published = publisher.publish(memory, step=1, borrow=True)
        snapshots.write(published, on_progress=gate)
        gate.wait_reached()
        with pytest.raises(DeadlineExceededError):
            published.wait_released(0.05)
        gate.open()
        published.wait_released(DEADLINE_S)
        memory["w"][:] = 2
    assert on_disk(channel) == {"1.1": {"w": np.ones(100, np.float32).tobytes()}}


def test_what_several_processes_published_together_is_one_snapshot(channel: Path) -> None:
    """Each has its own memory, and half of the split tensor; one of them writes all of it."""
    whole = np.arange(40, dtype=np.float32).reshape(4, 10)
    halves = [np.ascontiguousarray(whole[:, :5]), np.ascontiguousarray(whole[:, 5:])]
    shards = [{"w": Shard(1, 0, 5, 10)}, {"w": Shard(1, 5, 10, 10)}]
    with (
        WeightPublisher(channel, part=(0, 2)) as first,
        WeightPublisher(channel, part=(1, 2)) as second,
        SnapshotWriter(channel) as snapshots,
        ThreadPoolExecutor(1) as other,
    ):
        pending = other.submit(second.publish, {"w": halves[1]}, step=1, shards=shards[1])
        snapshots.write(first.publish({"w": halves[0], "b": halves[1]}, step=1, shards=shards[0]))
        pending.result(DEADLINE_S)
        snapshot = snapshots.wait(DEADLINE_S)
    assert snapshot is not None
    (shard,) = snapshot.path.glob("*.safetensors")
    entries = deserialize(shard.read_bytes())  # type: ignore[no-untyped-call]
    found = {name: np.frombuffer(about["data"], np.float32) for name, about in entries}
    assert found.keys() == {"w#0-5", "w#5-10", "b"}
    assert np.array_equal(np.hstack([found[name].reshape(4, 5) for name in ("w#0-5", "w#5-10")]), whole)


def test_a_version_whose_memory_is_gone_is_refused_at_once(channel: Path) -> None:
    with WeightPublisher(channel, max_arenas=2) as publisher, SnapshotWriter(channel) as snapshots:
        first = publisher.publish(weights(1), step=1)
        for step in (2, 3):
            publisher.publish(weights(step), step=step)
        with pytest.raises(NoPublicationError):
            snapshots.write(first)
        assert snapshots.wait(1) is None
    assert names_in(channel) == []


def test_bytes_that_are_not_what_was_published_never_become_a_snapshot(channel: Path) -> None:
    with WeightPublisher(channel, max_arenas=2) as publisher, SnapshotWriter(channel) as snapshots:
        snapshots.write(publisher.publish(weights(1), step=1))
        snapshots.wait(DEADLINE_S)
        before = names_in(channel)
        published = publisher.publish(weights(2), step=2)
        with SharedSegment.attach(published.manifest.segments[0].locator, writable=True) as segment:
            part = next(tensor for tensor in published.manifest.tensors if tensor.name == "b").parts[0]
            with memoryview(segment.mapping) as view:
                view[part.offset + 3] ^= 1
        snapshots.write(published)
        with pytest.raises(ChecksumMismatchError, match=r"1 tensors of version 1\.2 .* first 'b'"):
            snapshots.wait(DEADLINE_S)
        assert names_in(channel) == before
        assert snapshots.wait(1) is snapshots.latest  # an error is told once
        for step in (3, 4, 5):
            publisher.publish(weights(step), step=step, deadline_s=0.05)
    assert on_disk(channel) == {"1.1": bytes_of(1)}
    assert json.loads((channel / "snapshots/LATEST").read_text())["version"] == "1.1"


def test_what_went_wrong_is_raised_by_close_where_nobody_waited(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        snapshots = SnapshotWriter(channel)
        snapshots.start()
        published = publisher.publish(weights(1), step=1)
        with file_size_limit(800):
            snapshots.write(published)
            with pytest.raises(NoSpaceError, match="File too large"):
                snapshots.close()
        snapshots.close()
    assert names_in(channel) == []


# --- which versions are there ----------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_so_many_versions_are_kept(channel: Path, keep: int) -> None:
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, keep=keep) as snapshots:
        for step in range(1, 7):
            snapshots.write(publisher.publish(weights(step), step=step))
            snapshots.wait(DEADLINE_S)
            found = on_disk(channel)
            assert found == {f"1.{kept}": bytes_of(kept) for kept in range(max(1, step - keep + 1), step + 1)}


def test_what_is_not_whole_counts_for_none_of_them_and_goes_with_its_age(channel: Path) -> None:
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, keep=2) as snapshots:
        for step in range(1, 6):
            snapshots.write(publisher.publish(weights(step), step=step))
            snapshot = snapshots.wait(DEADLINE_S)
            assert snapshot is not None
            if step == 2:
                (snapshot.path / "model-00001-of-00001.safetensors").unlink()
            found = [str(entry.version) for entry in SnapshotDirectory(channel).entries()]
            assert found == {1: ["1.1"], 2: ["1.2", "1.1"], 3: ["1.3", "1.2", "1.1"], 4: ["1.4", "1.3"]}.get(
                step, ["1.5", "1.4"]
            )


def test_a_version_is_written_once_and_again_where_it_was_not_whole(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        published = publisher.publish(weights(1), step=1)
        with SnapshotWriter(channel) as snapshots:
            snapshots.write(published)
            first = snapshots.wait(DEADLINE_S)
            assert first is not None
            inode = first.path.stat().st_ino
            snapshots.write(published)
            assert snapshots.wait(DEADLINE_S) is first
        assert first.path.stat().st_ino == inode
        os.truncate(first.path / "model-00001-of-00001.safetensors", 5)
        with SnapshotWriter(channel) as snapshots:
            assert snapshots.latest is None
            snapshots.write(published)
    assert on_disk(channel) == {"1.1": bytes_of(1)}
    assert names_in(channel) == sorted(["LATEST", first.path.name])


def test_a_version_that_goes_back_is_refused_and_holds_nothing(channel: Path, tmp_path: Path) -> None:
    """A channel that was lost and made anew counts its epochs from 1 again; the disk remembers."""
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, directory=tmp_path / "disk") as snapshots:
        snapshots.write(publisher.publish(weights(7), step=7))
    with WeightPublisher(tmp_path / "anew", max_arenas=2) as publisher:
        for step, seed in ((6, 6), (7, 8)):
            with SnapshotWriter(tmp_path / "anew", directory=tmp_path / "disk") as snapshots:
                assert snapshots.latest is not None
                published = publisher.publish(weights(seed), step=step)
                with pytest.raises(VersionRegressError, match=r"has version 1\.7"):
                    snapshots.write(published)
        for step in (8, 9):
            publisher.publish(weights(step), step=step, deadline_s=0.05)
    assert on_disk(tmp_path / "disk") == {"1.7": bytes_of(7)}


def test_settings_that_cannot_work_and_calls_out_of_turn_are_refused(channel: Path) -> None:
    for settings in ({"keep": 0}, {"shard_bytes": 0}, {"keep": 1.5}, {"keep": True}):
        with pytest.raises(ConfigurationError, match="whole number from 1 on"):
            SnapshotWriter(channel, **settings)
    snapshots = SnapshotWriter(channel)
    with WeightPublisher(channel) as publisher, pytest.raises(LifecycleError, match="not started"):
        snapshots.write(publisher.publish(weights(1), step=1))
    with snapshots, pytest.raises(LifecycleError, match="already started"):
        snapshots.start()
    snapshots.close()


# --- a full disk -----------------------------------------------------------------------------------


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Of every file that this process writes to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_callers_own_code_raises_is_not_blamed_on_the_disk(channel: Path) -> None:
    def report(done: int, total: int) -> None:
        raise BrokenPipeError(32, "nobody reads the progress bar")

    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        snapshots.write(publisher.publish(weights(1), step=1), on_progress=report)
        with pytest.raises(BrokenPipeError, match="progress bar"):
            snapshots.wait(DEADLINE_S)
        assert names_in(channel) == ["LOCK"]
        snapshots.write(publisher.publish(weights(2), step=2, deadline_s=5))
    assert on_disk(channel) == {"1.2": bytes_of(2)}


def test_what_is_no_lock_is_no_live_writer(channel: Path) -> None:
    (channel / "snapshots").mkdir(mode=0o700, parents=True)
    channel.chmod(0o700)
    os.mkfifo(channel / "snapshots/LOCK")
    with pytest.raises(SegmentError, match="LOCK is no lock file"):
        SnapshotWriter(channel).start()
    assert names_in(channel) == ["LOCK"]


def test_a_full_disk_is_said_and_leaves_what_was_there() -> None:
    prefix = private_shm(NUM_BYTES)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a tmpfs")
    command = [*prefix, sys.executable, str(HERE / "full_disk_peer.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    error, _, rest = done.stdout.partition("\n")
    assert done.returncode == 0, done.stderr
    assert "No space left on device; make room, or keep fewer snapshots" in error
    assert rest.strip() == "2 1.1 ['1.1', 'LATEST', 'LOCK']"


# --- other processes -------------------------------------------------------------------------------


@contextmanager
def peer(channel: Path, point: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "snapshot_peer.py"), str(channel), point]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_is_killed_leaves_the_old_version_or_the_new_one(channel: Path, point: str) -> None:
    with WeightPublisher(channel, max_arenas=2) as publisher:
        publisher.publish(weights(1), step=1)
        with SnapshotWriter(channel, keep=1) as snapshots:
            snapshots.write(publisher.publish(weights(2), step=2))
        publisher.publish(weights(3), step=3)
        with peer(channel, point) as process:
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
        newest = 3 if point in NEW_IS_THERE else 2
        found = on_disk(channel)
        assert max(found) == f"1.{newest}"
        assert all(tensors == bytes_of(int(version.split(".")[1])) for version, tensors in found.items())
        with SnapshotWriter(channel, keep=1) as snapshots:
            assert snapshots.latest is not None
            assert str(snapshots.latest.version) == f"1.{newest}"
            assert [name for name in names_in(channel) if name.startswith(".")] == []
            snapshots.write(publisher.publish(weights(4), step=4, deadline_s=5))  # the dead one's lease is void
            snapshots.wait(DEADLINE_S)
    assert on_disk(channel) == {"1.4": bytes_of(4)}
    assert len(names_in(channel)) == 2
    assert json.loads((channel / "snapshots/LATEST").read_text())["version"] == "1.4"


def test_a_second_writer_is_refused_while_the_first_one_lives(channel: Path) -> None:
    with peer(channel, "hold") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(ChannelBusyError, match=f"has a live snapshot writer .*pid {first.pid}"):
            SnapshotWriter(channel).start()
        first.kill()
        first.wait(DEADLINE_S)
        with SnapshotWriter(channel) as snapshots:
            assert snapshots.latest is None


# --- the command line ------------------------------------------------------------------------------


def test_the_verb_writes_what_is_published_and_lists_what_is_there(
    channel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--ipc-dir", str(channel)]
    assert main(["snapshot", *where]) == 2
    assert "no channel at" in capsys.readouterr().err
    with WeightPublisher(channel) as publisher:
        assert main(["snapshot", *where]) == 2
        assert "nothing is published" in capsys.readouterr().err
        for step in (1, 2):
            publisher.publish(weights(step), step=step)
            assert main(["snapshot", *where, "--json"]) == 0
            written = json.loads(capsys.readouterr().out)
            assert (written["version"], written["num_tensors"], written["shards"]) == (f"1.{step}", 3, 1)
        assert main(["snapshot", *where, "--keep", "1"]) == 0
        assert "version 1.2 is on disk" in capsys.readouterr().out
    next(iter(Path(written["path"]).glob("*.safetensors"))).unlink()
    assert main(["snapshot", *where, "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["version"], each["is_whole"]) for each in listed] == [("1.2", False), ("1.1", True)]
    assert "is missing" in listed[0]["reason"]
    assert main(["snapshot", *where, "--list"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["1.2", "broken:"], ["1.1", "0.0"]]


def test_following_writes_each_version_until_it_is_interrupted(channel: Path) -> None:
    command = [sys.executable, "-m", "fastdeploy_rl.cli", "snapshot", "--follow", "--json", "--ipc-dir", str(channel)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with WeightPublisher(channel) as publisher:
            for step in (1, 2, 3):
                published = publisher.publish(weights(step), step=step)
                written = json.loads(process.stdout.readline())
                assert written["version"] == str(published.version)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
    assert on_disk(channel) == {f"1.{step}": bytes_of(step) for step in (1, 2, 3)}
    assert "LOCK" not in names_in(channel)
