"""A trainer that knows FastDeploy only, with CUDA tensors in a process of its own: the common suite, and what is its
own. On FakeCuda; not run on a GPU."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_suite import SourceSuite, arrived, assert_staged, plan_of, planned_bytes, soon, weights

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.dtypes import DTYPES, numpy_dtype
from fastdeploy_rl.errors import (
    CheckpointError,
    ConfigurationError,
    CudaError,
    CudaUnavailableError,
    DeadlineExceededError,
    LifecycleError,
    NoPublicationError,
    TrainerError,
)
from fastdeploy_rl.memory.ipc_metas import metas_name, read_ipc_metas_file
from fastdeploy_rl.plan.byte_range import ByteRange
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish.fastdeploy_files import write_saved_model_state, write_version
from fastdeploy_rl.publish.publisher import WeightPublisher, retire
from fastdeploy_rl.sources import registry
from fastdeploy_rl.sources.base import SourceConfig, WeightSource
from fastdeploy_rl.sources.described import DescribedFiles
from fastdeploy_rl.sources.ipc_metas import find_ipc_metas
from fastdeploy_rl.testing.fake_cuda import DEVICES, FakeCuda
from fastdeploy_rl.transport.base import Offer
from fastdeploy_rl.transport.device_memory import DeviceAllocation, DeviceReader, DeviceRun, DeviceSegment
from fastdeploy_rl.version import WeightVersion
from tests.process.fastdeploy_trainer import FastDeployTrainer

NAMES = {numpy_dtype(name): name for name in DTYPES}


@pytest.fixture(scope="module")
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as cuda, pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.environ.items():
            patch.setenv(name, value)
        for name in ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"):
            patch.delenv(name, raising=False)
        yield cuda
        counters = cuda.counters()
        assert (counters.live_openings, counters.frees_while_open) == (0, 0)


@pytest.fixture(scope="module")
def trainer(cuda: FakeCuda) -> Iterator[FastDeployTrainer]:
    with FastDeployTrainer(cuda.environ) as trainer:
        yield trainer


@pytest.fixture
def metas(tmp_path: Path) -> Path:
    (tmp_path / "shared_ipc_meta").mkdir()
    return tmp_path / "shared_ipc_meta"


def config(metas: Path, rank: int = 0, num_ranks: int = 1, specs: tuple[ParameterSpec, ...] = ()) -> SourceConfig:
    (metas.parent / "model").mkdir(exist_ok=True)
    places = metas.parent / "channel", metas.parent / "model"
    return SourceConfig(*places, rank, num_ranks, specs, num_threads=2, metas_dir=metas)


def specs_of(state: dict[str, Any]) -> tuple[ParameterSpec, ...]:
    return tuple(ParameterSpec(name, NAMES[value.dtype], value.shape, None) for name, value in state.items())


class StockPublisher:
    def __init__(self, trainer: FastDeployTrainer, one_rank: SourceConfig) -> None:
        self._trainer, self._config = trainer, one_rank

    def publish(self, state_dict: dict[str, Any], *, step: int, layout: str = "full") -> Offer:
        """The whole tensors are those of the only rank, whatever the layout. Asked for by somebody else than the source
        under test."""
        metas = self._config.metas_dir
        assert metas is not None
        self._trainer.write(metas / metas_name(0), state_dict)
        write_version(metas, step)
        return DescribedFiles(self._config, partial(find_ipc_metas, metas, self._config), "").offer(None, soon()).offer


@pytest.fixture
def one_rank(metas: Path) -> SourceConfig:
    return config(metas, specs=specs_of(weights(0)))


@pytest.fixture
def publisher(trainer: FastDeployTrainer, one_rank: SourceConfig) -> StockPublisher:
    return StockPublisher(trainer, one_rank)


@pytest.fixture
def source(one_rank: SourceConfig) -> Iterator[WeightSource]:
    source = registry.create("ipc", one_rank)
    yield source
    source.close()


class TestIpcMetas(SourceSuite):
    OWNS_MEMORY = True


# --- one rank --------------------------------------------------------------------------------------------


def taken(source: WeightSource) -> tuple[WeightVersion, dict[str, bytes]]:
    resolved = source.resolve(None, deadline_ns=soon())
    staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
    found = planned_bytes(staged)
    staged.release()
    return resolved.version, found


def as_bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.items()}


def test_a_handle_is_opened_once_for_all_its_tensors_and_nothing_stays_open(
    cuda: FakeCuda, trainer: FastDeployTrainer, source: WeightSource, metas: Path
) -> None:
    trainer.write(metas / metas_name(0), weights(1), cuts=2)
    resolved = source.resolve(None, deadline_ns=soon())
    before = cuda.counters()
    staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
    after = cuda.counters()
    assert (after.opens - before.opens, after.closes - before.closes, after.live_openings) == (2, 2, 0)
    assert_staged(resolved.manifest, staged, weights(1))
    staged.release()


def test_values_that_change_where_they_lie_are_another_version_and_show_in_no_copy(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path
) -> None:
    """As trainers do: the file is written once."""
    trainer.write(metas / metas_name(0), weights(1))
    first = source.resolve(None, deadline_ns=soon())
    staged = arrived(source.stage(first, plan_of(first.manifest), deadline_ns=soon()))
    assert source.resolve(None, deadline_ns=soon()) == first
    assert source.newest_version(deadline_ns=soon()) is None
    trainer.overwrite(metas / metas_name(0), weights(2))
    assert_staged(first.manifest, staged, weights(1))
    second = source.resolve(None, deadline_ns=soon())
    assert second.version == WeightVersion(1, first.version.step + 1)
    assert taken(source) == (second.version, as_bytes(weights(2)))
    with pytest.raises(NoPublicationError, match=f"{first.version} is not to be had: .* has {second.version}"):
        source.resolve(first.version, deadline_ns=soon())
    staged.release()


def test_the_version_is_the_one_that_the_trainer_wrote_down(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path
) -> None:
    trainer.write(metas / metas_name(0), weights(1))
    for step in (7, 8):
        trainer.overwrite(metas / metas_name(0), weights(step))
        write_version(metas.parent / "model", step)
        assert source.newest_version(deadline_ns=soon()) == WeightVersion(1, step)
        assert taken(source) == (WeightVersion(1, step), as_bytes(weights(step)))


def test_reading_a_table_ends_at_the_deadline(trainer: FastDeployTrainer, metas: Path, one_rank: SourceConfig) -> None:
    trainer.write(metas / metas_name(0), weights(1))
    with pytest.raises(DeadlineExceededError, match="ipc_metas_0: no time left to read it, at byte 2 of"):
        find_ipc_metas(metas, one_rank, time.monotonic_ns())


def described_in(source_config: SourceConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (source_config.channel / "described").iterdir()}


def test_other_bytes_under_the_number_of_former_ones_are_refused_until_the_trainer_numbers_them(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path, one_rank: SourceConfig
) -> None:
    trainer.write(metas / metas_name(0), weights(1))
    write_version(metas, 7)
    assert taken(source)[0] == WeightVersion(1, 7)
    before = described_in(one_rank)
    trainer.overwrite(metas / metas_name(0), weights(2))
    for version in (None, WeightVersion(1, 7)):
        with pytest.raises(TrainerError, match=rf"{metas / 'version.yaml'} still says version 1\.7.*other bytes"):
            source.resolve(version, deadline_ns=soon())
    assert described_in(one_rank) == before
    write_version(metas, 8)
    assert taken(source) == (WeightVersion(1, 8), as_bytes(weights(2)))


def test_bytes_that_were_not_what_was_read_leave_their_number_to_the_trainer(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path
) -> None:
    """Nobody ever had them: they were read while the trainer wrote."""
    trainer.write(metas / metas_name(0), weights(1))
    write_version(metas, 7)
    torn = source.resolve(None, deadline_ns=soon())
    trainer.overwrite(metas / metas_name(0), weights(2))
    source.discredit(torn)
    assert taken(source) == (WeightVersion(1, 7), as_bytes(weights(2)))


def test_a_number_that_was_counted_is_given_to_nothing_else(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path
) -> None:
    """By whoever asks for it, and after what it was given to turned out to be something else."""
    trainer.write(metas / metas_name(0), weights(1))
    first = taken(source)[0]
    assert source.resolve(first, deadline_ns=soon()).version == first  # rank 0's own part in the same update
    trainer.overwrite(metas / metas_name(0), weights(2))
    with pytest.raises(NoPublicationError, match=f"{first} is not to be had: .* has {first.epoch}.{first.step + 1}"):
        source.resolve(first, deadline_ns=soon())
    second = source.resolve(None, deadline_ns=soon())
    assert second.version == WeightVersion(1, first.step + 1)
    trainer.overwrite(metas / metas_name(0), weights(3))
    source.discredit(second)
    assert taken(source) == (WeightVersion(1, first.step + 2), as_bytes(weights(3)))


def test_a_trainer_that_is_gone_is_told_with_the_way_to_find_out(
    cuda: FakeCuda, source: WeightSource, metas: Path
) -> None:
    with FastDeployTrainer(cuda.environ) as other:
        other.write(metas / metas_name(0), weights(1))
        resolved = source.resolve(None, deadline_ns=soon())
        other.kill()
    before = cuda.counters()
    staged = source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon())
    with pytest.raises(CudaError, match=r"ipc_metas_0 \(GPU 0\) cannot be opened.*fastdeploy-rl doctor --ipc"):
        arrived(staged)
    staged.release()
    with pytest.raises(CudaError, match="doctor --ipc"):
        source.resolve(None, deadline_ns=soon())
    assert cuda.counters().opens == before.opens


def test_a_machine_without_a_driver_is_told_with_the_way_to_find_out(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.write(metas / metas_name(0), weights(1))
    monkeypatch.setenv("FASTDEPLOY_RL_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(CudaUnavailableError, match="doctor --ipc"):
        source.resolve(None, deadline_ns=soon())


def test_a_file_that_is_no_table_is_named_and_nothing_is_opened(
    cuda: FakeCuda, source: WeightSource, metas: Path
) -> None:
    before = cuda.counters()
    (metas / metas_name(0)).write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"ipc_metas_0: byte 2: opcode 0x63.*nothing was executed"):
        source.resolve(None, deadline_ns=soon())
    assert cuda.counters().opens == before.opens


@pytest.mark.parametrize(
    ("visible", "selected", "device"),
    [(each.uuid, "", number) for number, each in enumerate(DEVICES)] + [("0,1", "0", 0), ("0,1", "1", 1)],
)
@pytest.mark.parametrize("is_by_uuid", [False, True])
def test_a_device_has_its_file_under_whichever_name_the_trainer_gives_it(
    trainer: FastDeployTrainer,
    source: WeightSource,
    metas: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    selected: str,
    device: int,
    is_by_uuid: bool,
) -> None:
    """An index, or the identifier of a GPU or MIG instance. FakeCuda lists its devices once for a process, as the
    driver does, so that here all of them are there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("FLAGS_selected_gpus", selected)
    name = DEVICES[device].uuid if is_by_uuid or not selected else selected
    trainer.write(metas / metas_name(name), weights(1), device=device)
    assert taken(source)[1] == as_bytes(weights(1))


def test_files_for_another_device_are_named(trainer: FastDeployTrainer, source: WeightSource, metas: Path) -> None:
    trainer.write(metas / metas_name(5), weights(1))
    with pytest.raises(NoPublicationError, match=r"has ipc_metas_5, but none for GPU 0 \(yet\).*doctor --ipc"):
        source.resolve(None, deadline_ns=soon())


# --- ranges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        ByteRange(0, 5, 40, 1, 40, 3),
        ByteRange(0, 7, 64, 20, 9, 0),  # close rows, read with what lies between them
        ByteRange(0, 0, 30_000, 3, 100, 11),  # far ones
        ByteRange(0, 70_000, 512, 40, 16, 0),  # close ones that reach into the next allocation
        ByteRange(0, 79_990, 20, 1, 20, 0),  # a row that does
        ByteRange(0, 100, 0, 5, 4, 0),
    ],
)
def test_rows_of_any_stride_land_packed_from_whichever_allocation_has_them(
    trainer: FastDeployTrainer, metas: Path, wanted: ByteRange
) -> None:
    data = np.random.default_rng(5).integers(0, 256, 160_000, np.uint8)
    path = metas / metas_name(0)
    trainer.write(path, {"a": data[:80_000], "b": data[80_000:]})
    rows = read_ipc_metas_file(path)
    runs = [
        DeviceRun(80_000 * number, 80_000, DeviceAllocation("0", "it", rows[name].handle, 80_000))
        for number, name in enumerate("ab")
    ]
    expected = [data[wanted.offset + row * wanted.stride :][: wanted.row_bytes] for row in range(wanted.rows)]
    target = Mapping.private(4096)
    with closing(DeviceReader([DeviceSegment(tuple(runs))], lambda: None)) as reader:
        with closing(reader.open_fetch([wanted], target, soon())) as fetch:
            assert list(fetch.arrivals()) == [[0]]
            assert fetch.num_bytes == wanted.num_bytes
        with pytest.raises(ValueError, match="is outside of the 1 segments"):
            reader.open_fetch([wanted._replace(offset=160_000)], target, soon())
        with pytest.raises(DeadlineExceededError, match="no time left"):
            reader.open_fetch([wanted], target, time.monotonic_ns())
        closed = reader.open_fetch([wanted], target, soon())
        closed.close()
        with pytest.raises(LifecycleError, match="was closed"):
            list(closed.arrivals())
    with memoryview(target) as view:
        assert view[wanted.target_offset :][: wanted.num_bytes] == np.concatenate(expected).tobytes()
    target.close()


# --- two ranks -------------------------------------------------------------------------------------------

SPECS = (
    ParameterSpec("up", "F32", (6, 8), 1),
    ParameterSpec("down", "BF16", (8, 6), 0),
    ParameterSpec("norm", "F32", (6,), None),
    ParameterSpec("mtp/norm", "F32", (6,), None),
)


def slices(rank: int, seed: int = 0) -> dict[str, Any]:
    own = np.random.default_rng([seed, rank])
    return {
        "up": own.standard_normal((6, 4)).astype(np.float32),
        "down": own.integers(0, 2**16, (4, 6), np.uint16),
        "norm": np.random.default_rng(seed).standard_normal(6).astype(np.float32),
    }


def rank_takes(source: WeightSource, rank: int, version: WeightVersion | None) -> dict[str, bytes]:
    resolved = source.resolve(version, deadline_ns=soon())
    staged = arrived(source.stage(resolved, make_plan(resolved.manifest, SPECS, rank, 2), deadline_ns=soon()))
    found = planned_bytes(staged)
    staged.release()
    return found


def test_each_rank_copies_its_own_from_its_device_and_takes_rank_0s_word_for_the_rest(
    cuda: FakeCuda, trainer: FastDeployTrainer, metas: Path
) -> None:
    """The MTP model's norm is in FastDeploy's dictionary under the main one's name."""
    for rank in range(2):
        trainer.write(metas / metas_name(rank), slices(rank), device=rank)
    sources = [registry.create("ipc", config(metas, rank, 2, SPECS)) for rank in range(2)]
    with pytest.raises(NoPublicationError, match="rank 0 has described nothing"):
        sources[1].resolve(None, deadline_ns=soon())
    resolved = sources[0].resolve(None, deadline_ns=soon())
    assert resolved.manifest.layout == "tp:2"
    assert sources[1].resolve(resolved.version, deadline_ns=soon()) == resolved
    before = cuda.counters()
    for rank, source in enumerate(sources):
        own = as_bytes(slices(rank))
        assert rank_takes(source, rank, resolved.version) == own | {"mtp/norm": own["norm"]}
    assert cuda.counters().opens - before.opens == 2 * 2
    for source in sources:
        source.close()


def test_ranks_whose_common_tensors_differ_are_refused(trainer: FastDeployTrainer, metas: Path) -> None:
    for rank in range(2):
        trainer.write(metas / metas_name(rank), slices(rank, seed=rank), device=rank)
    source = registry.create("ipc", config(metas, 0, 2, SPECS))
    with pytest.raises(TrainerError, match="'norm' has different values in ipc_metas_0 and in ipc_metas_1"):
        source.resolve(None, deadline_ns=soon())
    source.close()


def test_a_process_that_does_not_see_every_ranks_device_says_so(
    trainer: FastDeployTrainer, metas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    trainer.write(metas / metas_name(0), slices(0))
    source = registry.create("ipc", config(metas, 0, 2, SPECS))
    with pytest.raises(ConfigurationError, match="does not list the devices of all 2 ranks"):
        source.resolve(None, deadline_ns=soon())
    source.close()


# --- where it is looked for --------------------------------------------------------------------------------


def test_what_our_publisher_announced_comes_first_and_the_files_when_it_is_gone(
    trainer: FastDeployTrainer, source: WeightSource, metas: Path, one_rank: SourceConfig
) -> None:
    trainer.write(metas / metas_name(0), weights(1))
    with WeightPublisher(one_rank.channel) as publisher:
        published = publisher.publish(weights(2), step=2)
        resolved = source.resolve(None, deadline_ns=soon())
        assert resolved == (published.version, published.manifest)
        staged = arrived(source.stage(resolved, plan_of(resolved.manifest), deadline_ns=soon()))
        assert_staged(resolved.manifest, staged, weights(2))
        staged.release()
        assert source.newest_version(deadline_ns=soon()) == published.version
    assert taken(source)[1] == as_bytes(weights(1))


def test_what_a_publisher_left_behind_hides_no_files_that_came_later(
    trainer: FastDeployTrainer,
    source: WeightSource,
    metas: Path,
    one_rank: SourceConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And by name both can be had. A publisher that lives comes first."""
    publisher = WeightPublisher(one_rank.channel)
    publisher.start()
    ours = publisher.publish(weights(2), step=2).version
    trainer.write(metas / metas_name(0), weights(3))
    write_version(metas, 3)
    theirs = WeightVersion(ours.epoch, 3)
    assert taken(source) == (ours, as_bytes(weights(2)))
    assert source.resolve(theirs, deadline_ns=soon()).version == theirs
    publisher.close(keep=True)
    for _ in range(2):
        assert taken(source) == (theirs, as_bytes(weights(3)))
    assert source.newest_version(deadline_ns=soon()) == theirs
    assert source.resolve(ours, deadline_ns=soon()).version == ours
    with pytest.raises(NoPublicationError, match=rf"1\.9 is not to be had: {metas} .*; and .*: {one_rank.channel} has"):
        source.resolve(WeightVersion(1, 9), deadline_ns=soon())
    told = [text for text in caplog.messages if "event=source_chosen" in text]
    assert ["source=channel" in told[0], "source=ipc_metas" in told[1]] == [True] * len(told)
    os.utime(metas / metas_name(0), ns=(0, 0))
    assert taken(source) == (ours, as_bytes(weights(2)))
    source.close()
    retire(one_rank.channel)


def test_both_places_are_named_where_nothing_is(source: WeightSource, metas: Path, one_rank: SourceConfig) -> None:
    for ask in (source.newest_version, source.current_epoch, partial(source.resolve, None)):
        with pytest.raises(NoPublicationError, match=f"nothing is published in {one_rank.channel}.*{metas} has none"):
            ask(deadline_ns=soon())
    assert not one_rank.channel.exists()


def test_snapshots_in_the_shared_directory_are_the_last_ones_of_fastdeploys_to_be_taken(
    metas: Path, one_rank: SourceConfig
) -> None:
    write_saved_model_state(metas, weights(4), rank=0, gpu=0)
    source = registry.create("ipc_snapshot", one_rank)
    assert taken(source)[1] == as_bytes(weights(4))
    assert one_rank.model_dir is not None
    write_saved_model_state(one_rank.model_dir, weights(3), rank=0, gpu=0)
    assert taken(source)[1] == as_bytes(weights(3))
    source.close()
    assert os.listdir(metas) == ["model_state.tp0.0.pdparams"]
