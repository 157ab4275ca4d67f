"""`serve` by files and over the wire: it comes up on the newest version by itself, and dead ranks come back to it."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from served_engine import Model, ServedEngine

from tests.process.trainer import Trainer

NUM_RANKS = 2
PROMPT, NUM_TOKENS = [1, 2, 3], 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model, Model]:
    place = tmp_path_factory.mktemp("models")
    a, b, c = (Model.write(place / name, seed=seed, is_tied=True) for seed, name in enumerate("abc"))
    return a, b, c


@contextmanager
def served(model: Model, place: Path, strategy: str, *options: str) -> Iterator[tuple[ServedEngine, dict[str, object]]]:
    options = ("--load-strategy", strategy, *options)
    with ServedEngine(model, place, num_ranks=NUM_RANKS, options=options) as engine:
        yield engine, engine.await_ready()


def check(engine: ServedEngine, model: Model, version: str) -> None:
    assert engine.differing(model) == []
    assert engine.complete(PROMPT, NUM_TOKENS)["weight_versions"] == [
        {"version": version, "start": 0, "end": NUM_TOKENS}
    ]
    assert engine.control.receipt(recompute=True).version == version


def lose(engine: ServedEngine, rank: int) -> None:
    engine.kill(rank)
    engine.await_event("rank_back")
    engine.await_serving()


def test_an_engine_that_starts_alone_comes_up_on_the_newest_snapshot(
    models: tuple[Model, Model, Model], tmp_path: Path
) -> None:
    a, b, c = models
    with Trainer("ipc_snapshot", tmp_path / "channel") as trainer:
        trainer.publish(b.weights, step=1)
    with served(a, tmp_path, "ipc_snapshot") as (engine, ready):
        assert ready["version"] == "1.1"
        check(engine, b, "1.1")
        lose(engine, 1)
        check(engine, b, "1.1")
        with Trainer("ipc_snapshot", tmp_path / "channel") as trainer:
            published = trainer.publish(c.weights, step=1)
            report = engine.control.update(deadline_s=30)
        assert report.receipt is not None
        assert report.receipt.content_digest == published.manifest.content_digest
        check(engine, c, "2.1")


def test_an_engine_that_joins_late_takes_the_version_of_the_trainers_server(
    models: tuple[Model, Model, Model], tmp_path: Path
) -> None:
    a, b, c = models
    with Trainer("rsync", tmp_path / "channel") as trainer:
        trainer.publish(b.weights, step=1)
        with served(a, tmp_path, "rsync") as (engine, ready):
            assert ready["version"] == "1.1"
            check(engine, b, "1.1")
            published = trainer.publish(c.weights, step=2, layout=f"tp:{NUM_RANKS}")
            report = engine.control.update(deadline_s=30)
            assert (report.copied_bytes, report.not_aliased) == (0, {})
            assert report.receipt is not None
            assert report.receipt.content_digest == published.manifest.content_digest
            check(engine, c, "1.2")
            lose(engine, 0)
            check(engine, c, "1.2")


def test_where_nothing_is_to_be_had_an_engine_serves_its_own_model(
    models: tuple[Model, Model, Model], tmp_path: Path
) -> None:
    with served(models[0], tmp_path, "ipc_snapshot") as (engine, ready):
        assert ready["version"] == ""
        assert "nothing is published" in str(ready["reason"])
        check(engine, models[0], "0.0")


def test_an_engine_that_is_told_to_stop_while_it_comes_up_stops(
    models: tuple[Model, Model, Model], tmp_path: Path
) -> None:
    """The weight server took the connection, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = json.dumps({"address": f"127.0.0.1:{mute.getsockname()[1]}"})
        options = ("--load-strategy", "rsync", "--rsync-config", config, "--update-deadline", "300")
        with ServedEngine(models[0], tmp_path, num_ranks=1, options=options) as engine:
            mute.settimeout(60)
            mute.accept()[0].close()
            asking, _ = mute.accept()  # lost once, it tries again
            health = engine.http.get("/health")
            assert (health.status_code, "takes the newest version over first" in health.text) == (503, True)
        asking.close()
