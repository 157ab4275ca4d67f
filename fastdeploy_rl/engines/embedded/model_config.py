"""The shape of a Llama-type model: read from a Hugging Face `config.json`, checked once, never changed.

Owns which models this engine can run and how they split over ranks. Knows nothing of Paddle or of files of weights.
Invariant: a `ModelConfig` that exists describes a model this engine computes exactly; anything it would compute
differently was refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_rl.coverage import Coverage, ParameterSpec
from fastdeploy_rl.errors import CheckpointError, ConfigurationError
from fastdeploy_rl.plan.llama import shard_axis

MAX_FILE_BYTES = 64 << 20
"""tokenizer.json of large vocabularies has tens of megabytes; nothing sensible has more."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama decoder; all of them global (before the split over ranks)."""

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
    tie_word_embeddings: bool
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

    def _split_sizes(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
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
    """A small file of a model directory, whole; CheckpointError when it is missing or larger than MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the model directory is incomplete") from error
    if len(data) > MAX_FILE_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_FILE_BYTES} bytes")
    return data


def parameter_specs(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """Every parameter in engine layout: linear weights are [in, out], embeddings and head [vocab, hidden]; float32."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes |= {FINAL_NORM: (config.hidden_size,), HEAD: (config.vocab_size, config.hidden_size)}
    return tuple(_spec(name, shape, config) for name, shape in shapes.items())


def local_shape(spec: ParameterSpec, num_ranks: int) -> tuple[int, ...]:
    """Shape of one rank's slice of a parameter."""
    return tuple(size // num_ranks if axis == spec.shard_axis else size for axis, size in enumerate(spec.shape))


def _spec(name: str, shape: tuple[int, ...], config: ModelConfig) -> ParameterSpec:
    if name == HEAD and config.tie_word_embeddings:
        return ParameterSpec(name, "F32", shape, shard_axis(name), Coverage.TIED, EMBEDDING)
    return ParameterSpec(name, "F32", shape, shard_axis(name))


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, heads),
        "self_attn.k_proj.weight": (hidden, kv_heads),
        "self_attn.v_proj.weight": (hidden, kv_heads),
        "self_attn.o_proj.weight": (heads, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (hidden, inner),
        "mlp.up_proj.weight": (hidden, inner),
        "mlp.down_proj.weight": (inner, hidden),
    }


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

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
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


def _parse(fields: _Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    num_heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    head_dim = fields.values.get("head_dim")
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=fields.size("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=hidden // num_heads if head_dim is None else fields.size("head_dim"),
        max_position_embeddings=fields.size("max_position_embeddings", 2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=tuple(sorted(set(eos_token_ids))),
    )


def _rope_theta(fields: _Fields) -> float:
    """Newer configurations keep it in `rope_parameters`, older ones at the top."""
    nested = fields.values.get("rope_parameters")
    if isinstance(nested, dict) and "rope_theta" in nested:
        return _Fields(fields.path, nested).number("rope_theta", 10000.0)
    return fields.number("rope_theta", 10000.0)


def _generation_stop_tokens(directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    return _Fields(path, read_json(path)).token_ids("eos_token_id") if path.exists() else ()


def _refuse_foreign_model(fields: _Fields) -> None:
    """What would load and then compute something else is refused here."""
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in expected.items():
        got = fields.values.get(key, value)
        if got != value:
            raise ConfigurationError(f"{fields.path}: {key}: this engine computes {value!r}, the model needs {got!r}")
    for key in ("rope_scaling", "rope_parameters"):
        scaling = fields.values.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
        if kind != "default":
            raise ConfigurationError(
                f"{fields.path}: {key}: this engine has plain rotary embeddings, the model needs {kind!r}"
            )


def _check_consistent(config: ModelConfig, path: Path) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{path}: num_key_value_heads {config.num_key_value_heads} does not divide "
            f"num_attention_heads {config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim: rotary embeddings need an even size, got {config.head_dim}")
