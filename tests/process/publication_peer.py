"""The other process of the publication tests: `python publication_peer.py VERB CHANNEL`. Speaks in lines.

read     stages the latest version, checks its bytes twice under the lease, again and again until stdin ends
hold     stages the latest version and keeps it until a line comes
publish  publishes one version and stays
borrow   publishes one version in its own memory and stays
write    publishes one version, then dies in the middle of the next (by SIGKILL from outside) while an arena is open
trainer  publishes steps without end
"""

import json
import os
import select
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fastdeploy_rl import checksum
from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.errors import NoPublicationError
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.planner import make_plan
from fastdeploy_rl.publish import publication
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.sources.base import ResolvedPublication, SourceConfig
from fastdeploy_rl.sources.ipc import IpcSource, IpcStaged

NUM_TENSORS = 6


def weights(step: int) -> dict[str, np.ndarray]:
    """Every byte differs from that of the step before; about 400 KB, so that a copy takes a while."""
    return {f"t{index}": np.full((128, 128), step * NUM_TENSORS + index, np.float32) for index in range(NUM_TENSORS)}


def _soon() -> int:
    return time.monotonic_ns() + 20_000_000_000


def _stage(source: IpcSource, resolved: ResolvedPublication) -> IpcStaged:
    specs = [ParameterSpec(tensor.name, tensor.dtype, tensor.shape, None) for tensor in resolved.manifest.tensors]
    return source.stage(resolved, make_plan(resolved.manifest, specs, 0, 1), deadline_ns=_soon())


def _say(text: str) -> None:
    print(text, flush=True)


def _is_stdin_over() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _check(manifest: Manifest, staged: IpcStaged) -> None:
    step = manifest.weight_version.step
    view = memoryview(staged.segments[0])
    for tensor, expected in zip(manifest.tensors, weights(step).values(), strict=True):
        data = bytes(view[tensor.parts[0].offset : tensor.parts[0].offset + tensor.num_bytes])
        if data != expected.tobytes() or checksum.of_bytes(data).hex() != tensor.checksum:
            raise SystemExit(f"{manifest.version} {tensor.name}: bytes changed under a lease")
    view.release()


def read(channel: Path) -> None:
    source = IpcSource(SourceConfig(channel))
    seen: Counter[str] = Counter()
    last = None
    _say("ready")
    while not _is_stdin_over():
        try:
            resolved = source.resolve(None, deadline_ns=_soon())
            staged = _stage(source, resolved)
        except NoPublicationError:
            seen["superseded"] += 1
            continue
        if last is not None and resolved.version < last:
            raise SystemExit(f"{resolved.version} came after {last}")
        seen["new" if resolved.version != last else "again"] += 1
        last = resolved.version
        _check(resolved.manifest, staged)
        _check(resolved.manifest, staged)
        staged.release()
    source.close()
    _say(json.dumps(dict(seen)))


def hold(channel: Path) -> None:
    source = IpcSource(SourceConfig(channel))
    resolved = source.resolve(None, deadline_ns=_soon())
    staged = _stage(source, resolved)
    _say(f"held {resolved.version}")
    sys.stdin.readline()
    _check(resolved.manifest, staged)
    staged.release()
    source.close()


def publish(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        _say(f"published {publisher.publish(weights(1), step=1).version}")
        sys.stdin.readline()


def borrow(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        memory = publisher.allocate({name: ("F32", array.shape) for name, array in weights(1).items()})
        for name, array in weights(1).items():
            memory[name][:] = array
        _say(f"published {publisher.publish(memory, step=1, borrow=True).version}")
        sys.stdin.readline()


def write(channel: Path) -> None:
    def stay(*_: object) -> list[list[checksum.Fletcher4]]:
        _say("writing")
        sys.stdin.readline()
        raise SystemExit("was to be killed")

    with WeightPublisher(channel) as publisher:
        _say(f"published {publisher.publish(weights(1), step=1).version}")
        publication.copy_out = stay  # type: ignore[assignment]
        publisher.publish(weights(2), step=2)


def trainer(channel: Path) -> None:
    with WeightPublisher(channel) as publisher:
        for step in range(1, 1_000_000):
            publisher.publish(weights(step), step=step)
            if step == 2:
                _say("published 2")


if __name__ == "__main__":
    os.environ["FASTDEPLOY_RL_COPY_THREADS"] = "1"
    verbs = {verb.__name__: verb for verb in (read, hold, publish, borrow, write, trainer)}
    verbs[sys.argv[1]](Path(sys.argv[2]))
