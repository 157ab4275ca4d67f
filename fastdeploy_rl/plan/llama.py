"""How Llama-type models (Qwen2 and Qwen3 among them) are split over tensor-parallel ranks, by parameter name.

Paddle's layout: linear weights are [in, out], embeddings and the head [vocab, hidden]. Column-parallel layers split
their outputs (and so their biases), row-parallel ones their inputs, both vocabulary tensors their rows; norms are
whole on every rank.
"""

import re

_SHARDED = re.compile(
    r"(?P<axis0>(model\.embed_tokens|lm_head|model\.layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj))\.weight"
    r"|model\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.bias)"
    r"|(?P<axis1>model\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.weight)",
    re.ASCII,
)


def shard_axis(name: str) -> int | None:
    """The axis along which the parameter of that name is split; None for norms and for names Llama does not have."""
    match = _SHARDED.fullmatch(name)
    if match is None:
        return None
    return 0 if match["axis0"] else 1
