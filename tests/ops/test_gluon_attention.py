"""Attention's kernel for Hopper GPUs on the CPU, against the reference, and the emulator's checks.

gluon_interpreter.py says which races it finds on the paths that run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.op_case import CONFIGS, Args, Chunks, ModelDraw, rounded_heads
from tests.support.operator_checks import model_case
from tests.support.packing import plain_args
from torch import Tensor

from finwhale.ops.attention import TopkEntries, ref
from finwhale.ops.attention import sparse_attention_hopper as hopper
from finwhale.ops.attention import sparse_attention_hopper_few_heads as few_heads
from finwhale.ops.attention import sparse_attention_hopper_many_heads as many_heads
from finwhale.ops.attention import sparse_attention_hopper_parts as parts
from finwhale.ops.attention import sparse_attention_hopper_unpack as unpacking
from finwhale.ops.attention.sparse_attention_triton import AttendPlan, AttentionProblem
from finwhale.ops.rounding import scaled_e4m3

from . import kernels_support as kernels_support
from .gluon_interpreter import emulated_launches, fences, without_fences
from .gluon_programs import Schedule
from .gluon_values import KernelFault

# Tokens with the window's first row, a part of it, and 3, 5 and 8 tiles of keys with C4.
STEP = ((0, 1), (37, 38), (259, 260), (703, 704), (1500, 1501))
KINDS = ("window", "C4", "C128")


def arguments(kind: str, heads: int, chunks: Chunks = STEP, padding: int | None = None) -> Args:
    """Arguments of sparse_attention; the token `padding` is one of padding."""
    sizes = replace(CONFIGS["flash"], num_attention_heads=heads)
    args = model_case(sizes, ModelDraw("cpu"), "sparse_attention", kind, chunks).args()
    if padding is not None:
        args[3].positions[padding] = -1
        if isinstance(args[5], TopkEntries):
            args[5].slots[padding] = -1
    return args


def plan(heads: int, splits: int = 1, share: int = 0, num_tokens: int = 5) -> AttendPlan:
    block_h, block_k, num_warps = hopper.tiles(num_tokens, heads, False)
    return AttendPlan(
        block_h=block_h, block_k=block_k, splits=splits, num_warps=num_warps, share=share
    )


def attend(args: Args, plan: AttendPlan, schedule: Schedule | None = None) -> Tensor:
    """Run the kernel; returns the output."""
    # The interpreter, which combines parts and unpacks rows, has no instructions of a GPU.
    alone = plan.splits == 1 and not unpacking.has_prompts(args[3])
    problem = replace(AttentionProblem(*args), early_launch=alone, inline_asm=alone)
    assert hopper.takes(problem)
    with emulated_launches(schedule):
        hopper.attend(problem, plan)
    return problem.out


def check(args: Args, plan: AttendPlan, padding: int | None = None) -> None:
    """Compare with the reference: weights and outputs are rounded to bfloat16, 2^-9 each."""
    found = attend(args, plan)
    wanted = torch.empty_like(found)
    ref.sparse_attention(*(*plain_args("sparse_attention", args)[:8], wanted))
    assert found.isfinite().all()
    if padding is not None:
        assert not found[padding].any()
        wanted[padding] = 0
    worst = (found - wanted).float().abs().amax() / wanted.float().abs().amax()
    assert worst < 2.0**-7, worst.item()


def check_rounded(args: Args, plan: AttendPlan) -> None:
    """Bit for bit what rounding the output afterwards gives."""
    values, scales = scaled_e4m3(attend(args, plan).flatten(1), 128)
    rounded = rounded_heads(*args[8].shape)
    attend((*args[:8], *rounded), plan)
    assert torch.equal(rounded[0].flatten(1).view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(rounded[1], scales)


@pytest.mark.parametrize("heads", [64, 32, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_entries(kind: str, heads: int) -> None:
    check(arguments(kind, heads, padding=1), plan(heads), padding=1)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences(kind: str) -> None:
    check(arguments(kind, 64, ((5000, 5001), (33000, 33001))), plan(64))


@pytest.mark.parametrize("heads", [128, 16])
def test_rounded_output(heads: int) -> None:
    check_rounded(arguments("C4", heads, STEP[:4], padding=1), plan(heads))


@pytest.mark.parametrize(("heads", "splits", "share"), [(64, 2, 0), (64, 3, 2), (8, 3, 0)])
def test_shares_of_the_keys(heads: int, splits: int, share: int) -> None:
    """Some shares have no keys, and with `share` all have the same number of tiles."""
    args = arguments("C4", heads, ((37, 38), (703, 704)), padding=0)
    check(args, plan(heads, splits, share), padding=0)


@pytest.mark.parametrize(("kind", "heads", "splits"), [("C4", 64, 1), ("C128", 32, 2)])
def test_one_token(kind: str, heads: int, splits: int) -> None:
    check(arguments(kind, heads, ((703, 704),)), plan(heads, splits, num_tokens=1))


@pytest.mark.parametrize("heads", [64, 32])
def test_schedules_give_the_same_bits(heads: int) -> None:
    args = arguments("C4", heads, STEP[2:4])
    wanted = attend(args, plan(heads)).clone()
    firsts = [(0,), (1,), (2,), (0, 1), (1, 2), (2, 1)]
    for schedule in [Schedule(seed) for seed in range(6)] + [Schedule(9, f) for f in firsts]:
        args[8].fill_(torch.nan)
        assert torch.equal(attend(args, plan(heads), schedule), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_rows_give_the_bits_of_packed_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, the first of which sees no whole window, and a decode, whose rows are packed.

    The second prompt sees four pages of C4 entries and six tiles of keys.
    """
    args = arguments(kind, 64, ((36, 38), (900, 903), (703, 704)))
    wanted = attend(args, plan(64)).clone()
    monkeypatch.setattr(unpacking, "LEAST_TOKENS", 2)
    monkeypatch.setattr(unpacking, "ROWS_PER_TOKEN", 1000)
    pages: list[list[bool]] = []

    def unpack_rows(*args: Any, **kwargs: Any) -> unpacking.UnpackedRows:
        found = unpacking.unpack_rows(*args, **kwargs)
        pages.append((found.page != unpacking.NOT_UNPACKED.value).tolist())
        return found

    monkeypatch.setattr(hopper, "unpack_rows", unpack_rows)
    for schedule in [Schedule(seed) for seed in range(4)] + [Schedule(9, (f,)) for f in range(3)]:
        args[8].fill_(torch.nan)
        assert torch.equal(attend(args, plan(64), schedule), wanted)
    # The rows of the window, and of the entries if there are any, of each launch.
    assert pages == [[True, True, False]] * (7 if kind == "window" else 14)


OWN, WEIGHTS, OTHER = fences(many_heads)


@pytest.mark.parametrize("lines", [*zip(fences(few_heads, parts)), (OWN,), (WEIGHTS, OTHER)])
def test_each_fence_is_needed(lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 heads, the reader's fence covers the query and the producers' stores too, and the
    fence after the weights' store covers what the other group's fence covers.
    """
    monkeypatch.setattr(unpacking, "LEAST_TOKENS", 2)
    heads = 64 if OWN in lines or OTHER in lines else 8
    match = "no fence_async_shared follows the write"
    with without_fences(*lines), pytest.raises(KernelFault, match=match):
        attend(arguments("window", heads, ((70, 72),)), plan(heads))
