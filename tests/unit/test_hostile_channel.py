"""A channel whose files somebody replaced: each is an error of the tree, leads nowhere else and keeps nobody."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fastdeploy_rl import manifest as manifests
from fastdeploy_rl.errors import ConfigurationError, FastDeployRLError, ManifestError, SegmentError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.memory.owner_lock import OwnerLock, is_alive, owner_of
from fastdeploy_rl.memory.private_directory import check_private_directory, open_private_directory
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.publish.arena_shelf import ArenaShelf
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.leases import Holder, LeaseTable
from fastdeploy_rl.publish.meeting import Meeting
from fastdeploy_rl.publish.meeting import Part as Of
from fastdeploy_rl.publish.publisher import WeightPublisher, retire


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    channel = Channel(tmp_path / "channel")
    channel.open()
    return channel


def _manifest() -> Manifest:
    segment = Segment(kind="shm", locator="arena", num_bytes=4096, arena=0, generation=2)
    tensor = Tensor("w", "F32", (4,), None, (Part(0, 0, 0, 0),), "0" * 64)
    return build_manifest("1.1", "full", [segment], [tensor], {})


def soon(seconds: float = 0.05) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


# --- the directory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o707, 0o770, 0o777, 0o1777, 0o2770])
def test_a_directory_that_is_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "channel"
    path.mkdir()
    path.chmod(mode)
    for look in (Channel(path).open, Channel(path).check):
        with pytest.raises(ConfigurationError, match=r"open to other users.*chmod 700"):
            look()
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert not list(path.iterdir())


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "channel"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigurationError, match="belongs to user"):
        Channel(path).open()
    assert not list(path.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o773])
def test_a_directory_that_others_could_put_another_one_for_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "shared" / "deep" / "channel").mkdir(parents=True, mode=0o700)
    (tmp_path / "shared" / "deep" / "channel").chmod(0o700)
    (tmp_path / "shared").chmod(mode)
    with pytest.raises(ConfigurationError, match=r"can be replaced by other users: .*/shared is open to them"):
        check_private_directory(tmp_path / "shared" / "deep" / "channel")
    (tmp_path / "shared").chmod(mode | stat.S_ISVTX)
    check_private_directory(tmp_path / "shared" / "deep" / "channel")


def test_a_group_that_is_not_ours_counts_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "channel").mkdir(parents=True)
    (tmp_path / "shared" / "channel").chmod(0o700)
    (tmp_path / "shared").chmod(0o775)
    check_private_directory(tmp_path / "shared" / "channel")
    monkeypatch.setattr(os, "getegid", lambda: (tmp_path / "shared").stat().st_gid + 1)
    with pytest.raises(ConfigurationError, match="can be replaced"):
        check_private_directory(tmp_path / "shared" / "channel")


def test_a_link_on_the_way_is_followed_only_where_nobody_else_can_turn_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "channel").mkdir(parents=True)
    (tmp_path / "real" / "channel").chmod(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "real")
    check_private_directory(tmp_path / "open" / "link" / "channel")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"/open is open to them"):
        check_private_directory(tmp_path / "open" / "link" / "channel")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "file/channel", "loop/channel"])
def test_a_path_that_can_be_no_directory_is_said_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigurationError):
        open_private_directory(tmp_path / name)


# --- what is put in a file's place ----------------------------------------------------------------------


def _socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # such a name has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _endless(path: Path, outside: Path) -> None:
    path.write_bytes(b"{")
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside.with_name("nowhere")),
    "device": lambda path, outside: path.symlink_to("/dev/zero"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "directory": lambda path, outside: path.mkdir(),
    "full directory": lambda path, outside: (path / "x").mkdir(parents=True),
    "socket": _socket,
    "endless": _endless,
    "empty": lambda path, outside: path.write_bytes(b""),
    "noise": lambda path, outside: path.write_bytes(os.urandom(100)),
}


def _open_table(channel: Channel) -> None:
    table = LeaseTable(channel.leases_path, channel.holders_dir)
    table.open()
    table.close()


@contextmanager
def _meeting(channel: Channel) -> Iterator[Meeting]:
    meeting = Meeting(channel, Of(0, 2))
    try:
        meeting.open()
        yield meeting
    finally:
        meeting.close()


def _gather(channel: Channel) -> None:
    with OwnerLock(channel.lock_of(1)), _meeting(channel) as meeting:
        meeting.gather(1, soon())


def _publish(channel: Channel) -> None:
    with WeightPublisher(channel.path) as publisher:
        publisher.publish({"w": np.zeros(4, np.float32)}, step=1)


READERS: dict[str, Callable[[Channel], object]] = {
    "LATEST": lambda channel: channel.read_publication(soon()),
    "MANIFEST": lambda channel: channel.read_publication(soon()),
    "EPOCH": lambda channel: channel.read_epoch(),
    "LEASES": _open_table,
    "OFFER.1": _gather,
    "OUTCOME": _gather,
}
WRITERS = dict.fromkeys(("LATEST", "MANIFEST", "EPOCH", "LEASES", "LOCK", "holders"), _publish)
WRITERS |= dict.fromkeys(("BELL", "LOCK.1"), _gather)


def _put(channel: Channel, name: str, kind: str, outside: Path) -> Path:
    outside.write_bytes(b"theirs")
    latest = channel.write_manifest(_manifest())
    channel.write_latest(latest)
    path = channel.path / (latest.file if name == "MANIFEST" else name)
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path, outside)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_stands_in_a_files_place_is_refused_and_left_there(
    channel: Channel, tmp_path: Path, name: str, kind: str
) -> None:
    path = _put(channel, name, kind, tmp_path / "outside")
    before = os.lstat(path)
    with pytest.raises(FastDeployRLError):
        READERS[name](channel)
    assert (tmp_path / "outside").read_bytes() == b"theirs"
    assert not (tmp_path / "nowhere").exists()
    after = os.lstat(path)
    assert (after.st_ino, after.st_size, after.st_mode) == (before.st_ino, before.st_size, before.st_mode)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_a_publisher_writes_through_nothing_that_stands_in_a_files_place(
    channel: Channel, tmp_path: Path, name: str, kind: str
) -> None:
    """It may take what is in its way away, or be refused; what a link leads to is nobody's business here."""
    _put(channel, name, kind, tmp_path / "outside")
    with contextlib.suppress(FastDeployRLError):
        WRITERS[name](channel)
    assert (tmp_path / "outside").read_bytes() == b"theirs"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_retire_takes_away_what_it_can_and_says_what_it_cannot(channel: Channel, tmp_path: Path, kind: str) -> None:
    path = _put(channel, "LATEST", kind, tmp_path / "outside")
    try:
        retire(channel.path)
    except FastDeployRLError as error:
        assert "LATEST" in str(error)  # noqa: PT017  (either way is right)
    else:
        assert not os.path.lexists(path)
    assert (tmp_path / "outside").read_bytes() == b"theirs"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("endless", "empty", "noise")])
def test_what_is_no_file_is_nobodys_lock(tmp_path: Path, kind: str) -> None:
    (tmp_path / "outside").write_bytes(b"theirs")
    KINDS[kind](tmp_path / "lock", tmp_path / "outside")
    assert not is_alive(tmp_path / "lock")
    assert owner_of(tmp_path / "lock") is None
    with pytest.raises(SegmentError, match="is no lock file"):
        OwnerLock(tmp_path / "lock").acquire()
    assert (tmp_path / "outside").read_bytes() == b"theirs"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/lock", "\udcff" * 200, "nowhere/lock"])
def test_what_can_be_no_path_is_nobodys_lock(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    assert not is_alive(tmp_path / name)
    assert owner_of(tmp_path / name) is None


@pytest.mark.parametrize("note", [b"", b"1", b"-1 5", b"1 nan", b"1 inf", b"1 1e300", b"9" * 60, b"1 \xff", b"1 -5"])
def test_a_note_that_nobody_wrote_names_nobody(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "lock").write_bytes(note)
    assert owner_of(tmp_path / "lock") is None


def test_a_holder_whose_lock_is_no_file_is_dead_and_in_nobodys_way(channel: Channel) -> None:
    table = LeaseTable(channel.leases_path, channel.holders_dir)
    table.create()
    try:
        with Holder(channel.holders_dir) as holder:
            for token in (1, 2):
                table.take(0, table.generation(0), token)
            (channel.holders_dir / f"{1:016x}.lock").mkdir()
            os.mkfifo(channel.holders_dir / f"{2:016x}.lock")
            assert table.holders(0) == ()
            lease = table.take(0, table.generation(0), holder.token)
            assert len(table.holders(0)) == 1
            lease.release()
    finally:
        table.close()


# --- what the files say ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "../outside",
        "/etc/passwd",
        "holders/manifest-1.1-0000000000000000.json",
        "manifest-1.1-0000000000000000.json\n",
        "manifest-1.1-0000000000000000.json\0",
        "manifest-1.1-../0000000000000.json",
        "manifest-1.1-" + "0" * 3000 + ".json",
        "manifest-" + "1" * 3000 + ".1-0000000000000000.json",
        "",
        ".",
        "LATEST",
        "EPOCH",
    ],
)
def test_latest_leads_to_nothing_but_a_manifest_beside_it(channel: Channel, tmp_path: Path, file: str) -> None:
    (tmp_path / "outside").write_bytes(manifests.encode(_manifest()))
    digest = manifests.file_digest(manifests.encode(_manifest()))
    (channel.path / "LATEST").write_bytes(msgspec.json.encode(Latest("1.1", file, digest)))
    with pytest.raises(ManifestError):
        channel.read_publication(soon())


@pytest.mark.parametrize(
    "version", ["", "1", "1.1.1", "-1.1", "1.1\n", "9223372036854775808.1", "1." + "9" * 3000, "x"]
)
def test_latest_names_a_version(channel: Channel, version: str) -> None:
    latest = channel.write_manifest(_manifest())
    (channel.path / "LATEST").write_bytes(msgspec.json.encode(msgspec.structs.replace(latest, version=version)))
    for look in (channel.read_latest, channel.take_epoch):
        with pytest.raises(ManifestError):
            look()
    assert not (channel.path / "EPOCH").exists()


@pytest.mark.parametrize(
    "text",
    ["999999999999999999", "9" * 19, "9" * 32, "-1", "1.5", "nan", "0x10", "\u0661", "1 2", "\0", "1\0", "1e9", " "],
)
def test_an_absurd_epoch_is_refused_and_kept(channel: Channel, text: str) -> None:
    (channel.path / "EPOCH").write_text(text)
    with pytest.raises(FastDeployRLError):
        channel.take_epoch()
    assert (channel.path / "EPOCH").read_text() == text


def test_an_absurd_epoch_of_the_latest_version_is_refused(channel: Channel) -> None:
    manifest = msgspec.structs.replace(_manifest(), version=f"{2**63 - 1}.1")
    channel.write_latest(channel.write_manifest(manifest))
    with pytest.raises(SegmentError, match="which no publisher counted to"):
        channel.take_epoch()
    assert not (channel.path / "EPOCH").exists()


def test_a_row_with_a_foreign_segment_is_let_go_and_the_segment_stays(channel: Channel) -> None:
    """A publisher that took it over would write into it, and unlink it."""
    table = LeaseTable(channel.leases_path, channel.holders_dir)
    table.create()
    names = [f"fastdeploy_rl.{os.getuid()}.0123456789ab.1.0.0.{os.getpid()}", f"model_weights_status.{os.getpid()}"]
    segments = [SharedSegment.create(name, 4096) for name in names]
    try:
        for row, name in enumerate([*names, "../../etc/passwd", "a/b", "."]):
            table.set_segment(row, name)
        shelf = ArenaShelf(table, channel.key, 1, 2, 0, lambda row: None)
        shelf.reconcile()
        assert shelf.num_bytes == 0
        assert [table.segment(row) for row in range(5)] == [""] * 5
        shelf.close()
        assert all(segment.is_current for segment in segments)
    finally:
        for segment in segments:
            segment.unlink()
            segment.close()
        table.close()


@pytest.mark.parametrize("name", ["OFFER.1", "OUTCOME"])
def test_what_other_parts_say_is_bounded_before_it_is_taken_apart(
    channel: Channel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_COMMAS", 2)
    (channel.path / name).write_bytes(b'{"nonces":["a","b","c"],"error":"","text":""}')
    with pytest.raises(ManifestError, match=f"{name} of the channel of .* more than 2 commas"):
        _gather(channel)


# --- files that shrink and grow under the reader ----------------------------------------------------------


def test_a_lease_table_that_is_cut_short_is_an_error_wherever_it_is_used(channel: Channel) -> None:
    """Its pages are gone: touching one would end the process."""
    table = LeaseTable(channel.leases_path, channel.holders_dir)
    table.create()
    with Holder(channel.holders_dir) as holder:
        lease = table.take(0, table.generation(0), holder.token)
        os.truncate(channel.leases_path, 0)
        assert not table.is_at_path
        for use in (
            lambda: table.generation(0),
            lambda: table.take(1, 0, holder.token),
            lambda: table.begin_write(2),
            lambda: table.holders(0),
            lambda: table.segment(0),
            lambda: table.set_segment(0, "x"),
            lambda: table.wait_free([0], soon()),
            table.repair,
        ):
            with pytest.raises(SegmentError, match="was cut short"):
                use()
        lease.release()
        table.close()


def test_a_segment_that_is_cut_short_or_replaced_is_not_current() -> None:
    name = f"fastdeploy_rl_test_cut.{os.getpid()}"
    segment = SharedSegment.create(name, 8192)
    try:
        assert segment.is_current
        for size in (4096, 16384):
            os.truncate(f"/dev/shm/{name}", size)
            assert not segment.is_current
        os.truncate(f"/dev/shm/{name}", 8192)
        assert segment.is_current
        segment.unlink()
        assert not segment.is_current
        other = SharedSegment.create(name, 8192)
        assert not segment.is_current
        other.close()
    finally:
        segment.unlink()
        segment.close()
