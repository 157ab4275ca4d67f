"""The shape of a Llama, Qwen2 or Qwen3 model: read from a Hugging Face `config.json`, checked once, never changed.

Owns which models this engine can run and how they split over ranks. Knows nothing of Paddle or of files of weights.
Invariant: a `ModelConfig` that exists describes a model this engine computes exactly; anything it would compute
differently was refused. What a config.json leaves out is what transformers' own configuration class takes for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.errors import CheckpointError, ConfigurationError
from fastdeploy_rl.memory.regular_file import read_regular
from fastdeploy_rl.plan.llama import shard_axis

MAX_FILE_BYTES = 64 << 20
"""tokenizer.json of large vocabularies has tens of megabytes; nothing sensible has more."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


class RopeScaling(NamedTuple):
    """Llama 3.1's stretching of rotary wavelengths beyond `original_max_position_embeddings` tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder; all of them global (before the split over ranks).

    `has_qkv_bias`, `has_output_bias` (of o_proj), `has_mlp_bias` (of all three), `has_qk_norm` (an RMS norm over each
    query and key head): which parameters a layer has beyond Llama's.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def check_divides(self, num_ranks: int) -> None:
        """ConfigurationError naming what `num_ranks` does not divide, and the rank counts that would work."""
        sizes = self._split_sizes()
        odd = [f"{name} {size}" for name, size in sizes.items() if num_ranks < 1 or size % num_ranks]
        if odd:
            works = [
                count
                for count in range(1, self.num_key_value_heads + 1)
                if not any(size % count for size in sizes.values())
            ]
            raise ConfigurationError(
                f"the model does not split over {num_ranks} ranks: not divisible: {', '.join(odd)}; "
                f"--tensor-parallel-size can be {', '.join(map(str, works))}"
            )

    def padded_vocab_size(self, num_ranks: int) -> int:
        """Rows of embedding and head over `num_ranks` ranks, the same number on each: those beyond `vocab_size` are
        zero and their logits are never looked at."""
        return -(-self.vocab_size // num_ranks) * num_ranks

    def _split_sizes(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": self.intermediate_size,
        }


def read_config(directory: Path) -> ModelConfig:
    """Reads `config.json` (and the stop tokens of `generation_config.json`, where there is one).

    ConfigurationError: no such directory, or a model this engine
    does not compute. CheckpointError: a file that is broken.
    """
    if not directory.is_dir():
        raise ConfigurationError(f"no such model directory: {directory}; --model takes a Hugging Face directory")
    path = directory / "config.json"
    fields = _Fields(path, read_json(path))
    _refuse_foreign_model(fields)
    config = _parse(fields, (*fields.token_ids("eos_token_id"), *_generation_stop_tokens(directory)))
    _check_consistent(config, path)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a bounded file; CheckpointError names the file and what is wrong with it."""
    try:
        return msgspec.json.decode(read_bounded(path), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON object: {error}") from error


def read_bounded(path: Path) -> bytes:
    """A small file of a model directory, whole; CheckpointError when it is missing, no regular file or larger than
    MAX_FILE_BYTES."""
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; get the model directory again") from error


def parameter_specs(config: ModelConfig, num_ranks: int = 1) -> tuple[ParameterSpec, ...]:
    """Every parameter in engine layout: linear weights are [in, out], embeddings and head [vocab, hidden]; float32.
    Over several ranks the vocabulary is padded so that it divides; a publication may pad it as it likes."""
    vocabulary = (config.padded_vocab_size(num_ranks), config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes |= {FINAL_NORM: (config.hidden_size,), HEAD: vocabulary}
    return tuple(_spec(name, shape, config) for name, shape in shapes.items())


def _spec(name: str, shape: tuple[int, ...], config: ModelConfig) -> ParameterSpec:
    if name not in (EMBEDDING, HEAD):
        return ParameterSpec(name, "F32", shape, shard_axis(name))
    is_tied = name == HEAD and config.tie_word_embeddings
    coverage, tied_to = (Coverage.TIED, EMBEDDING) if is_tied else (Coverage.UPDATED, None)
    return ParameterSpec(name, "F32", shape, shard_axis(name), coverage, tied_to, vocab_rows=config.vocab_size)


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    queries_keys_values = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes |= _linear_shapes(hidden, queries_keys_values, config.has_qkv_bias)
    if config.has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes |= _linear_shapes(heads, {"self_attn.o_proj": hidden}, config.has_output_bias)
    shapes |= {"post_attention_layernorm.weight": (hidden,)}
    shapes |= _linear_shapes(hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}, config.has_mlp_bias)
    return shapes | _linear_shapes(inner, {"mlp.down_proj": hidden}, config.has_mlp_bias)


def _linear_shapes(inputs: int, outputs: dict[str, int], has_bias: bool) -> dict[str, tuple[int, ...]]:
    weights: dict[str, tuple[int, ...]] = {f"{name}.weight": (inputs, size) for name, size in outputs.items()}
    return weights | ({f"{name}.bias": (size,) for name, size in outputs.items()} if has_bias else {})


@dataclass(frozen=True)
class _Fields:
    """Typed reads from one JSON object; errors name file and key."""

    path: Path
    values: dict[str, Any]

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{self.path}: {key}: expected a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.path}: {key}: expected a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if type(value) is not bool:
            raise CheckpointError(f"{self.path}: {key}: expected true or false, got {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            raise CheckpointError(f"{self.path}: {key}: expected a token id or a list of them, got {value!r}")
        return tuple(ids)


class _Family(NamedTuple):
    """What transformers' configuration class of a model type takes where config.json is silent (None: as many as
    query heads; hidden_size / heads), and whether its layers have norms over heads."""

    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    has_qk_norm: bool


_FAMILIES = {
    "llama": _Family(None, None, 2048, False),
    "qwen2": _Family(32, None, 32768, False),
    "qwen3": _Family(32, 128, 32768, True),
}


def _parse(fields: _Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    kind = str(fields.values["model_type"])
    family = _FAMILIES[kind]
    rope = _rope(fields)
    attention_bias = kind != "qwen2" and fields.flag("attention_bias")
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=fields.size("num_attention_heads"),
        num_key_value_heads=_num_key_value_heads(fields, family),
        head_dim=_head_dim(fields, family),
        max_position_embeddings=fields.size("max_position_embeddings", family.max_position_embeddings),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=(rope if "rope_theta" in rope.values else fields).number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        has_qkv_bias=kind == "qwen2" or attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=kind == "llama" and fields.flag("mlp_bias"),
        has_qk_norm=family.has_qk_norm,
        eos_token_ids=tuple(sorted(set(eos_token_ids))),
    )


def _num_key_value_heads(fields: _Fields, family: _Family) -> int:
    if fields.values.get("num_key_value_heads", family.num_key_value_heads) is None:
        return fields.size("num_attention_heads")
    return fields.size("num_key_value_heads", family.num_key_value_heads)


def _head_dim(fields: _Fields, family: _Family) -> int:
    if fields.values.get("head_dim", family.head_dim) is not None:
        return fields.size("head_dim", family.head_dim)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"{fields.path}: num_attention_heads {heads} does not divide hidden_size {hidden}")
    return hidden // heads


def _rope(fields: _Fields) -> _Fields:
    """The rotary embedding's own object: `rope_parameters` in newer configurations, `rope_scaling` in older ones."""
    for key in ("rope_scaling", "rope_parameters"):
        values = fields.values.get(key)
        if isinstance(values, dict) and values:
            return _Fields(fields.path, values)
    return _Fields(fields.path, {})


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    if _rope_type(rope.values) == "default":
        return None
    low, high = rope.number("low_freq_factor", None), rope.number("high_freq_factor", None)
    if low >= high:
        raise CheckpointError(f"{rope.path}: low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeScaling(rope.number("factor", None), low, high, rope.size("original_max_position_embeddings"))


def _rope_type(values: dict[str, Any]) -> object:
    return values.get("rope_type", values.get("type", "default"))


def _generation_stop_tokens(directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    return _Fields(path, read_json(path)).token_ids("eos_token_id") if path.exists() else ()


_FIXED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "use_mrope": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
}
"""What this engine computes; null says the same."""


def _refuse_foreign_model(fields: _Fields) -> None:
    """What would load and then compute something else is refused here."""
    kind = fields.values.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise _foreign(fields, "model_type", ", ".join(map(repr, _FAMILIES)), kind)
    for key, value in _FIXED.items():
        got = fields.values.get(key)
        if got is not None and got != value:
            raise _foreign(fields, key, repr(value), got)
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(layer != "full_attention" for layer in layer_types):
        raise _foreign(fields, "layer_types", "'full_attention' in every layer", layer_types)
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_foreign_rotation(fields, key, fields.values.get(key) or {})


def _refuse_foreign_rotation(fields: _Fields, key: str, values: object) -> None:
    kind = _rope_type(values) if isinstance(values, dict) else values
    if not isinstance(values, dict) or kind not in ("default", "llama3"):
        raise _foreign(fields, key, "rotary embeddings 'default' and 'llama3'", kind)
    differs_by_layer = any(isinstance(value, dict) for value in values.values())
    if differs_by_layer or values.get("partial_rotary_factor") not in (None, 1.0):
        raise _foreign(fields, key, "one rotary embedding of whole heads in all layers", values)


def _foreign(fields: _Fields, key: str, computed: str, needed: object) -> ConfigurationError:
    return ConfigurationError(f"{fields.path}: {key}: this engine computes {computed}, the model needs {needed!r:.200}")


def _check_consistent(config: ModelConfig, path: Path) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{path}: num_key_value_heads {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim: rotary embeddings need an even size, got {config.head_dim}")
