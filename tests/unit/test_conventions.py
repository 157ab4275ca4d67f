"""What each trainer's tensors are to the engine."""

import pytest

from fastdeploy_rl.errors import ConfigurationError
from fastdeploy_rl.manifest import Fused, Run
from fastdeploy_rl.plan.conventions import TensorRule, by_namespace, hugging_face, paddle_llama, paddleformers

ATTENTION = "model.layers.3.self_attn."
MLP = "model.layers.3.mlp."
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
}


def test_paddle_tensors_are_the_engines_own() -> None:
    assert paddle_llama(ATTENTION + "q_proj.weight", (4, 6)) == TensorRule(ATTENTION + "q_proj.weight", 1)
    assert paddle_llama(ATTENTION + "o_proj.weight", (6, 4)) == TensorRule(ATTENTION + "o_proj.weight", 0)
    assert paddle_llama(ATTENTION + "q_proj.bias", (6,)) == TensorRule(ATTENTION + "q_proj.bias", 0)
    assert paddle_llama("model.norm.weight", (4,)) == TensorRule("model.norm.weight")


def test_torch_linears_are_turned_and_cut_along_the_other_axis() -> None:
    for name, axis in [("q_proj", 0), ("k_proj", 0), ("o_proj", 1)]:
        rule = hugging_face(f"{ATTENTION}{name}.weight", (6, 4))
        assert rule == TensorRule(f"{ATTENTION}{name}.weight", axis, is_transposed=True)
    assert hugging_face(MLP + "down_proj.weight", (4, 6)).shard_axis == 1


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", ATTENTION + "q_proj.bias"])
def test_torch_embeddings_and_biases_stay_as_they_are(name: str) -> None:
    assert hugging_face(name, (8, 4)) == TensorRule(name, 0)
    assert hugging_face("model.norm.weight", (4,)) == TensorRule("model.norm.weight")


def test_a_fused_qkv_has_each_key_and_value_behind_its_queries() -> None:
    rule = paddleformers(CONFIG)(ATTENTION + "qkv_proj.weight", (8, 16))
    q, k, v = (f"{ATTENTION}{name}_proj.weight" for name in "qkv")
    runs = (Run(q, 0, 4), Run(k, 0, 2), Run(v, 0, 2), Run(q, 4, 8), Run(k, 2, 4), Run(v, 2, 4))
    assert rule == TensorRule(ATTENTION + "qkv_proj.weight", 1, fused=Fused(1, runs))


def test_a_fused_bias_is_cut_along_its_only_axis() -> None:
    rule = paddleformers(CONFIG)(ATTENTION + "qkv_proj.bias", (16,))
    assert rule.fused is not None
    assert (rule.shard_axis, rule.fused.axis, rule.fused.runs[1].name) == (0, 0, ATTENTION + "k_proj.bias")


@pytest.mark.parametrize("name", ["up_gate_proj", "gate_up_fused_proj"])
def test_a_fused_mlp_is_all_of_gate_then_all_of_up(name: str) -> None:
    rule = paddleformers(CONFIG)(f"{MLP}{name}.weight", (8, 12))
    assert rule.fused == Fused(1, (Run(MLP + "gate_proj.weight", 0, 6), Run(MLP + "up_proj.weight", 0, 6)))


def test_a_fused_mlp_of_a_split_trainer_is_gate_then_up_on_each_rank() -> None:
    rule = paddleformers(CONFIG | {"tensor_model_parallel_size": 2})(f"{MLP}up_gate_proj.weight", (8, 12))
    gate, up = MLP + "gate_proj.weight", MLP + "up_proj.weight"
    assert rule.fused == Fused(1, (Run(gate, 0, 3), Run(up, 0, 3), Run(gate, 3, 6), Run(up, 3, 6)))


def test_what_a_paddleformers_model_does_not_fuse_is_the_engines_own() -> None:
    rule = paddleformers(CONFIG | {"model_type": "llama"})(ATTENTION + "q_proj.weight", (8, 8))
    assert rule == TensorRule(ATTENTION + "q_proj.weight", 1)


@pytest.mark.parametrize("shape", [(8, 15), (16, 8), (16,), (8, 8)])
def test_a_fused_tensor_that_the_config_cannot_have_made_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"qkv_proj\.weight.*last axis 16"):
        paddleformers(CONFIG)(ATTENTION + "qkv_proj.weight", shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "phi3"}, "'phi3' is not known; ernie4_5, llama, qwen2, qwen3"),
        ({"num_attention_heads": 3}, "do not divide"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"tensor_model_parallel_size": 4}, "intermediate_size 6 does not divide over 4 ranks"),
    ],
)
def test_a_config_that_says_too_little_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        paddleformers(CONFIG | change)


# --- several models -----------------------------------------------------------------------------------


def test_a_draft_models_tensors_are_split_and_turned_by_their_names_inside_it() -> None:
    for convention in (paddle_llama, hugging_face):
        for name in ("q_proj.weight", "o_proj.weight", "q_proj.bias"):
            shape = (6, 4)[: 1 + name.endswith("weight")]
            rule = convention(ATTENTION + name, shape)
            assert convention(f"draft/{ATTENTION}{name}", shape) == rule._replace(name=f"draft/{ATTENTION}{name}")


def test_each_model_has_the_convention_of_its_namespace() -> None:
    rules = by_namespace(hugging_face, draft=paddleformers(CONFIG))
    name = ATTENTION + "qkv_proj.weight"
    bare = paddleformers(CONFIG)(name, (8, 16))
    moved = rules(f"draft/{name}", (8, 16))
    assert rules(ATTENTION + "q_proj.weight", (6, 4)) == hugging_face(ATTENTION + "q_proj.weight", (6, 4))
    assert (moved.name, moved.shard_axis, moved.fused.axis) == (f"draft/{name}", bare.shard_axis, bare.fused.axis)
    assert moved.fused.runs == tuple(Run(f"draft/{run.name}", run.start, run.stop) for run in bare.fused.runs)


def test_a_name_in_a_namespace_without_a_convention_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"mtp/norm.*namespace 'mtp'; there is one for draft"):
        by_namespace(paddle_llama, draft=paddle_llama)("mtp/norm", (4,))
    with pytest.raises(ConfigurationError, match="a/b"):
        by_namespace(paddle_llama, **{"a/b": paddle_llama})


def test_a_fused_tensor_is_never_taken_apart_by_another_models_config() -> None:
    with pytest.raises(ConfigurationError, match="by_namespace"):
        paddleformers(CONFIG)(f"draft/{ATTENTION}qkv_proj.weight", (8, 16))
    assert paddleformers(CONFIG)("draft/model.norm.weight", (4,)) == TensorRule("draft/model.norm.weight")
