"""Arenas that an engine gave back are filled with NaN at once, and nothing notices: neither live weights, nor the way
back of an update that is undone, nor a receipt that reads live memory again."""

from pathlib import Path

import pytest

from fastdeploy_rl import manager
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import ChecksumMismatchError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource
from fastdeploy_rl.testing import FaultySource
from fastdeploy_rl.update.client import BoardClient
from tests.engines.poison import PoisonedArenas
from tests.process.test_faulty_sources import flip_in_the_half_of_rank_1
from tests.process.test_update_numpy import MODEL, publish
from tests.process.threaded_engine import ThreadedEngine


@pytest.mark.parametrize("apply_mode", ["alias", "copy"])
def test_nothing_reads_an_arena_that_was_given_back(
    tmp_path: Path, apply_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[PoisonedArenas] = []

    def make(num_threads: int) -> PoisonedArenas:
        pairs.append(PoisonedArenas(num_threads))
        return pairs[-1]

    monkeypatch.setattr(manager, "ArenaPair", make)
    sources = [FaultySource(IpcSource(SourceConfig(tmp_path / "channel"))) for _ in range(2)]
    with (
        ThreadedEngine(MODEL, sources, apply_mode) as engine,
        WeightPublisher(tmp_path / "channel", max_arenas=3) as publisher,
        BoardClient(engine.port) as client,
    ):

        def check(seed: int) -> None:
            assert engine.holds(random_weights(MODEL, seed))
            client.receipt(recompute=True)
            assert engine.holds(random_weights(MODEL, seed))

        for step in (1, 2, 3):
            publish(publisher, random_weights(MODEL, step), step)
            client.update()
            check(step)
        published = publish(publisher, random_weights(MODEL, 4), 4)
        sources[1].then("stage", flip_in_the_half_of_rank_1(published.manifest))
        with pytest.raises(ChecksumMismatchError):
            client.update()
        check(3)
        client.update()
        check(4)
        client.clear()
        client.update()
        check(4)
        assert all(pair.num_poisoned >= 2 for pair in pairs)
