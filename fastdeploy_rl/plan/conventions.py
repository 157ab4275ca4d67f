"""How a trainer's tensors stand to the engine's, by name: what each is called there, how it is split, turned and fused.

Owns the name tables of the trainers we know. Refuses to know values and memory. Invariant: a `TensorRule` describes
the tensor *as the trainer has it* - its axes count in that shape - and names the engine's tensors, whose linear weights
are [in, out].
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.manifest import Fused, Run
from fastdeploy_rl.plan import llama

Shape = tuple[int, ...]


class TensorRule(NamedTuple):
    """`name`: the engine's. `shard_axis`: along which a publication for several ranks cuts it (None: it stays whole).
    `is_transposed`: its last two axes are swapped against the engine's. `fused`: it holds several of the engine's
    tensors, and `name` is none of them."""

    name: str
    shard_axis: int | None = None
    is_transposed: bool = False
    fused: Fused | None = None


Convention = Callable[[str, Shape], TensorRule]
"""(the trainer's name, the shape of its tensor) -> what it is to the engine.
ConfigurationError where such a tensor cannot have that shape."""


def paddle_llama(name: str, shape: Shape) -> TensorRule:
    """The engine's own names and layout: linear weights [in, out]. Also what PaddleFormers' Llama has."""
    return TensorRule(name, llama.shard_axis(name))


def hugging_face(name: str, shape: Shape) -> TensorRule:
    """torch modules and Hugging Face files: the same names, but every linear weight is [out, in]."""
    axis = llama.shard_axis(name)
    if not name.endswith("_proj.weight") or len(shape) != 2:
        return TensorRule(name, axis)
    return TensorRule(name, None if axis is None else 1 - axis, is_transposed=True)


_FUSED_MODELS = ("ernie4_5", "llama", "qwen2", "qwen3")
_FUSED = re.compile(
    r"(?P<prefix>.*\.)(?:self_attn\.(?P<qkv>qkv_proj)|mlp\.(?:up_gate_proj|gate_up_fused_proj))\.(?P<kind>weight|bias)",
    re.ASCII,
)


def paddleformers(config: Any) -> Convention:
    """The convention of a PaddleFormers model, from its own config (the object, or the dict of its config.json).

    Names are the engine's; linear weights are [in, out]. Where the model has one `qkv_proj`, each key/value head lies
    right behind its query heads; one `up_gate_proj` (`gate_up_fused_proj`) is all of gate, then all of up.
    ConfigurationError for a model type whose layout is not known here.
    """
    kind = _field(config, "model_type")
    if kind not in _FUSED_MODELS:
        raise ConfigurationError(f"paddleformers: model type {kind!r:.80} is not known; {', '.join(_FUSED_MODELS)} are")
    head_dim = _field(config, "head_dim") or _size(config, "hidden_size") // _size(config, "num_attention_heads")
    num_kv_heads = _field(config, "num_key_value_heads") or _size(config, "num_attention_heads")
    if _size(config, "num_attention_heads") % num_kv_heads:
        raise ConfigurationError(f"paddleformers: {num_kv_heads} key/value heads do not divide the attention heads")
    group = _size(config, "num_attention_heads") // num_kv_heads
    heads = [
        run
        for index in range(num_kv_heads)
        for run in (
            Run("q_proj", index * group * head_dim, (index + 1) * group * head_dim),
            Run("k_proj", index * head_dim, (index + 1) * head_dim),
            Run("v_proj", index * head_dim, (index + 1) * head_dim),
        )
    ]
    inner = _size(config, "intermediate_size")
    halves = [Run("gate_proj", 0, inner), Run("up_proj", 0, inner)]

    def rule(name: str, shape: Shape) -> TensorRule:
        match = _FUSED.fullmatch(name)
        if match is None:
            return paddle_llama(name, shape)
        block, runs = ("self_attn.", heads) if match["qkv"] else ("mlp.", halves)
        prefix, suffix = match["prefix"] + block, "." + match["kind"]
        axis = _checked_axis(name, shape, sum(run.stop - run.start for run in runs), match["kind"])
        named = tuple(Run(prefix + run.name + suffix, run.start, run.stop) for run in runs)
        return TensorRule(name, axis, fused=Fused(axis, named))

    return rule


def _checked_axis(name: str, shape: Shape, expected: int, kind: str) -> int:
    if len(shape) != (2 if kind == "weight" else 1) or shape[-1] != expected:
        raise ConfigurationError(
            f"{name!r:.600}: the model's config makes its last axis {expected}, its shape is {list(shape)}; "
            f"publish whole tensors with the config of the very model"
        )
    return len(shape) - 1


def _field(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _size(config: Any, key: str) -> int:
    value = _field(config, key)
    if type(value) is not int or value < 1:
        raise ConfigurationError(
            f"paddleformers: {key} of the model's config must be a positive integer, got {value!r}"
        )
    return value
