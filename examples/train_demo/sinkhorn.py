"""Sinkhorn normalisation of mHC's 4x4 mixing matrices: torch on the CPU, one Triton kernel each
way on a GPU.

Autograd through the iterations launches about eighty tiny kernels a call, and the model makes two
calls a layer. The backward kernel stores no iterates: it recomputes each one from the input, which
is 16 numbers a token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

# Triton takes no other annotations than tl.constexpr.
if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _normalise(x, i, eps):
        """Step i of the iteration on x [N, 4, 4]: columns when i is even, rows when it is odd."""
        columns = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
        rows = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
        return tl.where(i % 2 == 0, columns, rows)

    @triton.jit
    def _forward_kernel(x_ptr, y_ptr, num_tokens, num_steps, eps, BLOCK: tl.constexpr):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.arange(0, 4)
        offset = token[:, None, None] * 16 + j[None, :, None] * 4 + j[None, None, :]
        inside = (token < num_tokens)[:, None, None]
        x = tl.load(x_ptr + offset, mask=inside, other=1.0)
        for i in range(0, num_steps):
            x = _normalise(x, i, eps)
        tl.store(y_ptr + offset, x, mask=inside)

    @triton.jit
    def _backward_kernel(
        x_ptr,
        dy_ptr,
        dx_ptr,
        num_tokens,
        num_steps,
        eps,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.arange(0, 4)
        offset = token[:, None, None] * 16 + j[None, :, None] * 4 + j[None, None, :]
        inside = (token < num_tokens)[:, None, None]
        x0 = tl.load(x_ptr + offset, mask=inside, other=1.0)
        grad = tl.load(dy_ptr + offset, mask=inside, other=0.0)
        for back in range(0, num_steps):
            step = num_steps - 1 - back
            x = x0
            for i in range(0, step):
                x = _normalise(x, i, eps)
            column_sum = tl.sum(x, axis=1, keep_dims=True) + eps
            row_sum = tl.sum(x, axis=2, keep_dims=True) + eps
            gx = grad * x
            by_column = (grad - tl.sum(gx, axis=1, keep_dims=True) / column_sum) / column_sum
            by_row = (grad - tl.sum(gx, axis=2, keep_dims=True) / row_sum) / row_sum
            grad = tl.where(step % 2 == 0, by_column, by_row)
        tl.store(dx_ptr + offset, grad, mask=inside)


def sinkhorn_reference(x: Tensor, iters: int, eps: float) -> Tensor:
    """Columns once, then (iters - 1) times rows and columns of x [..., 4, 4], each divided by
    (sum + eps)."""
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


@torch.library.custom_op("finwhale_demo::sinkhorn", mutates_args=())
def _sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    y = torch.empty_like(x)
    num_tokens = x.numel() // 16
    _forward_kernel[(triton.cdiv(num_tokens, 128),)](
        x, y, num_tokens, 2 * iters - 1, eps, BLOCK=128
    )
    return y


@torch.library.custom_op("finwhale_demo::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(x: Tensor, dy: Tensor, iters: int, eps: float) -> Tensor:
    dx = torch.empty_like(x)
    num_tokens = x.numel() // 16
    _backward_kernel[(triton.cdiv(num_tokens, 128),)](
        x, dy.contiguous(), dx, num_tokens, 2 * iters - 1, eps, BLOCK=128
    )
    return dx


@_sinkhorn.register_fake
def _(x: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x)


@_sinkhorn_backward.register_fake
def _(x: Tensor, dy: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    x, ctx.iters, ctx.eps = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return _sinkhorn_backward(x, dy, ctx.iters, ctx.eps), None, None


_sinkhorn.register_autograd(_backward, setup_context=_setup_context)


def sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    """sinkhorn_reference with a kernel of its own on a GPU. x [..., 4, 4] fp32, contiguous."""
    return _sinkhorn(x.contiguous(), iters, eps) if x.is_cuda else sinkhorn_reference(x, iters, eps)
