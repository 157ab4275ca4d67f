"""How the parameters of Llama, Qwen2 and Qwen3 are split."""

import pytest

from fastdeploy_rl.plan.llama import shard_axis

AXES = {
    "model.embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "model.layers.0.self_attn.q_proj.weight": 1,
    "model.layers.7.self_attn.k_proj.weight": 1,
    "model.layers.29.self_attn.v_proj.weight": 1,
    "model.layers.129.self_attn.o_proj.weight": 0,
    "model.layers.1.mlp.gate_proj.weight": 1,
    "model.layers.1.mlp.up_proj.weight": 1,
    "model.layers.1.mlp.down_proj.weight": 0,
    "model.layers.1.input_layernorm.weight": None,
    "model.layers.1.post_attention_layernorm.weight": None,
    "model.norm.weight": None,
    "model.layers.0.self_attn.q_proj.bias": 0,
    "model.layers.12.self_attn.k_proj.bias": 0,
    "model.layers.0.self_attn.v_proj.bias": 0,
    "model.layers.0.self_attn.o_proj.bias": None,
    "model.layers.0.self_attn.q_norm.weight": None,
    "model.layers.0.self_attn.k_norm.weight": None,
    "model.layers.0.mlp.gate_proj.bias": 0,
    "model.layers.0.mlp.up_proj.bias": 0,
    "model.layers.0.mlp.down_proj.bias": None,
}


@pytest.mark.parametrize("name", AXES)
def test_columns_rows_vocabulary_biases_and_norms(name: str) -> None:
    assert shard_axis(name) == AXES[name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lm_head.weight.scale",
        "xlm_head.weight",
        "lm_headXweight",
        "model.layers..mlp.up_proj.weight",
        "lm_head.weight\n",
    ],
)
def test_names_that_llama_does_not_have_are_not_split(name: str) -> None:
    assert shard_axis(name) is None
