"""A trainer with nothing but numpy: it keeps float32 weights in memory, changes them, and has an engine serve them.

python examples/numpy_trainer.py --model "$(scripts/make_model)"
python examples/numpy_trainer.py --model "$(scripts/make_model)" --load-strategy ipc_snapshot   # or rsync
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from engine_process import engine_of, make_parser
from safetensors.numpy import load_file

from fastdeploy_rl import EngineController, SnapshotWriter, WeightPublisher, WeightServer
from fastdeploy_rl.plan.conventions import hugging_face
from fastdeploy_rl.publish.publisher import Published


def train_step(weights: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """Stands in for an optimizer: in place, as real ones work."""
    for weight in weights.values():
        weight += 1e-4 * random.standard_normal(weight.shape, np.float32)


@contextmanager
def delivery(load_strategy: str, channel: Path) -> Iterator[Callable[[Published], None]]:
    """What a trainer adds to its publisher: a call after each publication, which puts it where such an engine looks."""
    if load_strategy == "ipc_snapshot":
        with SnapshotWriter(channel) as snapshots:

            def write(published: Published) -> None:
                snapshots.write(published)
                snapshots.wait(deadline_s=60.0)  # a trainer that is in no hurry just goes on

            yield write
    elif load_strategy == "rsync":
        with WeightServer(channel):
            yield lambda published: None
    else:
        yield lambda published: None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--load-strategy", choices=("ipc", "ipc_snapshot", "rsync"), default="ipc", help="the engine's")
    options = parser.parse_args()
    # As a Hugging Face file has them: linear weights [out, in]. The convention tells the engine so.
    weights = {name: value.astype(np.float32) for name, value in load_file(options.model / "model.safetensors").items()}
    random = np.random.default_rng(0)
    with (
        engine_of(options, options.load_strategy) as address,
        WeightPublisher(options.ipc_dir) as publisher,
        delivery(options.load_strategy, options.ipc_dir) as deliver,
        EngineController(address) as engine,
    ):
        for step in range(1, options.steps + 1):
            train_step(weights, random)
            published = publisher.publish(weights, step=step, convention=hugging_face)
            deliver(published)
            report = engine.update(published.version, deadline_s=60.0)
            if report.receipt is None or report.receipt.content_digest != published.manifest.content_digest:
                raise SystemExit(f"version {published.version}: the engine's receipt is not what was published")
            print(f"version {published.version}: {published.num_bytes / 1e6:.0f} MB live and verified", flush=True)
        engine.receipt(recompute=True)
        print("every rank read its live memory again: all as published")


if __name__ == "__main__":
    main()
