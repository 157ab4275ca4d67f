"""Shared segments, owner locks, private directories and tensor views."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl import config
from fastdeploy_rl._native import Mapping
from fastdeploy_rl.errors import ConfigurationError, NoSpaceError, SegmentError
from fastdeploy_rl.memory import owner_lock
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.memory.private_directory import open_private_directory
from fastdeploy_rl.memory.shared_segment import SharedSegment, free_bytes
from fastdeploy_rl.memory.tensor_view import TensorView


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"fastdeploy_rl.test.{os.getpid()}.{request.node.name[:60].replace('[', '.').replace(']', '')}"


def _exists(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def test_what_the_creator_writes_an_attached_reader_sees_and_cannot_change(name: str) -> None:
    with SharedSegment.create(name, 8192) as segment, SharedSegment.attach(name) as reader:
        memoryview(segment.mapping)[5] = 42
        assert memoryview(reader.mapping)[5] == 42
        assert (reader.num_bytes, reader.mapping.is_writable) == (8192, False)
        with pytest.raises(TypeError):
            memoryview(reader.mapping)[5] = 1
        segment.unlink()
    assert not _exists(name)


def test_a_segment_has_all_its_pages_from_the_start_and_mode_0600(name: str) -> None:
    with SharedSegment.create(name, 1 << 20) as segment:
        status = os.stat(f"/dev/shm/{name}")
        segment.unlink()
    assert status.st_blocks * 512 >= 1 << 20
    assert status.st_mode & 0o777 == 0o600


def test_closing_is_refused_while_an_array_lies_in_the_segment(name: str) -> None:
    with SharedSegment.create(name, 4096) as segment:
        segment.unlink()
        array = TensorView(segment.mapping, 0, "F32", (4,)).numpy()
        with pytest.raises(BufferError):
            segment.close()
        array[:] = 7  # still mapped
        del array


def test_a_taken_name_is_refused_and_its_segment_left_alone(name: str) -> None:
    with SharedSegment.create(name, 4096) as segment:
        memoryview(segment.mapping)[0] = 9
        with pytest.raises(SegmentError, match=name):
            SharedSegment.create(name, 4096)
        assert memoryview(segment.mapping)[0] == 9
        segment.unlink()


def test_more_than_is_free_is_refused_with_both_numbers_and_leaves_no_name(name: str) -> None:
    needed = free_bytes() + (1 << 30)
    with pytest.raises(NoSpaceError, match=rf"needs {needed} bytes.*\d+ are free"):
        SharedSegment.create(name, needed)
    assert not _exists(name)


def test_room_that_vanishes_while_pages_are_reserved_leaves_no_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpaceError, match="needs 4096 bytes"):
        SharedSegment.create(name, 4096)
    assert not _exists(name)


def test_a_missing_segment_is_an_error_with_its_path(name: str) -> None:
    with pytest.raises(SegmentError, match=f"/dev/shm/{name} is missing"):
        SharedSegment.attach(name)


@pytest.mark.parametrize("bad", ["", "a/b", "..", "x" * 300])
def test_names_that_could_leave_the_directory_are_refused(bad: str) -> None:
    with pytest.raises(SegmentError, match="not a segment name"):
        SharedSegment.attach(bad)


def test_unlinking_twice_is_harmless(name: str) -> None:
    with SharedSegment.create(name, 4096) as segment:
        segment.unlink()
        segment.unlink()


def test_an_owner_is_alive_from_acquire_to_release(tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"
    with OwnerLock(path):
        assert is_alive(path)
        owner = owner_of(path)
        assert owner is not None
        assert owner.pid == os.getpid()
        assert path.stat().st_mode & 0o777 == 0o600
    assert not is_alive(path)
    assert not path.exists()


def test_a_second_owner_is_refused_by_name_and_the_first_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"
    with OwnerLock(path):
        with pytest.raises(SegmentError, match=f"pid {os.getpid()}"):
            OwnerLock(path).acquire()
        assert is_alive(path)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"
    code = (
        "import sys; from fastdeploy_rl.memory.owner_lock import OwnerLock; lock = OwnerLock(sys.argv[1]);"
        "lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with peer:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "held\n"
        assert is_alive(path)
        peer.kill()
        peer.wait(10)
        assert path.exists()
        assert not is_alive(path)
    with OwnerLock(path):
        assert is_alive(path)


def test_a_forked_child_neither_holds_nor_releases_the_lock_of_its_parent(tmp_path: Path) -> None:
    """A trainer's data loaders may outlive it, and end while it lives."""
    path = tmp_path / "owner.lock"
    code = (
        "import os, sys; from fastdeploy_rl.memory.owner_lock import OwnerLock; lock = OwnerLock(sys.argv[1]);"
        "lock.acquire(); os.fork() or lock.release(); os.write(1, b'forked\\n'); sys.stdin.read()"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert [peer.stdout.readline() for _ in range(2)] == ["forked\n"] * 2
        assert is_alive(path)
        peer.kill()
        peer.wait(10)
        assert not is_alive(path)
        with OwnerLock(path):
            assert is_alive(path)
        peer.stdin.close()
        peer.stdout.read()  # until the child has ended


def test_looking_whether_an_owner_lives_never_keeps_one_out(tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_alive(path)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(300):
            with OwnerLock(path):
                pass
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


def test_who_takes_the_locks_of_the_dead_away_keeps_no_new_owner_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock file is made before it is locked: for that moment it looks like a dead one's."""
    path = tmp_path / "owner.lock"
    sweeper = OwnerLock(path)
    sweeper.acquire()
    monkeypatch.setattr(owner_lock.time, "sleep", lambda seconds: sweeper.release())
    with OwnerLock(path):
        assert not sweeper.is_held
        assert is_alive(path)


def test_a_private_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    open_private_directory(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        open_private_directory(tmp_path / "open")


def test_a_symbolic_link_is_no_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="symbolic"):
        open_private_directory(tmp_path / "link")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", (2, 3)), ("BF16", (5,)), ("BOOL", (3,)), ("I64", ()), ("F32", (0, 4))]
)
def test_a_view_is_the_bytes_themselves(dtype: str, shape: tuple[int, ...]) -> None:
    mapping = Mapping.private(4096)
    view = TensorView(mapping, 64, dtype, shape)
    array = view.numpy()
    assert (array.shape, array.nbytes) == (shape, view.num_bytes)
    array[...] = 1
    assert bytes(memoryview(mapping)[64 : 64 + view.num_bytes]) == array.tobytes()
    assert not any(memoryview(mapping)[64 + view.num_bytes :])


@pytest.mark.parametrize(("offset", "shape"), [(4096, (1,)), (0, (1025,)), (-4, (1,)), (0, (-1,))])
def test_a_view_outside_its_mapping_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        TensorView(Mapping.private(4096), offset, "F32", shape)


def test_views_are_the_same_place_only_with_equal_bytes_and_meaning() -> None:
    mapping = Mapping.private(4096)
    view = TensorView(mapping, 512, "F32", (4,))
    assert view.same_place(TensorView(mapping, 512, "F32", (4,)))
    assert not view.same_place(TensorView(mapping, 512, "I32", (4,)))
    assert not view.same_place(TensorView(mapping, 516, "F32", (4,)))
    assert not view.same_place(TensorView(Mapping.private(4096), 512, "F32", (4,)))


def test_the_default_channel_is_in_the_runtime_directory_or_in_shared_memory(tmp_path: Path) -> None:
    assert config.default_channel({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "fastdeploy_rl"
    fallback = Path(f"/dev/shm/fastdeploy_rl-{os.getuid()}")
    assert config.default_channel({}) == fallback
    assert config.default_channel({"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) == fallback


@pytest.mark.parametrize("text", ["0", "-1", "two", "65", "9" * 40, "000164", "0" * 5000 + "1"])
def test_an_impossible_number_of_copy_threads_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="FASTDEPLOY_RL_COPY_THREADS"):
        config.num_copy_threads({"FASTDEPLOY_RL_COPY_THREADS": text})
    assert config.num_copy_threads({"FASTDEPLOY_RL_COPY_THREADS": "3"}) == 3
    assert config.num_copy_threads({}) >= 1


def test_a_deadline_that_is_no_time_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="update_s"):
        config.Deadlines(update_s=0)


def test_an_array_counts_as_an_export_until_it_dies() -> None:
    mapping = Mapping.private(4096)
    array = TensorView(mapping, 0, "F32", (2,)).numpy()
    assert mapping.num_exports == 1
    assert isinstance(array, np.ndarray)
    del array
    mapping.close()
    assert mapping.is_closed
