"""Linear layers as Triton kernels. Legend: N tokens, K input width, M output width, G groups.

1. `row_kernel` processes one token, or two with an unscaled weight. A program computes whole rows:
   it issues the loads of the weight, rounds the tokens while they run, and sums in float32 without
   tensor cores.
2. `tile_kernel` processes more tokens on tensor cores: a tile of the weight times BLOCK_N tokens.
   It rounds up to ROUNDED_TOKENS itself; for more, a separate kernel rounds first. Up to
   SPLIT_TOKENS, K is split into parts, which `sum_kernel` adds in order. With more tokens, torch
   multiplies unscaled weights.
3. `few_tokens`, where a table has it, replaces `tile_kernel` for up to ROUNDED_TOKENS tokens and
   E4M3 weights whose parts have at most FEW_STEPS steps. Its bits are the same. For up to
   PLAIN_TOKENS tokens, it also computes unscaled weights that are small enough. It splits K into
   shorter parts then, so its last bits may differ from those of `tile_kernel`.

A token's bits do not depend on the other tokens, nor on the number of tokens within a class: one
token, or two with an unscaled weight; with a small unscaled weight, up to PLAIN_TOKENS; up to
SPLIT_TOKENS; more. The split and the order of sums over K follow from K and M.

With `early_launch`, a kernel starts before the previous kernel ends. All but `tile_kernel` already
load some of their weight and scales, so the previous kernel must not write them. They read
everything else after that kernel ends.
With `invariant`, a token's bits do not depend on the number of tokens at all: one token is computed
as two, and any number of tokens uses the tiles for 2 to SPLIT_TOKENS.

An E4M3 weight has a float32 scale for each block of 128x128. All scales are powers of two, so they
can be applied anywhere without rounding. The input of an E4M3 weight is rounded to E4M3 and
multiplied on FP8 tensor cores. If `round_input` is false, the input is bfloat16, and each tile of
the weight is converted to bfloat16, which is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
import triton
from torch import Tensor

from finwhale.ops.launch import sizes as launch_sizes
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.linear import KERNEL_GROUP, LinearWeight
from finwhale.ops.linear.gemm_triton import row_kernel, sum_kernel, tile_kernel
from finwhale.ops.linear.quantise_triton import launch_tokens as quantise_tokens
from finwhale.ops.linear.quantise_triton import quantise, round_input
from finwhale.ops.moe import ExpertWeight

Weight = TypeVar("Weight", LinearWeight, ExpertWeight)
# row_kernel processes one token, or ROW_TOKENS if the weight is unscaled. A weight should occupy at
# least MIN_PROGRAMS programs. A program takes several blocks of rows only if a row has LONG_ROW
# bytes or more, because rounding the token is then expensive. If the token is not rounded, it takes
# at most MAX_PROGRAMS divided by the number of blocks. A program holds MIN_ROWS rows or HELD_BYTES
# of the weight at a time, whichever is more, and at most MAX_HELD_BYTES. If the programs can hold
# all of the weight, a program has one larger block: it loads all its rows before it waits for the
# token. E4M3 rows of more than MAX_ROW bytes use tile_kernel.
ROW_TOKENS = 2
MIN_PROGRAMS = 256
MAX_PROGRAMS = 2048
MIN_ROWS = 4
HELD_BYTES = 16384
MAX_HELD_BYTES = 32768
# Half of all registers. With more, other kernels would find no room beside these programs.
HELD_BY_ALL = 2**24
LONG_ROW = 4096
MAX_ROW = 8192
# tile_kernel. Up to SPLIT_TOKENS, it splits K. Up to ROUNDED_TOKENS, each program rounds its tokens
# itself, unless K has at most SHORT_STEPS steps.
SPLIT_TOKENS = 64
ROUNDED_TOKENS = 16
SHORT_STEPS = 12
# `few_tokens`: a part has at most FEW_STEPS steps, and a program computes FEW_ROWS rows.
FEW_STEPS = 8
FEW_ROWS = 64
# Number of steps whose E4M3 weights `few_tokens` requests before it waits. If it requested all, the
# loads of the kernels before it would take longer.
EARLY_STEPS = 6
# `few_tokens` with a bfloat16 weight, up to PLAIN_TOKENS tokens: a part has PLAIN_STEPS steps, and
# three programs fit a multiprocessor. All of them must run at once.
PLAIN_TOKENS = 8
PLAIN_STEPS = 4
PLAIN_PROGRAMS = 3
MANY_ROWS = 16384  # with this many rows of a plain weight, 64 tokens use tiles of 128 rows
SUM_ROWS = 32


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """A table's options for the linear layers.

    Attributes:
        invariant: the bits of a token do not depend on the number of tokens.
        early_launch: launch kernels early (`launch_options`).
        num_multiprocessors: number in the GPU; work is split over this many programs.
        few_tokens: few_tokens_hopper.launch, which computes what `tile_kernel` computes, for few
            tokens; None: `tile_kernel` does.
        early_steps: number of steps of a part whose E4M3 weights `few_tokens` requests before it
            waits.
        max_stages: most stages in which `tile_kernel` loads. Each takes shared memory.
    """

    invariant: bool = False
    early_launch: bool = False
    num_multiprocessors: int = launch_sizes.NUM_MULTIPROCESSORS
    few_tokens: Callable[..., None] | None = None
    early_steps: int = EARLY_STEPS
    max_stages: int = 6


DEFAULT = LinearOptions()


@dataclass(frozen=True, slots=True)
class LinearProblem:
    """out[n, g] = x[n, g] @ weight[g]^T, or the SwiGLU of its two halves if `limit` is given."""

    x: Tensor  # [N, G, K]; values of a row are contiguous
    weight: Tensor  # [G, M, K], or [G, 2M, K] if gated, contiguous
    scale: Tensor | None  # [G, M/128, K/128] float32, contiguous
    round_input: bool
    out_dtype: torch.dtype
    limit: float | None = None
    options: LinearOptions = DEFAULT

    @property
    def M(self) -> int:
        rows = self.weight.shape[1]
        return rows if self.limit is None else rows // 2

    @classmethod
    def of(cls, x_NGK: Tensor, w: LinearWeight, options: LinearOptions) -> Self:
        """The problem of a linear layer with a weight [M, K] or [G, M, K]."""
        weight, scale, dtype = w.weight, w.scale, w.out_dtype
        if weight.dim() == 2:
            weight, scale = weight[None], None if scale is None else scale[None]
        if dtype is None:
            dtype = weight.dtype if scale is None else torch.bfloat16
        return cls(x_NGK, weight, scale, w.input_group > 0, dtype, options=options)

    @classmethod
    def gated(cls, x_ND: Tensor, w: ExpertWeight, limit: float, options: LinearOptions) -> Self:
        """The first layer of a SwiGLU."""
        x_N1D, w13 = x_ND.unsqueeze(1), w.w13[None]
        scale = None if w.scale13 is None else w.scale13[None]
        return cls(x_N1D, w13, scale, w.input_group > 0, x_ND.dtype, limit, options)

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate the output [N, G, M]."""
        shape = (*self.x.shape[:2], self.M)
        return torch.empty(shape, dtype=dtype or self.out_dtype, device=self.x.device)


@dataclass(frozen=True, slots=True)
class RowPlan:
    blocks: int
    block_m: int
    block_k: int
    num_warps: int

    @staticmethod
    def of(p: LinearProblem) -> "RowPlan":
        groups, rows, width = p.weight.shape
        block_k = max(KERNEL_GROUP, triton.next_power_of_2(width))
        if block_k > width and width < LONG_ROW // 2:
            block_k = max(KERNEL_GROUP, width & -width)
        block_k = min(block_k, MAX_ROW // p.weight.element_size())
        row_bytes = width * p.weight.element_size()
        block_m = max(MIN_ROWS, HELD_BYTES // row_bytes)
        block_m = min(KERNEL_GROUP, block_m, max(1, MAX_HELD_BYTES * p.M // (row_bytes * rows)))
        block_m = 1 << block_m.bit_length() - 1
        while block_m > 1 and groups * triton.cdiv(p.M, block_m) < MIN_PROGRAMS:
            block_m //= 2
        blocks, programs = 1, groups * triton.cdiv(p.M, block_m)
        most = 4 if p.round_input else min(4, MAX_PROGRAMS // programs)
        if row_bytes >= LONG_ROW:
            while 2 * blocks <= most and programs >= 2 * blocks * MIN_PROGRAMS:
                blocks *= 2
        held = 2 * block_m * row_bytes * rows // p.M
        if blocks > 1 and held <= MAX_HELD_BYTES and groups * rows * row_bytes <= HELD_BY_ALL:
            blocks, block_m = 1, 2 * block_m
        few = row_bytes <= LONG_ROW and row_bytes != LONG_ROW // 2
        return RowPlan(blocks, block_m, block_k, 4 if few else 8)


@dataclass(frozen=True, slots=True)
class TilePlan:
    block_m: int
    block_n: int
    block_k: int
    split: int
    stages: int
    num_warps: int
    tokens_first: bool = False

    @staticmethod
    def of(p: LinearProblem, num_tokens: int | None = None) -> "TilePlan":
        """The plan for num_tokens, by default those of the problem."""
        (groups, rows, width), most_stages = p.weight.shape, p.options.max_stages
        num_tokens, block_k = num_tokens or p.x.shape[0], KERNEL_GROUP
        if num_tokens > SPLIT_TOKENS:
            tokens_first = p.scale is not None and p.round_input
            return TilePlan(128, 128, block_k, 1, min(4, most_stages), 8, tokens_first)
        steps = triton.cdiv(width, block_k)
        block_n = tile_tokens(num_tokens)
        plain = p.scale is None
        short = steps <= SHORT_STEPS or (plain and (block_n < 64 or rows < MANY_ROWS))
        block_m = 64 if short else 128
        tiles = groups * triton.cdiv(rows, 64 if plain else block_m)
        split = p.options.num_multiprocessors // tiles
        if plain or 10 * split * tiles < 9 * p.options.num_multiprocessors:
            split += 1
        stages = 4 if short or plain else 5
        # A ring of 6 takes more than half of a multiprocessor's shared memory. With a smaller one,
        # two programs may share a multiprocessor while another has none. The shared expert's first
        # layer runs beside other kernels, and needs the room.
        if stages == 5 and block_n == 16 and p.limit is None:
            stages = 6
        # The conversion holds the weight in registers; with 4 warps, 128 rows would spill.
        num_warps = 4 if short or plain or p.round_input else 8
        split, stages = max(1, min(steps, split)), min(stages, most_stages)
        return TilePlan(block_m, block_n, block_k, split, stages, num_warps)

    def steps(self, p: LinearProblem) -> int:
        """Number of steps of a part of K."""
        return triton.cdiv(triton.cdiv(p.x.shape[2], self.block_k), self.split)


def tile_tokens(num_tokens: int) -> int:
    """Number of tokens of a tile."""
    return min(64, max(16, triton.next_power_of_2(num_tokens)))


def few_plan(p: LinearProblem) -> TilePlan | None:
    """The plan with which `few_tokens` computes this problem; None: it does not."""
    options, num_tokens = p.options, p.x.shape[0]
    if options.few_tokens is None or options.invariant or p.x.dtype != torch.bfloat16:
        return None
    groups, rows, width = p.weight.shape
    if num_tokens > ROUNDED_TOKENS or rows % FEW_ROWS:
        return None
    plan = TilePlan.of(p)
    if p.scale is not None:
        return plan if p.round_input and plan.steps(p) <= FEW_STEPS else None
    split, rest = divmod(width, PLAIN_STEPS * KERNEL_GROUP)
    programs = groups * rows // FEW_ROWS * split
    plain = p.weight.dtype == torch.bfloat16 and not p.round_input and p.limit is None
    if not plain or num_tokens > PLAIN_TOKENS or rest or split < 2:
        return None
    fits = programs <= PLAIN_PROGRAMS * options.num_multiprocessors
    return replace(plan, split=split) if fits else None


def few_columns(num_tokens: int) -> int:
    """Number of tokens that `few_tokens` computes."""
    return 8 if num_tokens <= 8 else ROUNDED_TOKENS


def launch_tokens(model: launch_sizes.ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    rows = {1, ROW_TOKENS, PLAIN_TOKENS, ROUNDED_TOKENS, SPLIT_TOKENS}
    rows |= launch_sizes.last_of_classes(tile_tokens, SPLIT_TOKENS + 1)
    rows |= launch_sizes.last_of_classes(few_columns, ROUNDED_TOKENS)
    each = {per_token for per_token, _, _ in model.linears}
    found = {row // per_token for row in rows for per_token in each}
    return launch_sizes.up_to(most, found) | quantise_tokens(model, most)


LAUNCH_CLASSES = launch_sizes.LaunchClasses(tokens=launch_tokens)


def _run_rows(p: LinearProblem, plan: RowPlan) -> Tensor:
    out = p.empty()
    num_tokens, groups, width = p.x.shape
    row_kernel[(triton.cdiv(p.M, plan.blocks * plan.block_m), groups)](
        *(p.x, p.weight, p.weight if p.scale is None else p.scale, out, p.M),
        *(p.x.stride(0) if num_tokens > 1 else 0, p.x.stride(1)),
        0.0 if p.limit is None else p.limit,
        K=width,
        TOKENS=num_tokens,
        SCALED=p.scale is not None,
        ROUND=p.round_input,
        GATED=p.limit is not None,
        BLOCKS=plan.blocks,
        BLOCK_M=plan.block_m,
        BLOCK_K=plan.block_k,
        GROUP=KERNEL_GROUP,
        num_warps=plan.num_warps,
        **launch_options(p.options.early_launch),
    )
    return out


def _run_tiles(p: LinearProblem, plan: TilePlan, x_scale: Tensor | None = None) -> Tensor:
    num_tokens, groups, width = p.x.shape
    rows = p.weight.shape[1]
    blocks = triton.cdiv(num_tokens, plan.block_n)
    out = p.empty()
    parts = _empty_parts(p, plan, blocks * plan.block_n)
    scales = p.x.new_empty(0) if x_scale is None else x_scale
    strides = (0, 0, 0) if x_scale is None else x_scale.stride()
    tile_kernel[(triton.cdiv(rows, plan.block_m) * blocks, plan.split, groups)](
        *(p.x, scales, p.weight, p.weight if p.scale is None else p.scale),
        out if parts is None else parts,
        *(num_tokens, rows, width, p.x.stride(0), p.x.stride(1)),
        *strides,
        plan.steps(p),
        SCALED=p.scale is not None,
        ROUND=p.round_input,
        QUANTISED=x_scale is not None,
        PARTS=parts is not None,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.stages,
        TOKENS_FIRST=plan.tokens_first,
        num_warps=plan.num_warps,
        **launch_options(p.options.early_launch),
    )
    if parts is not None:
        _sum(p, parts, out, plan)
    return out


def _empty_parts(p: LinearProblem, plan: TilePlan, columns: int) -> Tensor | None:
    """Allocate the parts [split, G, rows of the weight, columns]; None: the output has no parts."""
    if plan.split == 1 and p.limit is None:
        return None
    groups, rows, _ = p.weight.shape
    shape = (plan.split, groups, rows, columns)
    return torch.empty(shape, dtype=torch.float32, device=p.x.device)


def _run_few_tokens(p: LinearProblem, plan: TilePlan) -> Tensor:
    options = p.options
    assert options.few_tokens is not None
    out, columns = p.empty(), few_columns(p.x.shape[0])
    parts = _empty_parts(p, plan, columns)
    target = out if parts is None else parts
    how = plan.steps(p), columns, options.early_steps, options.early_launch
    options.few_tokens(p.x, p.weight, p.scale, target, *how)
    if parts is not None:
        _sum(p, parts, out, plan)
    return out


def _sum(p: LinearProblem, parts: Tensor, out: Tensor, plan: TilePlan) -> None:
    """Add the parts. In parts and output, the rows of the groups are adjacent."""
    width, padded = out.shape[1] * out.shape[2], parts.shape[-1]
    block_n = min(16, padded)
    grid = (triton.cdiv(width, SUM_ROWS), triton.cdiv(out.shape[0], block_n))
    sum_kernel[grid](
        *(parts, out, out.shape[0], width, padded, parts[0].numel(), width),
        0.0 if p.limit is None else p.limit,
        PARTS=plan.split,
        GATED=p.limit is not None,
        BLOCK_M=SUM_ROWS,
        BLOCK_N=block_n,
        num_warps=4,
        **launch_options(p.options.early_launch),
    )


def _check(p: LinearProblem) -> None:
    if p.x.stride(2) != 1 or not p.weight.is_contiguous():
        raise ValueError(
            f"an input's rows and the weight must be contiguous, got strides {p.x.stride()} and"
            f" {p.weight.stride()}"
        )
    if p.weight.shape[2] != p.x.shape[2]:
        raise ValueError(
            f"inputs of {p.x.shape[2]} values do not fit a weight {list(p.weight.shape)}"
        )
    if (p.scale is None) != (p.weight.dtype != torch.float8_e4m3fn):
        raise ValueError(
            f"only E4M3 weights have a scale, got a weight of {p.weight.dtype} "
            f"{'without' if p.scale is None else 'with'} a scale"
        )
    if p.scale is None:
        return
    groups, rows, width = p.weight.shape
    wanted = (groups, triton.cdiv(rows, KERNEL_GROUP), triton.cdiv(width, KERNEL_GROUP))
    if tuple(p.scale.shape) != wanted or not p.scale.is_contiguous():
        raise ValueError(f"the scale must be contiguous {list(wanted)}, got {list(p.scale.shape)}")
    if width % KERNEL_GROUP or (p.limit is not None and rows // 2 % KERNEL_GROUP):
        raise ValueError(f"E4M3 weights must be multiples of {KERNEL_GROUP} wide, got {width}")


def run(p: LinearProblem) -> Tensor:
    """Run the kernel for this number of tokens; returns [N, G, M]."""
    _check(p)
    num_tokens = p.x.shape[0]
    if num_tokens == 0:
        return p.empty()
    if p.options.invariant:
        # Any number of tokens uses the tiles for 2 to SPLIT_TOKENS.
        p = replace(p, x=two_or_more(p.x))
        plan = TilePlan.of(p, min(p.x.shape[0], SPLIT_TOKENS))
        return _round_and_run_tiles(p, plan)[:num_tokens]
    if by_rows(p):
        return _run_rows(p, RowPlan.of(p))
    if p.scale is None and num_tokens > SPLIT_TOKENS and p.limit is None:
        return _run_many(p)
    few = few_plan(p)
    return _round_and_run_tiles(p, TilePlan.of(p)) if few is None else _run_few_tokens(p, few)


def _round_and_run_tiles(p: LinearProblem, plan: TilePlan) -> Tensor:
    """Run the tiles' kernel, after a kernel that rounds the tokens if `_rounded_before`."""
    if p.scale is None or not _rounded_before(p):
        return _run_tiles(p, plan)
    x, x_scale = quantise(p.x, early_launch=p.options.early_launch)
    return _run_tiles(replace(p, x=x), plan, x_scale)


def _rounded_before(p: LinearProblem) -> bool:
    """Whether a separate kernel rounds the tokens first (for E4M3 weights)."""
    in_tiles = p.x.shape[0] <= ROUNDED_TOKENS and p.x.shape[2] > SHORT_STEPS * KERNEL_GROUP
    return p.round_input and not in_tiles


def two_or_more(x: Tensor) -> Tensor:
    """Return x, with a single row repeated."""
    return x.expand(2, *x.shape[1:]) if x.shape[0] == 1 else x


def by_rows(p: LinearProblem) -> bool:
    """Whether `row_kernel` computes this problem, without `invariant`."""
    num_tokens, _, width = p.x.shape
    if p.scale is None:
        return num_tokens <= ROW_TOKENS
    return num_tokens == 1 and width <= MAX_ROW


def unsplit(
    x: tuple[Tensor, Tensor], weight_MK: Tensor, scale: Tensor, options: LinearOptions
) -> Tensor:
    """Rounded x [N, K] and its scales times an E4M3 weight; [N, M] bfloat16, not split over K."""
    weight, dtype = weight_MK[None], torch.bfloat16
    p = LinearProblem(x[0][:, None], weight, scale[None], True, dtype, options=options)
    return _run_tiles(p, replace(TilePlan.of(p), split=1), x[1][:, None]).squeeze(1)


def _run_many(p: LinearProblem) -> Tensor:
    """Multiply many tokens by an unscaled weight with torch."""
    x = round_input(p.x, early_launch=p.options.early_launch) if p.round_input else p.x
    x_GNK, weight_GKM = x.to(p.weight.dtype).transpose(0, 1), p.weight.mT
    if p.out_dtype == p.weight.dtype:
        return torch.bmm(x_GNK, weight_GKM).transpose(0, 1)
    if p.x.device.type != "cuda":
        return torch.bmm(x_GNK.float(), weight_GKM.float()).to(p.out_dtype).transpose(0, 1)
    return torch.bmm(x_GNK, weight_GKM, out_dtype=p.out_dtype).transpose(0, 1)


def prepare(w: Weight, *, group: int = KERNEL_GROUP) -> Weight:
    """Raise ValueError if the kernels of linear layers and experts cannot read the weight."""
    weight = w.weight if isinstance(w, LinearWeight) else w.w13
    in_blocks = weight.dtype == torch.float8_e4m3fn
    if w.input_group not in (0, group) or (in_blocks and w.scale_block != group):
        raise ValueError(
            f"these kernels round inputs in groups of {group} and read blocks of {group}, got "
            f"{w.input_group} and {w.scale_block}"
        )
    return w


def linear(x_NK: Tensor, w: LinearWeight, *, options: LinearOptions = DEFAULT) -> Tensor:
    """x [N, K] with strided rows -> [N, M]."""
    return run(LinearProblem.of(x_NK.unsqueeze(1), w, options)).squeeze(1)


def grouped_linear(
    x_NGK: Tensor,
    w: LinearWeight,
    scales_NS: Tensor | None = None,
    *,
    options: LinearOptions = DEFAULT,
) -> Tensor:
    """x [N, G, K] with strided tokens and groups, weight [G, M, K] -> [N, G, M]."""
    assert scales_NS is None, "this table's input is not rounded"
    return run(LinearProblem.of(x_NGK, w, options))


def swiglu_mlp(
    x_ND: Tensor, w: ExpertWeight, limit: float, *, options: LinearOptions = DEFAULT
) -> Tensor:
    """x [N, D], w13 [2I, D], w2 [D, I], with scale13 and scale2 if E4M3; returns [N, D].

    The hidden values are rounded to x's dtype, and then to E4M3 like any input. Up to
    ROUNDED_TOKENS tokens, no weight is requested early: these layers have time, because they run
    beside the router and the experts.
    """
    options = replace(options, early_steps=0)
    hidden = run(LinearProblem.gated(x_ND, w, limit, options)).squeeze(1)
    return linear(hidden, LinearWeight(w.w2, w.input_group, w.scale2), options=options)
