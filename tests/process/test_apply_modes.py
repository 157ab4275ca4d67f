"""Apply modes: what aliases, what is copied and why, what is refused, and what a rank still holds afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.cli.reports import print_report
from fastdeploy_rl.config import APPLY_MODES
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel, random_weights
from fastdeploy_rl.errors import ConfigurationError, DeadlineExceededError, NotAliasableError
from fastdeploy_rl.manager import ManagerConfig
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import NOT_ASKED, ResolvedPublication, SourceConfig, StagedSource
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_missed_and_fenced import wait_until
from tests.process.test_update_numpy import MODEL, publish
from tests.process.threaded_engine import ThreadedEngine
from tests.process.trainer import Trainer


@contextmanager
def rig(
    place: Path, apply_mode: str, num_ranks: int = 1, max_arenas: int = 3
) -> Iterator[tuple[NumpyEngine, WeightPublisher, BoardClient]]:
    with (
        NumpyEngine(MODEL, channel=place / "channel", num_ranks=num_ranks, apply_mode=apply_mode) as engine,
        WeightPublisher(place / "channel", max_arenas=max_arenas) as publisher,
        BoardClient(engine.port) as client,
    ):
        yield engine, publisher, client


def test_alias_strict_refuses_what_it_would_copy_and_names_it(tmp_path: Path):
    """Column slices cannot alias: refused before anything is leased; cut for the ranks it is taken, and all aliased."""
    with rig(tmp_path, "alias-strict", 3) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1, "tp:3")
        assert client.update().outcome == "done"
        before = client.receipt()
        publish(publisher, random_weights(MODEL, 2), 2)
        with pytest.raises(
            NotAliasableError,
            match=r"rank \d, version 1\.2: 1 of 6 parameters .*layers\.0\.up \(.*contiguous.*\).*--apply-mode alias",
        ):
            client.update()
        assert engine.holds(random_weights(MODEL, 1))
        assert client.receipt(recompute=True) == before
        assert client.status().version == "1.1"
        published = publish(publisher, random_weights(MODEL, 3), 3, "tp:3")
        report = client.update(published.version)
        assert engine.holds(random_weights(MODEL, 3))
        assert (report.copied_bytes, report.not_aliased, report.apply_mode) == (0, {}, "alias-strict")


def test_every_parameter_that_was_copied_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """auto: the rest is aliased; the report has a reason for each, its outline counts them."""
    weights = random_weights(MODEL, 4)
    halved = weights | {"norm": np.arange(5, dtype=np.float16), "scale": np.array(1.5, np.float16)}
    expected = halved | {name: halved[name].astype(np.float32) for name in ("norm", "scale")}
    with rig(tmp_path, "auto", 3) as (engine, publisher, client):
        publish(publisher, halved, 1)
        report = client.update()
        assert engine.holds(expected)
        for rank in report.ranks:
            assert set(rank.not_aliased) == {"norm", "scale", "layers.0.up"}
        assert list(report.not_aliased.values()) == [["norm", "scale"], ["layers.0.up"]]
        assert "F16 -> F32" in next(iter(report.not_aliased))
        sizes = {name: value.nbytes for name, value in expected.items()}
        assert report.copied_bytes == sizes["layers.0.up"] + 3 * (sizes["norm"] + sizes["scale"])
        assert report.aliased_bytes == sizes["embed"] + sizes["layers.0.down"]
        print_report(report, as_json=False)
        shown = capsys.readouterr().out
        assert "2 x dtype F16 -> F32 (norm, scale); 1 x " in shown
        (entry,) = client.history(1)
        assert sorted(entry.not_aliased.values()) == [1, 2]


class ChangingSource(IpcSource):
    """Memory that is reused: it must not be aliased."""

    def stage(self, resolved: ResolvedPublication, plan: object, *, deadline_ns: int) -> StagedSource:
        staged = super().stage(resolved, plan, deadline_ns=deadline_ns)
        staged.is_immutable = False
        return staged


@pytest.mark.parametrize("apply_mode", ["alias", "alias-strict"])
def test_memory_that_may_change_is_not_aliased_and_no_lease_stays(tmp_path: Path, apply_mode: str):
    source = ChangingSource(SourceConfig(tmp_path / "channel"))
    with (
        ThreadedEngine(MODEL, [source], apply_mode) as engine,
        WeightPublisher(tmp_path / "channel", max_arenas=2) as publisher,
        BoardClient(engine.port) as client,
    ):
        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step)
            with pytest.raises(ConfigurationError, match=f"apply mode {apply_mode} needs a source whose memory stays"):
                client.update()
            assert engine.holds(random_weights(MODEL, 0))


def test_auto_copies_memory_that_may_change_and_says_so(tmp_path: Path):
    source = ChangingSource(SourceConfig(tmp_path / "channel"))
    with (
        ThreadedEngine(MODEL, [source], "auto") as engine,
        WeightPublisher(tmp_path / "channel", max_arenas=2) as publisher,
        BoardClient(engine.port) as client,
    ):
        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step)
            report = client.update()
            assert engine.holds(random_weights(MODEL, step))
            assert list(report.not_aliased) == ["the source's memory does not stay as it is"]
            assert report.aliased_bytes == 0


def published_segments(engine: NumpyEngine) -> set[str]:
    """Names of published memory that rank 0 has mapped."""
    lines = Path(f"/proc/{engine.workers[0].pid}/maps").read_text().splitlines()
    paths = (line.partition("/dev/shm/")[2] for line in lines)
    return {path for path in paths if path and "board" not in path and "status" not in path and "_test" not in path}


def test_copies_hold_neither_lease_nor_mapping_of_what_was_published(tmp_path: Path):
    """Two arenas are enough although the engine never takes the later versions: nothing is leased. The same publisher
    must wait for an engine that aliases."""
    with rig(tmp_path, "copy", max_arenas=2) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        for step in (2, 3, 4, 5):
            publish(publisher, random_weights(MODEL, step), step, "full")
        wait_until(lambda: published_segments(engine) == set())
        assert engine.holds(random_weights(MODEL, 1))
        client.update()
        assert engine.holds(random_weights(MODEL, 5))


@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
def test_parameters_without_bytes_lie_in_no_memory_that_is_let_go(tmp_path: Path, shape: tuple[int, int]):
    """Column slices are copied, so that nothing holds the lease: an empty parameter that could alias goes with them."""
    model = NumpyModel((ParameterSpec("empty", "F32", (0, 4), None), ParameterSpec("columns", "F32", shape, 1)))
    with (
        NumpyEngine(model, channel=tmp_path, num_ranks=2, apply_mode="alias") as engine,
        WeightPublisher(tmp_path) as publisher,
        BoardClient(engine.port) as client,
    ):
        for seed in (1, 2, 3):
            weights = random_weights(model, seed)
            published = publish(publisher, weights, seed)
            report = client.update(published.version)
            assert "empty" not in {name for names in report.not_aliased.values() for name in names}
            assert engine.holds(weights)
            assert None not in engine.tokens()
        assert client.receipt(recompute=True).content_digest == published.manifest.content_digest


def test_aliases_keep_their_lease_until_the_next_commit(tmp_path: Path):
    with rig(tmp_path, "alias", max_arenas=2) as (engine, publisher, client):
        publish(publisher, random_weights(MODEL, 1), 1)
        client.update()
        assert published_segments(engine) != set()
        publish(publisher, random_weights(MODEL, 2), 2)
        with pytest.raises(DeadlineExceededError, match=f"pid {engine.workers[0].pid}"):
            publisher.publish({"norm": random_weights(MODEL, 3)["norm"]}, step=3, deadline_s=0.05)
        assert engine.holds(random_weights(MODEL, 1))
        client.update()
        publish(publisher, random_weights(MODEL, 4), 4)
        assert engine.holds(random_weights(MODEL, 2))


def lend(publisher: WeightPublisher, step: int, seed: int):
    memory = publisher.allocate({name: ("F32", value.shape) for name, value in random_weights(FLAT, seed).items()})
    fill(memory, seed)
    return memory, publisher.publish(memory, step=step, borrow=True)


def fill(memory: dict[str, np.ndarray], seed: int) -> None:
    for name, value in random_weights(FLAT, seed).items():
        memory[name][...] = value


FLAT = NumpyModel((ParameterSpec("up", "F32", (16, 24), None), ParameterSpec("norm", "F32", (128,), None)))


@contextmanager
def lending(place: Path, apply_mode: str) -> Iterator[tuple[NumpyEngine, WeightPublisher, BoardClient]]:
    with (
        NumpyEngine(FLAT, channel=place / "channel", num_ranks=1, apply_mode=apply_mode) as engine,
        WeightPublisher(place / "channel") as publisher,
        BoardClient(engine.port) as client,
    ):
        yield engine, publisher, client


def test_borrowed_memory_is_the_trainers_again_right_after_it_was_copied(tmp_path: Path):
    """It overwrites its tensors while the engine serves on; no byte of that is ever live before the next update."""
    with lending(tmp_path, "copy") as (engine, publisher, client):
        memory, published = lend(publisher, 1, 1)
        for step in (1, 2, 3):
            client.update(published.version)
            published.wait_released(10)
            fill(memory, step + 1)
            assert engine.holds(random_weights(FLAT, step))
            published = publisher.publish(memory, step=step + 1, borrow=True)


def test_borrowed_memory_that_is_aliased_stays_leased_until_clear(tmp_path: Path):
    with lending(tmp_path, "alias") as (engine, publisher, client):
        memory, published = lend(publisher, 1, 1)
        client.update(published.version)
        with pytest.raises(DeadlineExceededError, match=f"pid {engine.workers[0].pid}"):
            published.wait_released(0.05)
        assert engine.holds(random_weights(FLAT, 1))
        client.clear()
        published.wait_released(10)
        fill(memory, 2)
        publisher.publish(memory, step=2, borrow=True)
        client.update()
        assert engine.holds(random_weights(FLAT, 2))


@pytest.mark.parametrize("mode", ["", "fast", "ALIAS", "alias_strict", None])
def test_an_unknown_apply_mode_is_refused_with_the_known_ones(mode: str):
    with pytest.raises(ConfigurationError, match="apply mode must be one of auto, alias, alias-strict, copy"):
        ManagerConfig("ipc", mode)
    assert all(ManagerConfig("ipc", known).apply_mode == known for known in APPLY_MODES)


@pytest.mark.parametrize(("apply_mode", "aliased"), [("auto", False), ("alias", True)])
def test_files_are_used_in_place_only_where_that_is_asked_for(tmp_path: Path, apply_mode: str, aliased: bool):
    """Whoever cuts a mapped file ends the engine that lies in it; the report says why `auto` copied."""
    with (
        Trainer("ipc_snapshot", tmp_path / "channel") as trainer,
        NumpyEngine(
            MODEL,
            channel=tmp_path / "channel",
            num_ranks=1,
            apply_mode=apply_mode,
            load_strategy="ipc_snapshot",
        ) as engine,
        BoardClient(engine.port) as client,
    ):
        publish(trainer, random_weights(MODEL, 1), 1)
        report = client.update()
        assert engine.holds(random_weights(MODEL, 1))
        assert (report.copied_bytes == 0) == aliased
        assert (report.aliased_bytes > 0) == aliased
        assert list(report.not_aliased) == ([] if aliased else [NOT_ASKED])
