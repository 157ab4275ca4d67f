"""/dev/shm is full, and the run directory lies there too: an engine serves on, says why, and can be cleared."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.private_shm import private_shm

SCENE = """
import contextlib, os, sys
from pathlib import Path
from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.update.client import BoardClient
from tests.process.numpy_engine import NumpyEngine
from tests.process.test_update_numpy import MODEL, publish


def ask(what):
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        with BoardClient(engine.port) as client:
            print(what, getattr(getattr(client, what)(), "outcome", ""), client.status().is_serving)
    except FastDeployRLError as error:
        print(what, type(error).__name__, str(error), BoardClient(engine.port).__enter__().status().is_serving)
    else:
        assert len(os.listdir("/proc/self/fd")) == descriptors


channel = Path(sys.argv[1])
with NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine, WeightPublisher(channel) as publisher:
    publish(publisher, random_weights(MODEL, 1), 1)
    ask("update")
    publish(publisher, random_weights(MODEL, 2), 2)
    with open("/dev/shm/filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"x" * 4096)
    ask("update")
    print("old", engine.holds(random_weights(MODEL, 1)))
    ask("status")
    ask("clear")
    os.unlink("/dev/shm/filler")
    ask("update")
    print("new", engine.holds(random_weights(MODEL, 2)))
"""


def test_a_full_shm_fences_nobody_and_keeps_nobody_from_clearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = private_shm(8 << 20)
    if prefix is None:
        pytest.skip("this machine lets nobody mount a /dev/shm of their own")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    command = [*prefix, sys.executable, "-c", SCENE, str(tmp_path / "channel")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2])
    said = done.stdout.splitlines()
    assert said[:1] == ["update done True"], done.stderr[-2000:]
    assert said[1].startswith("update StepFailedError")
    assert said[1].endswith("True")
    assert "No space left on device" in said[1]
    assert said[2:] == ["old True", "status  True", "clear done False", "update done True", "new True"], said
