"""The tensors that the benchmark moves: 290 of them, 0.99 GB in bf16, with the shapes of Qwen2.5-0.5B.

Without the package and without numpy's help, since peers with an environment of their own use it too."""

import math

HIDDEN, INTERMEDIATE, KV, LAYERS, VOCAB = 896, 4864, 128, 24, 151936
ELEMENT_BYTES = 2


def shapes() -> dict[str, tuple[int, ...]]:
    """Global shape by name; linear weights [in, out]."""
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.q_proj.bias": (HIDDEN,),
        "self_attn.k_proj.weight": (HIDDEN, KV),
        "self_attn.k_proj.bias": (KV,),
        "self_attn.v_proj.weight": (HIDDEN, KV),
        "self_attn.v_proj.bias": (KV,),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (HIDDEN, INTERMEDIATE),
        "mlp.up_proj.weight": (HIDDEN, INTERMEDIATE),
        "mlp.down_proj.weight": (INTERMEDIATE, HIDDEN),
    }
    return names | {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}


def num_bytes() -> dict[str, int]:
    """Size of each."""
    return {name: math.prod(shape) * ELEMENT_BYTES for name, shape in shapes().items()}
