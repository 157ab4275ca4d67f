"""A machine with the living and the dead side by side, for the doctor's tests: `python doctor_scene.py PLACE`.

Two engines of two ranks, each on a channel of its own with a publisher, all of them on version 1. One pair is killed
outright, ranks included; the doctor looks, cleans and looks again; the other pair then takes one more version over. All
that was seen is printed as one JSON document. `doctor_scene.py engine CHANNEL` is one engine, until it is killed.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastdeploy_rl._native import CollectiveGroup
from fastdeploy_rl.control.controller import EngineController
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.numpy.runner import NumpyModel
from fastdeploy_rl.memory.shared_segment import SharedSegment
from fastdeploy_rl.publish.publisher import WeightPublisher
from tests.process.numpy_engine import NumpyEngine
from tests.process.publication_peer import NUM_TENSORS, weights

MODEL = NumpyModel(tuple(ParameterSpec(f"t{index}", "F32", (128, 128), None) for index in range(NUM_TENSORS)))
PEER = Path(__file__).with_name("publication_peer.py")
DEADLINE_S = 60.0


def run_engine(channel: Path) -> None:
    with NumpyEngine(MODEL, channel=channel, num_ranks=2) as engine:
        # What a served engine has besides: only the name of its collectives is another one there.
        name = f"fastdeploy_rl_collectives.{engine.port}"
        SharedSegment.create(name, CollectiveGroup.required_bytes(2, 1 << 16)).close()
        pids = [os.getpid(), *(worker.pid for worker in engine.workers)]
        print(json.dumps({"port": engine.port, "pids": pids}), flush=True)
        sys.stdin.readline()


def start(*command: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def kill(process: "subprocess.Popen[str]", others: list[int]) -> None:
    for pid in (process.pid, *others):
        os.kill(pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    for pipe in (process.stdin, process.stdout):
        pipe.close()
    for pid in others:
        await_end(pid)


def await_end(pid: int) -> None:
    """Of a process that is no child of ours: its descriptor becomes readable."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([fd], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"process {pid} outlives SIGKILL")
    finally:
        os.close(fd)


def names() -> list[str]:
    return sorted(os.listdir("/dev/shm"))


def doctor(channel: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastdeploy_rl.cli", "doctor", "--ipc-dir", str(channel), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    text = done.stdout if "--json" not in options else json.loads(done.stdout)
    return {"code": done.returncode, "out": text, "err": done.stderr, "names": names()}


def die(channel: Path) -> int:
    """An engine and a publisher that are killed on version 1; the engine's port."""
    publisher, engine = start(str(PEER), "publish", str(channel)), start(__file__, "engine", str(channel))
    publisher.stdout.readline()
    told = json.loads(engine.stdout.readline())
    with EngineController(told["port"]) as controller:
        controller.update(deadline_s=DEADLINE_S)
    kill(engine, told["pids"][1:])
    kill(publisher, [])
    return int(told["port"])


def play(place: Path) -> dict[str, Any]:
    dead, alive = place / "dead", place / "alive"
    with WeightPublisher(alive) as publisher, NumpyEngine(MODEL, channel=alive, num_ranks=2) as engine:
        with EngineController(engine.port) as controller:
            publisher.publish(weights(1), step=1)
            controller.update(deadline_s=DEADLINE_S)
            living = names()
            scene: dict[str, Any] = {"living": living, "alive_port": engine.port, "dead_port": die(dead)}
            scene["before"] = doctor(dead, "--json")
            scene["text"] = doctor(dead)
            scene["wanted"] = doctor(dead, "--engine", str(scene["dead_port"]), "--json")
            scene["cleaned"] = doctor(dead, "--clean", "--json")
            scene["again"] = doctor(dead, "--clean", "--json")
            scene["alive"] = doctor(alive, "--clean", "--json")
            publisher.publish(weights(2), step=2)
            controller.update(deadline_s=DEADLINE_S)
        scene["holds"] = engine.holds(weights(2))
    for name in names():
        if name == f"fastdeploy_rl_test.{scene['dead_port']}":  # the numpy engine's own, for which no lock speaks
            os.unlink(f"/dev/shm/{name}")
    scene["channel_files"] = sorted(path.name for path in dead.rglob("*"))
    return scene


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine(Path(sys.argv[2]))
    else:
        print(json.dumps(play(Path(sys.argv[1]))))
