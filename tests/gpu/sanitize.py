"""Every kernel of the nvidia table at small sizes, for compute-sanitizer; no test by itself.

compute-sanitizer --tool memcheck --kernel-name kns=_kernel python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --kernel-name kns=_kernel python tests/gpu/sanitize.py

The shared cases, compared with the references, and the operators at the sizes of Flash and of the
embedded model for a few tokens, padding included; what is meant for thousands of tokens begins at a
few hundred here. Every tensor gets memory of its own, so that what lies past its end is noticed.
"""

import os
import sys
from dataclasses import replace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from finwhale.bench import ops as bench
from finwhale.bench.packing import padded
from finwhale.ops import Ops, load_ops
from finwhale.ops.case import CONFIGS, ModelDraw, Sizes, results
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe import dispatch_triton
from finwhale.platform import Platform

TOKENS = (1, 3, 40, 140, 200)
# The same and what meets every plan of the experts: 0.75 to 150 pairs each.
EXPERTS = 8
# The operators that have other sizes on one of several ranks.
CUT = ("linear", "grouped_linear", "sparse_attention", "experts", "swiglu_mlp")
EXPERTS_TOKENS = (*TOKENS, 60, 120)
dispatch_triton.FEW_PAIRS = 256
mhc.MOST_TOKENS = 150


def run_cases(operator: str, table: Ops, reference: Ops) -> tuple[int, int]:
    """(cases that ran, cases that were wrong)"""
    cases = bench.shared_cases(operator)
    verdicts = [bench.check_case(case, table, reference, "cuda") for case in cases]
    ran = [verdict for verdict in verdicts if verdict is not None]
    return len(ran), sum(verdict.fault is not None for verdict in ran)


def run_sizes(operator: str, table: Ops, sizes: Sizes) -> int:
    calls = 0
    sizes = replace(sizes, n_routed_experts=min(EXPERTS, sizes.n_routed_experts), vocab_size=4096)
    kernel = bench.implementation(table, operator)
    for at_step in bench.at_steps(sizes, ModelDraw("cuda"), operator):
        weight = bench.make_weight(at_step(()), table)
        for count in EXPERTS_TOKENS if operator == "experts" else TOKENS:
            case = at_step(bench.mixed_step(count))
            results(kernel, bench.make_args(case, weight), case.written)
            calls += 1
        if operator in bench.PAGED:
            case = at_step(bench.mixed_step(4))
            results(kernel, padded(case.args(), bench.PAGED[operator], 3), case.written)
            calls += 1
    return calls


@torch.inference_mode()
def main() -> int:
    table, reference = load_ops(Platform.detect()), load_ops(Platform.detect(), reference=True)
    wrong = 0
    for operator in sys.argv[1:] or bench.kernels(table):
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
