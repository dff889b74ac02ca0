"""Calls of DeepSeek-V4.1's small operators, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from functools import partial

import torch

from finwhale.ops.deepseek_v41 import HashTensors
from finwhale.ops.deepseek_v41 import engram_triton as engram
from finwhale.ops.deepseek_v41 import mhc_delayed_triton as mhc
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.mhc_triton import MhcOptions
from finwhale.ops.paging import CacheRows

from .sm90_compile import f32, meta, page_table, step_tokens


def call_small(N: int) -> None:
    H, D = 4, 5120
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-20)
    w, how = MhcWeight(f32(24, H * D), f32(24), f32(24), f32(D)), MhcOptions(False, True, True)
    streams, pre = meta(N, H, D), f32(N, H)
    for last in (None, (meta(N, D), f32(N, H), f32(N, H, H))):
        _, after, parts = mhc.mhc_input(last, streams, pre, w, params, options=how)
        mhc.mhc_mixes(after, parts, w, params, options=how)
    mhc.collapse(streams, pre, early_launch=True)

    def ids(*shape: int) -> torch.Tensor:
        return meta(*shape, dtype=torch.int64)

    rows = CacheRows(f32(1024, 1), page_table(N, 64))
    engram.recall_ids(ids(N), 4, 7, rows, step_tokens(N, 2**20, N), early_launch=True)
    hashes = HashTensors(ids(4), ids(3, 8), ids(3, 8))
    table = meta(384006168, 256, dtype=torch.float8_e4m3fn)
    scale = meta(384006168, 8, dtype=torch.uint8)
    engram.look_up(ids(N, 4), hashes, table, scale, early_launch=True)
    kv = meta(N, (H + 1) * D)
    key, value = kv[:, :-D].unflatten(1, (H, D)), kv[:, -D:]
    engram.engram_gate(streams, key, value, f32(H, D), f32(H, D), 1e-20, early_launch=True)


CALLS: dict[str, Callable[[], None]] = {f"small-{n}": partial(call_small, n) for n in (8, 8192)}
FAR = {"small-many": partial(call_small, 2**22)}  # for sm90_far.py
