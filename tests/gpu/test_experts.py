"""The experts' kernels on Hopper beside each other: few tokens', and every plan's, bit for bit."""

import pytest
import torch

from finwhale.ops import load_ops
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.moe import ExpertWeight, UnreducedExperts
from finwhale.ops.moe import experts_hopper as kernels
from finwhale.ops.moe.experts_hopper import HopperPlan
from finwhale.ops.moe.experts_hopper_few import FEW_TOKENS
from finwhale.ops.moe.experts_layout import tile_experts
from finwhale.platform import Platform

HOPPER, PORTABLE = load_ops(Platform("nvidia", "sm90")), load_ops(Platform("amd", "gfx942"))

# D, I, E, K of Flash, Pro (fewer experts) and the embedded model, and on one of several ranks.
SIZES = [(4096, 2048, 256, 6), (7168, 3072, 96, 6), (256, 512, 6, 2)]
RANK_SIZES = [
    *((4096, 1024, 64, 6), (4096, 512, 64, 6), (4096, 256, 64, 6)),
    *((7168, 1536, 64, 6), (7168, 768, 64, 6), (7168, 384, 64, 6)),
]
RANK_NAMES = ["flash-2", "flash-4", "flash-8", "pro-2", "pro-4", "pro-8"]


def weights(D: int, I: int, E: int) -> ExpertWeight:  # noqa: E741
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    codes = draw(0, 256, E, 2 * I, D // 2), draw(0, 256, E, D, I // 2)
    scales = draw(118, 123, E, 2 * I, D // 32), draw(118, 123, E, D, I // 32)
    return tile_experts(ExpertWeight(*codes, 128, *scales))[0]


@pytest.mark.parametrize(
    ("D", "I", "E", "K"), SIZES + RANK_SIZES, ids=["flash", "pro", "demo", *RANK_NAMES]
)
def test_few_tokens_have_the_bits_they_have_among_many(D: int, I: int, E: int, K: int) -> None:  # noqa: E741
    w = weights(D, I, E)
    for id_dtype in (torch.int32, torch.int64):
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(2 * FEW_TOKENS, D, device="cuda", generator=generator).bfloat16()
            x *= 10 ** (seed - 2)
            score = torch.rand(len(x), E, device="cuda", generator=generator)
            ids = score.topk(K).indices.to(id_dtype)
            if seed == 3:
                ids[:, 1] = -1
            routed = torch.rand(len(x), K, device="cuda", generator=generator)
            shared = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()
            many, *few = (
                HOPPER.experts(
                    x[:count],
                    ids[:count],
                    routed[:count],
                    w,
                    10.0,
                    shared[:count] if seed % 2 else None,
                )
                for count in (len(x), *range(1, FEW_TOKENS + 1))
            )
            assert many.isfinite().all()
            assert all(torch.equal(found, many[: len(found)]) for found in few)


@pytest.mark.parametrize(("D", "I", "E", "K"), SIZES, ids=["flash", "pro", "demo"])
def test_hopper_s_kernels_agree_with_the_portable_ones(D: int, I: int, E: int, K: int) -> None:  # noqa: E741
    """Triton's interpreter compares the portable ones with the reference; it cannot run Gluon's.

    Both round the same values. They add in other orders and round to bfloat16 twice, which is 2e-3.
    With a routing weight in another place, other values are rounded, which is 4e-2.
    """
    w = weights(D, I, E)
    generator = torch.Generator("cuda").manual_seed(0)
    for num_tokens in (1, 2, *(each * E // K for each in (3, 20, 50, 94, 192))):
        x = torch.randn(num_tokens, D, device="cuda", generator=generator).bfloat16()
        score = torch.rand(num_tokens, E, device="cuda", generator=generator)
        ids = score.topk(K, 1).indices.int()
        routed = 0.1 + torch.rand(num_tokens, K, device="cuda", generator=generator)
        found = HOPPER.experts(x, ids, routed, w, 10.0).float()
        wanted = PORTABLE.experts(x, ids, routed, w, 10.0).float()
        assert (found - wanted).norm() < 1e-2 * wanted.norm(), num_tokens


def every_plan(num_experts: int) -> list[HopperPlan]:
    """Those that 1 to 300 pairs an expert take."""
    plans = [kernels.plan(each * num_experts, num_experts) for each in range(1, 301)]
    return list(dict.fromkeys(plans))


@pytest.mark.parametrize(("D", "I", "E", "K"), SIZES, ids=["flash", "pro", "demo"])
def test_a_token_has_the_same_bits_by_every_plan(
    D: int,
    I: int,  # noqa: E741
    E: int,
    K: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts are chosen unevenly, so that blocks are empty, full, and of every width between.

    Each plan runs eight times: a read that a copy overtakes is wrong in some runs only.
    """
    plans = every_plan(E)
    assert {plan.groups for plan in plans} == {1, 2, 4}
    w = weights(D, I, E)
    generator = torch.Generator("cuda").manual_seed(0)
    wrong: list[tuple[int, HopperPlan, int, float]] = []
    for pairs, skew in ((3, 0.0), (48, 0.1), (94, 0.0), (120, 0.1), (192, 0.03)):
        num_tokens = pairs * E // K
        x = torch.randn(num_tokens, D, device="cuda", generator=generator).bfloat16()
        score = torch.rand(num_tokens, E, device="cuda", generator=generator)
        score += skew * torch.randn(E, device="cuda", generator=generator)
        ids = score.topk(K, 1).indices.int()
        ids[::7, 0] = -1
        routed = torch.rand(num_tokens, K, device="cuda", generator=generator)
        wanted = None
        for plan in plans:
            monkeypatch.setattr(kernels, "plan", lambda *_, plan=plan: plan)
            for run in range(8):
                found = HOPPER.experts(x, ids, routed, w, 10.0)
                wanted = found if wanted is None else wanted
                tokens = (found != wanted).any(1).sum().item()
                if tokens:
                    wrong.append((pairs, plan, run, tokens))
        assert wanted is not None and wanted.isfinite().all()
    assert not wrong, wrong


@pytest.mark.parametrize("num_tokens", (1, 3, 8, 40, 128))
def test_mhc_adds_the_outputs_as_combine_does(num_tokens: int) -> None:
    D, K = 4096, 6
    generator = torch.Generator("cuda").manual_seed(num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    each, shared = draw(num_tokens, K, D).bfloat16(), draw(num_tokens, D).bfloat16()
    ids = torch.randint(-1, 8, (num_tokens, K), device="cuda", generator=generator).int()
    each[ids < 0] = torch.nan
    residual, post = draw(num_tokens, 4, D).bfloat16(), draw(num_tokens, 4).abs()
    res = draw(num_tokens, 4, 4).softmax(-1)
    w = MhcWeight(draw(24, 4 * D) * D**-0.5, draw(24).abs(), draw(24), draw(D))
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)
    assert HOPPER.mhc_of_terms is not None
    assert num_tokens <= HOPPER.mhc_of_terms.expert_tokens
    terms = UnreducedExperts(each, ids, shared, torch.bfloat16)
    total = HOPPER.experts_combine(each, ids, shared)
    streams = HOPPER.mhc_of_terms.mhc_post(terms, post, res, residual)
    found = HOPPER.mhc_of_terms.mhc_post_pre(terms, post, res, residual, w, params)
    wanted = HOPPER.mhc_post_pre(total, post, res, residual, w, params)
    for one, other in zip((streams, *found), (wanted[3], *wanted), strict=True):
        # The compiler may fuse other multiplications with additions. That changes float32 values in
        # their last places, and few bfloat16 values, by at most one place.
        if one.dtype == torch.bfloat16:
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
            assert (one != other).float().mean() < 0.01
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_products_that_four_groups_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """384 values of D are six tiles of rows: two groups take them."""
    w = weights(384, 128, 16)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(400, 384, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(400, 16, device="cuda", generator=generator).topk(4, 1).indices.int()
    routed = torch.rand(400, 4, device="cuda", generator=generator)
    four = HOPPER.experts(x, ids, routed, w, 10.0)
    one = HopperPlan(64, 1, (1, 3), (1, 4))
    monkeypatch.setattr(kernels, "plan", lambda *_: one)
    assert torch.equal(HOPPER.experts(x, ids, routed, w, 10.0), four)
