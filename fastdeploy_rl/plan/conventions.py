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
from fastdeploy_rl.plan import llama, namespaces

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
    right behind its query heads; one `up_gate_proj` (`gate_up_fused_proj`) is all of gate, then all of up - on each of
    the trainer's tensor-parallel ranks, whose slices are published as shards of the whole.
    ConfigurationError for a model type whose layout is not known here, and for a fused tensor in a namespace: another
    model has a config of its own (`by_namespace`).
    """
    kind = _field(config, "model_type")
    if kind not in _FUSED_MODELS:
        raise ConfigurationError(f"paddleformers: model type {kind!r:.80} is not known; {', '.join(_FUSED_MODELS)} are")
    heads, halves = _attention_runs(config), _mlp_runs(config)

    def rule(name: str, shape: Shape) -> TensorRule:
        match = _FUSED.fullmatch(name)
        if match is None:
            return paddle_llama(name, shape)
        if not namespaces.is_bare(name):
            raise ConfigurationError(
                f"{name!r:.600} belongs to another model than this convention's config: "
                "publish with by_namespace(paddleformers(main_config), NAMESPACE=paddleformers(its_config))"
            )
        block, runs = ("self_attn.", heads) if match["qkv"] else ("mlp.", halves)
        prefix, suffix = match["prefix"] + block, "." + match["kind"]
        axis = _checked_axis(name, shape, sum(run.stop - run.start for run in runs), match["kind"])
        named = tuple(Run(prefix + run.name + suffix, run.start, run.stop) for run in runs)
        return TensorRule(name, axis, fused=Fused(axis, named))

    return rule


def by_namespace(main: Convention, /, **others: Convention) -> Convention:
    """For several models that are published together: `main` for bare names, and each of `others` for the names in the
    namespace that it is given under, where it is asked for `NAME` of `draft/NAME`. ConfigurationError for a name in any
    other namespace."""
    for namespace in others:
        namespaces.check_namespace(namespace)
    conventions = {namespaces.MAIN: main, **others}
    known = ", ".join(sorted(others)) or "the main model only"

    def rule(name: str, shape: Shape) -> TensorRule:
        namespace, bare = namespaces.split(name)
        if namespace not in conventions:
            raise ConfigurationError(
                f"{name!r:.600}: no convention for namespace {namespace!r}; there is one for {known}"
            )
        return _moved(conventions[namespace](bare, shape), namespace)

    return rule


def _moved(rule: TensorRule, namespace: str) -> TensorRule:
    """The same rule, with the engine's names in that namespace."""
    fused = rule.fused
    if fused is not None:
        runs = tuple(Run(namespaces.join(namespace, run.name), run.start, run.stop) for run in fused.runs)
        fused = Fused(fused.axis, runs)
    return rule._replace(name=namespaces.join(namespace, rule.name), fused=fused)


def _attention_runs(config: Any) -> list[Run]:
    num_heads = _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigurationError(f"paddleformers: {num_kv_heads} key/value heads do not divide {num_heads} heads")
    head_dim = _size(config, "head_dim", _size(config, "hidden_size") // num_heads)
    widths = {"q_proj": num_heads // num_kv_heads * head_dim, "k_proj": head_dim, "v_proj": head_dim}
    return [
        Run(name, index * width, (index + 1) * width) for index in range(num_kv_heads) for name, width in widths.items()
    ]


def _mlp_runs(config: Any) -> list[Run]:
    inner, ranks = _size(config, "intermediate_size"), _size(config, "tensor_model_parallel_size", 1)
    if inner % ranks:
        raise ConfigurationError(f"paddleformers: intermediate_size {inner} does not divide over {ranks} ranks")
    share = inner // ranks
    return [Run(name, rank * share, (rank + 1) * share) for rank in range(ranks) for name in ("gate_proj", "up_proj")]


def _checked_axis(name: str, shape: Shape, expected: int, kind: str) -> int:
    if len(shape) != (2 if kind == "weight" else 1) or shape[-1] != expected:
        raise ConfigurationError(
            f"{name!r:.600}: the model's config makes its last axis {expected}, its shape is {list(shape)}; "
            f"publish whole tensors with the config of the very model"
        )
    return len(shape) - 1


def _field(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _size(config: Any, key: str, default: int | None = None) -> int:
    value = _field(config, key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigurationError(
            f"paddleformers: {key} of the model's config must be a positive integer, got {value!r}"
        )
    return value
