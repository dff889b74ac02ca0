"""Every kernel of the nvidia table at small sizes, for compute-sanitizer; no test by itself.

compute-sanitizer --tool memcheck --kernel-name kns=_kernel python -m tests.gpu.sanitize
compute-sanitizer --tool racecheck --kernel-name kns=_kernel python -m tests.gpu.sanitize [NAME ..]

The shared cases, compared with the references, and the operators at the sizes of Flash and of the
embedded model for a few tokens, padding included; what is meant for thousands of tokens begins at a
few hundred here. NAME is an operator, or "drafts" for all operators around drafts. Every tensor
gets memory of its own, so that what lies past its end is noticed.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from tests.support import operator_checks as checks
from tests.support.op_arguments import results
from tests.support.op_case import CONFIGS, Draw, ModelDraw, OpSizes, to_device
from tests.support.packing import padded
from torch import Tensor

from finwhale.ops import Ops, load_ops
from finwhale.ops.drafts import BlockShape
from finwhale.ops.moe import dispatch_triton
from finwhale.platform import Platform
from tools import operators as bench

from ..ops import draft_cases as drafts  # noqa: TID252

TOKENS = (1, 3, 40, 140, 200)
# The same and what meets every plan of the experts: 0.75 to 150 pairs each.
EXPERTS = 8
# The operators that have other sizes on one of several ranks.
CUT = ("linear", "grouped_linear", "sparse_attention", "experts", "swiglu_mlp")
EXPERTS_TOKENS = (*TOKENS, 60, 120)
dispatch_triton.FEW_PAIRS = 256


def run_cases(operator: str, table: Ops, reference: Ops) -> tuple[int, int]:
    """(cases that ran, cases that were wrong)"""
    cases = checks.shared_cases(operator)
    verdicts = [checks.check_case(case, table, reference, "cuda") for case in cases]
    ran = [verdict for verdict in verdicts if verdict is not None]
    return len(ran), sum(verdict.fault is not None for verdict in ran)


def run_sizes(operator: str, table: Ops, sizes: OpSizes) -> int:
    calls = 0
    sizes = replace(sizes, n_routed_experts=min(EXPERTS, sizes.n_routed_experts), vocab_size=4096)
    kernel = bench.implementation(table, operator)
    for at_step in checks.at_steps(sizes, ModelDraw("cuda"), operator):
        weight = checks.make_weight(at_step(()), table)
        for count in EXPERTS_TOKENS if operator == "experts" else TOKENS:
            case = at_step(checks.mixed_step(count))
            results(kernel, checks.make_args(case, weight), case.written)
            calls += 1
        if operator in checks.PAGED:
            case = at_step(checks.mixed_step(4))
            results(kernel, padded(case.args(), checks.PAGED[operator], 3), case.written)
            calls += 1
    return calls


def continued(args: tuple[Any, ...], ops: Ops) -> tuple[Tensor, ...]:
    args = to_device(args, "cuda")
    ops.continue_tokens(*args)
    return args[2:]


def accepted(case: drafts.Verification, ops: Ops) -> tuple[Tensor, ...]:
    args = to_device(case.args(), "cuda")
    return (*ops.accept_drafts(*args), *args[2:])


def blocks(last: tuple[int, ...], rows: int, ops: Ops) -> tuple[Tensor, ...]:
    newest, table = Draw().integers(1000, len(last)), drafts.window_table(last, 64, 128, rows)
    newest, tokens, table = to_device((newest, drafts.one_each(last), table), "cuda")
    block = ops.make_blocks(newest, tokens, table, BlockShape(rows, 2**17 + 1, 128))
    tokens = block.tokens
    return block.ids, tokens.positions, tokens.sequence, tokens.query_start, block.extra_kv_slots


def confidences(count: int, width: int, markov: int, ops: Ops) -> tuple[Tensor]:
    draw, w = Draw(), drafts.confidence_weight(width, markov)
    streams = draw.normal(count, 5, 4, width, scale=2.0).bfloat16()
    ids = draw.integers(40, count), draw.integers(40, count, 5)
    streams, newest, ids, w = to_device((streams, *ids, w), "cuda")
    return (ops.draft_confidences(streams, newest, ids, w, drafts.PARAMS),)


def draft_calls() -> Iterator[Callable[[Ops], tuple[Tensor, ...]]]:
    """Calls of every operator around drafts. Each returns what the operator has written."""
    for sizes in ((1, 1, 2), (128, 5, 4), (300, 64, 8)):
        yield partial(continued, drafts.continuation(*sizes))
    for step in drafts.STEPS:
        yield partial(accepted, drafts.verification(*step))
    for rows in (1, 2, 5, 8):
        yield partial(blocks, drafts.LAST, rows)
    for count, width, markov in ((1, 64, 0), (3, 100, 8), (4, 4096, 256)):
        yield partial(confidences, count, width, markov)


def run_drafts(table: Ops, reference: Ops) -> tuple[int, int]:
    """(calls, calls with wrong results)"""
    calls = wrong = 0
    for call in draft_calls():
        pairs = zip(call(table), call(reference), strict=True)
        wrong += not all(torch.allclose(one, other, rtol=1e-5, atol=1e-4) for one, other in pairs)
        calls += 1
    return calls, wrong


@torch.inference_mode()
def main() -> int:
    table, reference = load_ops(Platform.detect()), load_ops(Platform.detect(), reference=True)
    wrong = 0
    for operator in sys.argv[1:] or ("drafts", *bench.kernels(table)):
        if operator == "drafts":
            ran, failed = run_drafts(table, reference)
            wrong += failed
            print(f"drafts: {ran} calls, {failed} wrong", flush=True)
            continue
        ran, failed = run_cases(operator, table, reference)
        wrong += failed
        ran += run_sizes(operator, table, CONFIGS["demo"])
        ran += run_sizes(operator, table, CONFIGS["flash"])
        if operator in CUT:
            ran += run_sizes(operator, table, CONFIGS["flash"].of_rank(4))
        torch.cuda.synchronize()
        assert ran, f"nothing calls {operator}"
        print(f"{operator}: {ran} calls, {failed} cases wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
