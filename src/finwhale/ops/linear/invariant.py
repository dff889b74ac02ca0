"""Linear layers that give a token the same bits whatever the number of tokens.

One token is computed as two. Unscaled weights, and E4M3 weights whose input is not rounded, always
take our tiles, split over K as for few tokens. Other E4M3 weights are DeepGEMM's where it is
installed, which adds in one order for any number of tokens.
"""

from torch import Tensor

from finwhale.ops.linear import LinearWeight, ref
from finwhale.ops.linear.triton import gated_problem, problem, run_invariant, two_or_more
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.tables import optional

deepgemm = optional.deepgemm()


def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
    if deepgemm is not None and w.scale is not None and w.round_input:
        y_NM: Tensor = deepgemm.linear(two_or_more(x_NK), w)
        return y_NM[: x_NK.shape[0]]
    return run_invariant(problem(x_NK.unsqueeze(1), w)).squeeze(1)


def grouped_input(like_NX: Tensor, head_dim: int, w: LinearWeight) -> tuple[Tensor, Tensor | None]:
    """Of one form for any number of tokens: it decides which kernel attention is."""
    if deepgemm is None:
        return ref.grouped_input(like_NX, head_dim, w)
    found: tuple[Tensor, Tensor | None] = deepgemm.grouped_input(like_NX, head_dim, w, least=1)
    return found


def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
    if deepgemm is not None and w.scale is not None and w.round_input:
        x = two_or_more(x_NGK) if scales_NS is None else x_NGK
        y_NGM: Tensor = deepgemm.grouped_linear(x, w, scales_NS)
        return y_NGM[: x_NGK.shape[0]]
    return run_invariant(problem(x_NGK, w))


def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
    if deepgemm is not None and w.scale13 is not None and w.round_input:
        y_ND: Tensor = deepgemm.swiglu_mlp(two_or_more(x_ND), w, limit)
        return y_ND[: x_ND.shape[0]]
    hidden = run_invariant(gated_problem(x_ND, w, limit)).squeeze(1)
    return linear(hidden, LinearWeight(w.w2, w.round_input, w.scale2))
