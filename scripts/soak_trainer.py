"""The soak's trainer, a process of its own: publishes what it is told to, flaws included, and says what it holds.

The first line of standard input is a Start, the others are Orders; each is answered by one line of JSON. A flaw is made
the way it would come about: a tensor forgotten, of another shape, or a byte turned around where engines read it."""

import gc
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from soak_model import as_the_engine, model

from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.plan.conventions import Convention
from fastdeploy_rl.publish.publisher import WeightPublisher
from fastdeploy_rl.publish.snapshot_writer import SnapshotWriter
from fastdeploy_rl.publish.weight_server import WeightServer
from fastdeploy_rl.sources.registry import IPC_SNAPSHOT, RSYNC

Flaw = Literal["", "missing tensor", "wrong shape", "corrupted byte"]


class Start(msgspec.Struct, frozen=True):
    channel: str
    num_ranks: int
    strategy: str


class Order(msgspec.Struct, frozen=True):
    """`step` 0: publish nothing, count objects."""

    step: int = 0
    seed: int = 0
    layout: str = "full"
    flaw: Flaw = ""


def main() -> None:
    start = msgspec.json.decode(sys.stdin.readline(), type=Start)
    trained = model(start.num_ranks)
    rules = as_the_engine(trained)
    with Outlet(start) as outlet:
        _answer("ready")
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Order)
            if not order.step:
                gc.collect()
                _answer(sys.getallocatedblocks())
                continue
            weights = _flawed(random_weights(trained, order.seed), order.flaw)
            handed_out = outlet.publish(weights, order, lambda name, shape: rules[name])
            if order.flaw == "corrupted byte":
                _flip_byte(handed_out, order.seed)
            _answer(handed_out.manifest.version)


class HandedOut(NamedTuple):
    """Where the bytes are that engines read: the manifest's segments are files of `directory`."""

    manifest: Manifest
    directory: Path


class Outlet:
    """A publisher, and what the load strategy needs beside it."""

    def __init__(self, start: Start) -> None:
        self._publisher = WeightPublisher(start.channel)
        self._snapshots = SnapshotWriter(start.channel) if start.strategy == IPC_SNAPSHOT else None
        self._server = WeightServer(start.channel) if start.strategy == RSYNC else None
        self._stack = ExitStack()

    def __enter__(self) -> "Outlet":
        with ExitStack() as stack:
            for part in (self._publisher, self._snapshots, self._server):
                if part is not None:
                    stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def publish(self, weights: dict[str, np.ndarray], order: Order, convention: Convention) -> HandedOut:
        published = self._publisher.publish(weights, step=order.step, layout=order.layout, convention=convention)
        if self._snapshots is None:
            return HandedOut(published.manifest, Path("/dev/shm"))
        self._snapshots.write(published)
        snapshot = self._snapshots.wait()
        return HandedOut(snapshot.manifest, snapshot.path)


def _answer(value: str | int) -> None:
    print(json.dumps(value), flush=True)


def _flawed(weights: dict[str, np.ndarray], flaw: Flaw) -> dict[str, np.ndarray]:
    if flaw == "missing tensor":
        del weights["norm"]
    if flaw == "wrong shape":
        weights["layers.0.up"] = np.concatenate([weights["layers.0.up"]] * 2, axis=1)
    return weights


def _flip_byte(handed_out: HandedOut, seed: int) -> None:
    """One bit of a byte, chosen by `seed`, as a broken memory or disk would."""
    generator, manifest = np.random.default_rng(seed), handed_out.manifest
    full = [tensor for tensor in manifest.tensors if tensor.num_bytes]
    tensor = full[generator.integers(len(full))]
    part = tensor.parts[generator.integers(len(tensor.parts))]
    offset = part.offset + int(generator.integers(tensor.part_bytes(part)))
    with open(handed_out.directory / manifest.segments[part.segment].locator, "r+b", buffering=0) as memory:
        memory.seek(offset)
        byte = memory.read(1)
        memory.seek(offset)
        memory.write(bytes([byte[0] ^ 1]))


if __name__ == "__main__":
    main()
