"""Files that no SnapshotWriter wrote, as versions: the common suite over FastDeploy's, and what each format has."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file
from source_suite import SourceSuite, arrived, soon, weights

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.dtypes import DTYPES, numpy_dtype
from fastdeploy_rl.engines.embedded.checkpoint import Checkpoint
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint as write_checkpoint
from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config
from fastdeploy_rl.errors import (
    CheckpointError,
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    TrainerError,
)
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.fastdeploy_files import (
    file_name,
    part_name,
    write_model_state,
    write_saved_model_state,
    write_version,
)
from fastdeploy_rl.sources import fastdeploy_files, foreign_files, registry
from fastdeploy_rl.sources.base import SourceConfig, WeightSource
from fastdeploy_rl.sources.described import DescribedFiles
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.update.planned_transfer import transfer_planned
from fastdeploy_rl.version import WeightVersion

State = dict[str, Any]
NAMES = {numpy_dtype(name): name for name in DTYPES}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class Places(NamedTuple):
    """Where a trainer writes (`model`) and where an engine looks beside that."""

    model: Path
    channel: Path

    def config(self, rank: int = 0, num_ranks: int = 1, parameters: tuple[ParameterSpec, ...] = ()) -> SourceConfig:
        return SourceConfig(self.channel, self.model, rank, num_ranks, parameters, num_threads=2)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    (tmp_path / "model").mkdir()
    return Places(tmp_path / "model", tmp_path / "channel")


def offered(config: SourceConfig) -> Offer:
    """What is there, asked for by somebody else than the source under test."""
    return DescribedFiles(config, lambda _: foreign_files.find_foreign(config), "").offer(None, soon()).offer


# --- the common suite, one rank ---------------------------------------------------------------------


def in_parts(places: Places, rank: int, state: State) -> None:
    write_model_state(places.model, state, rank=rank, gpu=rank, num_parts=3)


def in_one_file(places: Places, rank: int, state: State) -> None:
    write_model_state(places.model, state, rank=rank, gpu=rank)


def legacy_name(gpu: int) -> str:
    """As older releases of FastDeploy wrote them."""
    return f"model_state.tp0{gpu}.pdparams"


def in_a_legacy_file(places: Places, rank: int, state: State) -> None:
    (path,) = write_model_state(places.model, state, rank=rank, gpu=rank)
    path.rename(places.model / legacy_name(rank))


def as_a_shared_pickle(places: Places, rank: int, state: State) -> None:
    places.channel.mkdir(exist_ok=True)
    write_saved_model_state(places.channel, state, rank=rank, gpu=rank)


FORMATS = [in_parts, in_one_file, in_a_legacy_file, as_a_shared_pickle]
Format = Callable[[Places, int, State], None]


class FastDeployTrainer:
    def __init__(self, places: Places, write: Format, config: SourceConfig) -> None:
        self._places, self._write, self._config = places, write, config

    def publish(self, state_dict: State, *, step: int, layout: str = "full") -> Offer:
        """Files are cut for the engine, whatever the layout."""
        self._write(self._places, 0, state_dict)
        write_version(self._places.model, step)
        return offered(self._config)


@pytest.fixture
def one_rank(places: Places) -> SourceConfig:
    specs = [ParameterSpec(name, NAMES[value.dtype], value.shape, None) for name, value in weights(0).items()]
    return places.config(parameters=tuple(specs))


@pytest.fixture(params=FORMATS)
def publisher(request: pytest.FixtureRequest, places: Places, one_rank: SourceConfig) -> FastDeployTrainer:
    return FastDeployTrainer(places, request.param, one_rank)


@pytest.fixture
def source(one_rank: SourceConfig) -> Iterator[WeightSource]:
    source = registry.create("ipc_snapshot", one_rank)
    yield source
    source.close()


class TestFastDeployFiles(SourceSuite):
    OWNS_MEMORY = True


# --- several ranks ----------------------------------------------------------------------------------

SPECS = (
    ParameterSpec("embed", "F32", (6, 5), 0),
    ParameterSpec("qkv", "F32", (5, 12), 1, fused=(FusedPart("q", 8), FusedPart("k", 4)), fused_axis=1),
    ParameterSpec("down", "BF16", (4, 3), 0),
    ParameterSpec("norm", "F32", (5,), None),
    ParameterSpec("head", "F32", (6, 5), 0, Coverage.TIED, "embed"),
)
PARTS = [in_parts, in_one_file]


def slices(rank: int, seed: int = 0) -> State:
    """What rank `rank` of two holds; what is not split is equal on both."""
    random, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    return {
        "embed": own.standard_normal((3, 5)).astype(np.float32),
        "qkv": own.standard_normal((5, 6)).astype(np.float32),
        "down": own.integers(0, 2**16, (2, 3), np.uint16),
        "norm": random.standard_normal(5).astype(np.float32),
    }


def taken(config: SourceConfig) -> dict[str, bytes]:
    """What one rank of an engine would have of the newest version."""
    source = registry.create("ipc_snapshot", config)
    resolved = source.resolve(None, deadline_ns=soon())
    plan = make_plan(resolved.manifest, config.parameters, config.rank, config.num_ranks)
    staged = arrived(source.stage(resolved, plan, deadline_ns=soon()))
    homes = {
        p.name: TensorView(Mapping.private(max(p.num_bytes, 1)), 0, p.dtype, p.local_shape)
        for p in staged.plan.parameters
    }
    transfer_planned(staged.plan.everything, resolved.manifest, staged.segments, homes, 1)
    staged.release()
    source.close()
    return {name: view.numpy().tobytes() for name, view in homes.items()}


def write_ranks(places: Places, write: Format, seed: int = 0, step: int = 1) -> None:
    for rank in range(2):
        write(places, rank, slices(rank, seed))
    write_version(places.model, step)


def configs(places: Places) -> list[SourceConfig]:
    return [places.config(rank, 2, SPECS) for rank in range(2)]


def assert_taken(places: Places, seed: int = 0) -> None:
    for config in configs(places):
        expected = {name: value.tobytes() for name, value in slices(config.rank, seed).items()}
        assert taken(config) == expected


def assert_refused(places: Places, error: type[FastDeployRLError], match: str) -> None:
    with pytest.raises(error, match=match):
        taken(configs(places)[0])


@pytest.mark.parametrize("write", FORMATS)
def test_every_rank_gets_its_own_slices(places: Places, write: Format) -> None:
    write_ranks(places, write)
    assert_taken(places)
    assert offered(configs(places)[0]).manifest.layout == "tp:2"


def test_formats_are_looked_for_in_fastdeploys_order(places: Places) -> None:
    """Whatever is there of the others, and however new it is."""
    for seed, write in reversed(list(enumerate(FORMATS))):
        write_ranks(places, write, seed)
    found = [name_of_part, file_name, lambda rank, gpu: legacy_name(gpu)]
    for seed, name in enumerate(found):
        assert_taken(places, seed)
        for rank in range(2):
            for path in places.model.glob(name(rank, rank)):
                path.unlink()
    assert_taken(places, 3)


def test_parts_that_stayed_behind_newer_files_and_their_version_are_refused(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    """FastDeploy would read them. Where only some of the files are newer it is told."""
    write_ranks(places, in_one_file, 2)
    write_ranks(places, in_parts, 1, step=2)
    parts = [path for rank in range(2) for path in places.model.glob(name_of_part(rank, rank))]
    for path in parts:
        os.utime(path, ns=(0, 5 * 10**9))
    assert_refused(places, NoPublicationError, "are older than model_state.tp0.0.pdparams and than the version")
    assert not places.channel.exists()
    os.utime(places.model / file_name(0, 0), ns=(0, 4 * 10**9))
    assert "parts_older_than_file" not in caplog.text
    assert_taken(places, 1)
    assert f"event=parts_older_than_file parts={places.model}" in caplog.text
    for path in parts:
        path.unlink()
    assert_taken(places, 2)


def name_of_part(rank: int, gpu: int) -> str:
    return part_name(rank, gpu, 0).replace("part0", "part*")


def test_one_version_has_one_content_whatever_its_format(places: Places) -> None:
    digests = set()
    for write in FORMATS:
        write_ranks(places, write)
        digests.add(offered(configs(places)[0]).manifest.content_digest)
        for path in [*places.model.glob("*.pdparams"), *places.channel.glob("*.pdparams")]:
            path.unlink()
    assert len(digests) == 1


# --- what is missing or mixed ------------------------------------------------------------------------


def renumber(places: Places, *pairs: tuple[int, str]) -> None:
    for rank in range(2):
        for old, new in pairs:
            path = places.model / part_name(rank, rank, old)
            path.rename(path.with_name(path.name.replace(f"part{old}", f"part{new}")))


def test_parts_may_be_counted_from_1_and_with_leading_zeros(places: Places) -> None:
    write_ranks(places, in_parts)
    renumber(places, (2, "003"), (1, "002"), (0, "001"))
    assert_taken(places)


@pytest.mark.parametrize(
    ("pairs", "missing"),
    [([(1, "3")], "1"), ([(2, "4"), (1, "3"), (0, "2")], "1"), ([(2, "9")], "2, 3, 4, 5, 6, 7, 8")],
)
def test_a_gap_in_the_parts_is_named(places: Places, pairs: list[tuple[int, str]], missing: str) -> None:
    write_ranks(places, in_parts)
    renumber(places, *pairs)
    assert_refused(places, NoPublicationError, rf"of the parts of rank 0, {missing} missing \(yet\)")


def test_a_part_that_is_there_twice_is_refused(places: Places) -> None:
    write_ranks(places, in_parts)
    shutil.copy(places.model / part_name(0, 0, 1), places.model / "model_state.tp0.0.part01.pdparams")
    assert_refused(places, TrainerError, "rank 0 has a part twice: 0, 1, 1, 2")


def test_a_file_that_is_named_almost_like_a_part_is_left_alone_and_said(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    """As FastDeploy does."""
    write_ranks(places, in_parts)
    (places.model / "model_state.tp0.0.partx.pdparams").write_bytes(b"?")
    (places.model / "model_state.pdparams").write_bytes(b"?")
    assert_taken(places)
    assert {record.getMessage() for record in caplog.records if "ignored" in record.getMessage()} == {
        "event=ignored file='model_state.tp0.0.partx.pdparams' reason='not the name of a part of a snapshot'"
    }


def test_a_directory_of_which_not_all_is_looked_at_has_no_version(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not seen might be a part, or a kind of file that comes first."""
    write_ranks(places, in_parts)
    monkeypatch.setattr(fastdeploy_files, "_MAX_ENTRIES", len(os.listdir(places.model)))
    assert_taken(places)
    (places.model / "log").write_bytes(b"")
    assert_refused(places, ConfigurationError, r"has more than \d+ entries")


def test_a_last_part_that_one_rank_lacks_shows_in_what_it_has(places: Places) -> None:
    write_ranks(places, in_parts)
    (places.model / part_name(1, 1, 2)).unlink()
    assert_refused(places, CoverageError, "norm: rank 1 of 2 has none")


def test_a_last_part_that_all_ranks_lack_shows_in_what_the_model_needs(places: Places) -> None:
    write_ranks(places, in_parts)
    for rank in range(2):
        (places.model / part_name(rank, rank, 2)).unlink()
    assert_refused(places, CoverageError, "norm: missing")


@pytest.mark.parametrize("write", FORMATS)
def test_a_rank_without_files_is_named(places: Places, write: Format) -> None:
    write(places, 0, slices(0))
    assert_refused(places, NoPublicationError, r"(rank 1 has no file|no file of 1 of 2 ranks).*")


def test_parts_of_another_version_that_stayed_are_refused(places: Places) -> None:
    """FastDeploy would load them over the newer ones."""
    write_ranks(places, in_parts)
    save_file({"norm": np.ones(5, np.float32)}, places.model / part_name(0, 0, 3))
    assert_refused(places, TrainerError, r"part3.*tensor norm is in another part too")


def test_fewer_parts_than_before_leave_none_of_the_old(places: Places) -> None:
    write_ranks(places, in_parts, 1)
    for rank in range(2):
        write_model_state(places.model, slices(rank, 2), rank=rank, gpu=rank, num_parts=2)
    assert_taken(places, 2)
    write_ranks(places, in_one_file, 3)
    assert_taken(places, 3)


def test_whole_tensors_or_the_slices_of_more_ranks_are_refused(places: Places) -> None:
    for rank in range(2):
        in_one_file(places, rank, slices(rank) | {"embed": np.zeros((6, 5), np.float32)})
    assert_refused(places, CoverageError, r"embed: rank 0 of 2 has shape \[6, 5\], which is the whole of it")


def test_one_value_that_each_rank_has_of_its_own_comes_without_axes(places: Places) -> None:
    """FastDeploy's file has it as the parameter is; the whole, as the model is told of it, is one after the other."""
    specs = (ParameterSpec("scale", "F32", (2,), 0), ParameterSpec("bias", "F32", (1,), None))
    one = np.float32([0.5])
    for rank in range(2):
        in_one_file(places, rank, {"scale": np.array(rank + 1, np.float32), "bias": one})
    write_version(places.model, 1)
    for rank in range(2):
        expected = {"scale": np.float32(rank + 1).tobytes(), "bias": one.tobytes()}
        assert taken(places.config(rank, 2, specs)) == expected
    in_one_file(places, 0, {"scale": np.array(1, np.float32), "bias": np.array(0.5, np.float32)})
    with pytest.raises(CoverageError, match=r"bias: rank 0 of 2 has shape \[\]; this engine's ranks have \[1\]"):
        taken(places.config(0, 2, specs))


def test_files_that_are_newer_than_their_version_are_told_of_once(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be of the next step, whose version comes last."""
    write_ranks(places, in_parts)
    version_file = places.model / "version.yaml"
    write_version(str(places.model), 3)
    assert_taken(places)
    assert "files_newer_than_version" not in caplog.text
    written_ns = version_file.stat().st_mtime_ns
    os.utime(places.model / part_name(1, 1, 0), ns=(written_ns + 1, written_ns + 1))
    source = registry.create("ipc_snapshot", configs(places)[0])
    for _ in range(2):
        assert source.resolve(None, deadline_ns=soon()).version == WeightVersion(1, 3)
    source.close()
    told = [text for text in caplog.messages if "event=files_newer_than_version" in text]
    assert len(told) == 1
    assert f"version=3 event=files_newer_than_version file={part_name(1, 1, 0)} newer_than={version_file}" in told[0]


def test_ranks_of_two_versions_are_told_by_what_is_not_split(places: Places) -> None:
    write_ranks(places, in_one_file, 1)
    in_one_file(places, 1, slices(1, 2))
    assert_refused(places, TrainerError, "'norm' has different values in .*tp0.* and in .*tp1")


def say_step(path: Path, text: str) -> None:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]) | {"__metadata__": {"step": text}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])


def test_files_whose_headers_say_another_step_are_refused_where_no_tensor_shows_it(places: Places) -> None:
    write_ranks(places, in_one_file, 1, step=2)
    paths = [places.model / file_name(rank, rank) for rank in range(2)]
    for path, step in zip(paths, "21", strict=True):
        say_step(path, step)
    assert_refused(places, NoPublicationError, rf"{paths[1]} says that it is step 1, its version file says 2")
    assert os.listdir(places.channel / "described") == []
    say_step(paths[1], "2")
    assert_taken(places, 1)


def test_a_tied_name_may_be_there_too(places: Places) -> None:
    for rank in range(2):
        in_one_file(places, rank, slices(rank) | {"head": slices(rank)["embed"]})
    assert_taken(places)
    in_one_file(places, 1, slices(1) | {"head": slices(0)["embed"]})
    assert_refused(places, CoverageError, "head: tied to embed, but published with other values")


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1])
@pytest.mark.parametrize("write", FORMATS)
def test_a_file_that_was_cut_is_named_and_nothing_is_described(places: Places, write: Format, num_bytes: int) -> None:
    write_ranks(places, write)
    path = max([*places.model.glob("*tp*1*.pdparams"), *places.channel.glob("*tp1*.pdparams")])
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert_refused(places, CheckpointError, f"{path}.*truncated|{path}.*no state dict")
    assert list((places.channel / "described").iterdir()) == []


# --- devices -----------------------------------------------------------------------------------------


def on_gpus(places: Places, gpus: list[str], seed: int = 0) -> None:
    for rank, gpu in enumerate(gpus):
        write_model_state(places.model, slices(rank, seed), rank=rank, gpu=gpu, num_parts=2)


def test_whichever_device_a_rank_was_written_for_is_taken_where_there_is_one(places: Places) -> None:
    on_gpus(places, ["5", "3"])
    assert_taken(places)


def test_files_of_several_devices_need_a_word_about_which_is_meant(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus(places, ["0", "1"], 1)
    on_gpus(places, ["4", "GPU-5a"], 2)
    assert_refused(places, ConfigurationError, "rank 0 has files of GPUs 0, 4.*CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    assert_taken(places, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5a,7")
    assert_taken(places, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert_refused(places, NoPublicationError, "files of GPUs 0, 1, 4, GPU-5a, this engine is on 6, 7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,1")
    assert_refused(places, TrainerError, "'norm' has different values in .*tp0.4.* and in .*tp1.1")


def test_legacy_names_tell_devices_alone(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(places, in_a_legacy_file)
    for rank, gpu in ((1, 10), (0, 9)):
        (places.model / legacy_name(rank)).rename(places.model / legacy_name(gpu))
    assert_taken(places)
    shutil.copy(places.model / legacy_name(9), places.model / legacy_name(2))
    assert_refused(places, ConfigurationError, "2 ranks have files of GPUs 2, 9, 10")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,10")
    assert_taken(places)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8")
    assert_refused(places, NoPublicationError, r"no file of GPUs 8 \(yet\)")


# --- changes between looking and taking ---------------------------------------------------------------


def test_files_that_were_replaced_since_they_were_described_are_not_staged(places: Places) -> None:
    config = places.config(0, 2, SPECS)
    write_ranks(places, in_one_file)
    source = registry.create("ipc_snapshot", config)
    resolved = source.resolve(None, deadline_ns=soon())
    write_ranks(places, in_one_file, 2)
    with pytest.raises(NoPublicationError, match="was changed or replaced since it was looked at"):
        source.stage(resolved, make_plan(resolved.manifest, SPECS, 0, 2), deadline_ns=soon())
    source.close()
    assert_taken(places, 2)


def test_the_other_ranks_take_rank_0s_word_and_read_nothing_but_their_own(places: Places) -> None:
    write_ranks(places, in_one_file)
    first, second = configs(places)
    with pytest.raises(NoPublicationError, match="rank 0 has described nothing"):
        offered(second)
    assert offered(first) == offered(second)


def test_a_pickle_that_would_execute_something_is_refused(places: Places) -> None:
    """In the model directory as well as in the shared one."""
    write_ranks(places, in_one_file)
    (places.model / file_name(0, 0)).write_bytes(b"\x80\x04cposix\nsystem\n\x8c\x04true\x85R.")
    assert_refused(places, CheckpointError, "'posix'.'system' has no place in a state dict; nothing was executed")


# --- round trips with what others wrote ---------------------------------------------------------------


def test_reading_a_pickle_ends_at_the_deadline(places: Places) -> None:
    as_a_shared_pickle(places, 0, weights(0))
    found = foreign_files.find_foreign(places.config())
    assert found is not None
    with pytest.raises(DeadlineExceededError, match=r"tp0\.0\.pdparams: no time left to read it, at byte 2 of"):
        found.read_layout(time.monotonic_ns())


def test_what_is_written_is_what_safetensors_and_paddle_read(tmp_path: Path) -> None:
    state = slices(0) | {"scale": np.array(3.5), "empty": np.zeros((0, 3), np.int32), "mask": np.array([True, False])}
    (path,) = write_model_state(str(tmp_path), state, rank=3, gpu="GPU-1f")
    assert path.name == "model_state.tp3.GPU-1f.pdparams"
    others = {name: value for name, value in state.items() if value.dtype != np.uint16}  # this reader has no BF16
    write_model_state(tmp_path, others, rank=3, gpu="GPU-1f")
    read = load_file(path)
    assert read.keys() == others.keys()
    for name, value in read.items():
        assert value.dtype == others[name].dtype
        assert np.array_equal(value, others[name])
    others = {name: value for name, value in state.items() if value.size}  # and this one fails at empty tensors
    write_model_state(tmp_path, others, rank=3, gpu="GPU-1f")
    for name, value in paddle.load(str(path), safetensors=True).items():
        assert value.numpy().tobytes() == others.pop(name).tobytes()
    assert others == {}
    saved = paddle.load(str(write_saved_model_state(str(tmp_path), state, rank=0, gpu=0)), return_numpy=True)
    saved.pop("StructuredToParameterName@@", None)
    assert {name: value.tobytes() for name, value in saved.items()} == {n: v.tobytes() for n, v in state.items()}


def test_parts_are_of_about_one_size_and_hold_each_tensor_once(tmp_path: Path) -> None:
    state = {f"t{number}": np.full(number + 1, number, np.float32) for number in range(20)}
    for num_parts in (2, 3, 7, 20):
        paths = write_model_state(tmp_path, state, rank=0, gpu=0, num_parts=num_parts)
        assert [path.name for path in paths] == [part_name(0, 0, part) for part in range(num_parts)]
        loaded = [load_file(path) for path in paths]
        assert [name for each in loaded for name in sorted(each, key=lambda name: int(name[1:]))] == list(state)
        sizes = [sum(value.nbytes for value in each.values()) for each in loaded]
        assert max(sizes) <= sum(sizes) / num_parts + 80
    with pytest.raises(ConfigurationError, match="20 tensors cannot be split over 21 files"):
        write_model_state(tmp_path, state, rank=0, gpu=0, num_parts=21)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(part_name(0, 0, part) for part in range(20))


def test_a_tensor_that_cannot_be_written_leaves_the_files_as_they_were(tmp_path: Path) -> None:
    (path,) = write_model_state(tmp_path, slices(0), rank=0, gpu=0)
    before = path.read_bytes()
    with pytest.raises(TrainerError, match="'w' is not contiguous"):
        write_model_state(tmp_path, slices(1) | {"w": np.zeros((4, 4))[:, :2]}, rank=0, gpu=0)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_the_safetensors_package_and_of_paddle_are_read(places: Places) -> None:
    """Their tensors begin where they like."""
    state = {"w" * length: np.arange(length, dtype=np.float32) for length in range(1, 6)}
    specs = tuple(ParameterSpec(name, NAMES[value.dtype], value.shape, None) for name, value in state.items())
    config = places.config(parameters=specs)
    save_file(state, places.model / file_name(0, 7), metadata={"x": "y"})
    expected = {name: value.tobytes() for name, value in state.items()}
    assert taken(config) == expected
    (places.model / file_name(0, 7)).unlink()
    places.channel.mkdir(exist_ok=True)
    tensors = {name: paddle.to_tensor(value) for name, value in state.items()}
    paddle.save(tensors, str(places.channel / file_name(0, 7)))
    assert any(part.offset % 4 for tensor in offered(config).manifest.tensors for part in tensor.parts)
    assert taken(config) == expected


@pytest.mark.parametrize("length", [0x0180, 0x0280, 0x0580, 0x0680, 0x10280, 0x20480])
def test_a_header_whose_length_looks_like_the_beginning_of_a_pickle_is_none(places: Places, length: int) -> None:
    """0x80 and a protocol number are the low bytes of 640, 896, ..., 66176, ..."""
    text = b'{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'.ljust(length)
    value = np.arange(5, dtype=np.float32).tobytes()
    (places.model / file_name(0, 0)).write_bytes(len(text).to_bytes(8, "little") + text + value)
    assert taken(places.config(parameters=(ParameterSpec("w", "F32", (5,), None),))) == {"w": value}


def test_versions_are_written_for_both_of_fastdeploys_readers(tmp_path: Path) -> None:
    write_version(tmp_path, 12)
    assert (tmp_path / "version.yaml").read_text() == "step: 12\nversion: 12\n"
    assert (tmp_path / "version.txt").read_text() == "12\n"
    for wrong in (-1, 2**63, True, "12"):
        with pytest.raises(ConfigurationError, match="a step is an integer"):
            write_version(tmp_path, wrong)  # type: ignore[arg-type]


# --- Hugging Face directories ------------------------------------------------------------------------

HEADS = "model.layers.0.self_attn.q_proj.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
MODEL = (
    ParameterSpec("model.embed_tokens.weight", "F32", (6, 5), 0),
    ParameterSpec(HEADS, "F32", (5, 8), 1),
    ParameterSpec(OUTPUT, "F32", (8, 5), 0),
    ParameterSpec("model.norm.weight", "F32", (5,), None),
    ParameterSpec("lm_head.weight", "F32", (6, 5), 0, Coverage.TIED, "model.embed_tokens.weight"),
)


def checkpoint(seed: int = 0) -> dict[str, np.ndarray]:
    """As the engine has it: linear weights are [in, out]."""
    random = np.random.default_rng(seed)
    return {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in MODEL[:4]}


def stored(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    turned = {name: np.ascontiguousarray(v.T) if "_proj" in name else v for name, v in values.items()}
    return turned | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}


def save_checkpoint(directory: Path, seed: int = 0, num_shards: int = 1) -> None:
    directory.mkdir(exist_ok=True)
    tensors = stored(checkpoint(seed))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    shards = {name: f"model-{number % num_shards}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def own_share(rank: int, num_ranks: int, seed: int = 0) -> dict[str, bytes]:
    shares = {}
    for spec in MODEL[:4]:
        value = checkpoint(seed)[spec.name]
        shares[spec.name] = (
            value if spec.shard_axis is None else np.split(value, num_ranks, spec.shard_axis)[rank]
        ).tobytes()
    return shares


def checkpoint_config(places: Places, rank: int = 0, num_ranks: int = 1) -> SourceConfig:
    return places.config(rank, num_ranks, MODEL)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_checkpoint_that_is_named_is_a_version(places: Places, num_shards: int, num_ranks: int) -> None:
    save_checkpoint(places.channel, num_shards=num_shards)
    write_version(places.channel, 3)
    for rank in range(num_ranks):
        config = checkpoint_config(places, rank, num_ranks)
        assert taken(config) == own_share(rank, num_ranks)
        assert offered(config).version == WeightVersion(1, 3)


def test_the_directory_an_engine_started_from_counts_only_where_it_is_numbered(places: Places) -> None:
    save_checkpoint(places.model)
    with pytest.raises(NoPublicationError, match=rf"nothing is published in {places.channel}.*{places.model}"):
        taken(checkpoint_config(places))
    assert not places.channel.exists()
    write_version(places.model, 9)
    assert taken(checkpoint_config(places)) == own_share(0, 1)
    assert offered(checkpoint_config(places)).version == WeightVersion(1, 9)


def real_model(directory: Path, *, is_tied: bool) -> None:
    """A small checkpoint of the embedded engine; nothing divides its vocabulary but itself."""
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 64}
    kind = {"model_type": "qwen2", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": is_tied}
    config = kind | sizes | heads | {"eos_token_id": 2, "hidden_act": "silu"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(5)
    specs = [spec for spec in parameter_specs(read_config(directory)) if spec.coverage is Coverage.UPDATED]
    write_checkpoint(directory, config, {spec.name: random.random(spec.shape, np.float32) for spec in specs})


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_engine_gets_from_files_what_it_loads_when_it_starts(places: Places, is_tied: bool, num_ranks: int) -> None:
    """From its own checkpoint, and from slices of it in FastDeploy's files; a padded vocabulary included."""
    real_model(places.channel, is_tied=is_tied)
    specs = parameter_specs(read_config(places.channel), num_ranks)
    with Checkpoint.open(places.channel) as opened:
        loaded = [opened.load(rank, num_ranks) for rank in range(num_ranks)]
    held = [{name: view.numpy() for name, view in views.items()} for views in loaded]
    for layout in ("full", f"tp:{num_ranks}"):
        for rank, values in enumerate(held):
            config = places.config(rank, num_ranks, specs)
            assert taken(config) == {name: value.tobytes() for name, value in values.items()}
            assert offered(config).manifest.layout == layout
        for rank, values in enumerate(held):
            write_model_state(places.model, values, rank=rank, gpu=rank, num_parts=2)


def test_links_as_model_hubs_make_them_are_followed(places: Places) -> None:
    save_checkpoint(places.model / "blobs")
    places.channel.mkdir()
    (places.channel / "model.safetensors").symlink_to("../model/blobs/model.safetensors")
    assert taken(checkpoint_config(places)) == own_share(0, 1)


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model-0.safetensors")
    tensors.popitem()
    save_file(tensors, directory / "model-0.safetensors")


def add_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model-0.safetensors")
    save_file(tensors | {"more": np.ones(3)}, directory / "model-0.safetensors")


def point_outside(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')


def lose_the_index(directory: Path) -> None:
    """As a model hub's cache that was cleaned in part."""
    index = directory / "model.safetensors.index.json"
    index.unlink()
    index.symlink_to("blobs/gone")
    (directory / "model.safetensors").touch()


def point_nowhere(directory: Path) -> None:
    """No file has a zero in its name, and nothing takes one."""
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "\\u0000.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (drop_tensor, "is missing, .* says that it is here"),
        (add_tensor, "more is here, but .* does not name it"),
        (point_outside, "expected the name of a .safetensors file"),
        (point_nowhere, "expected the name of a .safetensors file"),
        (lambda path: (path / "model.safetensors").touch(), "are both here"),
        (lose_the_index, "index.json: No such file"),
        (lambda path: (path / "model.safetensors.index.json").write_text("[]"), "no index of a checkpoint"),
        (lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "names no tensor"),
    ],
)
def test_an_index_and_shards_that_do_not_agree_are_refused(
    places: Places, damage: Callable[[Path], None], match: str
) -> None:
    save_checkpoint(places.channel, num_shards=2)
    damage(places.channel)
    with pytest.raises(CheckpointError, match=match):
        taken(checkpoint_config(places))


def test_a_shard_that_is_missing_is_named(places: Places) -> None:
    save_checkpoint(places.channel, num_shards=2)
    (places.channel / "model-1.safetensors").unlink()
    with pytest.raises(NoPublicationError, match=r"model-1\.safetensors"):
        taken(checkpoint_config(places))


def test_a_saved_tie_is_one_tensor_of_two_names(places: Places) -> None:
    """`paddle.save` has such a tensor once."""
    places.channel.mkdir()
    shared = paddle.ones([6, 5])
    state = {"embed": shared, "head": shared}
    specs = (ParameterSpec("embed", "F32", (6, 5), 0), ParameterSpec("head", "F32", (6, 5), 0, Coverage.TIED, "embed"))
    paddle.save(state, str(places.channel / file_name(0, 0)))
    assert taken(places.config(parameters=specs)) == {"embed": shared.numpy().tobytes()}


def test_snapshots_come_first(places: Places) -> None:
    """Files of another kind do not count where a channel has snapshots, whole or not."""
    write_ranks(places, in_one_file)
    places.channel.mkdir(0o700)
    (places.channel / "snapshots").mkdir(0o700)
    assert_taken(places)
    (places.channel / "snapshots" / f"1.1-{'0' * 16}").mkdir()
    assert_refused(places, NoPublicationError, "none of the 1 snapshots")
