"""The Triton kernels of mHC in the interpreter, against the reference."""

from typing import TypeAlias

import pytest
import torch

from finwhale.distributed.collectives import Alone
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.tensor_parallel import DIVIDED_TOKENS, TensorParallel
from finwhale.ops.mhc import FusedReduceMhc, HcHeadWeight, MhcParams, MhcWeight, ref
from finwhale.ops.mhc import mhc_triton as kernels
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.moe.combine_triton import combine

from .kernels_support import DTYPES, Inputs, assert_all_close, assert_close

PARAMS = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)
# x, post, res and residual of mhc_post_pre.
State: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# (N, D): widths of one part, of several with a rest, of several groups; a second block of tokens.
SIZES = ((0, 64), (1, 32), (1, 7), (3, 100), (17, 40), (2, 610))


def weight(inputs: Inputs, width: int) -> MhcWeight:
    return MhcWeight(
        fn=inputs.normal(24, 4 * width, scale=width**-0.5),
        scale=inputs.normal(24).abs(),
        base=inputs.normal(24),
        norm=inputs.normal(width),
    )


def state(inputs: Inputs, num_tokens: int, width: int, dtype: torch.dtype) -> State:
    """(x, post, res, residual)."""
    return (
        inputs.normal(num_tokens, width, dtype=dtype),
        inputs.normal(num_tokens, 4).abs(),
        inputs.normal(num_tokens, 4, 4).softmax(-1),
        inputs.outliers(num_tokens, 4, width, dtype=dtype),
    )


def rows(args: State, chosen: slice) -> State:
    x, post, res, residual = args
    return x[chosen], post[chosen], res[chosen], residual[chosen]


SIZES_AND_DTYPES = [
    pytest.param(size, dtype, marks=[pytest.mark.long] if dtype is torch.float32 and large else [])
    for size, large in zip(SIZES, (False, False, False, False, True, True), strict=True)
    for dtype in DTYPES
]


@pytest.mark.parametrize("size, dtype", SIZES_AND_DTYPES)
def test_against_the_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = Inputs()
    w = weight(inputs, size[1])
    args = state(inputs, *size, dtype)
    head = HcHeadWeight(w.fn[:4], w.scale[:1], w.base[:4], w.norm)
    assert_all_close(kernels.mhc_post_pre(*args, w, PARAMS), ref.mhc_post_pre(*args, w, PARAMS))
    assert_close(kernels.mhc_post(*args), ref.mhc_post(*args))
    assert_all_close(kernels.mhc_pre(args[3], w, PARAMS), ref.mhc_pre(args[3], w, PARAMS))
    assert_close(kernels.hc_head(args[3], head, PARAMS), ref.hc_head(args[3], head, PARAMS))


def terms(inputs: Inputs, num_tokens: int, width: int, dtype: torch.dtype) -> UnreducedExperts:
    """Random outputs of each token's 3 experts and of the shared expert; NaN for unused experts."""
    ids = torch.arange(num_tokens * 3, dtype=torch.int32).view(num_tokens, 3) % 5 - 1
    each = inputs.normal(num_tokens, 3, width, dtype=torch.bfloat16)
    each[ids < 0] = torch.nan
    shared = inputs.normal(num_tokens, width + 8, dtype=torch.bfloat16)[:, :width]
    return UnreducedExperts(each, ids, shared, dtype)


@pytest.mark.parametrize("size", ((1, 32), (17, 40), (2, 610)))
def test_experts_outputs_have_the_bits_of_their_sum(size: tuple[int, int]) -> None:
    inputs = Inputs()
    w = weight(inputs, size[1])
    _, post, res, residual = state(inputs, *size, torch.bfloat16)
    x = terms(inputs, *size, torch.bfloat16)
    total = combine(x.each, x.ids, x.shared)
    assert not total.isnan().any()
    wanted = kernels.mhc_post_pre(total, post, res, residual, w, PARAMS)
    found = kernels.mhc_post_pre(x, post, res, residual, w, PARAMS)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    streams = kernels.mhc_post(x, post, res, residual)
    assert torch.equal(streams, kernels.mhc_post(total, post, res, residual))


def test_experts_outputs_of_many_tokens_are_refused() -> None:
    inputs = Inputs()
    most = kernels.FEW_TOKENS
    x = terms(inputs, most + 1, 32, torch.bfloat16)
    _, post, res, residual = state(inputs, most + 1, 32, torch.bfloat16)
    any_number = kernels.MhcOptions(invariant=True)
    with pytest.raises(ValueError, match=f"at most {most} tokens, got {most + 1}"):
        kernels.mhc_post(x, post, res, residual, options=any_number)


def test_one_rank_passes_on_the_experts_outputs() -> None:
    """The next mHC operator adds them, up to a number of tokens."""
    mhc = FusedReduceMhc(2, kernels.num_programs, kernels.mhc_post, kernels.mhc_post_pre)
    links = TensorParallel(Alone(), mhc)
    assert [links.can_fuse_reduce(n, 32) for n in (0, 1, 2, 3)] == [False, True, True, False]
    assert not TensorParallel(Alone()).can_fuse_reduce(1, 32)
    x = terms(Inputs(), 1, 32, torch.bfloat16)
    assert links.reduce(x, torch.bfloat16) is x


def test_residual_streams_that_are_one_expanded_row() -> None:
    """As the first layer gets them."""
    inputs = Inputs()
    w = weight(inputs, 48)
    streams = inputs.normal(3, 48)[:, None].expand(-1, 4, -1)
    assert_all_close(kernels.mhc_pre(streams, w, PARAMS), ref.mhc_pre(streams, w, PARAMS))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        pytest.param(width, dtype, marks=pytest.mark.long if i == j else [], id=f"{rest}-dtype{j}")
        for i, (width, rest) in enumerate(((610, "a rest of D"), (256, "no rest")))
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_many_tokens_take_the_other_kernels(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FEW_TOKENS", 4)
    inputs = Inputs()
    w = weight(inputs, width)
    args = state(inputs, 70, width, dtype)
    head = HcHeadWeight(w.fn[:4], w.scale[:1], w.base[:4], w.norm)
    assert_all_close(kernels.mhc_post_pre(*args, w, PARAMS), ref.mhc_post_pre(*args, w, PARAMS))
    few = rows(args, slice(6))
    assert_close(kernels.mhc_post(*few), ref.mhc_post(*few))
    assert_all_close(kernels.mhc_pre(few[3], w, PARAMS), ref.mhc_pre(few[3], w, PARAMS))
    assert_close(kernels.hc_head(few[3], head, PARAMS), ref.hc_head(few[3], head, PARAMS))


def test_more_tokens_than_a_grid_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch_invariant, the kernels for few tokens take any number."""
    inputs = Inputs()
    args = state(inputs, 20, 100, torch.bfloat16)
    always = kernels.MhcOptions(invariant=True)
    wanted = kernels.mhc_post(*args, options=always)
    monkeypatch.setattr(kernels, "MAX_GRID_Y", 16)
    assert torch.equal(kernels.mhc_post(*args, options=always), wanted)
    plan = kernels.MhcPlan.of(20, torch.bfloat16, always, gemm=False)
    assert plan.few and plan.grid(20, 100)[1] == 2


def test_a_token_s_bits_do_not_depend_on_the_batch() -> None:
    inputs = Inputs()
    w = weight(inputs, 100)
    args = state(inputs, 18, 100, torch.bfloat16)
    together = kernels.mhc_post_pre(*args, w, PARAMS)
    for token in (0, 17):
        alone = kernels.mhc_post_pre(*rows(args, slice(token, token + 1)), w, PARAMS)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[token])


def test_rows_of_each_rank_have_the_bits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks divide the tokens of large steps."""
    monkeypatch.setattr(kernels, "FEW_TOKENS", 4)
    inputs = Inputs()
    w = weight(inputs, 64)
    args = state(inputs, 70, 64, torch.bfloat16)
    whole = kernels.mhc_post_pre(*args, w, PARAMS)
    first = kernels.mhc_pre(args[3], w, PARAMS)
    post = kernels.mhc_post(*args)
    for index in (0, 3):
        own = Rank(index, 4).rows(70)
        mine = rows(args, own)
        pairs = [
            *zip(kernels.mhc_post_pre(*mine, w, PARAMS), whole, strict=True),
            *zip(kernels.mhc_pre(mine[3], w, PARAMS), first, strict=True),
            (kernels.mhc_post(*mine), post),
        ]
        for part, of_all in pairs:
            assert torch.equal(part, of_all[own])


def test_the_ranks_rows_always_take_the_kernels_for_many_tokens() -> None:
    for size in (2, 4, 8):
        for num_tokens in range(DIVIDED_TOKENS, DIVIDED_TOKENS + 2 * size):
            own = Rank(size - 1, size).rows(num_tokens)
            assert own.stop == num_tokens
            assert own.stop - own.start > kernels.FEW_TOKENS


def test_unsupported_arguments_are_refused() -> None:
    inputs = Inputs()
    w = weight(inputs, 32)
    with pytest.raises(ValueError, match="4 residual streams, got 2"):
        kernels.mhc_pre(inputs.normal(1, 2, 32), w, PARAMS)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.mhc_pre(inputs.normal(1, 32, 4).mT, w, PARAMS)
    with pytest.raises(ValueError, match="at most 16384, got 20000"):
        kernels.mhc_pre(inputs.normal(1, 4, 20000), w, PARAMS)
    with pytest.raises(ValueError, match="res must be contiguous"):
        x, post, res, residual = state(inputs, 2, 32, torch.float32)
        kernels.mhc_post(x, post, res.mT, residual)
