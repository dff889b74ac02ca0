"""DeepSeek-V4.1's selection at the model's sizes, against the reference, exactly."""

from functools import partial

import pytest
import torch
from tests.support.op_case import Chunks
from tests.support.v41_keys import check_selections, selection_call

from finwhale.ops.deepseek_v41 import IndexRule
from finwhale.ops.deepseek_v41.select_triton import select_shared
from finwhale.ops.indexer.topk_long_triton import NUM_WARPS


def steps(context: int) -> dict[str, Chunks]:
    half = context // 2
    return {
        "decode": ((context - 1, context), (half - 1, half), (600, 601)),
        "verification": ((context - 6, context), (half - 3, half)),
        "prefill": ((context - 40, context), (700, 740)),
    }


@pytest.mark.parametrize("context", [3_000, 20_000, 100_000, 1_000_000])
@pytest.mark.parametrize("step", steps(0))
@pytest.mark.parametrize(("ratio", "keeps"), [(1, 2048), (2, 0)])
def test_selections(step: str, ratio: int, keeps: int, context: int) -> None:
    fast = {"inline_asm": True, "early_launch": True, "long_warps": NUM_WARPS}
    call = selection_call(steps(context)[step], ratio, width=128, page=256 // ratio, heads=32)
    rule = IndexRule(ratio=ratio, topk=512, scale=0.5, round_query=True)
    with torch.inference_mode():
        check_selections(partial(select_shared, **fast), call, rule, keeps, "cuda")
