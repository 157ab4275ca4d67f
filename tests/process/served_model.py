"""A random Llama of a few kilobytes with a tokenizer of bytes, as a Hugging Face directory."""

import json
import math
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fastdeploy_rl.coverage import Coverage
from fastdeploy_rl.engines.embedded.checkpoint import save_checkpoint
from fastdeploy_rl.engines.embedded.model_config import parameter_specs, read_config

END = "<|end|>"
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
CONFIG: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 256,
}


def write_tiny_llama(directory: Path, *, seed: int = 0, **overrides: object) -> Path:
    """The same seed gives the same weights; `overrides` go into config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | overrides
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    specs = [spec for spec in parameter_specs(read_config(directory)) if spec.coverage is Coverage.UPDATED]
    save_checkpoint(directory, config, {spec.name: _values(random, spec.shape) for spec in specs})
    _write_tokenizer(directory)
    return directory


def _values(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (random.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32)


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": CHAT}))
