"""Maps the tensor names in a checkpoint's files to the official names.

There are three sets of names: the official names; those of transformers' modules
(`model.layers.0.self_attn.q_a_proj`, experts stacked in one tensor); and those of transformers'
`save_pretrained`, which restores most official names but not all. Source: transformers 5.23
`conversion_mapping.py`, "deepseek_v4".
"""

import re
from functools import lru_cache

_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"\.weight_scale_inv$", ".scale"),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        # Attention. A compressor's norm is `norm`, the layer's norm is `kv_norm`.
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.compressor\.position_bias$", ".compressor.ape"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.attn\.q_a_norm\.", ".attn.q_norm."),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        # Mixture of experts.
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    )
]
_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_NUMBER = re.compile(r"\d+")


# The index of a part of a stacked expert tensor [experts, rows, columns]: (expert, start:stop).
ExpertPart = tuple[int, slice]


def official_name(stored: str) -> str:
    """The official name of a tensor that is not stacked. Unknown names do not change."""
    # A checkpoint has 70,000 names, and few that differ in more than their numbers. No pattern
    # looks at a number.
    return _renamed(stored) if _changes(_NUMBER.sub("0", stored)) else stored


@lru_cache(maxsize=10_000)
def _changes(name: str) -> bool:
    return _renamed(name) != name


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def official_tensors(
    stored: str, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...], ExpertPart | None]]:
    """The official tensors in one stored tensor: name, shape, and part of the stored tensor.

    `experts.gate_up_proj` [E, 2I, D] holds w1 in its first I rows and w3 in the others;
    `experts.down_proj` [E, D, I] holds w2.
    """
    name = official_name(stored)
    match = _STACKED.match(name)
    if match is None or len(shape) != 3:
        return [(name, shape, None)]
    experts, rows, columns = shape
    if match[2] == "down_proj":
        slices = [("w2", 0, rows)]
    else:
        slices = [("w1", 0, rows // 2), ("w3", rows // 2, rows)]
    return [
        (f"{match[1]}.{e}.{w}.weight", (stop - start, columns), (e, slice(start, stop)))
        for e in range(experts)
        for w, start, stop in slices
    ]
