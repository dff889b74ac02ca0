"""Calls of portable kernels, which test_arch_compile.py compiles for other GPUs than SM90."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from finwhale.engine.plan.draft_policy import step_kinds
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.deepseek_v4.weights import assembler
from finwhale.ops import load_ops
from finwhale.ops.attention import TopkEntries, Window
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.attention.sparse_attention_triton import sparse_attention
from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.linear.linear_triton import linear
from finwhale.ops.paging import CacheRows
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm

from .kernel_sources import kernel_names
from .sm90_compile import (
    arguments_of,
    compile_launch,
    e4m3,
    f32,
    meta,
    name_of,
    page_table,
    step_tokens,
)

LIMITS = StepLimits(
    num_tokens=8192,
    num_seqs=64,
    max_len=2**20,
    draft_kinds=tuple((kind.width, kind.drafts) for kind in step_kinds(5, block=True)),
)
Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]


def call_linear() -> None:
    """An E4M3 GEMM of many tokens, and the kernel that rounds them before."""
    linear(meta(8192, 1024), e4m3(1024, 1024))


def call_attention() -> None:
    """Flash's attention over selected entries: the kernel that needs the most shared memory."""
    tokens, table = step_tokens(256, 2**20, 1), page_table(256, 64)
    rows = CacheRows(meta(1024, RopeRow(512, 64).page_bytes(64), dtype=torch.uint8), table)
    sparse_attention(
        meta(256, 64, 512),
        f32(2**20, 32, 2),
        1e-6,
        tokens,
        Window(rows, 128),
        TopkEntries(rows, meta(256, 512, dtype=torch.int32)),
        f32(64),
        512**-0.5,
        meta(256, 64, 512),
    )


def call_indexer() -> None:
    tokens, table = step_tokens(8, 2**20, 1), page_table(8, 64)
    keys = CacheRows(meta(1024, IndexKey(128).page_bytes(64), dtype=torch.uint8), table)
    q, weights, rotary = meta(8, 64, 128), f32(8, 64), f32(2**20, 32, 2)
    select_entries(q, weights, keys, rotary, tokens, 512, 0.1, True)


def launch_all() -> None:
    """All launches of the AMD table that an engine with Flash and its DSpark head builds ahead."""
    ops = load_ops(Platform("amd", "gfx942"))
    config = published("flash-0731").with_layers(4)  # one of each kind
    form = WeightForm(dtype=torch.bfloat16, round_activations=True, ops=ops)
    weights = assembler(config, form, torch.device("meta")).finish_unfilled()
    model = DeepseekV4(config, ops, weights, round_activations=True, max_positions=2**20)
    groups = cache_spec(config)
    cache = LargestSteps.alone(model, groups, ops).cache
    LaunchEnumerator(model, groups, ops, cache, LIMITS)()


@cache
def amd_launches() -> dict[str, list[Launch]]:
    """By kernel, a launch with each set of constants. Numbers of splits count as one or several."""
    found: dict[str, dict[str, Launch]] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments, options = arguments_of(kernel, args, kwargs)
        fixed = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        if "SPLITS" in fixed:
            fixed |= {"SPLITS": fixed["SPLITS"] > 1, "ALL_SPLITS": None}
        of_kernel = found.setdefault(name_of(kernel), {})
        of_kernel.setdefault(f"{fixed} {options}", (kernel, args, kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        launch_all()
    return {name: list(launches.values()) for name, launches in found.items()}


def call_amd(name: str, **constants: int) -> None:
    """The launches of one kernel of the AMD table; those with these constants."""
    for kernel, args, kwargs in amd_launches().get(name, ()):
        if constants.items() <= kwargs.items():
            compile_launch(kernel, *args, grid=None, warmup=False, **kwargs)


# Kernels that the AMD table never launches.
NVIDIA_ONLY = {name for name in kernel_names() if "hopper" in name or "deepseek_v41" in name}
NVIDIA_ONLY.add("mhc.residual_streams_triton.sum_streams_few_kernel")  # adds sums of several ranks
AMD_KERNELS = sorted(kernel_names() - NVIDIA_ONLY)
CALLS: dict[str, Callable[[], None]] = {
    "linear": call_linear,
    "attention": call_attention,
    "indexer": call_indexer,
    # Before the AMD table had fewer stages, this tile needed the most shared memory.
    "amd": partial(call_amd, "linear.gemm_triton.tile_kernel", BLOCK_M=128, BLOCK_N=64),
    **{name: partial(call_amd, name) for name in AMD_KERNELS},
}
