"""A trainer of ours in a process of its own: a publisher and its weight server, for a model of `real_engine`'s."""

import subprocess
import sys
from pathlib import Path
from types import TracebackType

import numpy as np

from fastdeploy_rl import WeightPublisher
from fastdeploy_rl.publish.weight_server import WeightServer


class RealTrainer:
    """Starts the process; lives in a `with`."""

    def __init__(self, channel: Path, width: int) -> None:
        self._command = [sys.executable, "-m", __spec__.name, str(channel), str(width)]

    def __enter__(self) -> "RealTrainer":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        return self

    def publish(self, step: int) -> None:
        print(step, file=self._process.stdin, flush=True)
        if self._process.stdout.readline().strip() != str(step):
            raise RuntimeError(f"the trainer did not publish step {step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            self._process.stdin.close()
            self._process.wait(20)


def main(channel: Path, width: int) -> None:
    shapes = {"a.weight": (4, width), "a.bias": (width,), "b.weight": (width, 2), "b.bias": (2,)}
    with WeightPublisher(channel) as publisher, WeightServer(channel):
        for line in sys.stdin:
            tensors = {name: np.full(shape, float(line), np.float32) for name, shape in shapes.items()}
            publisher.publish(tensors, step=int(line))
            print(int(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
