"""Real engines over `ipc_snapshot` from files that no SnapshotWriter wrote: what is taken over, refused, and kept."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import (
    CheckpointError,
    ConfigurationError,
    CoverageError,
    FastDeployRLError,
    NoPublicationError,
    TrainerError,
)
from fastdeploy_rl.publish.fastdeploy_files import (
    part_name,
    write_model_state,
    write_saved_model_state,
    write_version,
)
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.sources import described, describing
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.described import DescribedFiles
from fastdeploy_rl.sources.foreign_files import find_foreign
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

RANKS = 2
Weights = dict[str, np.ndarray]

FUSED = NumpyModel(
    (
        ParameterSpec("embed", "F32", (12, 5), 0),
        ParameterSpec("qkv", "F32", (5, 24), 1, fused=(FusedPart("q", 16), FusedPart("k", 8)), fused_axis=1),
        ParameterSpec("down", "BF16", (18, 5), 0),
        ParameterSpec("norm", "F32", (5,), None),
        ParameterSpec("scale", "F32", (), None),
        ParameterSpec("head", "F32", (12, 5), 0, Coverage.TIED, "embed"),
    )
)
"""As FastDeploy's own models: what a rank has of a fused parameter is in its file."""


class Scene:
    """An engine of two ranks, and the directories that trainers write for it."""

    def __init__(self, model: NumpyModel, model_dir: Path, engine: NumpyEngine, client: BoardClient) -> None:
        self.model, self.model_dir, self.engine, self.client = model, model_dir, engine, client

    def write(self, seed: int, step: int, num_parts: int = 2) -> Weights:
        weights = random_weights(self.model, seed)
        for rank in range(RANKS):
            slices = self.engine.slices(weights, rank)
            write_model_state(self.model_dir, slices, rank=rank, gpu=rank, num_parts=num_parts)
        write_version(self.model_dir, step)
        return weights

    def assert_refused(self, error: type[FastDeployRLError], match: str, weights: Weights) -> None:
        """And nothing changed."""
        before = self.client.status(), self.client.receipt()
        with pytest.raises(error, match=match):
            self.client.update()
        assert self.client.status().version == before[0].version
        assert self.client.receipt() == before[1] == self.client.receipt(recompute=True)
        assert self.engine.holds(weights)

    def update(self, weights: Weights, version: str) -> UpdateReport:
        report = self.client.update()
        assert (report.outcome, report.version) == ("done", version)
        assert self.engine.holds(weights)
        assert report.receipt == self.client.receipt(recompute=True)
        return report


@contextmanager
def engine_at(tmp_path: Path, model: NumpyModel, apply_mode: str = "auto", channel: str = "channel") -> Iterator[Scene]:
    model_dir = tmp_path / "model"
    model_dir.mkdir(exist_ok=True)
    with (
        NumpyEngine(
            model,
            channel=tmp_path / channel,
            num_ranks=RANKS,
            load_strategy="ipc_snapshot",
            model_dir=model_dir,
            apply_mode=apply_mode,
        ) as engine,
        BoardClient(engine.port) as client,
    ):
        yield Scene(model, model_dir, engine, client)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with engine_at(tmp_path, FUSED) as scene:
        yield scene


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_every_format_of_fastdeploy_is_taken_over_bitwise(tmp_path: Path, apply_mode: str):
    """Parts, one file, other numbers of parts, and back to weights that were live before."""
    with engine_at(tmp_path, FUSED, apply_mode) as scene:
        for step, num_parts in enumerate([3, 1, 2, 5], 1):
            weights = scene.write(step, step, num_parts)
            scene.update(weights, f"1.{step}")
            assert scene.client.update().version == f"1.{step}"  # live already
        for path in scene.model_dir.glob("*.pdparams"):
            path.unlink()
        saved = random_weights(FUSED, 9)
        for rank in range(RANKS):
            write_saved_model_state(tmp_path / "channel", scene.engine.slices(saved, rank), rank=rank, gpu=rank)
        write_version(scene.model_dir, 5)
        scene.update(saved, "1.5")


def test_what_is_missing_mixed_or_damaged_is_refused_and_the_next_good_version_is_taken(scene: Scene):
    """One engine through all of it: what a trainer can do wrong changes nothing."""
    good = scene.write(1, 1)
    scene.update(good, "1.1")

    def spoil(damage: Callable[[], object], error: type[FastDeployRLError], match: str) -> None:
        scene.write(2, 2)
        damage()
        scene.assert_refused(error, match, good)
        for path in scene.model_dir.glob("*.pdparams"):
            path.unlink()

    directory, other = scene.model_dir, random_weights(FUSED, 3)
    last = directory / part_name(1, 1, 1)
    spoil((directory / part_name(0, 0, 0)).unlink, CoverageError, "rank 0 of 2 has none")
    spoil(last.unlink, CoverageError, "rank 1 of 2 has none")
    spoil(lambda: [path.unlink() for path in directory.glob("*tp1*")], NoPublicationError, "rank 1 has no file")
    spoil(lambda: last.write_bytes(last.read_bytes()[:-4]), CheckpointError, "truncated")
    spoil(lambda: last.rename(directory / part_name(1, 1, 3)), NoPublicationError, "1, 2 missing")
    spoil(lambda: last.chmod(0o666), ConfigurationError, "every user of this machine")
    spoil(lambda: save_file({"more": np.ones(3)}, directory / part_name(0, 0, 2)), CoverageError, "more: not a tensor")
    spoil(
        lambda: write_model_state(directory, scene.engine.slices(other, 1), rank=1, gpu=1, num_parts=2),
        TrainerError,
        "has different values in",
    )
    weights = scene.write(4, 3)
    scene.update(weights, "1.3")


def test_other_bytes_under_the_same_version_are_another_publication_of_it(scene: Scene):
    first = scene.update(scene.write(1, 1), "1.1")
    second = scene.update(scene.write(2, 1), "1.1")
    assert first.receipt.content_digest != second.receipt.content_digest


def test_bytes_that_change_without_a_trace_are_found_by_their_checksums(scene: Scene, tmp_path: Path):
    """What was described is not what is there, and the files' identities do not show it: the description is made anew,
    and what is there is taken."""
    good = scene.write(1, 1)
    scene.update(good, "1.1")
    config = SourceConfig(tmp_path / "channel", scene.model_dir, 0, RANKS, FUSED.specs)
    scene.write(2, 2)
    before = described_as(config)
    weights = scene.write(3, 2)
    before.rename(before.with_name(record_name(config)))
    scene.update(weights, "1.2")


def described_as(config: SourceConfig) -> Path:
    """The record of the files that are there, made as rank 0 makes it."""
    DescribedFiles(config, lambda _: find_foreign(config), "").offer(None, time.monotonic_ns() + 10**10)
    return config.channel / "described" / record_name(config)


def record_name(config: SourceConfig) -> str:
    found = find_foreign(config)
    assert found is not None
    return f"SET-{described._key(found, describing.identities(found))}"


def test_a_checkpoint_directory_is_taken_over_from_where_it_is_named(tmp_path: Path):
    """Linear weights are [out, in] there, and in halves; its shards change from step to step."""
    names = {"q": "model.layers.0.self_attn.q_proj.weight", "o": "model.layers.0.self_attn.o_proj.weight"}
    model = NumpyModel(
        (
            ParameterSpec("model.embed_tokens.weight", "F32", (12, 5), 0),
            ParameterSpec(names["q"], "F32", (5, 8), 1),
            ParameterSpec(names["o"], "F32", (8, 5), 0),
            ParameterSpec("model.norm.weight", "F32", (5,), None),
        )
    )
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with engine_at(tmp_path, model, channel="checkpoint") as scene:
        for step, shards in enumerate([["a"], ["a", "b"], ["x", "y", "z"]], 1):
            weights = random_weights(model, step)
            save_shards(checkpoint, weights, [f"model-{shard}.safetensors" for shard in shards])
            write_version(checkpoint, step)
            scene.update(weights, f"1.{step}")


def save_shards(directory: Path, weights: Weights, shards: list[str]) -> None:
    stored = {n: np.ascontiguousarray(v.T) if n.endswith("_proj.weight") else v for n, v in weights.items()}
    places = {name: shards[number % len(shards)] for number, name in enumerate(stored)}
    for shard in shards:
        save_file({name: stored[name] for name in stored if places[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
