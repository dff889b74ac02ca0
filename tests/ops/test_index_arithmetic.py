"""No kernel's 32-bit index arithmetic wraps, with tensors of more than 2^31 elements.

Each kernel's Triton IR is analysed for a launch that is never made (index_ranges.py), so this needs
neither a GPU nor memory: pages of any number, rows any stride apart, 4 million tokens a step.
"""

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

from . import sm90_far, sm90_wrong
from .conftest import Compile
from .kernel_sources import kernel_names

# Kernels of few tokens are not in sm90_far.
FEW_EXPERTS = ("flash-hopper-16-1", "pro-hopper-16-1", "pro-hopper-16-8", "pro-hopper-256-8")
FEW = [
    ("sm90_compile", call)
    for call in (
        "activations-pro-8",
        "mhc-pro-2",
        "linear-pro-1",
        "linear-pro-8",
        "linear-pro-64",
        "linear-flash-few-8",
        "drafts-flash-2",
        "drafts-flash-16",
        "indexer-1024-8-1048576",
    )
] + [("sm90_experts", call) for call in FEW_EXPERTS]
FEW += [
    ("sm90_v41_gemm", call)
    for call in ("v41-linear-25600-6144-1", "v41-linear-1792-5120-16", "v41-experts-2304-1")
]
FEW.append(("sm90_v41_small", "small-8"))
CALLS = [("sm90_far", call) for call in sm90_far.CALLS] + FEW
SMOKE = ("mhc-flash", "drafts-flash-2")  # in the core suite
# Findings of the analysis that other facts bound, by kernel and pointer, with the reason.
BOUNDED = {
    # The bins hold weights too; the number that is loaded here is one of tokens of a row.
    ("sampling.draw_triton._least_kernel", "list_ptr"),
    # Each level has fewer programs than the last, and no list more entries than that level's.
    ("indexer.topk_triton._select_kernel", "candidates_ptr"),
    ("indexer.topk_triton._select_kernel", "out_ptr"),
    # The output index of an entry is a sum of marks of at most topk entries.
    ("indexer.topk_long_triton._select_long_kernel", "out_ptr"),
    # Each byte of a sum counts entries of one line. All lines of a tile have at most TILE entries.
    ("indexer.topk_long_triton._select_long_kernel", "candidates_ptr"),
    # The kernel loads numbers of groups that it has stored.
    ("indexer.topk_long_triton._select_long_kernel", "scores_ptr"),
    ("indexer.topk_long_triton._select_long_kernel", "pages_ptr"),
    # A kernel stores where a sequence's unpacked rows begin. They take 1 KB each, so they are fewer
    # than 2^31. Only one sequence owns a page, so a sum is the number of one page in its table.
    ("attention.sparse_attention_hopper._attend_kernel", "window_rows_ptr"),
    ("attention.sparse_attention_hopper_unpack._unpack_kernel", "pages_ptr"),
    # All experts together have no more pairs than a step.
    ("moe.dispatch_triton._order_many_kernel", "order_ptr"),
    ("moe.dispatch_triton._order_many_kernel", "blocks_ptr"),
    # Blocks hold rows of pairs and the number of an expert, which is below 2^10.
    ("moe.experts_hopper._gate_up_kernel", "row_scale_ptr"),
    ("moe.experts_hopper._down_kernel", "row_scale_ptr"),
    ("moe.experts_triton._gate_up_kernel", "row_scale_ptr"),
    ("moe.experts_triton._down_kernel", "row_scale_ptr"),
}

# Its epochs wrap by design, and addresses of peers' memory are numbers to the analysis. A call has
# at most some hundred tokens (tests/distributed/test_partial_sums.py).
READS_PEERS = {"mhc.residual_streams_triton.sum_streams_few_kernel"}


@pytest.mark.parametrize(
    "module, call",
    [
        pytest.param(
            *names, id="-".join(names), marks=[] if names[1] in SMOKE else [pytest.mark.kernels]
        )
        for names in CALLS
    ],
)
def test_no_index_wraps(module: str, call: str, sm90: Compile) -> None:
    reports = sm90(module, call, mode="indices")
    assert reports
    found = [
        f"{report['kernel']}: {wrap}"
        for report in reports
        for wrap in report["wraps"]
        if (report["kernel"], wrap.partition(":")[0]) not in BOUNDED
    ]
    assert found == []


def test_every_kernel_is_analysed(sm90: Compile) -> None:
    found = {
        report["kernel"] for module, call in CALLS for report in sm90(module, call, mode="names")
    }
    assert found == kernel_names() - READS_PEERS


@pytest.mark.parametrize("call", sm90_wrong.CALLS)
def test_an_index_that_wraps_is_found(call: str, sm90: Compile) -> None:
    (wraps,) = {tuple(report["wraps"]) for report in sm90("sm90_wrong", call, mode="indices")}
    assert bool(wraps) == call.endswith("False")
