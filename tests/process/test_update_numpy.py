"""Updates over `ipc` on real worker processes of the numpy engine: what is taken over, what is refused, what stays."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import ChecksumMismatchError, CoverageError, NoPublicationError, VersionRegressError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine

SPECS = (
    ParameterSpec("embed", "F32", (12, 5), 0),
    ParameterSpec("norm", "F32", (5,), None),
    ParameterSpec("layers.0.up", "F32", (5, 18), 1),
    ParameterSpec("layers.0.down", "F32", (18, 5), 0),
    ParameterSpec("scale", "F32", (), None),
    ParameterSpec("empty", "F32", (0, 4), None),
    ParameterSpec("head", "F32", (12, 5), 0, Coverage.TIED, "embed"),
)
MODEL = NumpyModel(SPECS)
AXES = {spec.name: spec.shard_axis for spec in SPECS}


def publish(publisher: WeightPublisher, weights: dict[str, np.ndarray], step: int, layout: str = "full"):
    return publisher.publish(weights, step=step, layout=layout, convention=as_the_engine)


def as_the_engine(name: str, shape: tuple[int, ...]) -> TensorRule:
    """The trainer has every tensor as the engine does."""
    return TensorRule(name, AXES.get(name))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
@pytest.mark.parametrize("layout", ["full", "tp"])
def test_a_to_b_to_a_is_bitwise_on_every_rank(tmp_path: Path, num_ranks: int, apply_mode: str, layout: str):
    """Whatever mode and layout: after each update every live byte is the published one, and receipts say so."""
    layout = f"tp:{num_ranks}" if layout == "tp" else "full"
    a, b = random_weights(MODEL, 1), random_weights(MODEL, 2)
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=num_ranks, apply_mode=apply_mode) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        cold = engine.tokens()
        seen = []
        for step, weights in enumerate([a, b, a], 1):
            published = publish(publisher, weights, step, layout)
            report = client.update(published.version)
            assert report.outcome == "done"
            assert engine.holds(weights)
            assert report.receipt.content_digest == published.manifest.content_digest
            assert report.receipt == client.receipt() == client.receipt(recompute=True)
            assert client.status().version == str(published.version)
            seen.append(engine.tokens())
        assert seen[0] == seen[2]
        assert cold != seen[0] != seen[1]


def test_receipt_sums_are_the_published_checksums(tmp_path: Path):
    """`read` summed over ranks is the checksum of the whole tensor; `live` is that of each rank's slice."""
    weights = random_weights(MODEL, 3)
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        published = publish(publisher, weights, 1)
        receipt = client.update().receipt
        assert receipt.read == {tensor.name: tensor.checksum for tensor in published.manifest.tensors}
        assert receipt.read == {name: of_bytes(value.tobytes()).hex() for name, value in weights.items()}
        for rank in range(3):
            live = {name: of_bytes(data).hex() for name, data in engine.expected(weights, rank).items()}
            assert {name: sums[rank] for name, sums in receipt.live.items()} == live


def test_bf16_into_a_float32_engine_is_exact(tmp_path: Path):
    """Published BF16 arrives as the same numbers in F32, and says why it was not aliased."""
    halves = {name: top_halves(value) for name, value in random_weights(MODEL, 4).items()}
    wide = {name: widened(bits) for name, bits in halves.items()}
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, {name: as_bf16(value) for name, value in halves.items()}, 1)
        report = client.update()
        assert engine.holds(wide)
        assert report.ranks[0].not_aliased["norm"] == "dtype BF16 -> F32"


def top_halves(value: np.ndarray) -> np.ndarray:
    """The BF16 bits that a float32 array begins with."""
    return (value.reshape(-1).view(np.uint32) >> 16).astype(np.uint16).reshape(value.shape)


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers that BF16 bits stand for."""
    return (bits.reshape(-1).astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def as_bf16(bits: np.ndarray) -> "paddle.Tensor":
    if not bits.size:
        return paddle.zeros(bits.shape, "bfloat16")
    return paddle.to_tensor(bits.reshape(-1).view(np.int16)).view("bfloat16").reshape(bits.shape)


def test_a_broken_publication_is_refused_and_nothing_changes(tmp_path: Path):
    """The message names the missing and the wrongly shaped tensor; every byte and the version stay."""
    good = random_weights(MODEL, 5)
    broken = {name: value for name, value in random_weights(MODEL, 6).items() if name != "norm"}
    broken["layers.0.up"] = np.zeros((5, 21), np.float32)
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, good, 1)
        client.update()
        before = client.status(), client.receipt()
        publish(publisher, broken, 2)
        with pytest.raises(CoverageError, match=r"(?s)norm.*layers\.0\.up|layers\.0\.up.*norm"):
            client.update()
        assert engine.holds(good)
        assert client.status().version == before[0].version
        assert client.receipt() == before[1] == client.receipt(recompute=True)
        assert client.status().legacy_status == "NORMAL"
        publish(publisher, random_weights(MODEL, 7), 3)
        client.update()
        assert engine.holds(random_weights(MODEL, 7))


def test_nothing_published_is_an_error_that_says_so(tmp_path: Path):
    with NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=1) as engine, BoardClient(engine.port) as client:
        with pytest.raises(NoPublicationError):
            client.update()
        assert engine.holds(random_weights(MODEL, 0))


def test_a_version_that_goes_back_is_refused_unless_forced(tmp_path: Path):
    """The publisher's channel is recreated from scratch, so its epochs start over below the engine's version."""
    weights = random_weights(MODEL, 8)
    channel = tmp_path / "channel"
    with NumpyEngine(MODEL, channel=channel, num_ranks=1) as engine, BoardClient(engine.port) as client:
        with WeightPublisher(channel) as publisher:
            publish(publisher, random_weights(MODEL, 9), 7)
            client.update()
        (channel / "EPOCH").write_text("0\n")
        with WeightPublisher(channel) as publisher:
            older = publish(publisher, weights, 3)
            with pytest.raises(VersionRegressError, match=r"1\.3 would go back from 1\.7"):
                client.update(older.version)
            assert engine.holds(random_weights(MODEL, 9))
            client.update(older.version, force=True)
            assert engine.holds(weights)


def test_clear_frees_and_update_brings_back(tmp_path: Path):
    """Cleared: no weights, no KV cache, the word says so; an update serves again; a second clear is no error."""
    weights = random_weights(MODEL, 10)
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel") as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        publish(publisher, weights, 1)
        for _ in range(3):
            assert client.clear().outcome == "done"
            status = client.status()
            assert (status.legacy_status, status.is_serving) == ("CLEARED", False)
            assert engine.tokens() == [None, None, None]
            assert client.clear().outcome == "done"
            assert client.update().outcome == "done"
            assert client.status().legacy_status == "NORMAL"
            assert engine.holds(weights)


def test_a_rejected_update_of_a_cleared_engine_stays_cleared(tmp_path: Path):
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        client.clear()
        publish(publisher, {"norm": np.zeros(5, np.float32)}, 1)
        with pytest.raises(CoverageError):
            client.update()
        assert client.status().legacy_status == "CLEARED"
        assert engine.tokens() == [None, None]


def test_an_engine_without_weights_starts_cleared(tmp_path: Path):
    """No cold start: it says so until the first update brings weights."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", num_ranks=2, seed=-1) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        assert (client.status().legacy_status, client.status().is_serving) == ("CLEARED", False)
        publish(publisher, random_weights(MODEL, 12), 1)
        client.update()
        assert engine.holds(random_weights(MODEL, 12))
        assert client.status().is_serving


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_a_flipped_byte_of_a_live_parameter_is_named(tmp_path: Path, apply_mode: str):
    """A second process writes into rank 1's memory; `receipt
    --recompute` names the tensor and the rank, others are silent."""
    with (
        NumpyEngine(MODEL, channel=tmp_path / "channel", apply_mode=apply_mode) as engine,
        WeightPublisher(tmp_path / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        published = publish(publisher, random_weights(MODEL, 11), 1, "tp:3")
        client.update()
        if apply_mode == "alias":
            flip(*place_of(published.manifest, "layers.0.up", 1))
        else:
            flip(f"/proc/{engine.workers[1].pid}/mem", engine.ask(1, "address layers.0.up"))
        with pytest.raises(ChecksumMismatchError, match=r"1 live tensors .*layers\.0\.up on rank 1$"):
            client.receipt(recompute=True)


def flip(path: str, offset: int) -> None:
    """Turns one bit around, as a foreign process would: what is read-only in the engine is not so everywhere."""
    with open(path, "r+b", buffering=0) as memory:
        memory.seek(offset)
        byte = memory.read(1)
        memory.seek(offset)
        memory.write(bytes([byte[0] ^ 1]))


def place_of(manifest: Manifest, name: str, rank: int) -> tuple[str, int]:
    part = next(tensor for tensor in manifest.tensors if tensor.name == name).parts[rank]
    return f"/dev/shm/{manifest.segments[part.segment].locator}", part.offset


def test_two_engines_of_one_channel_stand_on_different_versions(tmp_path: Path):
    """Each keeps every byte of its own version while the other goes on, also when the slower one's is two behind."""
    channel = tmp_path / "channel"
    versions = [random_weights(MODEL, seed) for seed in range(4)]
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, apply_mode="alias") as slow,
        NumpyEngine(MODEL, channel=channel, num_ranks=1, apply_mode="alias") as quick,
        WeightPublisher(channel) as publisher,
        BoardClient(slow.port) as slow_client,
        BoardClient(quick.port) as quick_client,
    ):
        publish(publisher, versions[1], 1)
        slow_client.update()
        for step in (2, 3):
            publish(publisher, versions[step], step)
            assert quick_client.update().version == f"1.{step}"
            assert quick.holds(versions[step])
            assert slow.holds(versions[1])
        assert slow_client.receipt(recompute=True).version == "1.1"
        assert slow_client.update().version == "1.3"
        assert slow.holds(versions[3])
        assert quick.holds(versions[3])
