"""How Llama-type models (Llama, Qwen2, Qwen3) are split over tensor-parallel ranks, by parameter name.

Paddle's layout: linear weights are [in, out], embeddings and the head [vocab, hidden]. Column-parallel layers split
their outputs, and their biases with them; row-parallel ones split their inputs, so that their biases, which are added
to the sum of all ranks, are whole. Both vocabulary tensors split their rows. Norms are whole on every rank, those of
single heads too.
"""

import re

from fastdeploy_rl.plan import namespaces

_SHARDED = re.compile(
    r"(?P<axis0>(model\.embed_tokens|lm_head|model\.layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj))\.weight"
    r"|model\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.bias)"
    r"|(?P<axis1>model\.layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.weight)",
    re.ASCII,
)


def shard_axis(name: str) -> int | None:
    """The axis along which the parameter of that name is split; None for norms, for biases of row-parallel layers and
    for names these models do not have. A draft model's are split as those of the main one."""
    match = _SHARDED.fullmatch(namespaces.split(name).name)
    if match is None:
        return None
    return 0 if match["axis0"] else 1
