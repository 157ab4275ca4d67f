"""A numpy engine of real processes whose channel, board and words a foreign process fills with hostile things: each
command is refused with an error of the tree, and every live byte stays what it was."""

import mmap
import os
import random
import secrets
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from fastdeploy_rl import _native
from fastdeploy_rl.board import layout
from fastdeploy_rl.board.layout import SlotState
from fastdeploy_rl.board.legacy import WORDS
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import DeadlineExceededError, FastDeployRLError
from fastdeploy_rl.manifest import Manifest, Segment, build_manifest
from fastdeploy_rl.memory.owner_lock import OwnerLock
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.report import CommandKind
from fastdeploy_rl.update.client import BoardClient
from fastdeploy_rl.update.requests import client_lock_path
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_missed_and_fenced import wait_until

MODEL = NumpyModel((ParameterSpec("embed", "F32", (12, 64), 0), ParameterSpec("norm", "F32", (64,), None)))
FIRST, SECOND, THIRD = (random_weights(MODEL, seed) for seed in (1, 2, 3))


@dataclass
class Scene:
    """An engine that holds FIRST as version 1, in memory of its own, and SECOND published as version 2."""

    engine: NumpyEngine
    publisher: WeightPublisher
    channel: Channel
    client: BoardClient

    @property
    def latest(self) -> Manifest:
        return self.channel.read_publication(time.monotonic_ns() + 10**9)[1]

    @property
    def segment(self) -> Path:
        return Path("/dev/shm", self.latest.segments[0].locator)

    def assert_unchanged(self) -> None:
        assert self.engine.holds(FIRST)
        status = self.client.status()
        assert (status.admission, status.version) == ("serving", f"{self.publisher.epoch}.1")
        assert all(worker.poll() is None for worker in self.engine.workers)


@contextmanager
def scene(tmp_path: Path, **options: str) -> Iterator[Scene]:
    channel = Channel(tmp_path / "channel")
    with (
        NumpyEngine(MODEL, channel=channel.path, num_ranks=2, **options) as engine,
        WeightPublisher(channel.path, max_arenas=3) as publisher,
        BoardClient(engine.port) as client,
    ):
        publisher.publish(FIRST, step=1)
        client.update()
        publisher.publish(SECOND, step=2)
        yield Scene(engine, publisher, channel, client)


# --- what a channel can hold ----------------------------------------------------------------------------


def _announce(scene: Scene, **changes: object) -> None:
    """A manifest whose own digests hold, and which LATEST names as it should."""
    latest = scene.latest
    fields = {name: getattr(latest, name) for name in ("version", "layout", "segments", "tensors", "aliases")} | changes
    scene.channel.write_latest(scene.channel.write_manifest(build_manifest(**fields)))


def _with_segment(scene: Scene, **changes: object) -> None:
    _announce(scene, segments=[msgspec.structs.replace(scene.latest.segments[0], **changes)])


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _replace_by(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def _point_row_at(scene: Scene, name: str) -> None:
    """Manifest and lease table agree about a segment that is not the channel's."""
    segment: Segment = scene.latest.segments[0]
    row = 64 + 2048 * segment.arena + 64 + 64 * 16
    with open(scene.channel.leases_path, "r+b") as table:
        table.seek(row)
        table.write(name.encode().ljust(128, b"\0"))
    _with_segment(scene, locator=name)


ATTACKS: dict[str, Callable[[Scene], object]] = {
    "LATEST is noise": lambda s: (s.channel.path / "LATEST").write_bytes(os.urandom(200)),
    "LATEST is a pipe": lambda s: _replace_by(s.channel.path / "LATEST", os.mkfifo),
    "LATEST is a directory": lambda s: _replace_by(s.channel.path / "LATEST", Path.mkdir),
    "LATEST leads out": lambda s: _replace_by(s.channel.path / "LATEST", lambda p: p.symlink_to("/etc/passwd")),
    "LATEST names a file outside": lambda s: _rewrite(
        s.channel.path / "LATEST", lambda data: data.replace(b'"manifest-', b'"../manifest-')
    ),
    "the manifest is half": lambda s: _rewrite(_manifest_path(s), lambda data: data[: len(data) // 2]),
    "the manifest is another": lambda s: _rewrite(_manifest_path(s), lambda data: data.replace(b'"norm"', b'"mron"')),
    "the manifest is a pipe": lambda s: _replace_by(_manifest_path(s), os.mkfifo),
    "a tensor is missing": lambda s: _announce(s, tensors=s.latest.tensors[:1]),
    "a tensor has another shape": lambda s: _announce(
        s, tensors=[msgspec.structs.replace(s.latest.tensors[0], shape=(6, 128)), *s.latest.tensors[1:]]
    ),
    "a checksum is wrong": lambda s: _announce(
        s, tensors=[msgspec.structs.replace(s.latest.tensors[0], checksum="1" * 64), *s.latest.tensors[1:]]
    ),
    "the generation is absurd": lambda s: _with_segment(s, generation=2**63 - 2),
    "the row is absurd": lambda s: _with_segment(s, arena=2**62),
    "the publisher is absurd": lambda s: _with_segment(s, publisher=2**62),
    "the size is absurd": lambda s: _with_segment(s, num_bytes=2**62),
    "the locator is a dot file": lambda s: _with_segment(s, locator="..x"),
    "the locator is the board": lambda s: _with_segment(s, locator=f"fastdeploy_rl_board.{s.engine.port}"),
    "row and locator are the board": lambda s: _point_row_at(s, f"fastdeploy_rl_board.{s.engine.port}"),
    "row and locator are a word": lambda s: _point_row_at(s, f"model_weights_status.{s.engine.port}"),
    "row and locator are nowhere": lambda s: _point_row_at(s, "fastdeploy_rl.nowhere"),
    "the table is noise": lambda s: s.channel.leases_path.write_bytes(os.urandom(40000)),
    "the table is cut": lambda s: _truncate(s.channel.leases_path, 100),
    "the table is empty": lambda s: _truncate(s.channel.leases_path, 0),
    "the table is a pipe": lambda s: _replace_by(s.channel.leases_path, os.mkfifo),
    "the memory is cut": lambda s: _truncate(s.segment, 4096 if s.segment.stat().st_size > 4096 else 100),
    "the memory is gone": lambda s: _truncate(s.segment, 0),
    "the memory grew": lambda s: _truncate(s.segment, s.segment.stat().st_size + 4096),
    "the memory is a pipe": lambda s: _replace_by(s.segment, os.mkfifo),
    "the memory is a link": lambda s: _replace_by(s.segment, lambda p: p.symlink_to("/etc/passwd")),
    "the memory is other bytes": lambda s: _rewrite(s.segment, lambda data: data[::-1]),
    "the channel is open to others": lambda s: s.channel.path.chmod(0o777),
    "the channel is gone": lambda s: s.channel.path.rename(s.channel.path.with_name("moved")),
    "holders is a file": lambda s: (shutil.rmtree(s.channel.holders_dir), s.channel.holders_dir.write_text("")),
    "holders leads out": lambda s: (
        shutil.rmtree(s.channel.holders_dir),
        s.channel.holders_dir.symlink_to(s.channel.path.parent),
    ),
}


def _manifest_path(scene: Scene) -> Path:
    return scene.channel.path / scene.channel.read_latest().file


@contextmanager
def _restored(scene: Scene) -> Iterator[None]:
    """Whatever is done inside to channel and memory, both are as before afterwards, inode by inode."""
    path, segment, copy = scene.channel.path, scene.segment, scene.channel.path.with_name("copy")
    kept = segment.with_name(f"{segment.name}.kept")
    data, mode = segment.read_bytes(), stat.S_IMODE(path.stat().st_mode)
    files = {file: file.read_bytes() for file in path.iterdir() if file.is_file()}
    os.link(segment, kept)
    for file in files:
        copy.mkdir(exist_ok=True)
        os.link(file, copy / file.name)
    holders = copy / "holders"
    shutil.copytree(scene.channel.holders_dir, holders, copy_function=os.link)
    try:
        yield
    finally:
        if not path.exists():
            path.with_name("moved").rename(path)
        path.chmod(mode)
        _put_back(scene, copy, files)
        with open(kept, "r+b") as file:
            file.truncate(len(data))
            file.write(data)
        segment.unlink(missing_ok=True)
        kept.rename(segment)


def _put_back(scene: Scene, copy: Path, files: dict[Path, bytes]) -> None:
    for entry in scene.channel.path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for file, data in files.items():
        with open(copy / file.name, "r+b") as kept:
            kept.truncate(len(data))
            kept.write(data)
        os.rename(copy / file.name, file)
    os.rename(copy / "holders", scene.channel.holders_dir)
    shutil.rmtree(copy)


def _is_refused(client: BoardClient) -> bool:
    try:
        client.update(deadline_s=5.0)
    except FastDeployRLError:
        return True
    return False


def test_whatever_a_channel_is_made_to_hold_the_engine_serves_on_unchanged(tmp_path: Path):
    with scene(tmp_path, apply_mode="copy") as s:
        for name, attack in ATTACKS.items():
            with _restored(s):
                attack(s)
                assert _is_refused(s.client), name
                s.assert_unchanged()
        s.client.update()
        assert s.engine.holds(SECOND)


# --- what engines may do to published memory ---------------------------------------------------------------


def _rights(pid: int, name: str) -> list[str]:
    """Of each mapping of that segment in the process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(f"/dev/shm/{name}")]


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_engines_cannot_write_into_published_memory(tmp_path: Path, apply_mode: str):
    """The kernel's own account of every rank: while an engine holds a version, and of those it kept mapped before."""
    with scene(tmp_path, apply_mode=apply_mode) as s:
        locators = {s.latest.segments[0].locator}
        for step, weights in ((2, SECOND), (3, THIRD)):
            if step == 3:
                s.publisher.publish(weights, step=3)
                locators.add(s.latest.segments[0].locator)
            s.client.update()
            assert s.engine.holds(weights)
            for worker in s.engine.workers:
                rights = {name: _rights(worker.pid, name) for name in locators}
                assert {right for found in rights.values() for right in found} <= {"r--s"}, rights
                assert rights[s.latest.segments[0].locator] or apply_mode == "copy", rights


# --- the board ---------------------------------------------------------------------------------------------


class Intruder:
    """A process of the same user that knows where the board is, and keeps to no rule. Its lock lives, so that its slots
    are not swept out."""

    def __init__(self, engine: NumpyEngine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._token = secrets.randbits(60) | 1

    def __enter__(self) -> "Intruder":
        with ExitStack() as stack:
            stack.enter_context(OwnerLock(client_lock_path(self._engine.board.run_dir, self._token)))
            file = stack.enter_context(open(f"/dev/shm/fastdeploy_rl_board.{self._engine.port}", "r+b"))
            self.board = stack.enter_context(mmap.mmap(file.fileno(), 0))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(
        self, slot: int, state: int, kind: int, text: bytes, *, token: int = 0, deadline_ns: int | None = None
    ) -> None:
        """One slot, with any ticket, force and deadline; the doorbell is rung."""
        offset = layout.request_offset(slot)
        odd = self._random.choice
        fields = struct.pack(
            "<QQQq",
            odd((0, 2**64 - 1, self._random.getrandbits(64))),
            kind,
            odd((0, 1, 2**64 - 1)),
            odd((0, -(2**63), 2**63 - 1, -1, time.monotonic_ns() + 10**9)) if deadline_ns is None else deadline_ns,
        )
        self.board[offset + 8 : offset + 8 + len(fields) + 64] = fields + text.ljust(64, b"\xff")[:64]
        self.board[offset : offset + 8] = struct.pack("<Q", (token or self._token) << 3 | state)
        self.ring()

    def state(self, slot: int) -> int:
        return int(self.board[layout.request_offset(slot)]) & 7

    def ring(self) -> None:
        self._engine.board.ring_doorbell()

    def free(self, slot: int) -> None:
        offset = layout.request_offset(slot)
        self.board[offset : offset + 8] = bytes(8)


_TEXTS = [b"\xff" * 64, b"9" * 64, b"1.1\0\0x", b"../../x", b"-1.5", b"1.2 ", b"\xed\xa0\x80", "\u2028é".encode()]


def test_garbage_in_request_slots_is_refused_and_the_engine_serves_on_unchanged(tmp_path: Path):
    """Any state, kind, ticket, deadline and text, from a client that lives; the honest one is served in between."""
    with scene(tmp_path, apply_mode="copy") as s, Intruder(s.engine, 1) as intruder:
        kinds = [0, 4, 77, 2**32, 2**64 - 1, CommandKind.RECOMPUTE]
        for state in (*SlotState, 6, 7):
            for slot in range(8):
                intruder.fill(slot, state, kinds[(slot + state) % len(kinds)], _TEXTS[slot])
            assert s.client.receipt(recompute=True).version == f"{s.publisher.epoch}.1"
            s.assert_unchanged()
            for slot in range(8):
                intruder.free(slot)
        for odd, make in enumerate((os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/passwd"))):
            make(client_lock_path(s.engine.board.run_dir, 77 + odd))
            intruder.fill(odd, SlotState.SUBMITTED, CommandKind.CLEAR, b"", token=77 + odd)
        assert s.client.receipt(recompute=True).version == f"{s.publisher.epoch}.1"
        s.assert_unchanged()
        for text in _TEXTS:
            intruder.fill(3, SlotState.SUBMITTED, CommandKind.UPDATE, text)
            assert s.client.receipt(recompute=True).version == f"{s.publisher.epoch}.1"
            s.assert_unchanged()
            intruder.free(3)
        s.client.update()
        assert s.engine.holds(SECOND)


def test_a_request_whose_deadline_is_long_over_is_refused_and_leaves_no_rank_behind(tmp_path: Path):
    """Nobody would wait for the ranks' way back: the next command must find all of them idle."""
    with scene(tmp_path, apply_mode="copy") as s, Intruder(s.engine, 3) as intruder:
        for deadline_ns in (-(2**63), 0, time.monotonic_ns() - 60 * 10**9) * 3:
            intruder.fill(5, SlotState.SUBMITTED, CommandKind.UPDATE, bytes(64), deadline_ns=deadline_ns)
            assert _becomes(lambda: intruder.state(5) == SlotState.FINISHED)
            s.assert_unchanged()
            assert s.client.receipt(recompute=True).version == f"{s.publisher.epoch}.1"
            intruder.free(5)
        s.client.update()
        assert s.engine.holds(SECOND)


def test_noise_over_all_request_slots_leaves_the_engine_as_it_is(tmp_path: Path):
    """Whole slots of random bytes, bells and the ticket counter too: nobody lives who could have asked for that."""
    with scene(tmp_path, apply_mode="copy") as s, Intruder(s.engine, 2) as intruder:
        for seed in range(4):
            noise = random.Random(seed).randbytes(layout.RANKS_OFFSET - layout.REQUESTS_OFFSET)
            intruder.board[layout.REQUESTS_OFFSET : layout.RANKS_OFFSET] = noise
            intruder.board[layout.DOORBELL_OFFSET : layout.TICKET_OFFSET + 8] = noise[:24]
            intruder.ring()
            assert s.client.receipt(recompute=True).version == f"{s.publisher.epoch}.1"
            s.assert_unchanged()
        s.client.update()
        assert s.engine.holds(SECOND)


def test_records_that_are_overwritten_read_as_silence_until_their_writers_write_again(tmp_path: Path):
    """Of rank 0 for the whole engine, and of a rank for itself; no byte of a weight moves."""
    with scene(tmp_path, apply_mode="copy") as s, Intruder(s.engine, 4) as intruder:
        size = layout.COMMAND_OFFSET - layout.STATUS_OFFSET - 8
        wait_until(lambda: s.client.status().newest_version == f"{s.publisher.epoch}.2")  # rank 0 has no more to tell
        intruder.board[layout.STATUS_OFFSET + 8 : layout.COMMAND_OFFSET] = random.Random(1).randbytes(size)
        with pytest.raises(DeadlineExceededError, match="StatusRecord"):
            s.client.status()
        intruder.board[layout.rank_offset(1) + 8 : layout.rank_offset(1) + 500] = random.Random(2).randbytes(492)
        assert s.engine.holds(FIRST)
        s.client.update()
        assert s.engine.holds(SECOND)
        status = s.client.status()
        assert (status.admission, status.version) == ("serving", f"{s.publisher.epoch}.2")
        assert status.ranks[1].version == f"{s.publisher.epoch}.2"


# --- the status words --------------------------------------------------------------------------------------


def test_a_word_may_hold_anything_and_reads_the_truth_again(tmp_path: Path):
    """Each int32 that is no command is put right; none of them changes a byte."""
    values = [2, 3, -3, 7, 2**31 - 1, -(2**31), 255, 256, -256, 0x01000000, 2, -2]
    with scene(tmp_path, apply_mode="copy") as s:
        names = [f"{word}.{s.engine.port}" for word in WORDS]
        with ExitStack() as stack:
            segments = [stack.enter_context(SharedSegment.attach(name, writable=True)) for name in names]
            words = [segment.mapping for segment in segments]
            for value in values:
                _native.store_i32(words[0], 0, value)
                assert _becomes(lambda: _native.load_i32(words[0], 0) == 0), value
            for word in words[1:]:
                _native.store_i32(word, 0, -77)
            s.assert_unchanged()
            s.client.update()
            assert s.engine.holds(SECOND)
            assert _becomes(lambda: [_native.load_i32(word, 0) for word in words] == [0, 0, 0])


def _becomes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)  # bounded by the deadline above
    return True


def test_what_is_put_in_a_words_place_stops_nothing(tmp_path: Path):
    """The engine serves on; where the thing goes, the word is back."""
    makes: list[Callable[[Path], object]] = [
        os.mkfifo,
        Path.mkdir,
        lambda word: word.symlink_to("/etc/passwd"),
        lambda word: word.write_bytes(b"\1"),
        lambda word: word.write_bytes(bytes(4096)),
    ]
    with scene(tmp_path, apply_mode="copy") as s:
        word = Path(f"/dev/shm/model_weights_status.{s.engine.port}")
        for step, make in enumerate(makes, 3):
            word.unlink()
            make(word)
            weights = random_weights(MODEL, step)
            s.publisher.publish(weights, step=step)
            s.client.update()
            assert s.engine.holds(weights)
            assert s.client.status().admission == "serving"
            word.rmdir() if word.is_dir() else word.unlink()
            assert _becomes(lambda: word.is_file() and not word.is_symlink())


# --- the run directory -------------------------------------------------------------------------------------


def test_what_is_put_in_a_run_directorys_files_places_keeps_nobody(tmp_path: Path):
    with scene(tmp_path, apply_mode="copy") as s:
        run_dir = s.engine.board.run_dir
        for make in (
            os.mkfifo,
            Path.mkdir,
            lambda path: path.symlink_to("/dev/zero"),
            lambda p: p.write_bytes(b"\xff"),
        ):
            for name, ask in (("receipt.json", s.client.receipt), ("report.1.json", s.client.last_report)):
                path, kept = run_dir / name, run_dir / "kept"
                path.rename(kept)
                make(path)
                with pytest.raises(FastDeployRLError):
                    ask()
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                kept.rename(path)
        s.assert_unchanged()
        s.client.update()
        assert s.engine.holds(SECOND)
