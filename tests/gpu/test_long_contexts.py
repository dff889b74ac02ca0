"""The operators that read pages, at contexts of up to a million tokens, against the reference.

The tokens of a step are a sample: some at the end of the context, some in the middle of another
sequence's.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.support import operator_checks as checks
from tests.support.op_case import CONFIGS, ModelDraw

from finwhale.ops import load_ops
from finwhale.ops.attention import sparse_attention_hopper_unpack as unpacking
from finwhale.platform import Platform


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("context", [65_536, 262_144, 1_000_000])
@pytest.mark.parametrize("operator", checks.PAGED)
def test_sampled_tokens(operator: str, context: int) -> None:
    ops = load_ops(Platform("nvidia", "sm90"))
    reference = load_ops(Platform.detect(), reference=True)
    half = context // 2
    prompts = ((half - 1, half), (context - 45, context), (700, 740))
    decodes = ((context - 1, context), (half - 1, half), (6000, 6001))
    verification = ((context - 6, context),)
    for at_step in checks.at_steps(CONFIGS["flash"], ModelDraw("cuda"), operator):
        weight = checks.make_weight(at_step(()), ops)
        for chunks in (prompts, decodes, verification):
            verdict = checks.check_step(at_step, chunks, weight, ops, reference)
            assert verdict.fault is None, verdict


@pytest.mark.parametrize("context", [65_536, 262_144, 1_000_000])
def test_prompts_with_unpacked_rows(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of prompts that the kernel of many tokens reads, beside a decode."""
    monkeypatch.setattr(unpacking, "ROWS_PER_TOKEN", context)
    ops = load_ops(Platform("nvidia", "sm90"))
    reference = load_ops(Platform.detect(), reference=True)
    chunks = ((context - 300, context), (context // 2 - 1, context // 2), (0, 700))
    for at_step in checks.at_steps(CONFIGS["flash"], ModelDraw("cuda"), "sparse_attention"):
        weight = checks.make_weight(at_step(()), ops)
        verdict = checks.check_step(at_step, chunks, weight, ops, reference)
        assert verdict.fault is None, verdict
