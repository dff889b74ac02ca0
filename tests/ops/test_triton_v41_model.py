"""DeepSeek-V4.1's model with its table of Triton kernels, in the interpreter, beside the CPU's.

Weights are FP8 and FP4, and the cache is packed.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.models.v41_runner import step_inputs
from tests.support.v41_weights import plain_fp4
from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import V41_PATH
from finwhale.distributed.rank import ALONE
from finwhale.engine.start.kv_cache import allocate_cache, plan_cache
from finwhale.models.deepseek_v41 import architecture
from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.step_inputs import Inline
from finwhale.models.weight_sources import Weights
from finwhale.ops import Ops, load_ops
from finwhale.ops.mhc import FusedReduceMhc
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe import ref as moe_ref
from finwhale.ops.paging import PageTable
from finwhale.ops.tables import deepseek_v41, nvidia
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm

from . import triton_interpreter as triton_interpreter

PORTABLE, PAGES, LENGTH = Platform("nvidia", "sm100"), 40, 256
CPU = torch.device("cpu")
# Steps with the bounds of their prompts (v41_runner.py). The first sequence resumes after 16 cached
# tokens, of which it computes 12 again.
REPLAYS = {
    ((0, 16), (0, 6)): ((0, 21), (0, 6)),
    ((4, 21), (6, 7)): ((16, 21), (0, 6)),
    ((21, 22), (7, 8)): (),
}
# Few entries and blocks, so that short texts select. Two sequences are prefilled, then both decode,
# and then one verifies drafts beside the other.
CHANGES = {"index_topk": 4, "candidate_topk_blocks": 2, "sliding_window": 8}
STEPS = [((0, 21), (0, 6)), ((21, 22), (6, 7)), ((22, 25), (7, 8))]


def plain_experts(w: ExpertWeight) -> ExpertWeight:
    assert w.scale13 is not None and w.scale2 is not None
    w13, w2 = plain_fp4(w.w13, w.scale13), plain_fp4(w.w2, w.scale2)
    return ExpertWeight(w13.bfloat16(), w2.bfloat16(), w.input_group)


class Runner:
    exact = True

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        checkpoint = Checkpoint.open(V41_PATH)
        config = config_of(checkpoint.config).without_draft_head()
        config = replace(config, exact_prefill=self.exact, **CHANGES)  # type: ignore[arg-type]
        stream = Weights(config, checkpoint).open(CPU, ALONE)
        form = WeightForm(
            ops=ops, dtype=dtype, round_activations=True, storages=dict(stream.storages)
        )
        weights = architecture.assembler(config, form, CPU).fill(stream)
        self.model = architecture.build(
            config, ops, weights, checkpoint, round_activations=True, max_positions=LENGTH
        )
        self.groups, packed = architecture.cache_groups(config), ops.capabilities.packed_cache
        plan = plan_cache(
            self.groups,
            itemsize=dtype.itemsize,
            packed=packed,
            budget_bytes=2**26,
            max_num_seqs=4,
            max_step_tokens=64,
            wanted_tokens=1024,
        )
        plan = replace(plan, num_pages={group.name: PAGES for group in self.groups})
        self.cache = allocate_cache(self.groups, plan, dtype, CPU, packed)

    def __call__(self, text: Sequence[int], chunks: tuple[tuple[int, int], ...]) -> Tensor:
        """The logits [M,V] of a step with a chunk of the same text for each sequence, of the rows
        that have any.
        """
        count, tables = len(chunks), {}
        for group in self.groups:
            each = -(-LENGTH // group.tokens_per_page)
            pages = 1 + torch.arange(each)[None] * count + torch.arange(count)[:, None]
            first = torch.zeros(count, dtype=torch.int32)
            tables[group.name] = PageTable(pages.int(), first, group.rows_per_page)
        ids = torch.tensor([i for start, end in chunks for i in text[start:end]])
        inputs = replace(step_inputs(chunks, REPLAYS.get(chunks, ())), token_ids=ids, tables=tables)
        with torch.inference_mode():
            logits, _ = self.model.forward_with_logits(inputs, self.cache, Inline())
        return logits[logits.any(1)]


def distance(one: Tensor, other: Tensor) -> float:
    return float(((one - other).norm(dim=1) / other.norm(dim=1)).median())


@pytest.mark.long
def test_prompts_that_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "exact", False)
    monkeypatch.setitem(globals(), "STEPS", list(REPLAYS))
    test_logits_are_as_close_as_those_of_the_definitions()


@pytest.mark.long
def test_logits_are_as_close_as_those_of_the_definitions() -> None:
    """The logits of float32 are as far from the kernels' as from the definitions' in bfloat16.

    They are far, because a value near the middle of two FP4 values is rounded to either, and a
    random model spreads that.
    """
    table = deepseek_v41.table(nvidia.table(PORTABLE), PORTABLE, hopper=False)
    # The interpreter runs no kernels in Gluon. As in Hopper's table, mHC adds the experts' outputs.
    steps = mhc.num_programs, mhc.mhc_post, mhc.mhc_post_pre
    table = replace(
        table,
        finish_experts=plain_experts,
        experts_dispatch=moe_ref.dispatch,
        experts_compute=moe_ref.compute,
        mhc_of_terms=FusedReduceMhc(mhc.FEW_TOKENS, *steps),
    )
    kernels, cpu = Runner(table, torch.bfloat16), Platform.cpu()
    plain = Runner(load_ops(cpu, reference=True), torch.bfloat16)
    exact = Runner(load_ops(cpu), torch.float32)
    text = torch.randint(19, 1024, (25,), generator=torch.Generator().manual_seed(0)).tolist()
    # The median of one step is that of a few tokens.
    found, defined, wanted = (
        torch.cat([runner(text, chunks) for chunks in STEPS]) for runner in (kernels, plain, exact)
    )
    spread = distance(defined, wanted)
    assert distance(found, wanted) < 1.5 * spread and distance(found, defined) < 1.5 * spread
