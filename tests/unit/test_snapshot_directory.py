"""The files of a directory of snapshots: what counts as one, in which order, and what is left of what failed."""

import logging
import os
from pathlib import Path

import pytest

from fastdeploy_rl.errors import ConfigurationError, ManifestError, SegmentError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.publish.channel import Channel, Latest
from fastdeploy_rl.publish.snapshot_directory import Snapshot, SnapshotDirectory

_SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    directory = SnapshotDirectory(tmp_path / "channel")
    directory.open()
    return directory


def manifest_of(version: str, *, kind: str = "file", fill: str = "0") -> Manifest:
    segment = Segment(kind=kind, locator=_SHARD, num_bytes=600, arena=0, generation=0)  # type: ignore[arg-type]
    return build_manifest(
        version, "full", [segment], [Tensor("t", "U8", (4,), None, (Part(0, 512, 0, 0),), fill * 64)], {}
    )


def write(directory: SnapshotDirectory, version: str, **changes: str) -> Snapshot:
    temporary = directory.begin()
    (temporary / _SHARD).write_bytes(bytes(600))
    return directory.finish(temporary, manifest_of(version, **changes))


def versions(directory: SnapshotDirectory) -> list[str]:
    return [str(entry.version) for entry in directory.entries()]


def test_versions_are_listed_by_their_order_and_nothing_else_is(directory: SnapshotDirectory) -> None:
    for version in ("1.10", "1.9", "2.0", "1.2"):
        write(directory, version)
    for stray in (".tmp-0123456789ab", "1.3-0123", "01.3-0123456789abcdef", f"{2**63}.1-0123456789abcdef", "notes"):
        (directory.path / stray).mkdir()
    (directory.path / "1.99-0123456789abcdef").touch()
    (directory.path / "1.98-0123456789abcdef").symlink_to(directory.path)
    assert versions(directory) == ["2.0", "1.10", "1.9", "1.2"]


def test_where_there_is_no_directory_there_are_no_versions(tmp_path: Path) -> None:
    directory = SnapshotDirectory(tmp_path / "nowhere")
    assert directory.entries() == []
    assert directory.newest() is None
    assert not directory.path.exists()


def test_it_is_private_also_where_what_is_around_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    directory = SnapshotDirectory(tmp_path / "shared")
    directory.open()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.path.chmod(0o750)
    with pytest.raises(ConfigurationError, match="open to other users"):
        directory.entries()


def test_the_latest_file_names_what_was_finished_last(directory: SnapshotDirectory) -> None:
    for version in ("1.1", "1.2"):
        snapshot = write(directory, version)
    latest = Channel(directory.path).read("LATEST", 4096)
    file = f"{snapshot.path.name}/manifest-{snapshot.path.name}.json"
    assert f'"version":"1.2","file":"{file}"'.encode() in latest
    assert snapshot.num_bytes == 600


def test_what_is_read_is_what_was_written_and_a_removed_one_is_no_error(directory: SnapshotDirectory) -> None:
    written = write(directory, "1.1")
    (entry,) = directory.entries()
    assert directory.read(entry) == written
    write(directory, "1.2")
    directory.prune(1)
    assert directory.read(entry) is None


def test_memory_is_no_snapshot(directory: SnapshotDirectory) -> None:
    write(directory, "1.1", kind="shm")
    (entry,) = directory.entries()
    with pytest.raises(ManifestError, match="no file of a snapshot"):
        directory.read(entry)


def test_a_manifest_of_another_version_is_not_taken_for_it(directory: SnapshotDirectory) -> None:
    snapshot = write(directory, "1.1")
    digest = snapshot.path.name.partition("-")[2]
    (snapshot.path / f"manifest-1.1-{digest}.json").rename(snapshot.path / f"manifest-1.7-{digest}.json")
    snapshot.path.rename(directory.path / f"1.7-{digest}")
    (entry,) = directory.entries()
    with pytest.raises(ManifestError, match=r"is version 1\.1, but its name says another"):
        directory.read(entry)


def test_the_newest_that_is_whole_is_found_and_the_other_is_named(
    directory: SnapshotDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = write(directory, "1.1"), write(directory, "1.2")
    os.truncate(second.path / _SHARD, 599)
    with caplog.at_level(logging.WARNING):
        assert directory.newest() == first
    assert "snapshot=1.2 event=not_whole" in caplog.text
    assert "has 599 bytes, its manifest says 600" in caplog.text


def test_a_version_takes_the_place_of_one_that_was_not_whole(directory: SnapshotDirectory) -> None:
    broken = write(directory, "1.1", fill="1")
    (broken.path / _SHARD).unlink()
    assert write(directory, "1.1") == directory.newest()
    assert versions(directory) == ["1.1"]
    assert not broken.path.exists()


def test_pruning_keeps_the_newest_and_every_newer_one_that_is_not_whole(directory: SnapshotDirectory) -> None:
    written = [write(directory, f"1.{step}") for step in range(5)]
    (written[4].path / _SHARD).unlink()
    (written[1].path / _SHARD).unlink()
    directory.prune(3)
    assert versions(directory) == ["1.4", "1.3", "1.2", "1.1", "1.0"]
    directory.prune(2)
    assert versions(directory) == ["1.4", "1.3", "1.2"]


def test_what_cannot_be_removed_now_is_out_of_sight_and_goes_later(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where an open file leaves a name behind."""
    write(directory, "1.1")
    newest = write(directory, "1.2")
    with monkeypatch.context() as patch:
        patch.setattr("fastdeploy_rl.publish.snapshot_directory.shutil.rmtree", _busy)
        directory.prune(1)
    assert versions(directory) == ["1.2"]
    assert "event=not_removed_yet" in caplog.text
    assert len([name for name in os.listdir(directory.path) if name.startswith(".old-")]) == 1
    directory.prune(1)
    assert sorted(os.listdir(directory.path)) == sorted(["LATEST", newest.path.name])


def _busy(*_: object, **__: object) -> None:
    raise OSError(39, "Directory not empty")


def test_only_what_writers_leave_is_swept(directory: SnapshotDirectory) -> None:
    directory.begin()
    (directory.path / ".old-0123456789ab").mkdir()
    for name in (".tmp-notes", "old", ".snapshot"):
        (directory.path / name).mkdir()
    directory.sweep()
    assert sorted(os.listdir(directory.path)) == [".snapshot", ".tmp-notes", "old"]


def test_an_error_before_the_rename_leaves_what_was_there(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(directory, "1.1")
    latest = (directory.path / "LATEST").read_bytes()
    temporary = directory.begin()
    monkeypatch.setattr("fastdeploy_rl.publish.snapshot_directory.os.rename", _busy)
    with pytest.raises(SegmentError, match="cannot be written"):
        directory.finish(temporary, manifest_of("1.2"))
    directory.discard(temporary)
    assert directory.newest() == first
    assert (directory.path / "LATEST").read_bytes() == latest
    assert sorted(os.listdir(directory.path)) == sorted(["LATEST", first.path.name])


def test_an_error_after_the_rename_leaves_the_version_whole(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, "1.1")
    latest = (directory.path / "LATEST").read_bytes()

    def fail(self: Channel, latest: Latest) -> None:
        raise SegmentError("no")

    monkeypatch.setattr(Channel, "write_latest", fail)
    with pytest.raises(SegmentError):
        write(directory, "1.2")
    newest = directory.newest()
    assert newest is not None
    assert str(newest.version) == "1.2"
    assert (directory.path / "LATEST").read_bytes() == latest


def test_a_directory_with_too_many_names_has_no_newest(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdeploy_rl.publish.snapshot_directory._MAX_ENTRIES", 10)
    for number in range(12):
        (directory.path / f"1.{number}-{number:016x}").mkdir()
    with pytest.raises(ConfigurationError, match="more than 10 entries"):
        directory.newest()
