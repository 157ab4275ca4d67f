"""A trainer with nothing but numpy: it keeps float32 weights in memory, changes them, and has an engine serve them.

python examples/numpy_trainer.py --model "$(scripts/make_model)"
"""

import numpy as np
from engine_process import engine_of, make_parser
from safetensors.numpy import load_file

from fastdeploy_rl import EngineController, WeightPublisher
from fastdeploy_rl.plan.conventions import hugging_face


def train_step(weights: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """Stands in for an optimizer: in place, as real ones work."""
    for weight in weights.values():
        weight += 1e-4 * random.standard_normal(weight.shape, np.float32)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    # As a Hugging Face file has them: linear weights [out, in]. The convention tells the engine so.
    weights = {name: value.astype(np.float32) for name, value in load_file(options.model / "model.safetensors").items()}
    random = np.random.default_rng(0)
    with (
        engine_of(options) as address,
        WeightPublisher(options.ipc_dir) as publisher,
        EngineController(address) as engine,
    ):
        for step in range(1, options.steps + 1):
            train_step(weights, random)
            published = publisher.publish(weights, step=step, convention=hugging_face)
            report = engine.update(published.version, deadline_s=60.0)
            if report.receipt is None or report.receipt.content_digest != published.manifest.content_digest:
                raise SystemExit(f"version {published.version}: the engine's receipt is not what was published")
            print(f"version {published.version}: {published.num_bytes / 1e6:.0f} MB live and verified", flush=True)
        engine.receipt(recompute=True)
        print("every rank read its live memory again: all as published")


if __name__ == "__main__":
    main()
