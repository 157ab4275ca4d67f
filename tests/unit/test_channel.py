"""The channel directory: whole files, safe names, epochs that only rise."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_rl.checksum import Fletcher4
from fastdeploy_rl.errors import ConfigurationError, ManifestError, NoPublicationError, NoSpaceError, SegmentError
from fastdeploy_rl.manifest import Manifest, Part, Segment, Tensor, build_manifest
from fastdeploy_rl.publish.channel import Channel, Latest, order_of
from fastdeploy_rl.version import WeightVersion


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    channel = Channel(tmp_path / "channel")
    channel.open()
    return channel


def _manifest(version: str) -> Manifest:
    segment = Segment(kind="shm", locator="none", num_bytes=4096, arena=0, generation=2)
    tensor = Tensor("w", "F32", (4,), None, (Part(0, 0, 0, 0),), Fletcher4(1, 2, 3, 4).hex())
    return build_manifest(version, "full", [segment], [tensor], {})


def _publish(channel: Channel, manifest: Manifest) -> Latest:
    latest = channel.write_manifest(manifest)
    channel.write_latest(latest)
    return latest


def _deadline() -> int:
    return time.monotonic_ns() + 10**9


def _files(channel: Channel) -> set[str]:
    return {entry.name for entry in channel.path.iterdir() if entry.is_file()}


def test_a_channel_and_its_files_are_for_us_alone(channel: Channel) -> None:
    channel.take_epoch()
    _publish(channel, _manifest("1.1"))
    assert {path.stat().st_mode & 0o777 for path in (channel.path, channel.holders_dir)} == {0o700}
    assert {(channel.path / name).stat().st_mode & 0o777 for name in _files(channel)} == {0o600}


def test_a_channel_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    (tmp_path / "channel").chmod(0o750)
    with pytest.raises(ConfigurationError, match="0750"):
        Channel(tmp_path / "channel").open()
    assert list((tmp_path / "channel").iterdir()) == []


def test_looking_at_a_missing_channel_says_so_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoPublicationError, match="no trainer has published"):
        Channel(tmp_path / "channel").check()
    assert not (tmp_path / "channel").exists()


def test_epochs_rise_across_publishers_and_past_the_latest_version(channel: Channel) -> None:
    assert [channel.take_epoch(), channel.take_epoch()] == [1, 2]
    _publish(channel, _manifest("7.1"))
    (channel.path / "EPOCH").unlink()
    assert channel.take_epoch() == 8


@pytest.mark.parametrize("text", ["", "-1", "1.5", "9" * 20, "x" * 1000])
def test_an_epoch_that_is_no_number_is_refused_and_kept(channel: Channel, text: str) -> None:
    (channel.path / "EPOCH").write_text(text)
    with pytest.raises((SegmentError, ManifestError)):
        channel.take_epoch()
    assert (channel.path / "EPOCH").read_text() == text


def test_what_is_written_is_read_back(channel: Channel) -> None:
    manifest = _manifest("1.5")
    latest = _publish(channel, manifest)
    assert channel.read_publication(_deadline()) == (latest, manifest)
    assert latest.file == f"manifest-1.5-{latest.file_digest[:16]}.json"
    assert hashlib.sha256((channel.path / latest.file).read_bytes()).hexdigest() == latest.file_digest


def test_an_empty_channel_has_nothing_published(channel: Channel) -> None:
    assert channel.read_latest() is None
    with pytest.raises(NoPublicationError, match="nothing is published"):
        channel.read_publication(_deadline())


def test_superseded_manifests_and_leftovers_are_removed_and_strangers_kept(channel: Channel) -> None:
    _publish(channel, _manifest("1.1"))
    latest = _publish(channel, _manifest("1.2"))
    (channel.path / ".LATEST.abc.tmp").touch()
    (channel.path / "notes.txt").touch()
    channel.remove_superseded([latest.file])
    assert _files(channel) == {"LATEST", latest.file, "notes.txt"}
    channel.remove_latest()
    assert _files(channel) == {"notes.txt"}


@pytest.mark.parametrize("fails_at", ["manifest", "LATEST"])
def test_a_publication_that_cannot_be_written_leaves_the_old_one(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    before = _publish(channel, _manifest("1.1"))
    rename = os.rename

    def broken(source: Path, target: Path) -> None:
        if Path(target).name.startswith(fails_at):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(NoSpaceError, match="No space left"):
        _publish(channel, _manifest("1.2"))
    assert channel.read_publication(_deadline())[0] == before
    assert not [name for name in _files(channel) if name.endswith(".tmp")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"version": "1.1", "file": "../../etc/passwd", "file_digest": "0"}',
        '{"version": "1.1", "file": "/etc/passwd", "file_digest": "0"}',
        '{"version": "1.1", "file": "manifest-1.1-0000000000000000.json", "file_digest": "0", "more": 1}',
        "x" * 5000,
    ],
)
def test_a_latest_that_no_publisher_writes_is_refused(channel: Channel, text: str) -> None:
    (channel.path / "LATEST").write_text(text)
    with pytest.raises(ManifestError, match="LATEST"):
        channel.read_latest()


def test_a_latest_that_is_a_symbolic_link_is_refused(channel: Channel, tmp_path: Path) -> None:
    _publish(channel, _manifest("1.1"))
    (channel.path / "LATEST").rename(tmp_path / "elsewhere")
    (channel.path / "LATEST").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ManifestError, match="cannot be read"):
        channel.read_latest()


def test_a_manifest_whose_bytes_changed_is_refused(channel: Channel) -> None:
    latest = _publish(channel, _manifest("1.1"))
    data = (channel.path / latest.file).read_bytes()
    (channel.path / latest.file).write_bytes(data.replace(b'"w"', b'"v"'))
    with pytest.raises(ManifestError, match="not what was published"):
        channel.read_manifest(latest)


def test_a_manifest_of_another_version_is_refused(channel: Channel) -> None:
    latest = _publish(channel, _manifest("1.1"))
    with pytest.raises(ManifestError, match=r"is version 1\.1, but LATEST says 1\.2"):
        channel.read_manifest(Latest("1.2", latest.file, latest.file_digest))


def test_a_version_is_found_by_its_whole_name(channel: Channel) -> None:
    for version in ("1.1", "1.11", "11.1"):
        _publish(channel, _manifest(version))
    assert channel.read_version(WeightVersion(1, 1)) == _manifest("1.1")
    assert channel.read_version(WeightVersion(1, 2)) is None
    assert sorted(channel.manifest_files(), key=order_of)[-1].startswith("manifest-11.1-")


@pytest.mark.parametrize("name", ["manifest-1.1-x.json", "../manifest-1.1-0123456789abcdef.json", "LATEST", ""])
def test_what_is_no_name_of_a_manifest_is_not_read(channel: Channel, name: str) -> None:
    with pytest.raises(ManifestError, match="is no manifest of a channel"):
        channel.read_manifest_file(name)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_a_former_manifest_that_is_no_file_of_ours_is_refused(channel: Channel, make: Callable[[Path], None]) -> None:
    make(channel.path / "manifest-1.1-0123456789abcdef.json")
    with pytest.raises(ManifestError, match=r"no regular file|cannot be read"):
        channel.read_version(WeightVersion(1, 1))


def test_a_former_manifest_under_the_name_of_another_version_is_refused(channel: Channel) -> None:
    latest = _publish(channel, _manifest("1.1"))
    (channel.path / latest.file).rename(channel.path / latest.file.replace("-1.1-", "-1.2-"))
    with pytest.raises(ManifestError, match=r"is version 1\.1, but its name says 1\.2"):
        channel.read_version(WeightVersion(1, 2))


def test_a_missing_manifest_is_no_publication(channel: Channel) -> None:
    latest = _publish(channel, _manifest("1.1"))
    (channel.path / latest.file).unlink()
    with pytest.raises(NoPublicationError, match=r"1\.1-.* is missing"):
        channel.read_publication(_deadline())


def test_a_version_superseded_while_it_is_read_gives_the_newer_one(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(channel, _manifest("1.1"))
    read_manifest = channel.read_manifest

    def superseded_first(latest: Latest) -> Manifest:
        if latest.version == "1.1":
            channel.remove_superseded([_publish(channel, _manifest("1.2")).file])
        return read_manifest(latest)

    monkeypatch.setattr(channel, "read_manifest", superseded_first)
    latest, manifest = channel.read_publication(_deadline())
    assert (latest.version, manifest.version) == ("1.2", "1.2")


def test_latest_is_plain_json_for_other_tools(channel: Channel) -> None:
    latest = _publish(channel, _manifest("1.1"))
    assert json.loads((channel.path / "LATEST").read_text()) == {
        "version": "1.1",
        "file": latest.file,
        "file_digest": latest.file_digest,
    }


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_regular_file_in_a_files_place_is_refused(channel: Channel, make: Callable[[Path], None]) -> None:
    make(channel.path / "LATEST")
    with pytest.raises(ManifestError, match="LATEST cannot be read: no regular file"):
        channel.read_latest()
