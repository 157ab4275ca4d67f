"""A trainer that something befalls in the middle of a publication: `python publisher_peer.py CHANNEL INDEX COUNT`.

One of `COUNT` processes that publish together. Speaks JSON lines: each line of standard input is one `Order`, and its
answer what became of it. End of input is the order to close."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from fastdeploy_rl.errors import FastDeployRLError
from fastdeploy_rl.publish.publication import PublishStep
from fastdeploy_rl.publish.publisher import Published, WeightPublisher

SHAPES = {"w": (6, 4), "norm": (5,), "head": (6, 4)}
Kind = Literal["kill", "stop", "raise"]
When = Literal["begin", "end"]


class Fault(msgspec.Struct, frozen=True):
    """What happens at one end of one step."""

    step: str
    when: When
    kind: Kind


class Order(msgspec.Struct, frozen=True):
    """Publish tensors of `seed` as `step`: a copy, or (0, 1) borrowed in that one of two memories. `take_back` first
    waits until what was published in that memory is released; `train` then writes into it and publishes nothing."""

    step: int
    seed: int
    memory: int | None = None
    take_back: bool = False
    train: bool = False
    fault: Fault | None = None
    deadline_s: float = 5.0


def weights(seed: int) -> dict[str, np.ndarray]:
    """Every element of every tensor is another for every seed below 1000."""
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
    return {
        name: (np.arange(end - np.prod(shape), end) * 1000 + seed).astype(np.float32).reshape(shape)
        for end, (name, shape) in zip(ends, SHAPES.items(), strict=True)
    }


def share(seed: int, index: int, count: int) -> dict[str, np.ndarray]:
    """The tensors that one of several trainers has."""
    return {name: array for number, (name, array) in enumerate(weights(seed).items()) if number % count == index}


class Faults:
    """A PublishObserver that lets the fault happen, and remembers what it saw."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.seen: list[str] = []

    def begin(self, step: PublishStep) -> None:
        self.seen.append(step.name)
        self._meet(step, "begin")

    def end(self, step: PublishStep) -> None:
        self._meet(step, "end")

    def _meet(self, step: PublishStep, when: When) -> None:
        fault = self.fault
        if fault is None or (fault.step, fault.when) != (step.name, when):
            return
        if fault.kind == "raise":
            raise RuntimeError("as the test says")
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


class Trainer:
    """One publisher, two memories that it can lend, and what is published in them."""

    def __init__(self, publisher: WeightPublisher, faults: Faults, index: int, count: int) -> None:
        self._publisher = publisher
        self._faults = faults
        self._place = index, count
        wanted = {name: ("F32", array.shape) for name, array in share(0, index, count).items()}
        self._memories = [publisher.allocate(wanted) for _ in range(2)]
        self._lent: dict[int, Published] = {}

    def obey(self, order: Order) -> str:
        tensors = share(order.seed, *self._place)
        if order.take_back and order.memory is not None:
            self._lent.pop(order.memory).wait_released(order.deadline_s)
        if order.memory is not None:
            for name, array in tensors.items():
                self._memories[order.memory][name][:] = array
        return "trained" if order.train else self._publish(order, tensors)

    def _publish(self, order: Order, tensors: dict[str, np.ndarray]) -> str:
        self._faults.fault = order.fault
        self._faults.seen = []
        state = tensors if order.memory is None else self._memories[order.memory]
        published = self._publisher.publish(
            state, step=order.step, borrow=order.memory is not None, deadline_s=order.deadline_s
        )
        if order.memory is not None:
            self._lent[order.memory] = published
        return str(published.version)


def main(channel: Path, index: int, count: int) -> None:
    faults = Faults()
    with WeightPublisher(channel, part=(index, count), observer=faults) as publisher:
        trainer = Trainer(publisher, faults, index, count)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            try:
                answer = {"done": trainer.obey(msgspec.json.decode(line, type=Order)), "steps": faults.seen}
            except (FastDeployRLError, RuntimeError) as error:
                answer = {"error": type(error).__name__, "text": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ["FASTDEPLOY_RL_COPY_THREADS"] = "1"
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
