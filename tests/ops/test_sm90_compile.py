"""Every Triton kernel compiles for SM90 with the models' sizes and fits; what spills is known."""

import re

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

import triton

from . import (
    sm90_attention,
    sm90_collectives,
    sm90_compile,
    sm90_experts,
    sm90_v41_attention,
    sm90_v41_gemm,
    sm90_v41_select,
    sm90_v41_small,
)
from .conftest import Compile
from .kernel_sources import kernel_names

# Other sizes of kernels that a size of Flash compiles too.
OTHER_SIZES = {
    "attention-flash-32",
    "v41-attention-64-32",
    "v41-attention-8-8",
    "flash-hopper-32-1024",
    "flash-hopper-64-1024",
    "flash-hopper-128-1024",
    "linear-flash-64",
    "linear-flash-rank-8",
    *sm90_attention.OTHER_VARIANTS,
}
OTHER_MODELS = ("pro", "demo", "indexer-64", "indexer-1024")
# Calls that the core suite compiles: kernels of Triton's language and one of Gluon's.
SMOKE = ("mhc-flash-2", "1-3-64-64-64-False-32")


def marks(call: str) -> list[pytest.MarkDecorator]:
    other = call in OTHER_SIZES or any(f"-{model}-" in f"-{call}-" for model in OTHER_MODELS)
    if other:
        return [pytest.mark.long]
    return [] if call in SMOKE else [pytest.mark.kernels]


MODULES = (
    *(sm90_compile, sm90_attention, sm90_experts),
    *(sm90_v41_attention, sm90_v41_gemm, sm90_v41_select, sm90_v41_small),
)
CALLS = [
    pytest.param(module.__name__.rpartition(".")[2], call, id=call, marks=marks(call))
    for module in MODULES
    for call in module.CALLS
]
# Bytes of stack a thread: portable attention of many tokens; the indexer's scores of a prefill; the
# selection of 2048 blocks; Gluon programs of many columns, outside their loops over tiles.
# The embedded model's compressors, and kernels that store entries with their keys, reserve 8 bytes
# that no instruction uses.
SPILLING = {
    "indexer.select_entries_triton._scores_kernel": 16,
    "indexer.topk_long_triton._select_long_kernel": 16,
    "compressor.compress_triton._compress_kernel": 8,
    "attention.sparse_attention_triton._attend_kernel": 256,
    "attention.sparse_attention_hopper._attend_kernel": 32,
    "deepseek_v41.attention_triton._attend_kernel": 120,
    "deepseek_v41.experts_hopper._down_kernel": 120,
    "deepseek_v41.store_rows_triton._store_rows_kernel": 8,
    "moe.experts_hopper._gate_up_kernel": 64,
    "moe.experts_hopper._down_kernel": 64,
    "moe.experts_hopper_few._few_gate_up_kernel": 64,
    "moe.experts_hopper_few._few_down_kernel": 64,
}
if triton.__version__ < "3.7":  # it allocates a few more registers
    SPILLING |= {
        "compressor.compress_triton._compress_kernel": 24,
        "moe.experts_hopper._gate_up_kernel": 80,
        "sampling.draw_triton._least_kernel": 8,
    }
if triton.__version__.startswith("3.9"):
    SPILLING |= {
        "attention.sparse_attention_triton._attend_kernel": 776,
        "attention.sparse_attention_hopper._attend_kernel": 120,
    }
STREAMING = {
    "linear.gemm_triton.row_kernel",
    "mhc.residual_streams_triton.streams_few_kernel",
    "moe.router_triton._gate_few_kernel",
    "moe.router_triton._hash_kernel",
}
SHARED_LIMIT = 227 * 1024  # bytes that one block may have on SM90


@pytest.mark.parametrize("module, call", CALLS)
def test_it_compiles_and_fits(module: str, call: str, sm90: Compile) -> None:
    reports = sm90(module, call)
    assert reports
    for report in reports:
        assert report["spilled"] <= SPILLING.get(report["kernel"], 0), report
        assert report["registers"] <= 255, report
        assert report["shared"] <= SHARED_LIMIT, report


@pytest.mark.kernels
def test_few_tokens_weights_are_streamed_by_tma(sm90: Compile) -> None:
    """These kernels give every TMA load an L2 policy; the other kernels give it to none."""
    calls = [("sm90_experts", f"flash-hopper-16-{n}") for n in (1, 8, 8192)]
    calls.append(("sm90_compile", "linear-flash-few-8"))
    for report in (found for call in calls for found in sm90(*call)):
        hints = [load.endswith("L2::cache_hint") for load in report["tma_loads"]]
        if "experts_hopper_few" in report["kernel"] or "few_tokens_hopper" in report["kernel"]:
            assert hints, report
            assert all(hints), report
        else:
            assert not any(hints), report


@pytest.mark.kernels
def test_few_tokens_weights_leave_the_rest_of_the_l2_cache_alone(sm90: Compile) -> None:
    """Kernels whose weights a step reads once load them as the first to be evicted."""
    calls = ["linear-flash-1", "linear-flash-8", "mhc-flash-2", "activations-flash-8"]
    calls += ["drafts-flash-1", "drafts-flash-2"]
    reports = [found for call in calls for found in sm90("sm90_compile", call)]
    assert {report["kernel"] for report in reports if report["streamed_loads"]} == STREAMING


@pytest.mark.kernels
def test_projections_of_few_tokens_have_a_multiprocessor_each(sm90: Compile) -> None:
    """A ring of six leaves no room for a second program; the shared expert's has room for one."""
    shared: dict[str, list[int]] = {"5": [], "6": []}
    for report in sm90("sm90_compile", "linear-flash-8"):
        stages = re.search(r"'ROUND': True.*'STAGES': ([56])", report["constants"])
        if report["kernel"].endswith("tile_kernel") and stages:
            shared[stages[1]].append(report["shared"])
    assert min(shared["6"]) > SHARED_LIMIT / 2 > max(shared["5"])


@pytest.mark.kernels
def test_two_programs_with_all_their_weights_share_a_multiprocessor(sm90: Compile) -> None:
    """And with the largest parts, not three: the next kernel's programs find room."""
    reports = [found for n in (8, 16) for found in sm90("sm90_compile", f"linear-flash-few-{n}")]
    shared = [r["shared"] + 1024 for r in reports if r["kernel"].endswith("few_tokens_kernel")]
    assert len(shared) >= 6
    assert max(shared) <= SHARED_LIMIT / 2
    assert min(shared) < SHARED_LIMIT / 4


def test_every_kernel_is_compiled(sm90: Compile) -> None:
    """Without the calls that are marked long."""
    # tests/ops/test_sm90_collectives.py compiles PARTIAL_SUMS.
    calls = [param.values for param in CALLS if pytest.mark.long not in param.marks]
    calls += [("sm90_collectives", call) for call in sm90_collectives.PARTIAL_SUMS]
    found = {
        report["kernel"] for module, call in calls for report in sm90(module, call, mode="names")
    }
    assert found == kernel_names()
