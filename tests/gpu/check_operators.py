"""Every operator of a table beside its reference, at a model's sizes; no test by itself.

    python -m tests.gpu.check_operators [--config pro] [--operators NAME ..]

The small cases that tests share, then the model's sizes with outliers, padding and far pages, and
the same bits in other batches. Exits with 1 if a check failed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.support.op_case import CONFIGS, ModelDraw, OpSizes
from tests.support.operator_checks import (
    CHECKED_EXPERTS,
    Verdict,
    at_steps,
    check_large,
    check_operator,
)
from tests.support.packing import ACTIVATIONS
from tools.operators import PLATFORMS, RANKS, kernels

from finwhale.ops import Ops, load_ops
from finwhale.platform import Platform


def run_check(sizes: OpSizes, ops: Ops, operators: Sequence[str], *, invariant: bool) -> int:
    """Run all checks and print a line for each; returns the number of failed checks."""
    reference = load_ops(Platform.detect(), reference=True)
    sizes = replace(sizes, n_routed_experts=min(sizes.n_routed_experts, CHECKED_EXPERTS))
    real, single = ModelDraw("cuda"), ModelDraw("cuda", torch.float32)
    large = {"mhc_post_pre": 4 * sizes.hidden_size, "mhc_post": 4 * sizes.hidden_size}
    failed = 0
    for operator, kernel in kernels(ops).items():
        if operators and operator not in operators:
            continue
        draws = (real,) if operator in (*ACTIVATIONS, "sample") else (real, single)
        for verdict in check_operator(operator, sizes, draws, ops, reference, invariant=invariant):
            failed += _show(operator, verdict)
        if operator in large and large[operator] > 4096:
            (at_step,) = at_steps(sizes, real, operator)
            fault = check_large(at_step, kernel, large[operator])
            failed += _show(operator, Verdict("past 2^31 values", fault))
        torch.cuda.empty_cache()
    print(f"{failed} checks failed" if failed else "all checks passed")
    return failed


def _show(operator: str, verdict: Verdict) -> int:
    print(f"{'FAIL' if verdict.fault else 'pass'} {operator} {verdict.what} {verdict.fault or ''}")
    sys.stdout.flush()
    return verdict.fault is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="flash")
    add("--table", choices=PLATFORMS, default="nvidia")
    add("--operators", nargs="+", default=[])
    add("--batch-invariant", action="store_true")
    add("--tensor-parallel-size", type=int, choices=RANKS, default=1)
    args = parser.parse_args()
    sizes = CONFIGS[args.config].of_rank(args.tensor_parallel_size)
    ops = load_ops(PLATFORMS[args.table], batch_invariant=args.batch_invariant)
    with torch.inference_mode():
        return int(run_check(sizes, ops, args.operators, invariant=args.batch_invariant) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
