"""Calls of attention's Gluon kernel, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonASTSource

from finwhale.ops.attention import AllEntries, TopkEntries, Window
from finwhale.ops.attention import sparse_attention_hopper as hopper
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.linear import quantise_triton
from finwhale.ops.paging import CacheRows

from .sm90_compile import add_report, f32, meta, page_table, step_tokens

TYPES = {
    "q_ptr": "*bf16",
    "out_ptr": "*bf16",
    "positions_ptr": "*i64",
    "sequence_ptr": "*i32",
    "window_ptr": "*u8",
    "entry_ptr": "*u8",
    "window_pages_ptr": "*i32",
    "window_first_ptr": "*i32",
    "entry_rows_ptr": "*i32",
    "entry_first_ptr": "*i32",
    "eps": "fp32",
    "scale_log2": "fp32",
}
# kind of entries, splits, heads of the model's rank, heads a program, keys a step, whether the
# output is rounded; slots that a program loads, if they are not 512 (DSpark's blocks need 5).
VARIANTS = (
    (0, 4, 64, 64, 64, False),
    (1, 1, 64, 64, 64, True),
    (1, 5, 64, 64, 64, True),
    (2, 20, 64, 16, 32, False),
    (1, 1, 8, 8, 64, True),
    (1, 3, 64, 64, 64, False, 32),
    (1, 20, 64, 16, 32, False),
)
# The same kinds of entries with other numbers of heads and splits, or another output.
MORE_VARIANTS = (
    (1, 1, 64, 64, 64, False),
    (1, 1, 32, 32, 64, True),
    (1, 5, 32, 32, 64, False),
    (0, 1, 16, 16, 64, True),
    (2, 10, 8, 8, 64, False),
    (1, 3, 32, 32, 64, False, 32),
)


def call(
    kind: int,
    splits: int,
    heads: int,
    block_h: int,
    block_k: int,
    rounds: bool,
    num_slots: int = 512,
) -> None:
    rows = 2 if kind == 2 else 64
    few = heads <= hopper.FEW_HEADS
    mma_heads = hopper.mma_heads(heads)
    constants: dict[str, Any] = dict.fromkeys(hopper.UNPACKED) | {
        "W": 128,
        "WINDOW_ROWS": 64,
        "ENTRY_ROWS": rows,
        "ENTRIES": kind,
        "RATIO": 128,
        "SPLITS": splits,
        "BLOCK_K": block_k,
        "BLOCK_S": num_slots,
        "ROUND": rounds,
        "PDL": True,
        "HEADS_EACH": block_h,
        "ROWS": mma_heads,
        "FULL": block_h == mma_heads,
        "SHARE": 2 if splits == 5 else 0,
        "STEP": hopper.STEP,
        "PRODUCER_WARPS": hopper.PRODUCER_WARPS,
        "CONSUMER_REGISTERS": hopper.CONSUMER_REGISTERS,
        "PRODUCER_REGISTERS": hopper.FEW_HEADS_REGISTERS if few else hopper.PRODUCER_REGISTERS,
    }
    signature, values, attributes = {}, {}, {}
    for position, parameter in enumerate(hopper._attend_kernel.params):
        name = parameter.name
        if name in constants:
            signature[name], values[position,] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        if name == "out_ptr" and rounds:
            signature[name] = "*fp8e4nv"
        if name not in ("eps", "scale_log2", "stride_window", "stride_entry"):
            attributes[position,] = [["tt.divisibility", 16]]
    source = GluonASTSource(hopper._attend_kernel, signature, values, attributes)
    add_report(source, {"num_warps": hopper.NUM_WARPS}, constants)


def call_unpacked(kind: int) -> None:
    """A step with prompts, whose rows are unpacked first."""
    N = 8192
    tokens, small = step_tokens(N, 2**20, N), RopeRow(512, 64).page_bytes(2)
    pools = [meta(1024, RopeRow(512, 64).page_bytes(64), dtype=torch.uint8) for _ in range(2)]
    window, selected = (CacheRows(pool, page_table(N, 64)) for pool in pools)
    complete = CacheRows(meta(1024, small, dtype=torch.uint8), page_table(N, 2))
    slots = meta(N, 512, dtype=torch.int32)
    entries = (None, TopkEntries(selected, slots), AllEntries(complete, 128))[kind]
    out, scales = quantise_triton.empty_quantised(N, 64, 512, pools[0])
    queries, rotary, sink = meta(N, 64, 512), f32(2**20, 32, 2), f32(64)
    args = queries, rotary, 1e-6, tokens, Window(window, 128), entries, sink, 0.04
    hopper.sparse_attention(*args, out, scales.flatten(1))


def calls(*variants: tuple[Any, ...]) -> dict[str, Callable[[], None]]:
    return {"-".join(map(str, variant)): partial(call, *variant) for variant in variants}


OTHER_VARIANTS = calls(*MORE_VARIANTS) | {
    f"unpacked-{kind}": partial(call_unpacked, kind) for kind in (0, 2)
}
CALLS = calls(*VARIANTS) | {"unpacked-1": partial(call_unpacked, 1)} | OTHER_VARIANTS
