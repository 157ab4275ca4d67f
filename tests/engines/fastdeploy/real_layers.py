"""FastDeploy's own layers and their weight loaders, against what we say of their parameters.

Runs in FastDeploy's process. Faked: that there is a CUDA platform, and the process group, of which only numbers are
asked."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from fastdeploy.model_executor import utils
from fastdeploy.model_executor.layers import embeddings, linear, lm_head
from fastdeploy.platforms import current_platform
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from fastdeploy_rl.coverage import ParameterSpec
from fastdeploy_rl.engines.fastdeploy.model_weights import ModelWeights
from fastdeploy_rl.engines.fastdeploy.parameter_cut import EACH_RANK

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 64, 8, 2, 16, 96, 256


class Model(paddle.nn.Layer):
    """One of each kind."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fd_config = config
        self.column = linear.ColumnParallelLinear(config, "column", HIDDEN, 128, with_bias=True)
        self.row = linear.RowParallelLinear(config, "row", 128, HIDDEN, with_bias=True, layer_id=1)
        self.gate = linear.ReplicatedLinear(config, "gate", HIDDEN, 32)
        self.qkv_proj = linear.QKVParallelLinear(config, "qkv_proj", with_bias=True)
        self.up_gate_proj = linear.MergedColumnParallelLinear(
            config, "up_gate_proj", HIDDEN, 2 * INTERMEDIATE, with_bias=True
        )
        self.kv_b = linear.KVBatchLinear(config, self.column, "kv_b", 16, 8, 8, 8)
        self.embed_tokens = embeddings.VocabParallelEmbedding(config, VOCABULARY, HIDDEN)
        self.lm_head = lm_head.ParallelLMHead(config, VOCABULARY, HIDDEN, prefix="lm_head")


SHARDS = {
    "qkv_proj": {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM},
    "up_gate_proj": {"gate": INTERMEDIATE, "up": INTERMEDIATE},
}
"""What checkpoints have of a fused layer: the loader's word for it, and its outputs."""
LINEAR = ("column", "row", "gate", "qkv_proj", "up_gate_proj")
WHOLE = {
    "column.weight": (HIDDEN, 128),
    "column.bias": (128,),
    "row.weight": (128, HIDDEN),
    "gate.weight": (HIDDEN, 32),
    "embed_tokens.embeddings.weight": (VOCABULARY, HIDDEN),
    "lm_head.linear.weight": (HIDDEN, VOCABULARY),
}
"""Shapes in checkpoints of Paddle's layout; the first four are turned in torch's."""


def config_of(rank: int, num_ranks: int, model_format: str, is_sequence_parallel: bool) -> Any:
    group = SimpleNamespace(nranks=num_ranks, rank=rank, id=0, process_group=None)
    parallel = SimpleNamespace(
        tensor_parallel_size=num_ranks,
        tensor_parallel_rank=rank,
        tp_group=group,
        expert_parallel_size=1,
        use_sequence_parallel_moe=is_sequence_parallel,
    )
    model = SimpleNamespace(
        model_format=model_format,
        hidden_size=HIDDEN,
        head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        is_quantized=False,
        moe_layer_start_index=0,
        num_hidden_layers=4,
        enable_cache=False,
        tie_word_embeddings=False,
        lm_head_fp32=False,
        freeze_embedding=False,
        initializer_range=0.02,
        hidden_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    return SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        load_config=SimpleNamespace(dynamic_load_weight=False, load_choices="default_v1", is_pre_sharded=False),
        quant_config=None,
        scheduler_config=SimpleNamespace(splitwise_role="mixed"),
    )


def cuts(num_ranks: int, model_format: str, is_sequence_parallel: bool, is_done: bool) -> dict[str, Any]:
    """`is_done`: layers have been told that all is loaded; those of torch's layout are turned then. `wrong`: parameters
    of which a rank's part, as FastDeploy's loader makes it from a whole one, is not what our spec says. `whole`: shape
    and axis of those that have a whole; `parts`: of what the fused ones consist; `each_rank`: those that have none."""
    models = [_model(rank, num_ranks, model_format, is_sequence_parallel) for rank in range(num_ranks)]
    checkpoint = _checkpoint(model_format)
    for model in models:
        for name, pieces in checkpoint.items():
            _load(model, name, pieces)
        for layer in LINEAR if is_done else ():
            getattr(model, layer).quant_method.process_weights_after_loading(getattr(model, layer))
    is_turned = is_done and model_format == "torch"
    specs = {spec.name: spec for spec in ModelWeights(models[0], 0, num_ranks).specs}
    each_rank = [name for name, spec in specs.items() if [part.name for part in spec.fused] == [name + EACH_RANK]]
    wrong = [
        f"{name} of rank {rank}"
        for name, pieces in checkpoint.items()
        for rank, model in enumerate(models)
        if name not in each_rank
        and not np.array_equal(model.state_dict()[name].numpy(), _said(specs[name], pieces, rank, num_ranks, is_turned))
    ]
    return {
        "wrong": wrong,
        "whole": {name: [*spec.shape, spec.shard_axis] for name, spec in specs.items() if name not in each_rank},
        "each_rank": each_rank,
        "parts": {name: [part.name for part in spec.fused] for name, spec in specs.items() if spec.fused},
    }


def _model(rank: int, num_ranks: int, model_format: str, is_sequence_parallel: bool) -> Model:
    type(current_platform).is_cuda = lambda self: True
    utils._support_new_h2d = False
    fleet.fleet._hcg = SimpleNamespace(get_model_parallel_rank=lambda: rank)
    paddle.Tensor.cuda = lambda self: self
    fleet.fleet._user_defined_strategy = fleet.DistributedStrategy()
    if "model_parallel_rng" not in get_rng_state_tracker().states_:
        get_rng_state_tracker().add("model_parallel_rng", 1)
    return Model(config_of(rank, num_ranks, model_format, is_sequence_parallel))


def _checkpoint(model_format: str) -> dict[str, dict[str | None, np.ndarray]]:
    """Of each parameter the whole, or its pieces, by the loader's word for them."""
    random = np.random.default_rng(7)

    def values(*shape: int) -> np.ndarray:
        is_turned = model_format == "torch" and len(shape) == 2
        return random.standard_normal(shape[::-1] if is_turned else shape, dtype=np.float32)

    found: dict[str, dict[str | None, np.ndarray]] = {name: {None: values(*shape)} for name, shape in WHOLE.items()}
    found["embed_tokens.embeddings.weight"] = {None: random.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)}
    for layer, outputs in SHARDS.items():
        found[f"{layer}.weight"] = {shard: values(HIDDEN, size) for shard, size in outputs.items()}
        found[f"{layer}.bias"] = {shard: values(size) for shard, size in outputs.items()}
    return found


def _load(model: Model, name: str, pieces: dict[str | None, np.ndarray]) -> None:
    """By FastDeploy's loader of the parameter."""
    parameter = model.state_dict()[name]
    load = getattr(parameter, "weight_loader", None) or utils.default_weight_loader(model.fd_config)
    for shard, array in pieces.items():
        load(parameter, paddle.to_tensor(array), *([] if shard is None else [shard]))


def _said(
    spec: ParameterSpec, pieces: dict[str | None, np.ndarray], rank: int, num_ranks: int, is_turned: bool
) -> np.ndarray:
    """What our spec makes of the whole. The head's loader turns torch's layout at once."""
    is_turned = (is_turned and spec.name.partition(".")[0] in LINEAR) or (
        spec.name.startswith("lm_head") and pieces[None].shape != spec.shape
    )
    arrays = [array.T if is_turned else array for array in pieces.values()]
    if not spec.fused:
        return _share(arrays[0], spec.shard_axis, spec.shape, rank, num_ranks)
    shares = []
    for part, array in zip(spec.fused, arrays, strict=True):
        shape = tuple(part.size if at == spec.fused_axis else n for at, n in enumerate(spec.shape))
        shares.append(
            _share(_with_replicas(array, spec.fused_axis, part.size), spec.shard_axis, shape, rank, num_ranks)
        )
    return np.concatenate(shares, axis=spec.fused_axis)


def _with_replicas(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Key and value heads that several ranks have: each so often in the whole."""
    times = size // array.shape[axis]
    heads = np.split(array, array.shape[axis] // HEAD_DIM, axis=axis)
    return np.concatenate([head for head in heads for _ in range(times)], axis=axis) if times > 1 else array


def _share(array: np.ndarray, axis: int | None, shape: tuple[int, ...], rank: int, num_ranks: int) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(f"a whole of {array.shape} where our spec has {shape}")
    return array if axis is None else np.split(array, num_ranks, axis=axis)[rank]
