"""A trainer that publishes for stock FastDeploy too: what is there afterwards is what FastDeploy reads, for each rank,
and what our own engines read; where a publication fails, nothing of it is there. CUDA on FakeCuda; not run on a GPU."""

import os
import pickle
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fastdeploy_rl import FastDeployFiles, WeightPublisher
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FastDeployRLError,
    NoPublicationError,
    SegmentError,
    TrainerError,
    VersionRegressError,
)
from fastdeploy_rl.memory.cuda_record import open_device
from fastdeploy_rl.plan.conventions import hugging_face
from fastdeploy_rl.publish.channel import Channel
from fastdeploy_rl.publish.fastdeploy_files import PendingModelState, write_version
from fastdeploy_rl.publish.publisher import Shard
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.testing.fake_cuda import FakeCuda
from fastdeploy_rl.update.client import BoardClient
from tests.process.answering import soon
from tests.process.fastdeploy_trainer import FastDeployTrainer
from tests.process.numpy_engine import NumpyEngine

Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


def state(seed: int = 0) -> dict[str, Any]:
    """`head` is `norm`'s memory under another name; the MTP model has a norm of its own."""
    rng = np.random.default_rng(seed)
    norm = rng.standard_normal(6).astype(np.float16)
    q = rng.standard_normal((6, 8)).astype(np.float32)
    return {Q: q, NORM: norm, "head": norm, f"mtp/{NORM}": norm + 1, "mtp/proj": np.float32([seed, 1])}


class Places:
    def __init__(self, root: Path) -> None:
        self.channel, self.model, self.metas = root / "channel", root / "model", root / "shared_ipc_meta"
        self.model.mkdir()
        self.metas.mkdir(mode=0o700)

    def files(self, *gpus: str | int, num_parts: int = 1) -> FastDeployFiles:
        return FastDeployFiles(self.model, gpus, num_parts, self.metas)

    def arguments(self, *gpus: str) -> dict[str, Any]:
        """As `files`, for the trainer's process."""
        return {"model_dir": str(self.model), "metas_dir": str(self.metas), "gpus": gpus}

    def held(self) -> dict[str, bytes]:
        """All that is where FastDeploy looks."""
        return {path.name: path.read_bytes() for where in (self.model, self.metas) for path in where.iterdir()}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


@pytest.fixture
def publisher(places: Places) -> Iterator[WeightPublisher]:
    with WeightPublisher(places.channel) as publisher:
        yield publisher


# --- CPU tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_rank_has_its_slices_under_fastdeploys_names_and_our_channel_has_all(
    places: Places, publisher: WeightPublisher, num_parts: int
) -> None:
    files = places.files(4, 5, num_parts=num_parts)
    published = publisher.publish(state(), step=7, layout="tp:2", compat="fastdeploy", fastdeploy=files)
    whole = state()
    for rank, gpu in enumerate((4, 5)):
        parts = sorted(places.model.glob(f"model_state.tp{rank}.{gpu}.*"))
        assert len(parts) == num_parts
        found = {name: value for part in parts for name, value in load_file(part).items()}
        assert found.keys() == {Q, NORM, "head", "proj"}
        np.testing.assert_array_equal(found[Q], np.split(whole[Q], 2, 1)[rank])
        np.testing.assert_array_equal(found["proj"], whole["mtp/proj"])
    assert (places.model / "version.yaml").read_text() == "step: 7\nversion: 7\n"
    assert (places.model / "version.txt").read_text() == "7\n"
    assert Channel(places.channel).read_publication(soon())[1] == published.manifest
    assert {*published.manifest.aliases, *(tensor.name for tensor in published.manifest.tensors)} == set(whole)


def test_an_engine_here_tells_a_half_written_set_by_the_step_in_each_file(
    places: Places, publisher: WeightPublisher
) -> None:
    """No tensor shows it, since all are cut; stock FastDeploy reads whatever is there."""
    specs = (ParameterSpec(Q, "F32", (6, 8), 1),)
    config = SourceConfig(places.channel.with_name("elsewhere"), places.model, 0, 2, specs)
    source = registry.create("ipc_snapshot", config)
    for step in (1, 2):
        files = places.held() if step == 2 else {}
        state_dict = {Q: np.full((6, 8), step, np.float32)}
        arguments = {"compat": "fastdeploy", "fastdeploy": places.files(0, 1)}
        publisher.publish(state_dict, step=step, layout="tp:2", **arguments)
        assert source.resolve(None, deadline_ns=soon()).version.step == step
    described = sorted(os.listdir(config.channel / "described"))
    (places.model / "model_state.tp1.1.pdparams").write_bytes(files["model_state.tp1.1.pdparams"])
    with pytest.raises(NoPublicationError, match=r"tp1\.1\.pdparams says that it is step 1, its version file says 2"):
        source.resolve(None, deadline_ns=soon())
    write_version(places.model, 1)
    with pytest.raises(NoPublicationError, match=r"tp0\.0\.pdparams says that it is step 2, its version file says 1"):
        source.resolve(None, deadline_ns=soon())
    assert sorted(os.listdir(config.channel / "described")) == described
    source.close()


def test_a_full_layout_is_one_rank(places: Places, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    publisher.publish({"w": np.zeros(3, np.float32)}, step=1, compat="fastdeploy", fastdeploy=places.files())
    assert sorted(places.held()) == ["model_state.tp0.6.pdparams", "version.txt", "version.yaml"]


def test_a_publication_that_is_refused_leaves_the_files_as_they_were(
    places: Places, publisher: WeightPublisher
) -> None:
    first = publisher.publish(state(1), step=7, layout="tp:2", compat="fastdeploy", fastdeploy=places.files(0, 1))
    before = places.held()
    with pytest.raises(VersionRegressError):
        publisher.publish(state(2), step=7, layout="tp:2", compat="fastdeploy", fastdeploy=places.files(0, 1))
    assert places.held() == before
    assert Channel(places.channel).read_publication(soon())[1] == first.manifest


class Parts:
    """Two trainer processes, as threads; each has the whole of `w`'s half, and all of the norm."""

    def __init__(self, places: Places, publishers: list[WeightPublisher]) -> None:
        self.places, self._publishers = places, publishers

    def publish(self, part: int, step: int, **changes: Any) -> None:
        state_dict = {"w": np.full((2, 4), step + part, np.float32), NORM: np.full(6, step, np.float32)}
        shards = {"w": Shard(axis=0, start=2 * part, stop=2 * part + 2, size=4)}
        given = {"compat": "fastdeploy", "fastdeploy": self.places.files(0, 1)} | changes
        self._publishers[part].publish(state_dict, step=step, shards=shards, **given)


@pytest.fixture
def parts(places: Places) -> Iterator[Parts]:
    with ExitStack() as stack:
        yield Parts(places, [stack.enter_context(WeightPublisher(places.channel, part=(part, 2))) for part in (0, 1)])


def test_the_version_is_said_when_the_files_of_all_parts_are_there(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, put_in_place = threading.Event(), PendingModelState.finish

    def finish(state: PendingModelState) -> list[Path]:
        if "tp1" in state.pattern:
            assert goes_on.wait(10)
        return put_in_place(state)

    monkeypatch.setattr(PendingModelState, "finish", finish)
    version = parts.places.model / "version.yaml"
    with ThreadPoolExecutor(2) as pool:
        publishing = [pool.submit(parts.publish, part, 3) for part in range(2)]
        while not (parts.places.model / "model_state.tp0.0.pdparams").exists():
            time.sleep(0.01)  # bounded by the test's own limit
        assert not version.exists()
        goes_on.set()
        for each in publishing:
            each.result(10)
    assert version.read_text() == "step: 3\nversion: 3\n"


@pytest.mark.parametrize("changes", [{"compat": None, "fastdeploy": None}, {"num_parts": 2}, {"gpus": (0, 7)}])
def test_a_part_whose_files_do_not_come_is_named_and_the_version_stays(parts: Parts, changes: dict[str, Any]) -> None:
    """Without compat, or with settings of its own."""
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(parts.publish, part, 3) for part in range(2)]:
            each.result(10)
        before = (parts.places.model / "version.yaml").read_bytes()
        given = changes
        if "num_parts" in changes:
            given = {"fastdeploy": parts.places.files(0, 1, num_parts=2)}
        elif "gpus" in changes:
            given = {"fastdeploy": parts.places.files(*changes["gpus"])}
        first = pool.submit(parts.publish, 0, 4, deadline_s=1.0)
        second = pool.submit(parts.publish, 1, 4, **given)
        with pytest.raises(DeadlineExceededError, match=r"of parts \[1\], of step 4 .*version files are as they were"):
            first.result(10)
        second.result(10)
    assert (parts.places.model / "version.yaml").read_bytes() == before


def refusals() -> list[tuple[dict[str, Any], type[FastDeployRLError], str]]:
    one = {"w": np.zeros((2, 4), np.float32)}
    nowhere = FastDeployFiles("/nowhere/model", [0])
    return [
        ({"compat": "vllm"}, ConfigurationError, "compat must be None or 'fastdeploy', got 'vllm'"),
        ({"fastdeploy": None}, ConfigurationError, "go together"),
        ({"compat": None}, ConfigurationError, "go together"),
        ({"fastdeploy": FastDeployFiles("m", [0, 1])}, ConfigurationError, r"1 ranks need a device each.*\[0, 1\]"),
        ({"fastdeploy": FastDeployFiles("m", ["../0"])}, ConfigurationError, "no device is called '../0'"),
        ({"fastdeploy": nowhere}, SegmentError, "/nowhere/model/model_state.tp0.0.pdparams cannot be written"),
        ({"fastdeploy": FastDeployFiles("m", [0], 3)}, ConfigurationError, "1 tensors cannot be split over 3 files"),
        ({"state_dict": {Q: one["w"]}, "convention": hugging_face}, ConfigurationError, "turned or divided"),
        ({"state_dict": {"w": [1]}}, TrainerError, "'w' is no tensor"),
        ({"state_dict": {"__metadata__": one["w"]}}, TrainerError, "'__metadata__': the files' format"),
        ({"state_dict": {"UnpackBigParamInfor@@": one["w"]}}, TrainerError, "another use for that name"),
        (
            {"state_dict": one, "layout": "tp:2", "fastdeploy": FastDeployFiles("m", [0, 1])},
            ConfigurationError,
            "'w': not known by name how FastDeploy's ranks share them",
        ),
    ]


@pytest.mark.parametrize(("changes", "error", "said"), refusals())
def test_what_fastdeploy_could_not_read_is_refused_before_anything_is_published(
    places: Places,
    publisher: WeightPublisher,
    changes: dict[str, Any],
    error: type[FastDeployRLError],
    said: str,
) -> None:
    wanted = {
        "state_dict": {"w": np.zeros((2, 4), np.float32)},
        "step": 1,
        "compat": "fastdeploy",
        "fastdeploy": places.files(0),
    }
    with pytest.raises(error, match=said):
        publisher.publish(**wanted | changes)
    assert places.held() == {}
    assert Channel(places.channel).read_latest() is None


# --- CUDA tensors ------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with FakeCuda() as cuda:
        for name, value in cuda.environ.items():
            monkeypatch.setenv(name, value)
        for name in ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"):
            monkeypatch.delenv(name, raising=False)
        yield cuda


@pytest.fixture
def trainer(cuda: FakeCuda) -> Iterator[FastDeployTrainer]:
    with FastDeployTrainer(cuda.environ) as trainer:
        yield trainer


def as_stock_reads(path: Path, device: int = 0) -> dict[str, bytes]:
    """The steps of FastDeploy's `_convert_ipc_meta_to_tensor` and of Paddle's `_new_shared_cuda`."""
    _, context = open_device(str(device))
    found = {}
    for name, meta in pickle.loads(path.read_bytes()).items():
        meta[0] = meta[0].encode("latin-1")
        meta[6] = device
        handle, offset, num_bytes, _, _, lod, _ = tuple(meta)
        assert lod == []
        memory = context.open(handle, offset + num_bytes)
        data = bytearray(num_bytes)
        memory.read(offset, data)
        memory.close()
        found[name] = bytes(data)
    return found


def as_bytes(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


def test_cuda_tensors_are_read_where_they_lie_until_the_next_publication(
    places: Places, trainer: FastDeployTrainer
) -> None:
    for step in (1, 2, 3):
        tensors = {name: value for name, value in state(step).items() if not name.startswith("mtp/")}
        trainer.begin_publish(places.channel, tensors, step=step, **places.arguments("0"))
        version = trainer.receive()
        assert as_stock_reads(places.metas / "ipc_metas_0") == as_bytes(tensors)
        assert (places.model / "version.yaml").read_text() == f"step: {step}\nversion: {step}\n"
        latest, manifest = Channel(places.channel).read_publication(soon())
        assert latest.version == version
        assert {tensor.name for tensor in manifest.tensors} == set(tensors)
        # The first state's tensors went with the second publication, the second's with the third.
        assert trainer.ask("borrowed", channel=str(places.channel)) == [False] * (step - 1) + [True]
    assert stat.S_IMODE(os.stat(places.metas / "ipc_metas_0").st_mode) == 0o600
    trainer.ask("close", channel=str(places.channel))
    assert trainer.ask("borrowed", channel=str(places.channel)) == [False] * 3
    assert sorted(places.held()) == ["version.txt", "version.yaml"]


def test_a_directory_of_a_group_gives_the_file_to_it(places: Places, trainer: FastDeployTrainer) -> None:
    places.metas.chmod(0o750)
    trainer.begin_publish(places.channel, {"w": np.zeros(3, np.float32)}, step=1, **places.arguments("0"))
    trainer.receive()
    status = os.stat(places.metas / "ipc_metas_0")
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o640, os.stat(places.metas).st_gid)
    trainer.ask("close", channel=str(places.channel))


def test_either_engine_reads_what_two_ranks_publish_from_their_devices(
    places: Places, cuda: FakeCuda, trainer: FastDeployTrainer
) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    norm = np.arange(5, dtype=np.float32)
    with FastDeployTrainer(cuda.environ) as other:
        ranks = (trainer, other)
        for rank, process in enumerate(ranks):
            process.begin_publish(
                places.channel,
                {"w": whole[2 * rank : 2 * rank + 2], "norm": norm},
                step=1,
                **places.arguments("0", "1"),
                device=rank,
                part=(rank, 2),
                shards={"w": [0, 2 * rank, 2 * rank + 2, 4]},
            )
        assert [process.receive() for process in ranks] == ["1.1", "1.1"]
        for rank in range(2):
            found = as_stock_reads(places.metas / f"ipc_metas_{rank}", rank)
            assert found == {"w": whole[2 * rank : 2 * rank + 2].tobytes(), "norm": norm.tobytes()}
        specs = ParameterSpec("w", "F32", (4, 6), 0), ParameterSpec("norm", "F32", (5,), None)
        sums = []
        for channel in (places.channel, places.channel.with_name("elsewhere")):
            config = SourceConfig(channel, places.model, 0, 2, specs, metas_dir=places.metas)
            source = registry.create("ipc", config)
            resolved = source.resolve(None, deadline_ns=soon())
            sums.append({tensor.name: tensor.checksum for tensor in resolved.manifest.tensors})
            assert resolved.version.step == 1
            source.close()
        assert sums[0] == sums[1]
        for process in ranks:
            process.send("close", channel=str(places.channel))
        for process in ranks:
            process.receive()


def test_tensors_of_which_only_some_are_in_cuda_memory_are_refused(
    places: Places, publisher: WeightPublisher, cuda: FakeCuda
) -> None:
    class OnDevice:
        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("was exported")

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    tensors = {"d": OnDevice(), "w": np.zeros(3, np.float32)}
    with pytest.raises(TrainerError, match="'w' is not in CUDA memory, others are"):
        publisher.publish(tensors, step=1, compat="fastdeploy", fastdeploy=places.files(0))
    assert places.held() == {}


def test_what_cannot_be_put_in_place_is_told_and_the_version_is_not_said(
    places: Places, publisher: WeightPublisher
) -> None:
    """The publication stands: it was announced before."""
    (places.model / "model_state.tp1.1.pdparams").mkdir()
    with pytest.raises(SegmentError, match=r"model_state.tp1.1.pdparams cannot be written"):
        publisher.publish(state(), step=1, layout="tp:2", compat="fastdeploy", fastdeploy=places.files(0, 1))
    assert sorted(os.listdir(places.model)) == ["model_state.tp0.0.pdparams", "model_state.tp1.1.pdparams"]
    assert Channel(places.channel).read_publication(soon())[0].version == "1.1"


# --- an engine of ours, a trainer that knows FastDeploy only --------------------------------------------------

MODEL = NumpyModel(
    (
        ParameterSpec("up", "BF16", (10, 8), 1),
        ParameterSpec("embed", "F32", (6, 5), 0),
        ParameterSpec("norm", "F32", (5,), None),
    )
)


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_an_engine_follows_a_trainer_whose_tensors_change_where_they_lie(
    places: Places, trainer: FastDeployTrainer, apply_mode: str
) -> None:
    with (
        NumpyEngine(
            MODEL,
            channel=places.channel,
            num_ranks=2,
            model_dir=places.model,
            metas_dir=places.metas,
            apply_mode=apply_mode,
        ) as engine,
        BoardClient(engine.port) as client,
    ):
        for step in (1, 2, 3):
            weights = random_weights(MODEL, step)
            for rank in range(2):
                slices = engine.slices(weights, rank)
                path = places.metas / f"ipc_metas_{rank}"
                trainer.write(path, slices, device=rank) if step == 1 else trainer.overwrite(path, slices)
            write_version(places.model, step)
            report = client.update()
            assert (report.outcome, report.version) == ("done", f"1.{step}")
            assert engine.holds(weights)
            assert report.receipt == client.receipt(recompute=True)
        trainer.overwrite(places.metas / "ipc_metas_1", engine.slices(random_weights(MODEL, 4), 1))
        with pytest.raises(TrainerError, match="'norm' has different values in ipc_metas_0 and in ipc_metas_1"):
            client.update()
        assert engine.holds(weights)
        assert client.status().version == "1.3"
