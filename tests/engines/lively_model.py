"""Random Llamas of a few kilobytes whose answers wander, and do so differently for each seed."""

from pathlib import Path

import numpy as np
from served_engine import Model, Weights

from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config
from tests.process.served_model import CONFIG, write_tiny_llama

SETTINGS: dict[str, object] = CONFIG | {"max_position_embeddings": 512, "tie_word_embeddings": False}
"""config.json: two layers, four heads over two of keys and values, 264 tokens."""


def write_lively_model(directory: Path, seed: int) -> Model:
    write_tiny_llama(directory, **SETTINGS)
    weights = lively_weights(directory, seed)
    save_checkpoint(directory, SETTINGS, weights)
    return Model(directory, weights)


def lively_weights(directory: Path, seed: int) -> Weights:
    """Engine layout, for the model whose config.json lies there."""
    random = np.random.default_rng(seed)
    specs = [spec for spec in parameter_specs(read_config(directory)) if spec.coverage is Coverage.UPDATED]
    return {
        spec.name: random.standard_normal(spec.shape, np.float32) * np.float32(0.3 if len(spec.shape) > 1 else 0.1)
        + np.float32(len(spec.shape) == 1)
        for spec in specs
    }
