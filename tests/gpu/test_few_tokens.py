"""Linear layers of few tokens: the kernel that holds its weights has the bits of the tiles' kernel.

The sizes are those of Flash and Pro on one, two, four and eight ranks.
"""

from dataclasses import replace

import pytest
import torch

from finwhale.ops.linear import few_tokens_hopper
from finwhale.ops.linear import linear_triton as kernels

TILES = kernels.LinearOptions(early_launch=True)
FEW = replace(TILES, few_tokens=few_tokens_hopper.launch)
FLASH = [(1, 1536, 4096), (1, 40960, 1024), (1, 24576, 1024), (1, 16384, 1024), (4, 1024, 4096)]
FLASH += [(2, 1024, 4096), (1, 1024, 4096), (1, 4096, 4096), (1, 4096, 2048), (1, 4096, 1024)]
FLASH += [(1, 4096, 512), (1, 4096, 256), (1, 512, 4096)]
PRO = [(1, 2048, 7168), (1, 7168, 768)]  # the other layers have longer parts
SIZES = sorted({*FLASH, *PRO})
GATED = [(*size, 10.0) for size in SIZES if size[0] == 1 and size[1] % 256 == 0]
TOKENS = (2, 3, 6, 8, 9, 12, 16)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups, rows, width, limit", [*((*size, None) for size in SIZES), *GATED])
@torch.inference_mode()
def test_same_bits(
    groups: int, rows: int, width: int, out_dtype: torch.dtype, limit: float | None
) -> None:
    draw = torch.Generator("cuda").manual_seed(rows + width)
    weight = torch.randn(groups, rows, width, device="cuda", generator=draw)
    blocks = groups, -(-rows // 128), width // 128
    scale = 2.0 ** torch.randint(-3, 3, blocks, device="cuda", generator=draw).float()
    x = torch.randn(16, groups, width + 64, device="cuda", generator=draw).bfloat16()[..., :width]
    x[3] *= 1000
    x[5] = 0
    taken = 0
    for count in TOKENS:
        weights = (weight.to(torch.float8_e4m3fn), scale, True, out_dtype, limit)
        p = kernels.LinearProblem(x[:count], *weights, options=FEW)
        taken += kernels.few_plan(p) is not None
        found = kernels.run(p)
        assert torch.equal(found, kernels.run(replace(p, options=TILES)))
        assert torch.equal(found, kernels.run(p))
    assert taken == len(TOKENS)


@pytest.mark.parametrize("rows, width", [(2624, 4096), (1024, 4096), (1024, 7168)])
@torch.inference_mode()
def test_plain_weights(rows: int, width: int) -> None:
    """The bits of the tiles with as many parts: both multiply 16 values of K at a time."""
    draw = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(1, rows, width, device="cuda", generator=draw).bfloat16()
    x = torch.randn(16, 1, width + 64, device="cuda", generator=draw).bfloat16()[..., :width]
    for count in range(3, 9):
        p = kernels.LinearProblem(x[:count], weight, None, False, torch.float32, options=FEW)
        plan = kernels.few_plan(p)
        assert plan is not None and plan.steps(p) == kernels.PLAIN_STEPS
        found = kernels.run(p)
        assert torch.equal(found, kernels._run_tiles(replace(p, options=TILES), plan))
        exact = x[:count, 0].double() @ weight[0].double().T
        torch.testing.assert_close(found[:, 0].double(), exact, rtol=0, atol=1e-4 * width**0.5)
    p = kernels.LinearProblem(x[:9], weight, None, False, torch.float32, options=FEW)
    assert kernels.few_plan(p) is None
