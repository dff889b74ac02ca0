"""Checks of the values in a config.json. They raise CheckpointError with the name of the key."""

import math
from typing import Any

from finwhale.errors import CheckpointError

# Limits far above any DeepSeek-V4. They refuse a broken or hostile config.json before it causes
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
    "rope_scaling original_max_position_embeddings": 1 << 30,
    "dspark_block_size": 7,  # the compressors' kernels verify at most 8 tokens: one and its drafts
    "dspark_markov_rank": 1 << 14,
    "dspark_n_routed_experts": 1 << 14,
    "dspark_num_experts_per_tok": 1 << 14,
}


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


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
