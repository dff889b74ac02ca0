"""DeepSeek-V4.1's GEMM kernels in the interpreter, against the reference.

The reference gets weights as the float32 values that they stand for, and rounds inputs as the
kernels do, so that both multiply the same numbers: they differ by the order of float32 sums.
"""

from dataclasses import replace

import pytest
import torch
from tests.support.ptx import assembly, halves, run_ptx
from tests.support.v41_weights import assert_near, e4m3, plain

from finwhale.ops.deepseek_v41 import expand_triton as expand
from finwhale.ops.deepseek_v41 import gemm_triton as gemm
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe import ref as moe_ref
from finwhale.ops.rounding import round_e4m3

from .kernels_support import Inputs, assert_close

LIMIT = 0.7


# (N, G, M, K): one token; K with a rest; several parts, the last shorter; groups; many tokens, and
# rows with a rest.
LINEARS = (
    (1, 1, 96, 288),
    (1, 3, 64, 1056),
    (3, 1, 160, 288),
    (17, 1, 48, 1024),
    (5, 2, 64, 1152),
    (70, 1, 144, 160),
    (130, 2, 64, 128),
    (0, 1, 64, 64),
)


@pytest.mark.parametrize("rounds", (True, False))
@pytest.mark.parametrize("size", LINEARS, ids=str)
def test_linear(size: tuple[int, int, int, int], rounds: bool) -> None:
    N, G, M, K = size
    inputs = Inputs()
    weight, scale = e4m3(inputs.generator, G, M, K)
    x = inputs.outliers(N, G, 2 * K, dtype=torch.bfloat16)[..., :K]
    w = gemm.prepare(LinearWeight(weight, 32 * rounds, scale, scale_block=32))
    rounded = (round_e4m3(x, 32) if rounds else x).float()
    wanted = linear_ref.grouped_linear(rounded, LinearWeight(plain(weight, scale)))
    for dtype in (torch.bfloat16, torch.float32):
        w = replace(w, out_dtype=dtype)
        if G == 1:
            one = replace(w, weight=weight[0], scale=scale[0])
            found = gemm.linear(x[:, 0], one)[:, None]
        else:
            found = gemm.grouped_linear(x, w)
        assert_close(found, wanted.to(dtype))


@pytest.mark.parametrize("many_rows", (64, 96))
def test_no_index_of_a_part_is_lost_and_bits_are_the_batch_s(
    many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K has 17 chunks: in one part, or in parts of 8, 8 and 1."""
    monkeypatch.setattr(gemm, "MANY_ROWS", many_rows)
    inputs = Inputs()
    weight, scale = e4m3(inputs.generator, 1, 64, 1056)
    w = LinearWeight(weight[0], 32, scale[0], torch.float32, scale_block=32)
    x = inputs.outliers(64, 1056, dtype=torch.bfloat16)
    together = gemm.linear(x, w)
    for first, last in ((0, 2), (5, 22), (30, 64)):
        assert torch.equal(gemm.linear(x[first:last], w), together[first:last])


def test_scales_and_codes_at_their_ends() -> None:
    """Each code times a scale of 2^-100 and of 2^7; 2^8 is infinite."""
    codes = torch.arange(256).to(torch.uint8)
    codes[(codes & 127) == 127] = 0
    weight = codes[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    x[:, 3] = 1.0
    for exponent in (-100.0, 7.0):
        scale = torch.full((8, 1), 2.0**exponent)
        w = LinearWeight(weight, 0, scale, torch.float32, scale_block=32)
        assert torch.equal(gemm.linear(x, w)[1], plain(weight, scale)[:, 3])
    w = replace(w, scale=torch.full((8, 1), 256.0))
    assert not gemm.linear(x, w)[:, 1:].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_plain_weights(dtype: torch.dtype) -> None:
    inputs = Inputs()
    weight = inputs.normal(40, 96, dtype=dtype)
    x = inputs.normal(3, 96, dtype=torch.bfloat16)
    for group in (0, 32):
        w = gemm.prepare(LinearWeight(weight, group, out_dtype=torch.float32))
        assert_close(gemm.linear(x, w), linear_ref.linear(x, replace(w, weight=weight.float())))


# (N, D, I): one token; parts; many tokens, and half a tile of hidden rows.
@pytest.mark.parametrize(
    "size", ((1, 1152, 96), (6, 1152, 64), (33, 64, 288), (70, 96, 96)), ids=str
)
def test_the_shared_expert(size: tuple[int, int, int]) -> None:
    N, D, I = size  # noqa: E741
    inputs = Inputs()
    w13, scale13 = e4m3(inputs.generator, 2 * I, D)
    w2, scale2 = e4m3(inputs.generator, D, I)
    x = inputs.outliers(N, D, dtype=torch.bfloat16)
    w = gemm.prepare(ExpertWeight(w13, w2, 32, scale13 / 8, scale2, scale_block=32))
    wanted = ExpertWeight(plain(w13, scale13 / 8), plain(w2, scale2), 32)
    assert_near(gemm.swiglu_mlp(x, w, LIMIT), moe_ref.swiglu_mlp(x.float(), wanted, LIMIT))


def test_unsupported_arguments_are_refused() -> None:
    x, weight = Inputs().normal(2, 64, dtype=torch.bfloat16), e4m3(Inputs().generator, 64, 64)
    codes, scale = weight
    with pytest.raises(ValueError, match="blocks of 32"):
        gemm.prepare(LinearWeight(codes, 128, scale))
    with pytest.raises(ValueError, match="blocks of 32"):
        gemm.prepare(LinearWeight(codes, 32, scale))
    with pytest.raises(ValueError, match="scale must be"):
        gemm.linear(x, LinearWeight(codes, 32, scale.T.contiguous()[:1], scale_block=32))
    with pytest.raises(ValueError, match="rounded inputs"):
        gemm.swiglu_mlp(x, ExpertWeight(codes, codes, 0, scale, scale, 32), LIMIT)


@pytest.mark.parametrize("exponent", (3, 110, 127, 128))
def test_the_instructions_of_sm90_decode_every_byte(exponent: int) -> None:
    """The interpreter runs the decoder without them."""
    codes = torch.arange(256)[:, None] * torch.tensor([1, 3, 5, 7]) & 255
    word = sum(codes[:, i] << 8 * i for i in range(4))
    nan = (codes & 127) == 127
    half = min(exponent + 120, 255) << 7
    factor = torch.tensor(half | half << 16)
    found = halves(run_ptx(assembly(expand.expand_e4m3), word, factor, factor))
    wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * 2.0 ** (exponent - 127)
    assert torch.equal(found[~nan], wanted.bfloat16().float()[~nan])
