"""One token's experts, which have kernels of their own on Hopper, beside those of more tokens."""

import pytest
import torch

from finwhale.ops.moe import ExpertWeight, triton_fold
from finwhale.ops.moe import triton_experts as kernels

# D, I, E, K of Flash, Pro (fewer experts) and the demo model.
SIZES = [(4096, 2048, 256, 6), (7168, 3072, 96, 6), (256, 128, 16, 4)]


def weights(D: int, I: int, E: int) -> ExpertWeight:  # noqa: E741
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    codes = draw(0, 256, E, 2 * I, D // 2), draw(0, 256, E, D, I // 2)
    scales = draw(118, 123, E, 2 * I, D // 32), draw(118, 123, E, D, I // 32)
    return triton_fold.finish(ExpertWeight(*codes, True, *scales))[0]


@pytest.mark.parametrize(("D", "I", "E", "K"), SIZES, ids=["flash", "pro", "demo"])
def test_one_token_has_the_bits_it_has_among_others(D: int, I: int, E: int, K: int) -> None:  # noqa: E741
    w = weights(D, I, E)
    for id_dtype in (torch.int32, torch.int64):
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(1, D, device="cuda", generator=generator).bfloat16() * 10 ** (seed - 2)
            ids = torch.rand(1, E, device="cuda", generator=generator).topk(K).indices.to(id_dtype)
            if seed == 3:
                ids[0, 1] = -1
            routed = torch.rand(1, K, device="cuda", generator=generator)
            shared = torch.randn(1, D, device="cuda", generator=generator).bfloat16()
            alone, together = (
                kernels.experts(
                    x.repeat(count, 1),
                    ids.repeat(count, 1),
                    routed.repeat(count, 1),
                    w,
                    10.0,
                    shared.repeat(count, 1) if seed % 2 else None,
                )
                for count in (1, 2)
            )
            assert alone.isfinite().all()
            assert torch.equal(together, alone.repeat(2, 1))
