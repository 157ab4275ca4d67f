"""The `ipc_snapshot` source: the common suite, and what only files on a disk have."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import deserialize
from source_suite import SourceSuite, assert_holds, plan_of, soon, weights

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.dtypes import numpy_dtype
from fastdeploy_rl.errors import (
    ChecksumMismatchError,
    ConfigurationError,
    ManifestError,
    NoPublicationError,
    VersionFormatError,
)
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish import snapshot_directory
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.snapshot_directory import Entry, Snapshot, SnapshotDirectory
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig, readable
from fastdeploy_rl.sources.ipc_snapshot import SnapshotSource
from fastdeploy_rl.version import WeightVersion


class SnapshottingPublisher:
    """Publishes, and returns when what it published is on disk."""

    def __init__(self, publisher: WeightPublisher, snapshots: SnapshotWriter) -> None:
        self._publisher = publisher
        self._snapshots = snapshots

    def publish(self, state_dict: dict[str, Any], *, step: int, layout: str = "full") -> Snapshot:
        self._snapshots.write(self._publisher.publish(state_dict, step=step, layout=layout))
        snapshot = self._snapshots.wait(30)
        assert snapshot is not None
        return snapshot


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


@pytest.fixture(params=[4 << 30, 200], ids=["one-shard", "several-shards"])
def shard_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def publisher(channel: Path, shard_bytes: int) -> Iterator[SnapshottingPublisher]:
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, shard_bytes=shard_bytes) as snapshots:
        yield SnapshottingPublisher(publisher, snapshots)


@pytest.fixture
def source(channel: Path) -> Iterator[SnapshotSource]:
    source = registry.create("ipc_snapshot", SourceConfig(channel))
    assert isinstance(source, SnapshotSource)
    yield source
    source.close()


class TestSnapshotSource(SourceSuite):
    pass


@pytest.fixture
def three(channel: Path) -> list[Snapshot]:
    """Versions 1.1, 1.2 and 1.3 of two shards each; their trainer has gone."""
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, shard_bytes=500) as snapshots:
        both = SnapshottingPublisher(publisher, snapshots)
        found = [both.publish(weights(step), step=step) for step in (1, 2, 3)]
    assert [len(snapshot.manifest.segments) for snapshot in found] == [2, 2, 2]
    return found


def _truncate(snapshot: Snapshot) -> None:
    os.truncate(_shard(snapshot, 1), 600)


def _take_a_shard(snapshot: Snapshot) -> None:
    _shard(snapshot, 1).unlink()


def _take_the_manifest(snapshot: Snapshot) -> None:
    _manifest_file(snapshot).unlink()


def _change_the_manifest(snapshot: Snapshot) -> None:
    file = _manifest_file(snapshot)
    file.write_bytes(file.read_bytes().replace(b'"full"', b'"tp:2"'))


def _rename(snapshot: Snapshot) -> None:
    """As if another manifest had come into its place."""
    digest = snapshot.path.name.rpartition("-")[2]
    _manifest_file(snapshot).rename(snapshot.path / f"manifest-{snapshot.version}-{digest[::-1]}.json")
    snapshot.path.rename(snapshot.path.parent / f"{snapshot.version}-{digest[::-1]}")


def _put_a_pipe_there(snapshot: Snapshot) -> None:
    _shard(snapshot, 1).unlink()
    os.mkfifo(_shard(snapshot, 1))


BREAKS = [_truncate, _take_a_shard, _take_the_manifest, _change_the_manifest, _rename, _put_a_pipe_there]


def _shard(snapshot: Snapshot, number: int) -> Path:
    return snapshot.path / snapshot.manifest.segments[number].locator


def _manifest_file(snapshot: Snapshot) -> Path:
    return snapshot.path / f"manifest-{snapshot.path.name}.json"


@pytest.mark.parametrize("break_it", BREAKS)
def test_what_is_not_whole_is_passed_over_with_one_warning(
    source: SnapshotSource, three: list[Snapshot], break_it: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert source.resolve(None, deadline_ns=soon()).version == three[2].version  # known, and broken all the same
    break_it(three[2])
    with caplog.at_level(logging.WARNING):
        found = [source.resolve(None, deadline_ns=soon()) for _ in range(3)]
    assert found == [(three[1].version, three[1].manifest)] * 3
    assert [text for text in caplog.messages if "event=not_whole" in text and f"snapshot={three[2].version} " in text]
    assert len(caplog.messages) == 1
    staged = source.stage(found[0], plan_of(found[0].manifest), deadline_ns=soon())
    assert_holds(found[0].manifest, staged.segments, weights(2))
    staged.release()


def test_a_directory_that_is_too_large_to_look_through_has_no_newest(
    source: SnapshotSource, three: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not seen might be newer."""
    monkeypatch.setattr(snapshot_directory, "_MAX_ENTRIES", len(os.listdir(three[2].path.parent)))
    assert source.resolve(None, deadline_ns=soon()).version == three[2].version
    (three[2].path.parent / "notes").write_text("mine")
    for version in (None, three[2].version):
        with pytest.raises(ConfigurationError, match=r"has more than \d+ entries"):
            source.resolve(version, deadline_ns=soon())


@pytest.mark.parametrize("break_it", BREAKS)
def test_by_name_the_error_says_what_is_wrong_and_names_the_newest_that_is_whole(
    source: SnapshotSource, three: list[Snapshot], break_it: Any
) -> None:
    break_it(three[2])
    with pytest.raises(NoPublicationError, match=rf"version 1\.3 is not to be had: .*{three[2].version}-.* has 1\.2"):
        source.resolve(three[2].version, deadline_ns=soon())
    assert source.resolve(three[0].version, deadline_ns=soon()) == (three[0].version, three[0].manifest)


def test_where_none_is_whole_nothing_is_taken(source: SnapshotSource, three: list[Snapshot]) -> None:
    for snapshot in three:
        _truncate(snapshot)
    with pytest.raises(NoPublicationError, match="none of the 3 snapshots"):
        source.resolve(None, deadline_ns=soon())


def test_a_discredited_version_gives_way_to_an_older_one_but_for_its_name(
    source: SnapshotSource, three: list[Snapshot]
) -> None:
    for expected in reversed(three):
        resolved = source.resolve(None, deadline_ns=soon())
        assert resolved.version == expected.version
        source.discredit(resolved)
    with pytest.raises(NoPublicationError, match="none of the 3 snapshots"):
        source.resolve(None, deadline_ns=soon())
    assert source.resolve(three[2].version, deadline_ns=soon()).version == three[2].version


@pytest.mark.parametrize(
    ("file", "text", "step"),
    [
        ("version.yaml", "version: 7\nstep: 2\n", 2),
        ("version.yaml", "version: 1.1\n", 1),
        ("version.txt", "2\n", 2),
        ("version.txt", "900\n", 3),
    ],
)
def test_the_newest_up_to_the_wanted_version_is_taken(
    channel: Path, tmp_path: Path, three: list[Snapshot], file: str, text: str, step: int
) -> None:
    (tmp_path / file).write_text(text)
    source = SnapshotSource(SourceConfig(channel, model_dir=tmp_path))
    assert source.resolve(None, deadline_ns=soon()).version == three[step - 1].version
    assert source.resolve(three[2].version, deadline_ns=soon()).version == three[2].version


def test_a_wanted_version_before_all_snapshots_is_an_error_that_names_it(
    channel: Path, tmp_path: Path, three: list[Snapshot]
) -> None:
    (tmp_path / "version.yaml").write_text("step: 0\n")
    source = SnapshotSource(SourceConfig(channel, model_dir=tmp_path))
    with pytest.raises(NoPublicationError, match=r"up to version 0, which .*version\.yaml asks for"):
        source.resolve(None, deadline_ns=soon())
    (tmp_path / "version.yaml").write_text("step: newest\n")
    with pytest.raises(VersionFormatError):
        source.resolve(None, deadline_ns=soon())


def test_a_shard_that_is_cut_after_it_was_found_is_not_staged(source: SnapshotSource, three: list[Snapshot]) -> None:
    resolved = source.resolve(None, deadline_ns=soon())
    _truncate(three[2])
    with pytest.raises(ManifestError, match="its manifest says"):
        source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert_holds(resolved.manifest, staged.segments, weights(2))
    staged.release()


def test_a_shard_that_is_cut_while_it_is_mapped_is_an_error_and_no_signal(
    channel: Path, source: SnapshotSource
) -> None:
    """Reading it would end this process."""
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel) as snapshots:
        large = {"w": np.arange(8 * 4096, dtype=np.float32)}
        snapshot = SnapshottingPublisher(publisher, snapshots).publish(large, step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    os.truncate(snapshot.path / snapshot.manifest.segments[0].locator, 4096)
    with pytest.raises(ChecksumMismatchError, match="bytes of tensor 'w' in shard 0 of a snapshot cannot be read"):
        for _ in readable(staged, staged.arrivals(deadline_ns=soon())):
            pass
    staged.release()


def test_a_link_in_a_shards_place_is_not_followed(
    source: SnapshotSource, three: list[Snapshot], tmp_path: Path
) -> None:
    resolved = source.resolve(None, deadline_ns=soon())
    _shard(three[2], 0).rename(tmp_path / "elsewhere")
    _shard(three[2], 0).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoPublicationError, match="cannot be opened"):
        source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    assert source.resolve(None, deadline_ns=soon()).version == three[1].version


def test_a_directory_that_others_can_enter_is_refused(source: SnapshotSource, three: list[Snapshot]) -> None:
    three[0].path.parent.chmod(0o755)
    with pytest.raises(ConfigurationError, match="open to other users"):
        source.resolve(None, deadline_ns=soon())


def test_staged_files_outlast_their_removal_and_are_not_kept_after_release(
    source: SnapshotSource, publisher: SnapshottingPublisher
) -> None:
    publisher.publish(weights(1), step=1)
    resolved = source.resolve(None, deadline_ns=soon())
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    for step in range(2, 6):
        publisher.publish(weights(step), step=step)
    with pytest.raises(NoPublicationError):
        source.resolve(resolved.version, deadline_ns=soon())
    assert (staged.is_immutable, staged.is_copied_unless_asked, staged.is_vouched()) == (True, True, True)
    assert_holds(resolved.manifest, staged.segments, weights(1))
    staged.release()
    assert all(segment.is_closed for segment in staged.segments)
    assert "model-0000" not in Path("/proc/self/maps").read_text()


def test_each_rank_reads_its_half_and_maps_no_other_shard(channel: Path, source: SnapshotSource) -> None:
    tensors = {"split": np.arange(64, dtype=np.float32).reshape(8, 8)}
    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, shard_bytes=64) as snapshots:
        snapshots.write(publisher.publish(tensors, step=1, layout="tp:2", convention=_split_columns))
    resolved = source.resolve(None, deadline_ns=soon())
    sizes = [segment.num_bytes for segment in resolved.manifest.segments]
    for rank in range(2):
        plan = make_plan(resolved.manifest, [ParameterSpec("split", "F32", (8, 8), 1)], rank, 2)
        assert plan.read_bytes == 128
        staged = source.stage(resolved, plan, deadline_ns=soon())
        assert [segment.num_bytes for segment in staged.segments] == [[sizes[0], 1], [1, sizes[1]]][rank]
        place = plan.parameters[0].alias
        assert place is not None
        view = TensorView(staged.segments[place.segment], place.offset, "F32", (8, 4)).numpy()
        assert np.array_equal(view, tensors["split"][:, 4 * rank : 4 * rank + 4])
        del view
        staged.release()


def _split_columns(name: str, shape: tuple[int, ...]) -> TensorRule:
    return TensorRule(name, shard_axis=1)


@pytest.mark.parametrize("layout", ["full", "tp:2"])
def test_the_reference_implementation_reads_every_shard(
    channel: Path, publisher: SnapshottingPublisher, layout: str
) -> None:
    snapshot = publisher.publish(weights(4), step=1, layout=layout)
    found: dict[str, dict[str, Any]] = {}
    for segment in snapshot.manifest.segments:
        found |= dict(deserialize((snapshot.path / segment.locator).read_bytes()))  # type: ignore[no-untyped-call]
    for tensor in snapshot.manifest.tensors:
        names = [tensor.name] if len(tensor.parts) == 1 else [f"{tensor.name}#{p.start}-{p.stop}" for p in tensor.parts]
        parts = [np.frombuffer(found[name]["data"], numpy_dtype(tensor.dtype)) for name in names]
        shaped = [part.reshape(found[name]["shape"]) for name, part in zip(names, parts, strict=True)]
        whole = shaped[0] if tensor.shard_axis is None else np.concatenate(shaped, tensor.shard_axis)
        assert whole.shape == tensor.shape
        assert whole.tobytes() == weights(4)[tensor.name].tobytes()
    latest = json.loads((snapshot.path.parent / "LATEST").read_text())
    assert latest["version"] == str(snapshot.version)
    assert (snapshot.path.parent / latest["file"]).is_file()


def test_a_version_that_goes_while_it_is_read_is_no_fault_and_a_newer_one_is_taken(
    source: SnapshotSource, three: list[Snapshot], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All that was listed goes before it is read, as where a writer keeps one version and a reader is slow."""
    listed = SnapshotDirectory.entries
    monkeypatch.setattr(SnapshotDirectory, "entries", lambda self: _listed_before(listed(self), three, monkeypatch))
    assert source.resolve(None, deadline_ns=soon()).version == WeightVersion(1, 4)
    assert caplog.messages == []


def _listed_before(entries: list[Entry], written: list[Snapshot], monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """The first time only: meanwhile 1.4 comes, of the contents of 1.3, and the others go."""
    monkeypatch.undo()
    newest = msgspec.structs.replace(written[2].manifest, version="1.4")
    directory = SnapshotDirectory(written[2].path.parent.parent)
    temporary = directory.begin()
    for segment in newest.segments:
        (written[2].path / segment.locator).rename(temporary / segment.locator)
    directory.finish(temporary, newest)
    directory.prune(1)
    return entries


def test_a_reader_never_misses_while_versions_come_and_go(channel: Path, source: SnapshotSource) -> None:
    """Only one is kept, so that every publication removes what was there."""
    seen: list[WeightVersion] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(source.resolve(None, deadline_ns=soon()).version)

    with WeightPublisher(channel) as publisher, SnapshotWriter(channel, keep=1) as snapshots:
        both = SnapshottingPublisher(publisher, snapshots)
        both.publish(weights(1), step=1)
        reader = threading.Thread(target=look)
        reader.start()
        try:
            for step in range(2, 30):
                both.publish(weights(step), step=step)
        finally:
            is_over.set()
            reader.join(30)
    assert seen == sorted(seen)
    assert len(set(seen)) > 1
    assert len(list((channel / "snapshots").iterdir())) == 2  # one version, LATEST
