"""DeepSeek-V4.1's GEMM kernels in the interpreter, against the reference.

The reference gets weights as the float32 values that they stand for, and rounds inputs as the
kernels do, so that both multiply the same numbers: they differ by the order of float32 sums.
"""

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.v41_weights import assert_near, e4m3, fp4, plain, plain_fp4
from torch import Tensor

from finwhale.number_formats import e2m1_values
from finwhale.ops.deepseek_v41 import expand_triton as expand
from finwhale.ops.deepseek_v41 import experts_triton as experts
from finwhale.ops.deepseek_v41 import gemm_triton as gemm
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.moe import ExpertWeight, combine_triton, dispatch_triton
from finwhale.ops.moe import ref as moe_ref
from finwhale.ops.rounding import round_e4m3

from .kernels_support import Inputs, assert_close

LIMIT = 0.7


# (N, G, M, K): one token; K with a rest; rounding inside and before; several parts; several blocks
# of many tokens, and rows with a rest; groups.
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


def test_no_index_of_a_part_is_lost_and_bits_are_the_batch_s() -> None:
    """K has 9 steps in parts of 5 and 4."""
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


def weights_of(
    E: int,
    D: int,
    I: int,  # noqa: E741
    largest: tuple[int, int] = (125, 125),
) -> tuple[experts.GroupedExperts, ExpertWeight]:
    """In the kernels' layout, and as float32."""
    inputs = Inputs()
    w13, scale13 = fp4(inputs.generator, E, 2 * I, D, largest=largest[0])
    w2, scale2 = fp4(inputs.generator, E, D, I, largest=largest[1])
    wanted = ExpertWeight(plain_fp4(w13, scale13), plain_fp4(w2, scale2), 32)
    loaded = gemm.prepare(ExpertWeight(w13, w2, 32, scale13, scale2))
    return experts.finish_experts(loaded), wanted


def pairs_of(N: int, D: int, E: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(1)
    ids = torch.stack([torch.randperm(E, generator=inputs.generator)[:K] for _ in range(N)])
    x = inputs.outliers(N, D, dtype=torch.bfloat16)
    return x, ids.to(torch.int32), inputs.normal(N, K).abs()


def run(x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeight) -> Tensor:
    pairs = experts.dispatch(ids, len(w.w2))
    return combine_triton.combine(experts.compute(x, weights, pairs, w, LIMIT), ids)


def defined(x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeight) -> Tensor:
    each = moe_ref.compute(x.float(), weights, moe_ref.dispatch(ids, len(w.w2)), w, LIMIT)
    return moe_ref.combine(each, ids)


# (N, D, E, K, I): one token, two steps of 256 columns, and 9 groups, as on one of eight ranks;
# more experts than pairs; more pairs than a block.
@pytest.mark.parametrize(
    "size", ((1, 512, 3, 2, 288), (5, 320, 4, 2, 96), (20, 192, 1, 1, 64)), ids=str
)
def test_experts(size: tuple[int, ...]) -> None:
    N, D, E, K, I = size  # noqa: E741
    w, wanted = weights_of(E, D, I)
    x, ids, weights = pairs_of(N, D, E, K)
    ids[N // 2 :: 5, 0] = -1
    x = torch.cat((x, x), 1)[:, :D]
    assert_near(run(x, ids, weights, w), defined(x, ids, weights, wanted))


def test_the_routing_weight_is_applied_before_rounding() -> None:
    """Rounding after it, as the authors do, and before it give results 4% apart."""
    w, wanted = weights_of(3, 128, 256)
    x, ids, weights = pairs_of(6, 128, 3, 2)
    found = run(x, ids, weights, w).float()
    given = x.repeat_interleave(2, 0), ids.view(-1, 1)
    unweighted = defined(*given, torch.ones(12, 1), wanted)
    later = (unweighted.view(6, 2, 128) * weights[:, :, None]).sum(1)
    expected = defined(x, ids, weights, wanted)
    assert (found - expected).norm() < 0.005 * expected.norm()
    assert (found - later).norm() > 0.01 * expected.norm()


# E8M0 exponents that the decoder does not reach, and some of the least.
@pytest.mark.parametrize("largest", ((130, 125), (21, 160), (128, 128)), ids=str)
def test_any_exponent(largest: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "AT_ONCE", 1)  # one expert
    w, wanted = weights_of(2, 64, 64, largest)
    x, ids, weights = pairs_of(3, 64, 2, 2)
    x = x * 2.0 ** (125 - largest[0])
    found = run(x, ids, weights, w)
    assert_near(found, defined(x, ids, weights, wanted))
    assert found.count_nonzero() > found.numel() / 2
    assert w.expert_scale is not None
    above = [max(0, exponent - 128) for exponent in largest]
    assert w.expert_scale.tolist() == [[2.0**a for a in above]] * 2


def test_a_scale_of_nan_is_not_lost() -> None:
    w13, scale13 = fp4(Inputs().generator, 2, 64, 64, largest=125)
    scale13[1, 5, 1] = 255
    w = ExpertWeight(w13, w13.clone(), 32, scale13, scale13.clone())
    finished = experts.finish_experts(w)
    assert finished.expert_scale is not None
    assert finished.expert_scale.isnan().tolist() == [[False] * 2, [True] * 2]


# Gate and up: one tile of rows and two; down likewise; many tokens of an expert.
@pytest.mark.parametrize("block_rows, rows", ((16, 128), (32, 64)))
def test_a_token_s_bits_are_those_that_it_has_alone(block_rows: int, rows: int) -> None:
    w, _ = weights_of(2, 192, 96)
    x, ids, weights = pairs_of(40, 192, 2, 2)
    ids[7] = -1
    plan = experts.ExpertsPlan(block_rows, (rows, 128, 2, 8), (rows, 128, 2, 8))
    pairs = dispatch_triton.order_pairs(ids, 2, block_rows, early_launch=False)
    each = x.new_empty(*ids.shape, 192)
    experts.launch(x, weights, pairs, w, LIMIT, plan, each, gemm.DEFAULT)
    together = combine_triton.combine(each, ids)
    assert together[7].count_nonzero() == 0
    for token in (0, 39):
        row = slice(token, token + 1)
        assert torch.equal(run(x[row], ids[row], weights[row], w), together[row])


def test_unsupported_arguments_are_refused() -> None:
    w, wanted = weights_of(2, 64, 64)
    x, ids, weights = pairs_of(2, 64, 2, 2)
    with pytest.raises(ValueError, match="FP4"):
        experts.finish_experts(wanted)
    with pytest.raises(ValueError, match="layout"):
        run(x, ids, weights, wanted)
    with pytest.raises(ValueError, match="whole tiles of 64"):
        experts.finish_experts(replace(w, w13=w.w13[:, :96].contiguous()))
    with pytest.raises(ValueError, match="contiguous"):
        run(x, ids, weights.T.contiguous().T, w)
    weight, scale = e4m3(Inputs().generator, 64, 64)
    with pytest.raises(ValueError, match="blocks of 32"):
        gemm.prepare(LinearWeight(weight, 128, scale))
    with pytest.raises(ValueError, match="scale must be"):
        gemm.linear(x, LinearWeight(weight, 32, scale.T.contiguous()[:1], scale_block=32))
    with pytest.raises(ValueError, match="rounded inputs"):
        gemm.swiglu_mlp(x, ExpertWeight(weight, weight, 0, scale, scale, 32), LIMIT)


def run_ptx(source: str, *inputs: Tensor) -> list[Tensor]:
    """What the decoders' few PTX instructions compute of 32-bit words, int64 here."""
    lines = [line.rstrip(";").replace(",", "").split() for line in source.splitlines()]
    outputs = len({word for line in lines for word in line[1:2] if word[0] == "$"})
    values = {f"${outputs + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return values[name] if name in values else torch.tensor(int(name, 0))

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        halves = [
            (word >> 16 * i & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
            for word in (x, y)
            for i in (0, 1)
        ]
        pair = halves[0].double() * halves[2].double(), halves[1].double() * halves[3].double()
        bits = [half.bfloat16().view(torch.uint16).long() for half in pair]
        return bits[0] | bits[1] << 16

    for name, *operands in lines:
        if name in ("{", "}", ".reg"):
            continue
        x, *rest = map(value, operands[1:])
        if name == "prmt.b32":
            both = x | rest[0] << 32
            parts = [(both >> 8 * (rest[1] >> 4 * i & 7) & 255) << 8 * i for i in range(4)]
            found = torch.stack(parts).sum(0)
        elif name == "lop3.b32":
            assert rest[2] == 0xEA
            found = x & rest[0] | rest[1]
        else:
            operations = {
                "shr.u32": lambda x, y: x >> y,
                "shl.b32": lambda x, y: x << y & 0xFFFFFFFF,
                "and.b32": lambda x, y: x & y,
                "mul.rn.bf16x2": multiply,
            }
            found = operations[name](x, *rest)
        values[operands[0]] = found
    return [values[f"${i}"] for i in range(outputs)]


def halves(words: list[Tensor]) -> Tensor:
    """The bfloat16 values of pairs: [words, values of a word]."""
    parts = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(parts, -1).to(torch.uint16).view(torch.bfloat16).float()


def assembly(function: Any) -> str:
    """The instructions in a decoder's source."""
    found = re.search(r'"""(\{.*?\})"""', inspect.getsource(function.fn), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("exponent", (3, 110, 127, 128))
def test_the_instructions_of_sm90_decode_every_byte(exponent: int) -> None:
    """The interpreter runs the decoders without them."""
    codes = torch.arange(256)[:, None] * torch.tensor([1, 3, 5, 7]) & 255
    word = sum(codes[:, i] << 8 * i for i in range(4))
    nan = (codes & 127) == 127

    def factor(bias: int) -> Tensor:
        half = min(exponent + bias, 255) << 7
        return torch.tensor(half | half << 16)

    given = word, factor(120), factor(120)
    found = halves(run_ptx(assembly(expand.expand_e4m3), *given))
    wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * 2.0 ** (exponent - 127)
    assert torch.equal(found[~nan], wanted.bfloat16().float()[~nan])
    groups = torch.randint(256, (512, 16), generator=Inputs().generator).to(torch.uint8)
    words = experts._packed(groups).view(torch.int32).long() & 0xFFFFFFFF
    given = words, factor(126), factor(126)
    found = halves(run_ptx(assembly(expand.expand_e2m1), *given))
    found = found.unflatten(-1, (2, 4)).transpose(1, 2)
    values = e2m1_values(groups.device) * 2.0 ** (exponent - 127)
    assert torch.equal(
        found.flatten(1), values[torch.stack((groups & 15, groups >> 4), -1).flatten(1).long()]
    )
