"""A PaddleFormers model that fuses its projections, and what PaddleFormers itself exports of it: python ... DIRECTORY.

Leaves `state.npz` (the model's own state dict) and `hf/` (its Hugging Face form: split, linear weights [out, in]).
"""

import json
import sys
from pathlib import Path

import numpy as np
from paddleformers.transformers import Ernie4_5Config, Ernie4_5ForCausalLM

CONFIG = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96, "use_bias": True}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": False}


def main(directory: Path) -> None:
    config = Ernie4_5Config(**CONFIG, **HEADS)
    config.fuse_rms_norm = False  # the fused kernel is not registered on a CPU
    model = Ernie4_5ForCausalLM(config)
    for parameter in model.parameters():
        parameter.set_value(np.random.default_rng(parameter.size).normal(size=parameter.shape).astype(np.float32))
    np.savez(directory / "state.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
    model.save_pretrained(str(directory / "hf"), save_to_hf=True)
    (directory / "config.json").write_text(json.dumps({"model_type": config.model_type, **CONFIG, **HEADS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
