"""An engine of real processes takes its weights through a stand-in of FastDeploy's package `checkpoint_transfer`."""

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_rl.checksum import of_bytes
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import FastDeployRLError, NoPublicationError
from fastdeploy_rl.testing import fake_checkpoint_transfer as fake
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_strategies import MATRIX

Weights = dict[str, np.ndarray]
NUM_RANKS = 2
MODEL = MATRIX.model


@pytest.mark.parametrize("api", ["downloader", "stream"])
def test_an_engine_follows_the_steps_that_its_trainer_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    for name in ("wire", "model"):
        (tmp_path / name).mkdir()
    fake.write_package(tmp_path / "packages")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=":")
    wire, version_file = tmp_path / "wire", tmp_path / "model" / "version.yaml"
    config = {"transport": "checkpoint_transfer", "api": api, "config": {"directory": str(wire)}}
    a, b = random_weights(MODEL, 1), random_weights(MODEL, 2)
    with (
        NumpyEngine(
            MODEL,
            channel=tmp_path / "channel",
            num_ranks=NUM_RANKS,
            load_strategy="rsync",
            rsync_config=config,
            model_dir=tmp_path / "model",
            update_s=20.0,
        ) as engine,
        BoardClient(engine.port) as client,
    ):

        def send(step: int, weights: Weights) -> None:
            """Each rank is sent what it is to hold, as the engine holds it."""
            fake.send(wire, step, [engine.slices(weights, rank) for rank in range(NUM_RANKS)])

        cold = engine.tokens()
        with pytest.raises(NoPublicationError, match="cannot tell its latest"):
            client.update()
        assert engine.tokens() == cold
        for step, weights in ((5, a), (6, b), (7, a)):
            send(step, weights)
            version_file.write_text(f"step: {step}\n")
            report = client.update()
            assert (report.outcome, report.version) == ("done", f"1.{step}")
            assert engine.holds(weights)
            for rank in range(NUM_RANKS):
                for name, live in engine.dump(rank).items():
                    assert report.receipt.live[name][rank] == of_bytes(live).hex(), name
        version_file.write_text("step: 8\n")
        with pytest.raises(FastDeployRLError, match="step 8"):
            client.update()
        assert engine.holds(a)
        send(8, b)
        assert client.update().version == "1.8"
        assert engine.holds(b)
        version_file.unlink()
        send(9, a)
        assert client.update("9").version == "1.9"  # as FastDeploy's own routes name a step
        assert engine.holds(a)
