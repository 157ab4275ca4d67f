"""`rsync` through FastDeploy's closed package, by a stand-in of both its interfaces: what each rank is sent is what it
serves, held to a manifest that rank 0 makes."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from source_suite import SourceSuite, assert_staged, weights

from fastdeploy_rl._native import Mapping
from fastdeploy_rl.coverage import Coverage, FusedPart, ParameterSpec
from fastdeploy_rl.errors import (
    CheckpointError,
    ConfigurationError,
    CoverageError,
    DeadlineExceededError,
    NoPublicationError,
    PeerLostError,
    TrainerError,
)
from fastdeploy_rl.memory.host_tensor import borrow
from fastdeploy_rl.memory.tensor_view import TensorView
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.receipt import RankReceipt, check_reads, merge
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig, StagedSource, WeightSource
from fastdeploy_rl.sources.checkpoint_transfer import CheckpointTransferSource
from fastdeploy_rl.sources.rsync_config import CheckpointTransferConfig
from fastdeploy_rl.testing import fake_checkpoint_transfer as fake
from fastdeploy_rl.update.planned_transfer import transfer_arriving
from fastdeploy_rl.version import WeightVersion

Array = NDArray[Any]
QKV = (FusedPart("q", 8), FusedPart("k", 4), FusedPart("v", 4))
SPECS = (
    ParameterSpec("embed", "F32", (8, 4), 0, vocab_rows=7),
    ParameterSpec("qkv", "BF16", (4, 16), 1, fused=QKV, fused_axis=1),
    ParameterSpec("down", "F32", (8, 4), 0),
    ParameterSpec("up", "F32", (4, 8), 1, is_transposed=True),
    ParameterSpec("norm", "F32", (4,), None),
    ParameterSpec("head", "F32", (8, 4), 0, Coverage.TIED, tied_to="embed", vocab_rows=7),
)
STEP = WeightVersion(1, 7)


def soon(seconds: float = 20) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def sent(seed: int, num_ranks: int = 2) -> list[dict[str, Array]]:
    """What each rank is sent; `norm` is the same for all."""
    parts = []
    for rank in range(num_ranks):
        part: dict[str, Array] = {}
        for spec in SPECS:
            rng = np.random.default_rng([seed, rank if spec.shard_axis is not None else 0, len(part)])
            shape = spec.local_shape(num_ranks)
            values = rng.integers(0, 2**16, shape, np.uint16) if spec.dtype == "BF16" else rng.standard_normal(shape)
            part[spec.name] = values if spec.dtype == "BF16" else values.astype(np.float32)
        part["head"] = part["embed"]
        parts.append(part)
    parts[-1]["embed"][-1] = 0  # the row that pads the vocabulary
    return parts


class Engine:
    """The ranks of an engine, one after the other in this process."""

    def __init__(self, directory: Path, api: str, num_ranks: int = 2, specs: tuple[ParameterSpec, ...] = SPECS) -> None:
        options = CheckpointTransferConfig(api=api, config={"directory": str(directory / "wire")})  # type: ignore[arg-type]
        self.specs = specs
        self.sources = [
            CheckpointTransferSource(
                SourceConfig(directory / "channel", directory / "model", rank, num_ranks, specs, num_threads=1), options
            )
            for rank in range(num_ranks)
        ]

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def resolve(self, version: WeightVersion | None) -> list[ResolvedPublication]:
        return [source.resolve(version, deadline_ns=soon()) for source in self.sources]

    def stage(self, resolved: ResolvedPublication, rank: int, deadline_ns: int | None = None) -> StagedSource:
        plan = make_plan(resolved.manifest, self.specs, rank, len(self.sources))
        return self.sources[rank].stage(resolved, plan, deadline_ns=deadline_ns or soon())

    def take(self, version: WeightVersion | None) -> list[dict[str, Array]]:
        """What each rank holds afterwards, checked against the manifest as an update does."""
        receipts, held = [], []
        for rank, resolved in enumerate(self.resolve(version)):
            staged = self.stage(resolved, rank)
            held.append(_installed(staged, resolved, receipts))
            staged.release()
        manifest = resolved.manifest
        merged = merge(receipts, source="rsync", layout_digest=manifest.layout_digest)
        check_reads(merged, {tensor.name: tensor.checksum for tensor in manifest.tensors})
        return held


def _installed(staged: StagedSource, resolved: ResolvedPublication, receipts: list[RankReceipt]) -> dict[str, Array]:
    homes = {p.name: TensorView(Mapping.private(4096), 0, p.dtype, p.local_shape) for p in staged.plan.parameters}
    sums = transfer_arriving(staged.arrivals(deadline_ns=soon()), resolved.manifest, staged.segments, homes, 1)
    receipts.append(
        RankReceipt(
            staged.plan.rank,
            resolved.manifest.version,
            {name: value.hex() for name, value in sums.read.items()},
            {name: value.hex() for name, value in sums.live.items()},
        )
    )
    return {name: home.numpy().copy() for name, home in homes.items()}


def assert_same(held: list[dict[str, Array]], parts: list[dict[str, Array]]) -> None:
    for mine, part in zip(held, parts, strict=True):
        assert set(mine) == {spec.name for spec in SPECS if spec.coverage is Coverage.UPDATED}
        for name, values in mine.items():
            np.testing.assert_array_equal(values, part[name], err_msg=name)


@pytest.fixture(params=["downloader", "stream"])
def api(request: pytest.FixtureRequest) -> Iterator[str]:
    with fake.installed(request.param):
        yield request.param


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("wire", "model"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def engine(directory: Path, api: str) -> Iterator[Engine]:
    made = Engine(directory, "auto")
    yield made
    made.close()


@pytest.fixture
def wire(directory: Path) -> Path:
    return directory / "wire"


# --- the common suite, on the older interface: the newer one has no word for a step that is not there -------------


class StepTrainer:
    """Has one step at a time, as FastDeploy's trainers do, and says in `version.yaml` which."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def publish(self, state_dict: dict[str, Any], *, step: int, layout: str = "full") -> ResolvedPublication:
        """To one rank, whatever the layout. What comes back was described by another engine."""
        for old in (self._directory / "wire").iterdir():
            old.unlink()
        fake.send(self._directory / "wire", step, [state_dict])
        (self._directory / "model" / "version.yaml").write_text(f"step: {step}\n")
        other = one_rank(self._directory, "other")
        resolved = other.resolve(None, deadline_ns=soon())
        other.close()
        return resolved


def one_rank(directory: Path, channel: str) -> CheckpointTransferSource:
    specs = tuple(
        ParameterSpec(name, borrow(array, name).dtype, array.shape, None) for name, array in weights(0).items()
    )
    options = CheckpointTransferConfig(config={"directory": str(directory / "wire")})
    return CheckpointTransferSource(SourceConfig(directory / channel, directory / "model", parameters=specs), options)


class TestCheckpointTransferSource(SourceSuite):
    OWNS_MEMORY = True

    @pytest.fixture
    def publisher(self, directory: Path) -> Iterator[StepTrainer]:
        with fake.installed("downloader"):
            yield StepTrainer(directory)

    @pytest.fixture
    def source(self, directory: Path, publisher: StepTrainer) -> Iterator[WeightSource]:
        source = one_rank(directory, "channel")
        yield source
        source.close()

    def test_what_was_superseded_before_it_was_staged_is_refused(self, source: WeightSource, publisher: Any) -> None:
        """Unless this rank has it still, from when it described it."""
        first = publisher.publish(weights(1), step=1)
        old = source.resolve(None, deadline_ns=soon())
        publisher.publish(weights(2), step=2)
        staged = self._stage(source, old)
        assert_staged(first.manifest, staged, weights(1))
        staged.release()
        with pytest.raises(NoPublicationError, match="no weights of step 1"):
            self._stage(source, old)


# --- what is received --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_serves_what_it_is_sent(directory: Path, wire: Path, api: str, num_ranks: int) -> None:
    fake.send(wire, 7, sent(1, num_ranks))
    engine = Engine(directory, api, num_ranks)
    assert_same(engine.take(STEP), sent(1, num_ranks))
    engine.close()


def test_one_version_after_the_other_is_taken(engine: Engine, wire: Path) -> None:
    for step in (1, 2, 3):
        fake.send(wire, step, sent(step))
        assert_same(engine.take(WeightVersion(1, step)), sent(step))


def test_all_ranks_find_the_manifest_that_rank_0_made(engine: Engine, wire: Path) -> None:
    fake.send(wire, 7, sent(1))
    first, second = engine.resolve(STEP)
    assert first == second
    assert (first.version, first.manifest.layout, first.manifest.aliases) == (STEP, "tp:2", {"head": "embed"})


def test_the_same_bytes_have_the_same_identity_however_they_come(directory: Path, wire: Path) -> None:
    digests = set()
    for api in ("downloader", "stream"):
        with fake.installed():
            engine = Engine(directory, api)
            fake.send(wire, 7, sent(1))
            digests.add(engine.resolve(STEP)[0].manifest.content_digest)
            engine.close()
    assert len(digests) == 1


def test_rank_0_receives_its_own_part_once(
    engine: Engine, wire: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.send(wire, 7, sent(1))
    received: list[int] = []
    if api == "downloader":
        get_weights = fake.RDMAWeightsDownloader.get_weights
        monkeypatch.setattr(
            fake.RDMAWeightsDownloader,
            "get_weights",
            lambda self, step, rank: received.append(rank) or get_weights(self, step, rank),
        )
    else:
        receive_stream = fake.CheckpointTransfer.receive_stream
        monkeypatch.setattr(
            fake.CheckpointTransfer,
            "receive_stream",
            lambda self, **asked: received.append(self._rank) or receive_stream(self, **asked),
        )
    engine.take(STEP)
    assert received == [1, 0, 1]


def test_a_tied_parameter_that_is_another_one_is_refused(engine: Engine, wire: Path) -> None:
    parts = sent(1)
    parts[1]["head"] = parts[1]["head"] + 1
    fake.send(wire, 7, parts)
    resolved = engine.resolve(STEP)[0]
    assert resolved.manifest.aliases == {}
    with pytest.raises(CoverageError, match="head"):
        make_plan(resolved.manifest, SPECS, 0, 2)


# --- which version -------------------------------------------------------------------------------------


def test_the_version_file_names_the_step(engine: Engine, wire: Path, directory: Path) -> None:
    fake.send(wire, 9, sent(9))
    (directory / "model" / "version.yaml").write_text("step: 9\nversion: 8\n")
    assert engine.resolve(None)[1].version == WeightVersion(1, 9)
    assert_same(engine.take(None), sent(9))


def test_without_a_version_there_is_no_latest(engine: Engine, wire: Path) -> None:
    fake.send(wire, 7, sent(1))
    with pytest.raises(
        NoPublicationError, match=r"cannot tell its latest; name a version \(1\.STEP\), or write .*yaml"
    ):
        engine.resolve(None)


def test_a_step_that_nobody_sent_is_refused(engine: Engine, wire: Path, api: str, directory: Path) -> None:
    with pytest.raises(NoPublicationError if api == "downloader" else PeerLostError, match="step 7"):
        engine.resolve(STEP)
    assert not (directory / "channel").exists()


def test_other_ranks_wait_for_nobody(engine: Engine) -> None:
    with pytest.raises(NoPublicationError, match=r"rank 0 has not described version 1\.7 for 2 ranks"):
        engine.sources[1].resolve(STEP, deadline_ns=soon())


def test_what_was_described_for_another_number_of_ranks_is_not_taken(
    engine: Engine, wire: Path, directory: Path, api: str
) -> None:
    fake.send(wire, 7, sent(1, 4))
    other = Engine(directory, api, 4)
    other.resolve(STEP)
    other.close()
    with pytest.raises(NoPublicationError, match="for 2 ranks"):
        engine.sources[1].resolve(STEP, deadline_ns=soon())


def test_the_same_step_with_other_bytes_is_another_publication(engine: Engine, wire: Path, directory: Path) -> None:
    fake.send(wire, 7, sent(1))
    before = engine.resolve(STEP)[0].manifest
    assert_same(engine.take(STEP), sent(1))
    fake.send(wire, 7, sent(2))
    assert_same(engine.take(STEP), sent(2))
    assert engine.sources[1].resolve(STEP, deadline_ns=soon()).manifest.content_digest != before.content_digest
    assert len(list((directory / "channel" / "checkpoint_transfer").glob("manifest-1.7-*"))) == 1


def test_a_few_manifests_are_kept(engine: Engine, wire: Path, directory: Path) -> None:
    for step in (5, 6, 7, 8, 9, 3):
        fake.send(wire, step, sent(step))
        engine.resolve(WeightVersion(1, step))
    kept = sorted(
        path.name.split("-")[1] for path in (directory / "channel" / "checkpoint_transfer").glob("manifest-*")
    )
    assert kept == ["1.3", "1.7", "1.8", "1.9"]


# --- what does not fit ---------------------------------------------------------------------------------


def _cut_wrong(parts: list[dict[str, Array]]) -> None:
    parts[1]["down"] = np.zeros((8, 4), np.float32)


def _unknown(parts: list[dict[str, Array]]) -> None:
    parts[0]["rotary"] = np.zeros(3, np.float32)


def _missing_on_one(parts: list[dict[str, Array]]) -> None:
    del parts[0]["norm"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut_wrong, r"down: rank 1 of 2 has shape \[8, 4\], which is the whole of it"),
        (_unknown, "rotary: not a tensor of this model"),
        (_missing_on_one, "norm: rank 0 of 2 has none"),
    ],
)
def test_parts_that_do_not_fit_the_model_are_refused_by_name(
    engine: Engine, wire: Path, directory: Path, spoil: Any, said: str
) -> None:
    parts = sent(1)
    spoil(parts)
    fake.send(wire, 7, parts)
    with pytest.raises(CoverageError, match=said):
        engine.resolve(STEP)
    assert not (directory / "channel").exists()


def test_what_is_not_cut_must_be_the_same_for_all_ranks(engine: Engine, wire: Path, directory: Path) -> None:
    parts = sent(1)
    parts[1]["norm"] = parts[1]["norm"] + 1
    fake.send(wire, 7, parts)
    with pytest.raises(TrainerError, match="'norm' is not cut, and rank 1 is sent other values than rank 0"):
        engine.resolve(STEP)
    assert not (directory / "channel").exists()


def test_a_rank_that_is_sent_something_else_later_does_not_pass(engine: Engine, wire: Path) -> None:
    """Between rank 0's look and rank 1's the trainer sends another version under the same step."""
    fake.send(wire, 7, sent(1))
    resolved = engine.resolve(STEP)
    fake.send(wire, 7, sent(2))
    receipts: list[RankReceipt] = []
    for rank in range(2):
        staged = engine.stage(resolved[rank], rank)
        _installed(staged, resolved[rank], receipts)
        staged.release()
    merged = merge(receipts, source="rsync", layout_digest=resolved[0].manifest.layout_digest)
    with pytest.raises(TrainerError, match="down"):
        check_reads(merged, {tensor.name: tensor.checksum for tensor in resolved[0].manifest.tensors})


@pytest.mark.parametrize("change", ["missing", "shape", "dtype", "new"])
def test_a_rank_that_is_sent_other_tensors_later_says_so(engine: Engine, wire: Path, change: str) -> None:
    fake.send(wire, 7, sent(1))
    resolved = engine.resolve(STEP)[1]
    parts = sent(1)
    if change == "missing":
        del parts[1]["down"]
    else:
        name = "surplus" if change == "new" else "down"
        parts[1][name] = np.zeros(
            (3, 4) if change == "shape" else (4, 4), np.float16 if change == "dtype" else np.float32
        )
    fake.send(wire, 7, parts)
    staged = engine.stage(resolved, 1)
    with pytest.raises(TrainerError, match=r"rank 1 was (not )?sent '?(down|surplus)"):
        list(staged.arrivals(deadline_ns=soon()))
    staged.release()
    fake.send(wire, 7, sent(1))
    assert_same(engine.take(STEP), sent(1))


def test_bytes_that_are_no_state_dict_are_not_executed(directory: Path, wire: Path) -> None:
    (wire / "7.0.pdparams").write_bytes(b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with fake.installed("downloader"):
        engine = Engine(directory, "auto", 1)
        with pytest.raises(CheckpointError, match=r"'os'\.'system' has no place in a state dict; nothing was executed"):
            engine.resolve(STEP)
        engine.close()


# --- the package ---------------------------------------------------------------------------------------


def test_without_the_package_the_configuration_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint_transfer needs the package of that name"):
        Engine(directory, "auto")


@pytest.mark.parametrize(("has", "asked"), [("stream", "downloader"), ("downloader", "stream")])
def test_an_interface_that_the_package_lacks_is_refused(directory: Path, wire: Path, has: Any, asked: str) -> None:
    fake.send(wire, 7, sent(1))
    with fake.installed(has):
        engine = Engine(directory, asked)
        with pytest.raises(ConfigurationError, match=f"has no interface '{asked}'"):
            engine.resolve(STEP)
        engine.close()


def test_what_the_package_raises_is_told_and_its_client_not_used_again(
    engine: Engine, wire: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.send(wire, 7, sent(1))
    broken: list[object] = []

    def fail(self: object) -> None:
        broken.append(self)
        raise OSError("no such HCA")

    with monkeypatch.context() as patch:
        for client in (fake.RDMAWeightsDownloader, fake.CheckpointTransfer):
            patch.setattr(client, "initialize", fail)
        with pytest.raises(PeerLostError, match="checkpoint_transfer failed: OSError: no such HCA"):
            engine.resolve(STEP)
    assert len(broken) == 1
    assert_same(engine.take(STEP), sent(1))


def test_a_package_that_hangs_is_given_up_at_the_deadline_and_writes_nowhere(
    engine: Engine, wire: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.send(wire, 7, sent(1))
    resolved = engine.resolve(STEP)[1]
    let_go = threading.Event()
    hung: list[threading.Thread] = []

    def hang(self: Any) -> None:
        hung.append(threading.current_thread())
        let_go.wait(60)
        self._is_initialized = True

    with monkeypatch.context() as patch:
        for client in (fake.RDMAWeightsDownloader, fake.CheckpointTransfer):
            patch.setattr(client, "initialize", hang)
        staged = engine.stage(resolved, 1, soon(0.2))
        with pytest.raises(DeadlineExceededError, match="checkpoint_transfer does not answer"):
            list(staged.arrivals(deadline_ns=soon(0.2)))
        arena = staged.segments[0]
        staged.release()
    before = bytes(arena)
    let_go.set()
    hung[0].join(20)
    assert bytes(arena) == before
    assert_same(engine.take(STEP), sent(1))


def test_rank_0_gives_up_describing_at_the_deadline(
    engine: Engine, wire: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.send(wire, 7, sent(1))
    let_go = threading.Event()
    hung: list[threading.Thread] = []

    def hang(self: object) -> None:
        hung.append(threading.current_thread())
        let_go.wait(60)

    with monkeypatch.context() as patch:
        for client in (fake.RDMAWeightsDownloader, fake.CheckpointTransfer):
            patch.setattr(client, "initialize", hang)
        with pytest.raises(DeadlineExceededError, match="step 7 from checkpoint_transfer"):
            engine.sources[0].resolve(STEP, deadline_ns=soon(0.2))
    let_go.set()
    hung[0].join(20)
    assert not (directory / "channel").exists()


def test_a_version_that_is_released_early_is_not_received_to_its_end(engine: Engine, wire: Path) -> None:
    fake.send(wire, 7, sent(1))
    resolved = engine.resolve(STEP)
    staged = engine.stage(resolved[1], 1)
    staged.release()
    for thread in threading.enumerate():
        if thread.name.startswith("receive "):
            thread.join(20)
    assert_same(engine.take(STEP), sent(1))


def test_tensors_on_a_gpu_are_brought_to_the_host(directory: Path, wire: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        def __init__(self, array: Array) -> None:
            self._array = array

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def cpu(self) -> Array:
            return self._array

    def receive_stream(self: Any, **asked: Any) -> Iterator[tuple[str, OnGpu]]:
        return ((name, OnGpu(array)) for name, array in sent(1)[self._rank].items())

    monkeypatch.setattr(fake.CheckpointTransfer, "receive_stream", receive_stream)
    with fake.installed("stream"):
        engine = Engine(directory, "stream")
        assert_same(engine.take(STEP), sent(1))
        engine.close()


def test_a_client_is_used_again_but_by_one_version_at_a_time(
    directory: Path, wire: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    initialize = fake.CheckpointTransfer.initialize
    monkeypatch.setattr(fake.CheckpointTransfer, "initialize", lambda self: made.append(self._rank) or initialize(self))
    with fake.installed("stream"):
        engine = Engine(directory, "stream")
        for step in (1, 2):
            fake.send(wire, step, sent(step))
            engine.take(WeightVersion(1, step))
        assert made == [1, 0, 1, 1]  # rank 0 describes with a client of its own for rank 1, each time
        staged = [engine.stage(engine.resolve(WeightVersion(1, step))[1], 1) for step in (1, 2)]
        for step, each in zip((1, 2), staged, strict=True):
            held = _installed(each, engine.resolve(WeightVersion(1, step))[1], [])
            np.testing.assert_array_equal(held["down"], sent(step)[1]["down"])
        for each in staged:
            each.release()
        engine.close()


def test_trimming_lets_go_of_what_rank_0_received(engine: Engine, wire: Path) -> None:
    fake.send(wire, 7, sent(1))
    resolved = engine.resolve(STEP)
    for source in engine.sources:
        source.trim()
    staged = engine.stage(resolved[0], 0)
    receipts: list[RankReceipt] = []
    held = _installed(staged, resolved[0], receipts)
    np.testing.assert_array_equal(held["down"], sent(1)[0]["down"])
    staged.release()
