"""A Llama in numpy, float64 and without a cache: what a model must say, worked out by nothing of the engine's."""

from collections.abc import Mapping, Sequence

import numpy as np

Floats = np.ndarray


def logits(config: Mapping[str, object], weights: Mapping[str, Floats], token_ids: Sequence[int]) -> Floats:
    """Of every position: [tokens, vocab]. `weights` in engine layout, linear ones [in, out]."""
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    eps = float(config["rms_norm_eps"])
    hidden = weights["model.embed_tokens.weight"][list(token_ids)].astype(np.float64)
    cosines, sines = rotary(len(token_ids), int(config["hidden_size"]) // heads, float(config["rope_theta"]))
    for index in range(int(config["num_hidden_layers"])):
        layer = layer_weights(weights, index)
        normed = normalize(hidden, layer["input_layernorm"], eps)
        query = rotate(split(normed @ layer["self_attn.q_proj"], heads), cosines, sines)
        key = rotate(split(normed @ layer["self_attn.k_proj"], kv_heads), cosines, sines)
        value = split(normed @ layer["self_attn.v_proj"], kv_heads)
        mixed = _attend(query, key.repeat(heads // kv_heads, 0), value.repeat(heads // kv_heads, 0))
        hidden = hidden + mixed @ layer["self_attn.o_proj"]
        normed = normalize(hidden, layer["post_attention_layernorm"], eps)
        gate = normed @ layer["mlp.gate_proj"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj"])) @ layer["mlp.down_proj"]
    return normalize(hidden, weights["model.norm.weight"], eps) @ head(weights).T


def head(weights: Mapping[str, Floats]) -> Floats:
    """[vocab, hidden]; a tied one is the embedding."""
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def layer_weights(weights: Mapping[str, Floats], index: int) -> dict[str, Floats]:
    """By their names without layer and `.weight`."""
    prefix = f"model.layers.{index}."
    return {
        name.removeprefix(prefix).removesuffix(".weight"): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }


def log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def split(values: Floats, heads: int) -> Floats:
    """-> [heads, tokens, head_dim]"""
    return values.reshape(len(values), heads, -1).transpose(1, 0, 2)


def _attend(query: Floats, key: Floats, value: Floats) -> Floats:
    """-> [tokens, heads * head_dim]"""
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    mixed = np.exp(log_softmax(scores)) @ value
    return mixed.transpose(1, 0, 2).reshape(query.shape[1], -1)


def normalize(hidden: Floats, weight: Floats, eps: float) -> Floats:
    return hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + eps) * weight


def rotary(count: int, head_dim: int, theta: float) -> tuple[Floats, Floats]:
    angles = np.outer(np.arange(count), theta ** -(np.arange(0, head_dim, 2) / head_dim))
    both = np.concatenate([angles, angles], -1)
    return np.cos(both), np.sin(both)


def rotate(values: Floats, cosines: Floats, sines: Floats) -> Floats:
    first, second = np.split(values, 2, -1)
    return values * cosines + np.concatenate([-second, first], -1) * sines
