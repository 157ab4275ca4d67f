"""One of several trainer processes that publish each version together: `python part_peer.py CHANNEL INDEX COUNT`.

Obeys JSON lines and answers each with one. A command: {"step": 7, "whole": [names], "shards": {name: [axis, start,
stop]}, "tied": {name: other}, "changed": [names], "deadline_s": 5}; the answer: the version and digest it was told, or
the error. Ends with stdin."""

import json
import sys
from typing import Any

import numpy as np

from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.publish.publisher import Shard, WeightPublisher

SHAPE = (8, 12)
NAMES = ("w", "v", "norm", "embed")


def whole(name: str, step: int) -> np.ndarray:
    """The full tensor of that name at that step; no two are equal anywhere."""
    start = step * 10_000 + sum(map(ord, name)) * 100
    return np.arange(start, start + SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)


def _tensors(command: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Shard]]:
    tensors = {name: whole(name, command["step"]) for name in command.get("whole", ())}
    shards = {}
    for name, (axis, start, stop) in command.get("shards", {}).items():
        tensors[name] = np.ascontiguousarray(np.take(whole(name, command["step"]), range(start, stop), axis))
        shards[name] = Shard(axis, start, stop, SHAPE[axis])
    for name in command.get("changed", ()):
        tensors[name] = tensors[name] + 1
    tensors |= {name: tensors[other] for name, other in command.get("tied", {}).items()}
    return tensors, shards


def _publish(publisher: WeightPublisher, command: dict[str, Any]) -> dict[str, str]:
    tensors, shards = _tensors(command)
    try:
        published = publisher.publish(
            tensors,
            step=command["step"],
            layout=command.get("layout", "full"),
            shards=shards,
            deadline_s=command.get("deadline_s", 30.0),
        )
    except FastDeployRLError as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"version": str(published.version), "digest": published.manifest.content_digest}


def main(channel: str, index: str, count: str) -> None:
    with WeightPublisher(channel, part=(int(index), int(count)), max_arenas=2) as publisher:
        print(json.dumps({"epoch": publisher.epoch}), flush=True)
        for line in sys.stdin:
            print(json.dumps(_publish(publisher, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
