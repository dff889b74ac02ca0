"""Reads and checks the values in a config.json. Errors are CheckpointErrors that name the key."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from finwhale.errors import CheckpointError

T = TypeVar("T")

# The code supports only these values. A config may omit the key or repeat the value.
FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hc_mult": 4,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
FIXED_QUANTISATION: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
}
# Limits far above any published model. They refuse a broken or hostile config.json before it causes
# large allocations or loops.
_MAX_SIZE = 1 << 20
_MAX_NUMBER = 1e9
_MAX = {
    "vocab_size": 1 << 24,
    "num_hidden_layers": 1 << 10,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "sliding_window": 1 << 16,
    "index_topk": 1 << 16,
    "head_dim": 1 << 14,
    "index_head_dim": 1 << 14,
    "num_attention_heads": 1 << 14,
    "index_n_heads": 1 << 14,
    "hc_sinkhorn_iters": 1000,
    "max_position_embeddings": 1 << 30,
    "engram_num_embeddings": 1 << 32,
    "engram_vocab_size": 1 << 32,
    "engram_compressed_vocab_size": 1 << 24,
    "engram_max_ngram_size": 16,
    "engram_n_heads": 64,
    "engram_head_dim": 1 << 14,
    "rope_scaling original_max_position_embeddings": 1 << 30,
    "dspark_block_size": 7,  # the compressors' kernels verify at most 8 tokens: one and its drafts
    "dspark_markov_rank": 1 << 14,
    "dspark_n_routed_experts": 1 << 14,
    "dspark_num_experts_per_tok": 1 << 14,
}


def get(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise CheckpointError(f"config.json has no {name}")
    return raw[name]


def typed(raw: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A value that is absent, null or of one of the types `kinds`."""
    value, wanted = raw.get(name), " or ".join(kind.__name__ for kind in kinds)
    fits = value is None or (isinstance(value, kinds) and not isinstance(value, bool))
    require(fits, f"{name} must be a {wanted}, got {shown(value)}")
    return value


def token_ids(raw: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id and eos_token_ids."""
    bos, eos = raw.get("bos_token_id"), raw.get("eos_token_id")
    several = tuple(eos) if isinstance(eos, list) else (1 if eos is None else eos,)
    return {"bos_token_id": 0 if bos is None else bos, "eos_token_ids": several}


def check_architecture(raw: Mapping[str, Any], model_type: str, architecture: str) -> None:
    found, architectures = raw.get("model_type"), raw.get("architectures")
    known = architectures is None or architecture in str(architectures)
    if found != model_type or not known:
        raise CheckpointError(
            f"config.json describes another model: model_type {found!r}, architectures "
            f"{architectures!r}; Finwhale serves model_type {model_type!r}, architecture "
            f"{architecture!r} only"
        )


def check_same(raw: Mapping[str, Any], fixed: Mapping[str, object], prefix: str = "") -> None:
    """Check that each value is absent or the one in `fixed`."""
    for name, wanted in fixed.items():
        check_fixed(prefix + name, raw.get(name, wanted), wanted)


def require(fulfilled: object, problem: str) -> None:
    if not fulfilled:
        raise CheckpointError(f"config: {problem}")


def check_fixed(name: str, found: object, wanted: object) -> None:
    fits = found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
    require(fits, f"{name} {found!r} is not supported, only {wanted!r} is")


def check_positive(name: str, value: Any, *kinds: type) -> None:
    number: Any = value if type(value) in kinds else 0  # a bool does not count as a number
    what = "number" if float in kinds else "integer"
    require(0 < number < math.inf, f"{name} must be a positive {what}, got {shown(value)}")
    limit = _MAX.get(name, _MAX_SIZE if float not in kinds else _MAX_NUMBER)
    require(number <= limit, f"{name} must be at most {limit}, got {shown(value)}")


def check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    require(value % divisor == 0, f"{name} {value} must be a multiple of {divisor_name} {divisor}")


def check_layer_ids(name: str, ids: tuple[Any, ...], num_layers: int) -> None:
    inside = all(type(i) is int and 0 <= i < num_layers for i in ids)
    require(
        ids and inside,
        f"{name} must be layers from 0 to {num_layers - 1}, got {shown(list(ids))}",
    )
    ascending = list(ids) == sorted(set(ids))
    require(ascending, f"{name} must be different and ascend, got {shown(list(ids))}")


def check_heads(heads: int, groups: int, rope: int, widths: Mapping[str, int]) -> None:
    """Check the sizes of attention. widths: those of a head, by name."""
    check_multiple("num_attention_heads", heads, "o_groups", groups)
    for name, width in widths.items():
        require(width >= rope, f"{name} {width} must be at least qk_rope_head_dim {rope}")
    require(rope % 2 == 0, f"qk_rope_head_dim must be even, got {rope}")


def check_experts(top: int, experts: int, of_stage: tuple[int, int]) -> None:
    """Check num_experts_per_tok and n_routed_experts, of the layers and of a DSpark stage."""
    require(
        top <= experts,
        f"num_experts_per_tok {top} is more than n_routed_experts {experts}",
    )
    top, experts = of_stage
    require(
        top <= experts,
        f"{top} experts per token of the DSpark stages are more than their {experts} routed "
        "experts",
    )


def check_token_ids(bos: object, eos: tuple[object, ...], vocab_size: int) -> None:
    require(eos, "eos_token_id is an empty list")
    for token in (bos, *eos):
        require(
            type(token) is int and 0 <= token < vocab_size,
            f"token id {token!r} is outside the vocabulary of {vocab_size}",
        )


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def preset(presets: Mapping[str, T], name: str) -> T:
    """A published configuration. Raises CheckpointError: none has this name."""
    if name not in presets:
        known = ", ".join(sorted(presets))
        raise CheckpointError(f"unknown configuration {name!r}; there are {known}")
    return presets[name]
