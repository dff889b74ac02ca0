"""Manifold-constrained hyper-connections (mHC): the contracts.

Source: DeepSeek-V4 technical report, section 2.2. Legend: N tokens, H residual streams, D hidden.

The state between blocks is (x [N,D], post_mix [N,H], res_mix [N,H,H], residual [N,H,D]): the output
of the last block, whose post step is still pending, the mixes for that step, and the residual
streams before it. At the first layer, the mixes and the residual are None, and x is the residual
streams [N,H,D] themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import PartialSum


@dataclass(frozen=True, slots=True)
class MhcWeight:
    """The projection that computes a block's mixes.

    Attributes:
        fn: [2H + H*H, H*D] float32: rows for pre, for post, then for res row by row.
        scale: [2H + H*H] float32: the checkpoint's three scales, repeated over their rows.
        base: [2H + H*H] float32.
        norm: [D] float32, the RMSNorm of the block's input.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class HcHeadWeight:
    """The weights that collapse the residual streams after the last layer.

    Attributes:
        fn: [H, H*D] float32.
        scale: [1] float32.
        base: [H] float32.
        norm: [D] float32, the final RMSNorm.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class MhcParams:
    """num_iters: Sinkhorn iterations; eps: for the mixes and Sinkhorn; rms_eps: for the norms."""

    num_iters: int
    eps: float
    rms_eps: float


class MhcPre(Protocol):
    """Compute the mixes from the residual streams X, and the block's normalised input.

    m = (flatten(X) fn^T) * rsqrt(mean(flatten(X)^2) + rms_eps), scaled and shifted;
    pre = sigmoid(m_pre) + eps; post = 2 sigmoid(m_post);
    res = Sinkhorn(softmax(m_res over the last axis) + eps); x = RMSNorm(sum_i pre_i X_i).
    """

    def __call__(
        self, residual_NHD: Tensor, w: MhcWeight, params: MhcParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x [N,D] in the residual's dtype, post [N,H] and res [N,H,H] in float32."""


class MhcPost(Protocol):
    """X'_k = post_k * x + sum_j res[j,k] X_j."""

    def __call__(
        self, x_ND: Tensor, post_NH: Tensor, res_NHH: Tensor, residual_NHD: Tensor
    ) -> Tensor:
        """Returns the new residual streams [N,H,D] in the residual's dtype."""


class MhcPostPre(Protocol):
    """The pending post step, then the next block's pre step, as one operator."""

    def __call__(
        self,
        x_ND: Tensor,
        post_NH: Tensor,
        res_NHH: Tensor,
        residual_NHD: Tensor,
        w: MhcWeight,
        params: MhcParams,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the state for the next block; x is the block's normalised input."""


class HcHead(Protocol):
    """RMSNorm(sum_i (sigmoid(m_i * scale + base_i) + eps) X_i) with m as in MhcPre."""

    def __call__(self, streams_NHD: Tensor, w: HcHeadWeight, params: MhcParams) -> Tensor:
        """Returns the hidden states [N,D] in the streams' dtype."""


Terms = PartialSum | UnreducedExperts


@dataclass(frozen=True, slots=True)
class FusedReduceMhc:
    """mHC operators that add the terms of x in the kernel that reads them.

    The terms are the outputs of a token's experts, the partial sums of the ranks, or both. The sum
    over experts is that of `ExpertsCombine`. The sum over ranks is a tree of pairs in float32,
    rounded to the dtype of the partial sums and then to that of the residual streams. If a rank is
    missing, the results contain NaN.

    MhcPost and MhcPostPre of the whole sum may differ in the last bits, because the compiler may
    fuse other multiplications with additions.

    With a PartialSum, all ranks must make the same calls in the same order. The kernels for a
    PartialSum are not built at start, because the ranks build one after the other; the first call
    compiles one kernel for all numbers of tokens.

    Attributes:
        expert_tokens: the most tokens for which the operators take `UnreducedExperts`.
        num_programs: (N, D) -> the most programs of a launch that exchange words; 0: the operators
            do not take the partial sums of N tokens.
        mhc_post, mhc_post_pre: MhcPost and MhcPostPre that add the terms of x.
    """

    expert_tokens: int
    num_programs: Callable[[int, int], int]
    mhc_post: Callable[[Terms, Tensor, Tensor, Tensor], Tensor]
    mhc_post_pre: Callable[
        [Terms, Tensor, Tensor, Tensor, MhcWeight, MhcParams], tuple[Tensor, Tensor, Tensor, Tensor]
    ]
