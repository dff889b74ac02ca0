"""DeepSeek-V4.1's GEMMs, experts and small operators on a GPU, against the references on it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.support.v41_weights import assert_near, e4m3, fp4, plain, plain_fp4
from torch import Tensor

from finwhale.ops.deepseek_v41 import experts_hopper as experts
from finwhale.ops.deepseek_v41 import gemm_triton as gemm
from finwhale.ops.deepseek_v41 import mhc_delayed_triton as mhc
from finwhale.ops.deepseek_v41 import ref
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.mhc import MhcParams, MhcWeight, mhc_triton
from finwhale.ops.mhc.ref import mhc_post
from finwhale.ops.moe import ExpertWeight, combine_triton
from finwhale.ops.moe import ref as moe_ref
from finwhale.ops.rounding import round_e4m3

DEVICE = "cuda"
FAST = gemm.GemmOptions(early_launch=True, inline_asm=True)
TOKENS = (1, 2, 17, 64, 65, 300, 600)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outliers(*shape: int) -> Tensor:
    x = torch.randn(shape, generator=draw(1))
    return torch.where(torch.rand(shape, generator=draw(2)) < 0.01, 300 * x, x).bfloat16().cuda()


def close(found: Tensor, wanted: Tensor) -> None:
    """float32: sums in another order; bfloat16: one rounding."""
    found, wanted, half = found.float(), wanted.float(), found.dtype == torch.bfloat16
    allowed = 1e-5 * wanted.abs().amax() + (2.0**-7 * wanted.abs() if half else 0.0)
    assert found.isfinite().all()
    assert ((found - wanted).abs() <= allowed).all()


# The sizes of one of four ranks: rows with a rest, one group and two.
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    "size", ((1, 1792, 5120), (1, 12288, 1280), (1, 5120, 2048), (2, 1024, 4096), (1, 130, 96))
)
@pytest.mark.parametrize("rounds", (True, False))
def test_linear(size: tuple[int, int, int], num_tokens: int, rounds: bool) -> None:
    G, M, K = size
    weight, scale = (part.cuda() for part in e4m3(draw(), G, M, K))
    x = outliers(num_tokens, G, K)
    given = (round_e4m3(x, 32) if rounds else x).float()
    wanted = linear_ref.grouped_linear(given, LinearWeight(plain(weight, scale)))
    for dtype in (torch.bfloat16, torch.float32):
        w = LinearWeight(weight, 32 * rounds, scale, dtype, scale_block=32)
        if G == 1:
            w = replace(w, weight=weight[0], scale=scale[0])
            call = partial(gemm.linear, x[:, 0], w)
        else:
            call = partial(gemm.grouped_linear, x, w)
        found = call(options=FAST)
        close(found, wanted.squeeze(1) if G == 1 else wanted)
        assert torch.equal(found, call()), "the PTX changes bits"


@pytest.mark.parametrize("exponent", (-117.0, -100.0, 0.0, 7.0))
def test_every_code_is_exact(exponent: float) -> None:
    """Subnormal codes are subnormal bfloat16 values before the multiplication by a factor."""
    codes = torch.arange(256).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    weight = codes[:, None].repeat(1, 32).view(torch.float8_e4m3fn).cuda()
    scale = torch.full((8, 1), 2.0**exponent, device=DEVICE)
    for num_tokens in (1, 2, 100):
        x = torch.zeros(num_tokens, 32, dtype=torch.bfloat16, device=DEVICE)
        x[:, 3] = 1.0
        w = LinearWeight(weight, 0, scale, torch.float32, scale_block=32)
        wanted = plain(weight, scale)[:, 3]
        found = gemm.linear(x, w, options=FAST)
        assert torch.equal(found[-1], wanted), (found[-1] != wanted).nonzero()[:5]


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_the_shared_expert(num_tokens: int) -> None:
    w13, scale13 = (part.cuda() for part in e4m3(draw(), 1152, 5120))
    w2, scale2 = (part.cuda() for part in e4m3(draw(3), 5120, 576))
    x = outliers(num_tokens, 5120)
    w = ExpertWeight(w13, w2, 32, scale13 / 64, scale2, scale_block=32)
    wanted = ExpertWeight(plain(w13, scale13 / 64), plain(w2, scale2), 32)
    found = gemm.swiglu_mlp(x, w, 10.0, options=FAST)
    assert_near(found, moe_ref.swiglu_mlp(x.float(), wanted, 10.0))
    assert torch.equal(found, gemm.swiglu_mlp(x, w, 10.0)), "the PTX changes bits"


@pytest.mark.parametrize(
    "num_tokens, width",
    [(n, width) for n in (*TOKENS, 3000) for width in (576, 288)] + [(1, 2304), (1, 1152)],
)
def test_experts(num_tokens: int, width: int) -> None:
    """Twelve experts of one of four or eight ranks; some tokens have fewer than six."""
    w13, scale13 = (part.cuda() for part in fp4(draw(), 12, 2 * width, 5120))
    w2, scale2 = (part.cuda() for part in fp4(draw(3), 12, 5120, width))
    wanted_w = ExpertWeight(plain_fp4(w13, scale13), plain_fp4(w2, scale2), 32)
    w = experts.finish_experts(ExpertWeight(w13, w2, 32, scale13, scale2))
    x = outliers(num_tokens, 5120) / 1024
    ids = torch.rand(num_tokens, 12, generator=draw(4)).argsort(1)[:, :6].to(torch.int32).cuda()
    ids[num_tokens // 2 :: 5, 0] = -1
    weights = torch.rand(num_tokens, 6, generator=draw(5)).cuda()

    pairs = experts.dispatch(ids, 12, options=FAST)
    each = experts.compute(x, weights, pairs, w, 10.0, options=FAST)
    wanted = moe_ref.compute(x.float(), weights, moe_ref.dispatch(ids, 12), wanted_w, 10.0)
    assert_near(combine_triton.combine(each, ids), moe_ref.combine(wanted, ids))
    again = experts.compute(x, weights, pairs, w, 10.0, options=FAST)
    stored = ids >= 0
    assert torch.equal(each[stored], again[stored])


def test_captured_experts_of_one_token() -> None:
    """They read other experts, weights and values in each replay; scales are up to 16."""
    w13, scale13 = (part.cuda() for part in fp4(draw(), 12, 1152, 5120, largest=131))
    w2, scale2 = (part.cuda() for part in fp4(draw(3), 12, 5120, 576, largest=131))
    w = experts.finish_experts(ExpertWeight(w13, w2, 32, scale13, scale2))
    x = torch.zeros(1, 5120, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(1, 6, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(1, 6, device=DEVICE)

    def run() -> Tensor:
        pairs = experts.dispatch(ids, 12, options=FAST)
        each = experts.compute(x, weights, pairs, w, 10.0, options=FAST)
        return combine_triton.combine(each, ids, early_launch=True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in range(20):
        x.copy_(torch.randn(1, 5120, generator=draw(seed)) / 1024)
        weights.copy_(torch.rand(1, 6, generator=draw(seed)))
        ids.copy_(torch.randperm(12, generator=draw(seed))[:6])
        ids[0, seed % 6] = -1
        graph.replay()
        assert torch.equal(found, run())


@pytest.mark.parametrize("num_tokens", (1, 3, 128, 129, 2000))
def test_inputs_of_the_mixes_before(num_tokens: int) -> None:
    D, H = 5120, 4
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-20)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).cuda()

    generator = draw()
    w = MhcWeight(normal(24, H * D) * (H * D) ** -0.5, normal(24).abs(), normal(24), normal(D))
    streams, pre = outliers(num_tokens, H, D), normal(num_tokens, H).abs()
    x, post = normal(num_tokens, D).bfloat16(), normal(num_tokens, H).abs()
    res = normal(num_tokens, H, H).softmax(-1)
    options = mhc_triton.MhcOptions(early_launch=True, inline_asm=True)
    for last in (None, (x, post, res)):
        found, after, parts = mhc.mhc_input(last, streams, pre, w, params, options=options)
        if last is not None:
            close(after, mhc_post(x, post, res, streams))
        close(found, ref.mhc_input(None, after, pre, w, params)[0])
        mixes = mhc.mhc_mixes(after, parts, w, params, options=options)
        for one, other in zip(mixes, ref.mhc_mixes(after, None, w, params), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    close(
        mhc.collapse(streams, pre, early_launch=True),
        (pre[:, :, None] * streams.float()).sum(1).bfloat16(),
    )
