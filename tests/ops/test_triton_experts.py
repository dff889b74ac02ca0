"""The Triton kernels of the routed experts in the interpreter, against the reference.

The reference gets the FP4 weights as the float32 values that they stand for. An activation within a
rounding of float32 of the middle between two E4M3 values may fall on either side, so that what
comes out may differ by some units of what one term of the last sum weighs.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from finwhale.ops import load_ops
from finwhale.ops.moe import ExpertWeight, dispatch_triton, ref
from finwhale.ops.moe import experts_triton as kernels
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.experts_layout import TiledExperts, tile_experts
from finwhale.platform import Platform

from .kernels_support import Inputs, assert_close

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LIMIT = 0.7
KERNELS = load_ops(Platform("amd", "gfx942"))
REFERENCE = load_ops(Platform.cpu(), reference=True)


def fp4(inputs: Inputs, *shape: int, spread: int) -> tuple[Tensor, Tensor]:
    """Codes and exponents; exponents of a row lie up to `spread` below 2^-2."""
    generator, (experts, rows, width) = inputs.generator, shape
    codes = torch.randint(256, (experts, rows, width // 2), generator=generator)
    exponents = 125 - torch.randint(spread + 1, (experts, rows, width // 32), generator=generator)
    exponents[..., 0] = 125
    return codes.to(torch.uint8), exponents.to(torch.uint8)


def plain(codes: Tensor, exponents: Tensor) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    values = VALUES[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    scale = torch.exp2(exponents.float() - 127)
    return (values.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)


def weights_of(E: int, D: int, I: int, spread: int) -> tuple[ExpertWeight, ExpertWeight]:  # noqa: E741
    """As a checkpoint has them, and as float32."""
    inputs = Inputs()
    w13, scale13 = fp4(inputs, E, 2 * I, D, spread=spread)
    w2, scale2 = fp4(inputs, E, D, I, spread=spread)
    wanted = ExpertWeight(plain(w13, scale13), plain(w2, scale2), 128)
    return ExpertWeight(w13, w2, 128, scale13, scale2), wanted


def tiled(w: ExpertWeight) -> TiledExperts:
    assert w.scale13 is not None and w.scale2 is not None
    copy = replace(
        w,
        w13=w.w13.clone(),
        w2=w.w2.clone(),
        scale13=w.scale13.clone(),
        scale2=w.scale2.clone(),
    )
    result, changed = tile_experts(copy)
    assert changed == 0
    return result


def pairs_of(N: int, D: int, E: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(1)
    ids = torch.stack([torch.randperm(E, generator=inputs.generator)[:K] for _ in range(N)])
    return (
        inputs.outliers(N, D, dtype=torch.bfloat16),
        ids.to(torch.int32),
        inputs.normal(N, K).abs(),
    )


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    error = (found.float() - wanted).abs()
    unit = wanted.abs().amax()
    assert error.max() <= 0.02 * unit
    assert (error > 2.0**-7 * wanted.abs() + 1e-3 * unit).float().mean() <= 0.02


# (N, D, E, K, I, spread of exponents): one token; more experts than pairs; exponents 11 apart.
@pytest.mark.parametrize("size", ((1, 128, 3, 2, 128, 3), (5, 256, 4, 2, 128, 11)), ids=str)
@pytest.mark.parametrize("with_shared", (False, True))
def test_against_the_reference(size: tuple[int, ...], with_shared: bool) -> None:
    N, D, E, K, I, spread = size  # noqa: E741
    raw, wanted = weights_of(E, D, I, spread)
    x, ids, weights = pairs_of(N, D, E, K)
    ids[N // 2 :: 5, 0] = -1
    shared = Inputs(2).normal(N, D, dtype=torch.bfloat16) if with_shared else None
    found = KERNELS.experts(x, ids, weights, tiled(raw), LIMIT, shared)
    expected = REFERENCE.experts(x.float(), ids, weights, wanted, LIMIT)
    assert_near(found, expected if shared is None else expected + shared.float())


def test_one_token_s_experts_lie_elsewhere() -> None:
    """More of them than there are here."""
    raw, wanted = weights_of(2, 128, 128, 3)
    x, _, weights = pairs_of(1, 128, 2, 2)
    weights = Inputs(3).normal(1, 6).abs()
    w = tiled(raw)
    for ids in ([[-1, -1, -1, 0, -1, -1]], [[-1, 1, -1, -1, -1, 0]]):
        found = KERNELS.experts(x, torch.tensor(ids, dtype=torch.int32), weights, w, LIMIT)
        expected = REFERENCE.experts(x.float(), torch.tensor(ids), weights, wanted, LIMIT)
        assert_near(found, expected)


def test_the_routing_weight_is_applied_before_rounding() -> None:
    """Rounding after it, as the authors do, and before it give results 4% apart."""
    raw, wanted = weights_of(3, 128, 256, 3)
    x, ids, weights = pairs_of(6, 128, 3, 2)
    found = KERNELS.experts(x, ids, weights, tiled(raw), LIMIT).float()
    given = x.float().repeat_interleave(2, 0), ids.view(-1, 1)
    unweighted = REFERENCE.experts(*given, torch.ones(12, 1), wanted, LIMIT)
    weighted_later = (unweighted.view(6, 2, 128) * weights[:, :, None]).sum(1)
    expected = REFERENCE.experts(x.float(), ids, weights, wanted, LIMIT)
    assert (found - expected).norm() < 0.005 * expected.norm()
    assert (found - weighted_later).norm() > 0.02 * expected.norm()


def test_rows_apart_and_no_token() -> None:
    raw, _ = weights_of(3, 128, 128, 3)
    x, ids, weights = pairs_of(2, 128, 3, 2)
    w = tiled(raw)
    apart = torch.cat((x, x), 1)[:, :128]
    assert torch.equal(
        KERNELS.experts(apart, ids, weights, w, LIMIT), KERNELS.experts(x, ids, weights, w, LIMIT)
    )
    assert KERNELS.experts(x[:0], ids[:0], weights[:0], w, LIMIT).shape == (0, 128)


def test_sums_in_float32() -> None:
    """Several ranks may add the sums before these are rounded."""
    each, shared = Inputs().normal(5, 3, 100).bfloat16(), Inputs().normal(5, 100).bfloat16()
    ids = torch.tensor([[0, -1, 1]] * 5)
    found = combine(each, ids, shared, torch.float32)
    assert_close(found, ref.combine(each.clone(), ids, shared, torch.float32))
    assert torch.equal(found.bfloat16(), combine(each, ids, shared))


def summed(
    x: Tensor, ids: Tensor, weights: Tensor, w: TiledExperts, plan: kernels.ExpertsPlan
) -> Tensor:
    pairs = dispatch_triton.order_pairs(ids, len(w.w2), plan.block_rows, early_launch=False)
    each = x.new_empty(*ids.shape, x.shape[1])
    kernels.launch(x, weights, pairs, w, LIMIT, plan, each)
    return combine(each, ids)


# (pairs, experts, chunk, chunks at a time): one program for an expert; one chunk; a rest of a
# chunk; a rest of the chunks; more experts than a program adds up.
@pytest.mark.parametrize(
    "size",
    ((40, 3, 0, 0), (30, 3, 32, 2), (33, 3, 32, 2), (200, 5, 32, 2), (200, 40, 16, 4)),
    ids=str,
)
def test_pairs_are_ordered_by_expert(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, experts, chunk, scanned = size
    block_n = 16
    if chunk:
        monkeypatch.setattr(dispatch_triton, "FEW_PAIRS", 16)
        monkeypatch.setattr(dispatch_triton, "CHUNK", chunk)
        monkeypatch.setattr(dispatch_triton, "SCAN_CHUNKS", scanned)
    ids = torch.randint(-1, experts, (pairs, 1), generator=Inputs().generator)
    ids[ids == 1] = 0  # an expert without pairs, and one with several blocks
    monkeypatch.setattr(torch, "empty", partial(torch.full, fill_value=99))
    found = dispatch_triton.order_pairs(ids, experts, block_n, early_launch=False)
    monkeypatch.undo()
    order, pair_rows, blocks = found.order, found.pair_rows, found.blocks
    wanted_rows, wanted_blocks, first = torch.full((pairs,), -1), [], 0
    for expert in range(experts):
        mine = (ids[:, 0] == expert).nonzero()[:, 0]
        wanted_rows[mine] = first + torch.arange(len(mine))
        assert order[first : first + len(mine)].tolist() == mine.tolist()
        starts = range(first, first + len(mine), block_n)
        wanted_blocks += [[expert, start, first + len(mine)] for start in starts]
        first += -(-len(mine) // 8) * 8
    assert pair_rows.tolist() == wanted_rows.tolist()
    assert [block for block in blocks.tolist() if block[0] != -1] == wanted_blocks


@pytest.mark.parametrize("block_i", [128, 64, 32])
def test_many_tokens_give_a_token_the_bits_it_has_alone(
    block_i: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several chunks of pairs, several blocks an expert, and other tiles: one that rounds a
    whole group of hidden values, and those that leave them to the next launch.
    """
    raw, _ = weights_of(3, 128, 128, 3)
    w = tiled(raw)
    x, ids, weights = pairs_of(40, 128, 3, 2)
    ids[7] = -1
    monkeypatch.setattr(dispatch_triton, "FEW_PAIRS", 32)
    plan = kernels.ExpertsPlan(16, (block_i, 2, 8), (128, 2, 4))
    monkeypatch.setattr(dispatch_triton, "CHUNK", 32)
    together = summed(x, ids, weights, w, plan)
    assert together[7].count_nonzero() == 0
    for token in (0, 7, 39):
        row = slice(token, token + 1)
        alone = KERNELS.experts(x[row], ids[row], weights[row], w, LIMIT)
        assert torch.equal(alone, together[row])


def test_groups_of_zeros_do_not_count_and_far_groups_are_rounded() -> None:
    codes, exponents = fp4(Inputs(), 1, 128, 128, spread=2)
    exponents[0, :, 1] = 90
    codes[0, :64, 16:32] &= 0x88
    w = ExpertWeight(codes, codes.clone(), 128, exponents, exponents.clone())
    far = (codes[0, 64:, 16:32] & 0x77).long()
    values = (far & 7 > 0).sum() + (far >> 4 > 0).sum()
    _, changed = tile_experts(w)
    assert changed == 2 * values


def test_exponents_of_zeros_and_at_the_end_of_e8m0() -> None:
    """A quantiser gives a group of zeros the scale 1, whatever its row has."""
    codes, exponents = fp4(Inputs(), 1, 128, 128, spread=2)
    codes[0, :, 16:32] &= 0x88
    exponents[0, :, 1] = 200
    exponents[0, 0] = 2
    w, changed = tile_experts(ExpertWeight(codes, codes.clone(), 128, exponents, exponents.clone()))
    assert changed == 0
    assert w.row_scale2 is not None
    assert w.row_scale2[0, 0] == 2.0**-126 and (w.row_scale2[0, 1:] == 2.0 ** (125 - 6 - 127)).all()


def test_unsupported_arguments_are_refused() -> None:
    raw, wanted = weights_of(3, 128, 128, 3)
    with pytest.raises(ValueError, match="FP4"):
        tile_experts(wanted)
    x, ids, weights = pairs_of(2, 128, 3, 2)
    with pytest.raises(ValueError, match="bfloat16"):
        KERNELS.experts(x.float(), ids, weights, tiled(raw), LIMIT)
    with pytest.raises(ValueError, match="contiguous"):
        KERNELS.experts(x, ids.T.contiguous().T, weights, tiled(raw), LIMIT)
