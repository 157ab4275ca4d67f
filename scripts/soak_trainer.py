"""The soak's trainer, a process of its own: publishes what it is told to, flaws included, and says what it holds.

The first line of standard input is a Start, the others are Orders; each is answered by one line of JSON. A flaw is made
the way it would come about: a tensor forgotten, of another shape, or a byte turned around where it was published."""

import gc
import json
import sys
from typing import Literal

import msgspec
import numpy as np
from soak_model import as_the_engine, model

from fastdeploy_rl.engines.numpy.runner import random_weights
from fastdeploy_rl.manifest import Manifest
from fastdeploy_rl.publish.publisher import WeightPublisher

Flaw = Literal["", "missing tensor", "wrong shape", "corrupted byte"]


class Start(msgspec.Struct, frozen=True):
    channel: str
    num_ranks: int


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
    with WeightPublisher(start.channel) as publisher:
        _answer("ready")
        for line in sys.stdin:
            order = msgspec.json.decode(line, type=Order)
            if not order.step:
                gc.collect()
                _answer(sys.getallocatedblocks())
                continue
            weights = _flawed(random_weights(trained, order.seed), order.flaw)
            published = publisher.publish(
                weights, step=order.step, layout=order.layout, convention=lambda name, shape: rules[name]
            )
            if order.flaw == "corrupted byte":
                _flip_byte(published.manifest, order.seed)
            _answer(str(published.version))


def _answer(value: str | int) -> None:
    print(json.dumps(value), flush=True)


def _flawed(weights: dict[str, np.ndarray], flaw: Flaw) -> dict[str, np.ndarray]:
    if flaw == "missing tensor":
        del weights["norm"]
    if flaw == "wrong shape":
        weights["layers.0.up"] = np.concatenate([weights["layers.0.up"]] * 2, axis=1)
    return weights


def _flip_byte(manifest: Manifest, seed: int) -> None:
    """One bit of a published byte, chosen by `seed`, as a broken memory would."""
    generator = np.random.default_rng(seed)
    full = [tensor for tensor in manifest.tensors if tensor.num_bytes]
    tensor = full[generator.integers(len(full))]
    part = tensor.parts[generator.integers(len(tensor.parts))]
    offset = part.offset + int(generator.integers(tensor.part_bytes(part)))
    with open(f"/dev/shm/{manifest.segments[part.segment].locator}", "r+b", buffering=0) as memory:
        memory.seek(offset)
        byte = memory.read(1)
        memory.seek(offset)
        memory.write(bytes([byte[0] ^ 1]))


if __name__ == "__main__":
    main()
