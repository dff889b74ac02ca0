"""mHC's post and pre steps as separate kernels, for platforms without a faster fused kernel."""

from torch import Tensor

from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.mhc_triton import mhc_post, mhc_pre


def mhc_post_pre(
    x_ND: Tensor,
    post_NH: Tensor,
    res_NHH: Tensor,
    residual_NHD: Tensor,
    w: MhcWeight,
    params: MhcParams,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    streams = mhc_post(x_ND, post_NH, res_NHH, residual_NHD)
    return *mhc_pre(streams, w, params), streams
