"""mHC as Triton kernels, for H = 4 residual streams.

There are two passes over the residual streams. The first pass applies the pending post step and
writes new residual streams. From the written values it computes the GEMM with fn and the sum of
squares, in parts over D. The second pass adds the parts, and computes the gates and the block's
normalised input.

- Up to FEW_TOKENS, `streams_few_kernel` and `block_input_kernel` run. A program of the former has
  32 values of D, so even one token occupies D / 32 programs. A second row of programs of the latter
  runs the Sinkhorn iterations in parallel with the block's input. With `early_launch`, both kernels
  start before the previous kernel ends, and read only weights until it has ended (but one token's
  GEMM starts after it). If x is `UnreducedExperts`, each program adds its tile of the experts'
  outputs. If x is a `PartialSum`, `sum_streams_few_kernel` replaces `streams_few_kernel`: each
  program exchanges its tile of x with the same program on the other ranks.
- With more tokens, `planes_kernel` rearranges fn, `streams_many_kernel` divides D into slots,
  `gates_kernel` computes the gates with a thread for each token, and `block_input_kernel` reads
  the residual streams a second time.

The GEMM has float32 precision: fn is exactly the sum of three bfloat16 matrices. Each matrix is
multiplied by the bfloat16 residual streams, and the results are added in float32, the small ones
first. A token's bits do not depend on the other tokens. They depend on the number of tokens only by
whether it exceeds FEW_TOKENS.

Legend: N tokens, H residual streams, D hidden, M rows of fn, S parts ("slots") of the GEMM.

Bytes of `mhc_post_pre` with bfloat16: 10 D values per token (x, residual, new residual streams,
block input), 8 D more for the second pass if the residual streams exceed the L2 cache, and fn once,
16 M D bytes. The floors at 4.39 TB/s, in microseconds for 1, 128 and 8192 tokens (8192 with the
second pass), are: Flash (D 4096) 0.4, 2.7, 153 (214); Pro (D 7168) 0.7, 4.8, 268 (375).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from finwhale.ops.launch import check_contiguous
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.sizes import LaunchClasses, up_to
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight
from finwhale.ops.mhc.gates_triton import block_input_kernel, gates_kernel
from finwhale.ops.mhc.residual_streams_triton import (
    planes_kernel,
    streams_few_kernel,
    streams_many_kernel,
    sum_streams_few_kernel,
)
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import Channel, PartialSum, Phases

NUM_STREAMS = 4
MAX_WIDTH = 16384
MAX_GRID_Y = 65_535  # of a launch
FEW_TOKENS = 128
TILE_VALUES = 512  # of x, in a program for few tokens


@dataclass(frozen=True, slots=True)
class MhcOptions:
    """A table's options for mHC.

    Attributes:
        invariant: the kernels for few tokens run for any number of tokens, so that the bits of a
            token do not depend on the number of tokens.
        early_launch: launch these kernels early (`launch_options`).
        inline_asm: use PTX instructions (the kernels' COMPILED).
    """

    invariant: bool = False
    early_launch: bool = False
    inline_asm: bool = False


DEFAULT = MhcOptions()


@dataclass(frozen=True, slots=True)
class MhcPlan:
    """The kernel of the first pass, and its tile sizes.

    Attributes:
        few: the kernel for few tokens.
        block_n, block_d: tokens and values of D that a program processes at a time.
        slots: programs along D for each block of tokens; 0: one for each block_d.
        stages: stages of the pipelined loop over D.
    """

    few: bool
    block_n: int
    block_d: int
    num_warps: int
    slots: int = 0
    stages: int = 1

    @staticmethod
    def of(
        num_tokens: int, dtype: torch.dtype, options: MhcOptions, *, gemm: bool = True
    ) -> "MhcPlan":
        """The plan for residual streams of a dtype. gemm: the pass computes the GEMM with fn."""
        if num_tokens <= FEW_TOKENS or options.invariant:
            if gemm or num_tokens > MAX_GRID_Y:
                return MhcPlan(True, block_n=16, block_d=32, num_warps=4)
            return MhcPlan(True, block_n=1, block_d=TILE_VALUES, num_warps=4)  # the same bits
        if not gemm:
            return MhcPlan(False, block_n=4, block_d=512, slots=4, num_warps=4)
        if dtype == torch.bfloat16:
            return MhcPlan(False, block_n=64, block_d=32, slots=8, num_warps=4, stages=3)
        return MhcPlan(False, block_n=32, block_d=16, slots=8, num_warps=8)

    def grid(self, num_tokens: int, width: int) -> tuple[int, int]:
        """Number of programs along D and along the tokens."""
        slots = self.slots or triton.cdiv(width, self.block_d)
        return slots, triton.cdiv(num_tokens, self.block_n)


def _check_streams(streams_NHD: Tensor) -> None:
    _, streams, width = streams_NHD.shape
    if streams != NUM_STREAMS:
        raise ValueError(f"these mHC kernels need {NUM_STREAMS} residual streams, got {streams}")
    if width > MAX_WIDTH:
        raise ValueError(f"these mHC kernels support a width of at most {MAX_WIDTH}, got {width}")
    if streams_NHD.stride(2) != 1:
        raise ValueError(f"a stream's values must be contiguous, got {streams_NHD.stride()}")


def _check_partial(partial: PartialSum, streams_NHD: Tensor, options: MhcOptions) -> None:
    x, channel = partial.x, partial.channel
    num_tokens, _, width = streams_NHD.shape
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a partial sum is float32 or bfloat16, got {x.dtype}")
    if width * x.dtype.itemsize % 4:
        raise ValueError(f"a partial sum has whole words of 4 bytes, got {width} {x.dtype}")
    programs = num_programs(num_tokens, width, options=options)
    if not 0 < programs <= len(channel.epochs) or channel.block < TILE_VALUES:
        raise ValueError(f"the channel does not fit partial sums {tuple(x.shape)}")


def _check_terms(terms: UnreducedExperts, num_tokens: int) -> None:
    if num_tokens > FEW_TOKENS:
        raise ValueError(
            f"these mHC kernels add experts' outputs of at most {FEW_TOKENS} tokens, got "
            f"{num_tokens}"
        )
    if terms.shared.stride(1) != 1:
        raise ValueError(f"a row's values must be contiguous, got {terms.shared.stride()}")
    check_contiguous(each=terms.each, ids=terms.ids)


LAUNCH_CLASSES = LaunchClasses(tokens=lambda model, most: up_to(most, (1, FEW_TOKENS, MAX_GRID_Y)))


def num_programs(num_tokens: int, width: int, *, options: MhcOptions = DEFAULT) -> int:
    """See `FusedReduceMhc`."""
    plans = [MhcPlan.of(num_tokens, torch.bfloat16, options, gemm=gemm) for gemm in (True, False)]
    if num_tokens == 0 or not plans[0].few:
        return 0
    return max(math.prod(plan.grid(num_tokens, width)) for plan in plans)


def _planes(fn: Tensor, dtype: torch.dtype) -> Tensor:
    """Rearrange fn [M,4D] for `streams_many_kernel`."""
    num_rows, width = fn.shape[0], fn.shape[1] // NUM_STREAMS
    count = 3 if dtype == torch.bfloat16 else 1
    planes = torch.empty((count, num_rows, width, NUM_STREAMS), dtype=dtype, device=fn.device)
    planes_kernel[(triton.cdiv(width, 512), num_rows)](
        fn, planes, width, M=num_rows, BLOCK_D=512, num_warps=4
    )
    return planes


@dataclass(frozen=True, slots=True)
class Post:
    """The pending post step, as the first pass reads it.

    Attributes:
        x: [N,D], or with topk > 0 the outputs [N,K,D] of each token's experts.
        mix, res: the mixes.
        ids, shared, topk: see UnreducedExperts. With topk = 0, the kernels read neither tensor.
        dtype: dtype of the sum that the ranks exchange.
        channel: the channel of a PartialSum; None: there is nothing to exchange.
    """

    x: Tensor
    mix: Tensor
    res: Tensor
    ids: Tensor
    shared: Tensor
    topk: int
    dtype: torch.dtype
    channel: Channel | None

    @staticmethod
    def of(
        x_ND: Tensor | PartialSum | UnreducedExperts,
        mix: Tensor,
        res: Tensor,
        streams_NHD: Tensor,
        options: MhcOptions,
    ) -> "Post":
        own, channel = x_ND, None
        if isinstance(x_ND, PartialSum):
            _check_partial(x_ND, streams_NHD, options)
            own, channel = x_ND.x, x_ND.channel
        assert not isinstance(own, PartialSum)
        x, ids, shared, topk = own, mix, mix, 0
        if isinstance(own, UnreducedExperts):
            _check_terms(own, streams_NHD.shape[0])
            x, ids, shared, topk = own.each, own.ids, own.shared, own.ids.shape[1]
        assert isinstance(x, Tensor)
        check_contiguous(x=x, post=mix, res=res)
        return Post(x, mix, res, ids, shared, topk, own.dtype, channel)


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The tensors of the first pass; without a post step, `out` is `streams`. fn: None: no GEMM."""

    plan: MhcPlan
    streams: Tensor
    post: Post | None
    fn: Tensor | None
    out: Tensor
    parts: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The kernels' arguments from the mixes on. They do not read those that do not exist."""
        post, out = self.post, self.out
        mixes = (out, out) if post is None else (post.mix, post.res)
        return *mixes, self.streams, out, out if self.fn is None else self.fn, self.parts

    def sizes(self) -> tuple[int, ...]:
        num_tokens, _, width = self.streams.shape
        return num_tokens, width, self.streams.stride(0), self.streams.stride(1)

    def constants(self, options: MhcOptions) -> dict[str, Any]:
        return {
            "M": 0 if self.fn is None else self.fn.shape[0],
            "ROWS": 16 if self.fn is None else self.parts.shape[2],
            "POST": self.post is not None,
            "COMPILED": options.inline_asm,
            "BLOCK_N": self.plan.block_n,
            "BLOCK_D": self.plan.block_d,
            "num_warps": self.plan.num_warps,
        }


def run_streams(
    streams_NHD: Tensor,
    post: tuple[Tensor | PartialSum | UnreducedExperts, Tensor, Tensor] | None,
    fn: Tensor | None,
    options: MhcOptions,
    phases: Phases = (0, 1),
) -> tuple[Tensor, Tensor]:
    """Run the first pass.

    Args:
        post: (x, post, res) of the pending post step; None: there is no post step.
        fn: None: compute no GEMM.
        phases: phases of the exchange with the other ranks to run.

    Returns:
        The residual streams after the post step, and the GEMM's parts [N,S,ROWS] float32: M
        results, then the sum of squares.
    """
    _check_streams(streams_NHD)
    num_tokens, _, width = streams_NHD.shape
    step = None if post is None else Post.of(*post, streams_NHD, options)
    out_NHD = streams_NHD
    if step is not None:
        out_NHD = torch.empty(streams_NHD.shape, dtype=streams_NHD.dtype, device=streams_NHD.device)
    plan = MhcPlan.of(num_tokens, streams_NHD.dtype, options, gemm=fn is not None)
    parts = out_NHD
    if fn is not None:
        check_contiguous(fn=fn)
        slots, _ = plan.grid(num_tokens, width)
        rows = triton.next_power_of_2(max(16, fn.shape[0] + 1))
        shape = (num_tokens, slots, rows) if plan.few else (slots, rows, num_tokens)
        parts = torch.empty(shape, dtype=torch.float32, device=out_NHD.device)
        parts = parts if plan.few else parts.permute(2, 0, 1)
    if num_tokens:
        p = FirstPass(plan, streams_NHD, step, fn, out_NHD, parts)
        if plan.few:
            _launch_few(p, options, phases)
        else:
            _launch_many(p, options)
    return out_NHD, parts


def _launch_few(p: FirstPass, options: MhcOptions, phases: Phases) -> None:
    num_tokens, _, width = p.streams.shape
    channel = None if p.post is None else p.post.channel
    # With an early start of one token's GEMM, a step is 3% slower on one H200, and as fast on two.
    early = options.early_launch and (num_tokens > 1 or p.fn is None)
    grid = p.plan.grid(num_tokens, width)
    x, experts, topk = p.streams, (p.streams, p.streams, 0), 0
    if p.post is not None:
        x, topk = p.post.x, p.post.topk
        experts = (p.post.ids, p.post.shared, p.post.shared.stride(0) if topk else 0)
    constants = p.constants(options) | {"K": topk, **launch_options(early)}
    if p.post is None or channel is None:
        streams_few_kernel[grid](x, *experts, *p.tensors(), *p.sizes(), **constants)
        return
    del constants["POST"]
    sum_streams_few_kernel[grid](
        x if topk else x.view(-1).view(torch.int32),
        *experts,
        *channel.arguments(),
        channel.index,
        channel.capacity,
        *p.tensors(),
        *p.sizes(),
        BFLOAT16=p.post.dtype == torch.bfloat16,
        W=channel.size,
        REGION=channel.block,
        FIRST=phases[0],
        LAST=phases[1],
        **constants,
    )


def _launch_many(p: FirstPass, options: MhcOptions) -> None:
    num_tokens, _, width = p.streams.shape
    tensors, plan = p.tensors(), p.plan
    if p.fn is not None:
        tensors = (*tensors[:4], _planes(p.fn, p.streams.dtype), p.parts)
    steps = triton.cdiv(triton.cdiv(width, plan.block_d), plan.slots)
    streams_many_kernel[plan.grid(num_tokens, width)](
        p.streams if p.post is None else p.post.x,
        *tensors,
        *p.sizes(),
        steps,
        EVEN=steps * plan.slots * plan.block_d == width,
        STAGES=plan.stages,
        **p.constants(options),
    )


Mixes = tuple[Tensor, Tensor, Tensor]


def empty_mixes(streams_NHD: Tensor) -> Mixes:
    """Allocate pre [N,H], post [N,H] and res [N,H,H]."""
    (num_tokens, streams, _), device = streams_NHD.shape, streams_NHD.device
    pre, post = torch.empty((2, num_tokens, streams), dtype=torch.float32, device=device)
    return pre, post, pre.new_empty(num_tokens, streams, streams)


def run_gates(
    parts: Tensor, width: int, w: MhcWeight, mixes: Mixes, params: MhcParams, options: MhcOptions
) -> None:
    """Compute the mixes of more than FEW_TOKENS."""
    num_tokens, slots, rows = parts.shape
    gates_kernel[(triton.cdiv(num_tokens, 32),)](
        *(parts, w.scale, w.base, *mixes),
        *(num_tokens, width, params.eps, params.rms_eps),
        ITERS=params.num_iters,
        COMPILED=options.inline_asm,
        SLOTS=slots,
        ROWS=rows,
        BLOCK_N=32,
        num_warps=1,
    )


def run_block_input(
    streams_NHD: Tensor,
    parts: Tensor,
    w: MhcWeight | HcHeadWeight,
    mixes: Mixes,
    kind: str,
    params: MhcParams,
    options: MhcOptions,
) -> Tensor:
    """Compute the block's input. kind: KIND of the kernel, which says what it reads and writes."""
    num_tokens, _, width = streams_NHD.shape
    y_ND = torch.empty((num_tokens, width), dtype=streams_NHD.dtype, device=streams_NHD.device)
    if num_tokens == 0:
        return y_ND
    few = MhcPlan.of(num_tokens, streams_NHD.dtype, options).few
    _, slots, rows = parts.shape
    pre, post, res = mixes
    block_d = triton.next_power_of_2(width)
    block_input_kernel[(num_tokens, 2 if kind == "block" else 1)](
        *(streams_NHD, parts, pre, w.scale, w.base, w.norm, post, res, y_ND),
        *(width, streams_NHD.stride(0), streams_NHD.stride(1), params.eps, params.rms_eps),
        *(parts.stride(0), parts.stride(2), slots),
        KIND=kind,
        ITERS=params.num_iters,
        COMPILED=options.inline_asm,
        ROWS=rows,
        BLOCK_S=triton.next_power_of_2(slots),
        BLOCK_D=block_d,
        num_warps=min(16, max(1, block_d // (1024 if few else 512))),
        **launch_options(few and options.early_launch),
    )
    return y_ND


def _second_pass(
    streams_NHD: Tensor, parts: Tensor, w: MhcWeight, params: MhcParams, options: MhcOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (block input, post, res)."""
    check_contiguous(scale=w.scale, base=w.base, norm=w.norm)
    mixes, kind = empty_mixes(streams_NHD), "block"
    if not MhcPlan.of(len(streams_NHD), streams_NHD.dtype, options).few:
        kind = "given"
        run_gates(parts, streams_NHD.shape[2], w, mixes, params, options)
    y_ND = run_block_input(streams_NHD, parts, w, mixes, kind, params, options)
    return y_ND, mixes[1], mixes[2]


def mhc_pre(
    residual_NHD: Tensor, w: MhcWeight, params: MhcParams, *, options: MhcOptions = DEFAULT
) -> tuple[Tensor, Tensor, Tensor]:
    streams, parts = run_streams(residual_NHD, None, w.fn, options)
    return _second_pass(streams, parts, w, params, options)


def mhc_post(
    x_ND: Tensor | PartialSum | UnreducedExperts,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    *,
    options: MhcOptions = DEFAULT,
) -> Tensor:
    return run_streams(residual_NHD, (x_ND, post_NH, res_NHH), None, options)[0]


def mhc_post_pre(
    x_ND: Tensor | PartialSum | UnreducedExperts,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
    *,
    options: MhcOptions = DEFAULT,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams, parts = run_streams(residual_NHD, (x_ND, post_NH, res_NHH), w.fn, options)
    return *_second_pass(streams, parts, w, params, options), streams


def hc_head(
    streams_NHD: Tensor, w: HcHeadWeight, params: MhcParams, *, options: MhcOptions = DEFAULT
) -> Tensor:
    streams, parts = run_streams(streams_NHD, None, w.fn, options)
    check_contiguous(scale=w.scale, base=w.base, norm=w.norm)
    return run_block_input(streams, parts, w, (parts,) * 3, "head", params, options)
