"""One story for every load strategy: a user changes one flag, and every byte, receipt and refusal stays what it was."""

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.config import Deadlines
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import CoverageError, NoPublicationError
from fastdeploy_rl.plan.conventions import TensorRule
from fastdeploy_rl.publish.publisher import Published
from fastdeploy_rl.receipt import Receipt
from fastdeploy_rl.report import UpdateReport
from fastdeploy_rl.sources import registry
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_layout_matrix import Matrix, add_fused, add_plain, add_transposed, add_vocabulary
from tests.process.test_rank_death import await_recovery, check_whole, kill
from tests.process.test_update_numpy import MODEL, as_the_engine
from tests.process.trainer import Trainer

Weights = dict[str, np.ndarray]
STRATEGIES = registry.load_strategies()
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


def publish(trainer: Trainer, weights: Weights, step: int, layout: str = "full") -> Published:
    return trainer.publish(weights, step=step, layout=layout, convention=as_the_engine)


# --- every byte, in every layout


def some_of_everything() -> Matrix:
    """Whole tensors, slices, turned, fused and padded ones; of one, two and four bytes an element."""
    matrix = Matrix()
    for dtype in ("F32", "BF16", "U8"):
        for add in (add_plain, add_transposed, add_fused, add_vocabulary):
            add(matrix, dtype)
    return matrix


MATRIX = some_of_everything()


def publish_matrix(trainer: Trainer, weights: Weights, step: int, layout: str) -> Published:
    tensors = MATRIX.tensors(weights, is_reversed=step % 2 == 0)
    return trainer.publish(tensors, step=step, layout=layout, convention=lambda name, shape: MATRIX.rules[name])


@each_strategy
@pytest.mark.parametrize(("apply_mode", "num_ranks"), [("auto", 3), ("alias", 2), ("copy", 2)])
def test_every_layout_there_and_back(channel: Path, strategy: str, apply_mode: str, num_ranks: int):
    a, b = random_weights(MATRIX.model, 1), random_weights(MATRIX.model, 2)
    with (
        NumpyEngine(
            MATRIX.model,
            channel=channel,
            num_ranks=num_ranks,
            apply_mode=apply_mode,
            load_strategy=strategy,
            update_s=20.0,
        ) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        order = [("full", a), ("full", b), (f"tp:{num_ranks}", a), (f"tp:{num_ranks}", b), ("full", a)]
        for step, (layout, weights) in enumerate(order, 1):
            published = publish_matrix(trainer, weights, step, layout)
            report = client.update()
            assert (report.outcome, report.version) == ("done", str(published.version))
            check_every_byte(engine, weights, report, published)
        assert client.receipt(recompute=True) == report.receipt


def check_every_byte(engine: NumpyEngine, weights: Weights, report: UpdateReport, published: Published) -> None:
    for rank in range(engine.num_ranks):
        found, expected = engine.dump(rank), engine.expected(weights, rank)
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []
    stored = {name: of_bytes(array.tobytes()).hex() for name, array in MATRIX.arrays(weights).items()}
    assert report.receipt.read == stored
    assert report.receipt.content_digest == published.manifest.content_digest


def test_equal_weights_have_one_receipt_whichever_way_they_came(tmp_path: Path):
    """Nothing in it but the name of the way is of the way."""
    weights = random_weights(MODEL, 1)
    receipts: dict[str, Receipt] = {}
    for strategy in STRATEGIES:
        channel = tmp_path / strategy
        with (
            NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy=strategy) as engine,
            Trainer(strategy, channel) as trainer,
            BoardClient(engine.port) as client,
        ):
            published = publish(trainer, weights, 1)
            receipts[strategy] = client.update().receipt
            assert receipts[strategy].content_digest == published.manifest.content_digest
            assert receipts[strategy].source == strategy
            assert engine.holds(weights)
    first = receipts["ipc"]
    assert {(r.version, r.content_digest, *r.read.items()) for r in receipts.values()} == {
        (first.version, first.content_digest, *first.read.items())
    }
    assert all(receipt.live == first.live for receipt in receipts.values())


# --- what is refused, and who comes back


@each_strategy
def test_a_broken_publication_is_refused_and_nothing_changes(channel: Path, strategy: str):
    good = random_weights(MODEL, 5)
    broken = {name: value for name, value in random_weights(MODEL, 6).items() if name != "norm"}
    with (
        NumpyEngine(MODEL, channel=channel, load_strategy=strategy) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        publish(trainer, good, 1)
        client.update()
        before = client.receipt()
        publish(trainer, broken, 2)
        with pytest.raises(CoverageError, match="norm"):
            client.update()
        assert engine.holds(good)
        assert client.receipt() == before == client.receipt(recompute=True)
        assert client.status().legacy_status == "NORMAL"
        publish(trainer, random_weights(MODEL, 7), 3)
        client.update()
        assert engine.holds(random_weights(MODEL, 7))


@each_strategy
def test_nothing_published_is_an_error_that_says_so(channel: Path, strategy: str):
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=1, load_strategy=strategy) as engine,
        Trainer(strategy, channel),
        BoardClient(engine.port) as client,
    ):
        with pytest.raises(NoPublicationError, match="nothing is published"):
            client.update()
        assert engine.holds(random_weights(MODEL, 0))


@each_strategy
@pytest.mark.parametrize("apply_mode", ["auto", "copy"])
def test_cleared_and_brought_back_any_number_of_times(channel: Path, strategy: str, apply_mode: str):
    weights = random_weights(MODEL, 8)
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy=strategy, apply_mode=apply_mode) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        publish(trainer, weights, 1)
        for _ in range(3):
            client.clear()
            assert engine.tokens() == [None, None]
            client.update()
            assert engine.holds(weights)


@each_strategy
def test_a_rank_that_died_comes_back_to_what_was_committed(channel: Path, strategy: str):
    """Also where a newer version can be had meanwhile."""
    with (
        NumpyEngine(
            MODEL,
            channel=channel,
            load_strategy=strategy,
            is_restarted_on_death=True,
            deadlines=Deadlines(update_s=5.0, attach_s=20.0, rejoin_s=20.0, finish_s=0.3),
        ) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        publish(trainer, random_weights(MODEL, 1), 1)
        client.update()
        publish(trainer, random_weights(MODEL, 2), 2)
        kill(engine, 1)
        await_recovery(engine, client, 1)
        check_whole(engine, client, random_weights(MODEL, 1), "1.1")
        client.update()
        check_whole(engine, client, random_weights(MODEL, 2), "1.2")


# --- who moves how much

HALVES = NumpyModel((ParameterSpec("rows", "F32", (512, 64), 0), ParameterSpec("columns", "F32", (64, 512), 1)))
HALVES_BYTES = 2 * 512 * 64 * 4


@each_strategy
@pytest.mark.parametrize("layout", ["full", "tp:2"])
def test_each_of_two_ranks_moves_half_of_the_bytes(channel: Path, strategy: str, layout: str):
    weights = random_weights(HALVES, 1)
    with (
        NumpyEngine(HALVES, channel=channel, num_ranks=2, load_strategy=strategy) as engine,
        Trainer(strategy, channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        axes = {spec.name: spec.shard_axis for spec in HALVES.specs}
        trainer.publish(weights, step=1, layout=layout, convention=lambda name, shape: TensorRule(name, axes[name]))
        report = client.update()
        assert engine.holds(weights)
        assert [moved(report, rank) for rank in (0, 1)] == [HALVES_BYTES // 2] * 2
        if trainer.server is not None:
            assert trainer.server.num_payload_bytes == HALVES_BYTES


def moved(report: UpdateReport, rank: int) -> int:
    return next(step.num_bytes for step in report.ranks[rank].steps if step.step == "stage")


@pytest.mark.parametrize(("bucket_bytes", "num_streams"), [(1, 3), (4096, 1), (1 << 30, 2)])
def test_the_result_does_not_depend_on_how_the_bytes_were_cut(channel: Path, bucket_bytes: int, num_streams: int):
    """A byte a bucket, tensors larger than a bucket, everything in one."""
    weights = random_weights(MODEL, 1)
    config = {"bucket_bytes": bucket_bytes, "num_streams": num_streams}
    with (
        NumpyEngine(MODEL, channel=channel, num_ranks=2, load_strategy="rsync", rsync_config=config) as engine,
        Trainer("rsync", channel) as trainer,
        BoardClient(engine.port) as client,
    ):
        published = publish(trainer, weights, 1)
        report = client.update(deadline_s=30)
        assert engine.holds(weights)
        assert report.receipt.content_digest == published.manifest.content_digest
        assert report.receipt.read == {name: of_bytes(value.tobytes()).hex() for name, value in weights.items()}
