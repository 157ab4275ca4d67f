"""Weights without a manifest: what rank 0 writes down about them, when it reads again, and what others take from it."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_rl import checksum
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, NoPublicationError, TrainerError
from fastdeploy_rl.manifest import Manifest, Part, Tensor
from fastdeploy_rl.sources import described, describing
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedFiles
from fastdeploy_rl.sources.describing import FileLayout, FoundFiles
from fastdeploy_rl.sources.rank_slices import UNSUMMED
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.version import WeightVersion

SHAPE, NORM = (4, 6, 5), (7,)
RNG = np.random.default_rng(0)
WHOLE = RNG.standard_normal(SHAPE).astype(np.float32)
SCALE = RNG.standard_normal(NORM).astype(np.float16)


def soon() -> int:
    return time.monotonic_ns() + 10_000_000_000


def write(directory: Path, axis: int | None = None, seed: int = 0) -> None:
    """Two files: a half each of `w`, cut along `axis`, after a few other bytes; and all of `norm`."""
    values = WHOLE + np.float32(seed)
    halves = np.split(values, 2, axis) if axis is not None else [values, values]
    for name, half in zip("ab", halves, strict=True):
        (directory / name).write_bytes(b"123" + half.tobytes() + SCALE.tobytes())


def layout(axis: int | None, read: list[str], deadline_ns: int) -> FileLayout:
    read.append("headers")
    if axis is None:
        parts, twins, place = (Part(0, 3, 0, 0),), [("w", Part(1, 3, 0, 0))], 3 + WHOLE.nbytes
    else:
        half = SHAPE[axis] // 2
        parts, twins = (Part(0, 3, 0, half), Part(1, 3, half, 2 * half)), []
        place = 3 + WHOLE.nbytes // 2
    tensors = [
        Tensor("w", "F32", SHAPE, axis, parts, UNSUMMED),
        Tensor("norm", "F16", NORM, None, (Part(0, place, 0, 0),), UNSUMMED),
    ]
    return FileLayout("tp:2", tensors, [*twins, ("norm", Part(1, place, 0, 0))])


class Scene:
    """Files, and whoever describes them. `read`: how often headers, and with them all bytes, were read."""

    def __init__(self, tmp_path: Path, axis: int | None = None) -> None:
        self.directory = tmp_path / "model"
        self.directory.mkdir()
        self.channel = tmp_path / "channel"
        self.read: list[str] = []
        self.axis = axis
        write(self.directory, axis)
        (self.directory / "version.yaml").write_text("step: 7\n")

    def find(self, deadline_ns: int = 0) -> FoundFiles | None:
        return FoundFiles(self.directory, ("a", "b"), partial(layout, self.axis, self.read), "two halves")

    def offer(self, rank: int = 0, version: WeightVersion | None = None, deadline_ns: int = 0) -> Offer:
        config = SourceConfig(self.channel, self.directory, rank, 2, num_threads=2)
        return DescribedFiles(config, self.find, "nowhere").offer(version, deadline_ns or soon()).offer

    @property
    def store(self) -> Path:
        return self.channel / "described"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("batch_bytes", [32 << 20, 100, 24, 20, 4])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_checksums_are_those_of_the_whole_tensors_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: int | None, batch_bytes: int
) -> None:
    monkeypatch.setattr(describing, "_BATCH_BYTES", batch_bytes)
    manifest = Scene(tmp_path, axis).offer().manifest
    assert {tensor.name: tensor.checksum for tensor in manifest.tensors} == {
        "w": checksum.of_bytes(WHOLE.tobytes()).hex(),
        "norm": checksum.of_bytes(SCALE.tobytes()).hex(),
    }
    assert [(segment.kind, segment.locator) for segment in manifest.segments] == [("file", "a"), ("file", "b")]
    assert manifest.version == "1.7"


def test_files_that_did_not_change_are_read_once(scene: Scene) -> None:
    """Also by an engine that starts anew; and a new number for the same files needs no reading either."""
    first = scene.offer()
    assert scene.offer() == first == scene.offer(version=WeightVersion(1, 7))
    (scene.directory / "version.yaml").write_text("step: 8\n")
    second = scene.offer()
    assert second.version == WeightVersion(1, 8)
    assert second.manifest.content_digest == first.manifest.content_digest
    assert scene.read == ["headers"]


def test_other_bytes_under_the_same_version_are_another_publication_of_it(scene: Scene) -> None:
    first = scene.offer()
    write(scene.directory, seed=1)
    second = scene.offer()
    assert second.version == first.version
    assert second.manifest.content_digest != first.manifest.content_digest
    assert second.manifest.layout_digest == first.manifest.layout_digest
    assert scene.read == ["headers"] * 2


def test_the_other_ranks_find_what_rank_0_described_and_read_nothing(scene: Scene) -> None:
    first = scene.offer()
    assert scene.offer(rank=1) == first
    assert scene.read == ["headers"]


@pytest.mark.parametrize("happened", ["nothing", "rewritten", "renumbered"])
def test_a_rank_that_finds_no_description_says_so(scene: Scene, happened: str) -> None:
    """Rank 0 has not come yet, or the files are others since."""
    if happened != "nothing":
        scene.offer()
    if happened == "rewritten":
        write(scene.directory, seed=1)
    if happened == "renumbered":
        (scene.directory / "version.yaml").write_text("step: 8\n")
    with pytest.raises(NoPublicationError, match=r"rank 0 has .*described.*\(yet\)"):
        scene.offer(rank=1)
    assert scene.channel.exists() == (happened != "nothing")


def test_a_version_that_the_files_are_not_is_refused_and_the_one_that_they_are_is_named(scene: Scene) -> None:
    with pytest.raises(NoPublicationError, match=rf"version 1\.6 is not to be had: {scene.directory} has 1\.7"):
        scene.offer(version=WeightVersion(1, 6))
    assert scene.read == []


def test_without_a_version_file_newer_files_are_a_newer_version(scene: Scene) -> None:
    (scene.directory / "version.yaml").unlink()
    os.utime(scene.directory / "a", ns=(1, 5_000_000_000))
    os.utime(scene.directory / "b", ns=(1, 6_000_000_000))
    assert scene.offer().version == WeightVersion(1, 6_000_000_000)
    os.utime(scene.directory / "a", ns=(1, 7_000_000_000))
    assert scene.offer().version == WeightVersion(1, 7_000_000_000)


def test_what_every_rank_should_have_alike_and_has_not_is_refused(scene: Scene) -> None:
    data = bytearray((scene.directory / "b").read_bytes())
    data[-1] ^= 1
    (scene.directory / "b").write_bytes(data)
    with pytest.raises(TrainerError, match="'norm' has different values in a and in b"):
        scene.offer()
    assert list(scene.store.iterdir()) == []


def test_files_that_change_while_they_are_read_are_not_described(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_up(*arguments: object) -> object:
        sums = original(*arguments)
        write(scene.directory, seed=1)
        return sums

    original = describing._sum_up
    monkeypatch.setattr(describing, "_sum_up", sum_up)
    with pytest.raises(NoPublicationError, match="changed while they were read"):
        scene.offer()
    assert list(scene.store.iterdir()) == []


def test_reading_ends_at_the_deadline(scene: Scene) -> None:
    with pytest.raises(DeadlineExceededError, match="all of their 988 bytes, of which 0 were: give the update a later"):
        scene.offer(deadline_ns=time.monotonic_ns())
    assert list(scene.store.iterdir()) == []


def test_who_comes_while_another_reads_waits_until_its_own_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, go_on = threading.Event(), threading.Event()
    original = described.describe

    def describe(*arguments: Any) -> Manifest:
        is_reading.set()
        assert go_on.wait(20)
        return original(*arguments)

    monkeypatch.setattr(described, "describe", describe)
    config = SourceConfig(scene.channel, scene.directory, 0, 2)
    files = DescribedFiles(config, scene.find, "nowhere")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(files.offer, None, soon())
        assert is_reading.wait(20)
        with pytest.raises(DeadlineExceededError, match="which is being described"):
            files.offer(None, time.monotonic_ns() + 10_000_000)
        go_on.set()
        assert files.offer(None, soon()) == first.result(20)
    assert scene.read == ["headers"]


def opened_directory(scene: Scene) -> None:
    scene.directory.chmod(0o1777)


def opened_file(scene: Scene) -> None:
    (scene.directory / "b").chmod(0o666)


def opened_parent(scene: Scene) -> None:
    scene.directory.parent.chmod(0o777)


@pytest.mark.parametrize("opened", [opened_directory, opened_file, opened_parent])
def test_what_every_user_may_change_is_not_taken(scene: Scene, opened: Callable[[Scene], None]) -> None:
    scene.channel.mkdir(0o700)
    opened(scene)
    with pytest.raises(ConfigurationError, match="every user of this machine"):
        scene.offer()
    assert scene.read == []
    scene.directory.parent.chmod(0o700)


def test_descriptions_that_others_could_have_written_are_not_taken(scene: Scene) -> None:
    scene.offer()
    scene.store.chmod(0o755)
    for rank in (0, 1):
        with pytest.raises(ConfigurationError, match="open to other users"):
            scene.offer(rank)


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"version":"1.7","file":"x","file_digest":"y"}'])
def test_a_damaged_description_is_made_anew(scene: Scene, damage: bytes) -> None:
    first = scene.offer()
    (record,) = scene.store.glob("SET-*")
    record.write_bytes(damage)
    assert scene.offer() == first
    assert scene.read == ["headers"] * 2
    assert scene.offer(rank=1) == first


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{}")])
def test_a_damaged_manifest_is_made_anew(scene: Scene, damage: Callable[[Path], None]) -> None:
    first = scene.offer()
    (manifest,) = scene.store.glob("manifest-*")
    damage(manifest)
    assert scene.offer() == first


def test_a_few_descriptions_stay(scene: Scene) -> None:
    for seed in range(7):
        write(scene.directory, seed=seed)
        offer = scene.offer()
        assert scene.offer(rank=1) == offer
    assert len(list(scene.store.glob("SET-*"))) == len(list(scene.store.glob("manifest-*"))) == 4
    assert len(list(scene.store.iterdir())) == 8


def test_what_is_forgotten_is_read_again(scene: Scene) -> None:
    """Bytes were not what the manifest says, and the identities of the files do not show why."""
    config = SourceConfig(scene.channel, scene.directory, 0, 2)
    files = DescribedFiles(config, scene.find, "nowhere")
    files.offer(None, soon())
    files.forget(WeightVersion(1, 6))
    files.offer(None, soon())
    assert scene.read == ["headers"]
    files.forget(WeightVersion(1, 7))
    files.offer(None, soon())
    assert scene.read == ["headers"] * 2


def test_nothing_found_is_said_with_the_places(scene: Scene) -> None:
    files = DescribedFiles(SourceConfig(scene.channel), lambda _: None, "x, y")
    with pytest.raises(NoPublicationError, match="nothing is published in x, y"):
        files.offer(None, soon())
    assert not scene.channel.exists()


# --- one version is of one moment, and one number has one content -----------------------------------


@pytest.mark.parametrize("is_known", [False, True])
def test_a_version_that_is_said_anew_while_its_files_are_looked_at_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Whether their bytes are read, or known and only numbered anew."""
    if is_known:
        scene.offer()
        (scene.directory / "version.yaml").write_text("step: 8\n")
    before = sorted(scene.store.glob("*"))
    original = described.check_unchanged

    def check_unchanged(*arguments: Any) -> None:
        (scene.directory / "version.yaml").write_text("step: 9\n")
        original(*arguments)

    monkeypatch.setattr(described, "check_unchanged", check_unchanged)
    with pytest.raises(NoPublicationError, match=rf"changed from 1\.{8 if is_known else 7} to 1\.9 while they were"):
        scene.offer()
    assert sorted(scene.store.glob("*")) == before


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ({"a": 7, "b": 6}, r"b says that it is step 6, its version file says 7"),
        ({"a": 8, "b": 8}, r"a says that it is step 8, its version file says 7"),
        ({"a": 7, "b": None}, r"b does not say its step, its version file says 7"),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_files_that_say_another_step_than_their_version_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, steps: dict[str, int | None], match: str, is_known: bool
) -> None:
    if is_known:
        (scene.directory / "version.yaml").write_text("step: 5\n")
        scene.offer()
        (scene.directory / "version.yaml").write_text("step: 7\n")
    before, read = sorted(scene.store.glob("*")), list(scene.read)
    found = scene.find()
    assert found is not None
    monkeypatch.setattr(scene, "find", lambda _: replace(found, read_steps=lambda: steps))
    with pytest.raises(NoPublicationError, match=match):
        scene.offer()
    assert (sorted(scene.store.glob("*")), scene.read) == (before, read)
    monkeypatch.setattr(scene, "find", lambda _: replace(found, read_steps=lambda: dict.fromkeys("ab", 7)))
    assert scene.offer().version == WeightVersion(1, 7)


def test_files_that_say_two_steps_are_refused_also_where_no_version_file_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scene.directory / "version.yaml").unlink()
    found = scene.find()
    assert found is not None
    monkeypatch.setattr(scene, "find", lambda _: replace(found, read_steps=lambda: {"a": 7, "b": 6}))
    with pytest.raises(NoPublicationError, match="b says that it is step 6, a says 7"):
        scene.offer()
    assert scene.read == []


def test_a_step_is_one_of_the_epoch_in_which_somebody_published_in_the_channel(scene: Scene) -> None:
    """So that a trainer may change over to files, and back."""
    scene.offer()
    (scene.channel / "EPOCH").write_text("3\n")
    assert scene.offer().version == scene.offer(rank=1).version == WeightVersion(3, 7)
    assert scene.read == ["headers"]
    (scene.directory / "version.yaml").unlink()
    assert scene.offer().version.epoch == 3
