"""Linear layers of many tokens by DeepGEMM, of few by the Triton kernels.

DeepGEMM compiles a kernel with nvcc at the first call of a shape; inputs are rounded by our kernel
in the layout that it reads. A token's bits do not depend on how many there are past SPLIT_TOKENS.
"""

import deep_gemm
import torch
from torch import Tensor

from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear import triton as kernels
from finwhale.ops.linear.quantise import quantise, swiglu_quantise
from finwhale.ops.moe import ExpertWeight

__all__ = ["grouped_linear", "linear", "swiglu_mlp"]


def _suits(num_tokens: int, w: LinearWeight) -> bool:
    """Whether DeepGEMM takes it: many tokens, E4M3 weights, bfloat16 results."""
    return (
        num_tokens > kernels.SPLIT_TOKENS
        and w.scale is not None
        and w.out_dtype in (None, torch.bfloat16)
    )


def _product(x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, K] and its scales as `quantise` returns them; bfloat16 [N, M]."""
    out = torch.empty((x[0].shape[0], weight.shape[0]), dtype=torch.bfloat16, device=weight.device)
    deep_gemm.fp8_gemm_nt(x, (weight, scale), out, disable_ue8m0_cast=True)
    return out


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    if w.scale is None or not _suits(x_NK.shape[0], w):
        return kernels.linear(x_NK, w)
    return _product(quantise(x_NK), w.weight, w.scale)


def grouped_linear(x_NGK: Tensor, w: LinearWeight) -> Tensor:
    if w.scale is None or not _suits(x_NGK.shape[0], w):
        return kernels.grouped_linear(x_NGK, w)
    num_tokens, groups, _ = x_NGK.shape
    shape = (num_tokens, groups, w.weight.shape[1])
    out = torch.empty(shape, dtype=torch.bfloat16, device=x_NGK.device)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", quantise(x_NGK), (w.weight, w.scale), out)
    return out


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    """As `triton.swiglu_mlp`."""
    if x_ND.shape[0] <= kernels.SPLIT_TOKENS or w.scale13 is None or w.scale2 is None:
        return kernels.swiglu_mlp(x_ND, w, limit)
    gate_up = _product(quantise(x_ND), w.w13, w.scale13)
    return _product(swiglu_quantise(gate_up, limit), w.w2, w.scale2)
