"""Calls whose tensors reach beyond 2^31 elements, for test_index_arithmetic.py."""

from collections.abc import Callable
from functools import partial

from finwhale.ops.attention.sparse_attention_hopper import sparse_attention

from . import sm90_compile as near
from . import sm90_experts as experts
from . import sm90_v41_attention as v41
from . import sm90_v41_gemm as gemm
from . import sm90_v41_select as select
from . import sm90_v41_small as small

TOKENS = 2**22
PAIR_TOKENS = 2**19  # of 8 experts each


def calls() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name, (D, A, Q, E) in near.MODELS.items():
        found[f"activations-{name}"] = partial(near.call_all, D, A, Q, E, TOKENS)
        found[f"mhc-{name}"] = partial(near.call_mhc, D, TOKENS)
        found[f"drafts-{name}"] = partial(near.call_drafts, D, TOKENS // 8, 7)
        inner = 2048 if D == 4096 else 3072
        found[f"linear-{name}"] = partial(near.call_linear, D, A, Q, inner, TOKENS)
    for width, heads, topk in ((512, 64, 512), (512, 64, 1024), (128, 16, 64)):
        for N, max_len, max_query in (
            (64, 2**22, 1),
            (2**15, 2**20, 2**15),
            (TOKENS, 2**14, TOKENS),
        ):
            name = f"indexer-{topk}-{max_len}"
            found[name] = partial(near.call_indexer, width, heads, topk, N, max_len, max_query)
    for name, sizes in (("flash", (64, 512, 1024, 512)), ("pro", (128, 512, 1536, 1024))):
        for N in (32, TOKENS):
            step = (*sizes, N, 1 if N == 32 else N)
            found[f"attention-{name}-{N}"] = partial(near.call_attention, *step)
            found[f"attention-hopper-{name}-{N}"] = partial(
                near.call_attention, *step, sparse_attention
            )
    for N in (32, TOKENS):
        found[f"attention-hopper-few-heads-{N}"] = partial(
            near.call_attention, 16, 512, 1024, 512, N, 1 if N == 32 else N, sparse_attention
        )
    found["v41-rows"] = partial(v41.call_rows, TOKENS, TOKENS)
    for heads, N in ((64, 1), (64, TOKENS), (16, TOKENS)):
        found[f"v41-attention-{heads}-{N}"] = partial(v41.call_attention, heads, N)
    D, I, E, _ = experts.MODELS["pro"]  # noqa: E741
    for number, plan in enumerate(experts.PLANS):
        call = partial(experts.call, D, I, E, 8, PAIR_TOKENS, plan)
        found[f"experts-{number}"] = call
    return found | gemm.FAR | select.FAR | small.FAR


CALLS = calls()
