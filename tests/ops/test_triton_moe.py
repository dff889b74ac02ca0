"""The Triton kernels of the router in the interpreter, against the reference."""

import pytest
import torch
from torch import Tensor

from finwhale.ops.moe import ref
from finwhale.ops.moe import router_triton as kernels

from .kernels_support import DTYPES, Inputs, assert_close

# (N, D, E, K): no token; one; a rest in every dimension; several chunks of D.
SIZES = ((0, 64, 8, 2), (1, 64, 8, 1), (3, 100, 37, 6), (70, 40, 64, 8), (2, 600, 16, 4))


def positions(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens)


def inputs_of(size: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(x, gate, bias, table, token_ids)."""
    tokens, width, experts, topk = size
    inputs = Inputs()
    rows = [torch.randperm(experts, generator=inputs.generator)[:topk] for _ in range(50)]
    return (
        inputs.normal(tokens, width, dtype=dtype),
        inputs.normal(experts, width, scale=3 * width**-0.5),
        inputs.normal(experts),
        torch.stack(rows),
        torch.randint(50, (tokens,), generator=inputs.generator),
    )


def assert_routes(
    x: Tensor, gate: Tensor, bias: Tensor, table: Tensor, token_ids: Tensor, topk: int
) -> None:
    """Compare both routes with their definitions: the same experts, close weights."""
    where = positions(len(x))
    ids, weights = kernels.route_by_score(x, gate, bias, topk, 1.5, where)
    wanted_ids, wanted_weights = ref.route_by_score(x, gate, bias, topk, 1.5, where)
    assert torch.equal(ids, wanted_ids.int())
    assert_close(weights, wanted_weights)
    ids, weights = kernels.route_by_hash(x, gate, table, token_ids, 2.5, where)
    wanted_ids, wanted_weights = ref.route_by_hash(x, gate, table, token_ids, 2.5, where)
    assert torch.equal(ids, wanted_ids.int())
    assert_close(weights, wanted_weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_the_reference(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    x, gate, bias, table, token_ids = inputs_of(size, dtype)
    assert_routes(x, gate, bias, table, token_ids, size[3])


def test_a_gate_in_bfloat16_gives_what_its_float32_values_give() -> None:
    x, gate, bias, table, token_ids = inputs_of((3, 100, 37, 6), torch.bfloat16)
    narrow = gate.bfloat16()
    for found, wanted in (
        (
            kernels.route_by_score(x, narrow, bias, 6, 1.5, positions(3)),
            ref.route_by_score(x, narrow.float(), bias, 6, 1.5, positions(3)),
        ),
        (
            kernels.route_by_hash(x, narrow, table, token_ids, 1.5, positions(3)),
            ref.route_by_hash(x, narrow.float(), table, token_ids, 1.5, positions(3)),
        ),
    ):
        assert torch.equal(found[0], wanted[0].int())
        assert_close(found[1], wanted[1])


def test_scores_keep_their_precision_at_both_ends() -> None:
    """softplus is e^z far below zero and z far above it."""
    z = torch.tensor([-80.0, -30.0, -17.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 17.0, 90.0, 3e4])
    x, gate = torch.ones(1, 1), z[:, None]
    table = torch.arange(len(z))[None]
    for each in range(len(z)):
        # Against one other expert of score sqrt(log 2), so that the weight shows the score.
        pair = torch.cat((gate[each], torch.zeros(1)))[:, None]
        _, weights = kernels.route_by_hash(
            x, pair, table[:, :2], torch.tensor([0]), 1.0, positions(1)
        )
        score = torch.log1p(torch.exp(-z[each].double().abs())) + z[each].double().clamp(min=0)
        ratio = score.sqrt() / torch.log(torch.tensor(2.0).double()).sqrt()
        assert torch.allclose((weights[0, 0] / weights[0, 1]).double(), ratio, rtol=4e-6, atol=0)


def test_ties_go_to_the_lowest_expert_in_order() -> None:
    x, gate = torch.ones(2, 32), torch.ones(40, 32) * 0.01
    bias = torch.zeros(40)
    bias[[7, 31]] = 1.0
    ids, weights = kernels.route_by_score(x, gate, bias, 6, 1.0, positions(2))
    assert ids.tolist() == [[7, 31, 0, 1, 2, 3]] * 2
    assert torch.allclose(weights, torch.full((2, 6), 1 / 6), rtol=1e-6)


def test_a_row_of_nan_chooses_distinct_experts_that_exist() -> None:
    x = torch.full((1, 32), torch.nan)
    ids, _ = kernels.route_by_score(x, torch.ones(10, 32), torch.zeros(10), 8, 1.0, positions(1))
    assert len(set(ids[0].tolist())) == 8 and ids.min() >= 0 and ids.max() < 10


def test_padding_chooses_nothing() -> None:
    x, gate, bias, table, token_ids = inputs_of((3, 100, 37, 6), torch.bfloat16)
    where = torch.tensor([5, -1, 9])
    for ids, weights in (
        kernels.route_by_score(x, gate.bfloat16(), bias, 6, 1.5, where),
        kernels.route_by_hash(x, gate.bfloat16(), table, token_ids, 1.5, where),
    ):
        assert (ids[1] == -1).all() and (weights[1] == 0).all()
        assert (ids[[0, 2]] >= 0).all() and (weights[[0, 2]] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_take_the_other_kernels(dtype: torch.dtype) -> None:
    """Three blocks of tokens and of experts, a rest of D."""
    x, gate, bias, table, token_ids = inputs_of((130, 300, 140, 6), dtype)
    gate = gate.to(dtype)
    assert_routes(x, gate, bias, table, token_ids, 6)


def test_a_token_s_bits_do_not_depend_on_the_batch() -> None:
    x, gate, bias, table, token_ids = inputs_of((40, 600, 40, 6), torch.bfloat16)
    gate = gate.bfloat16()
    together = kernels.route_by_score(x, gate, bias, 6, 1.5, positions(40))
    hashed = kernels.route_by_hash(x[:3], gate, table, token_ids[:3], 1.5, positions(3))[1]
    for token in (0, 2, 39):
        row = slice(token, token + 1)
        alone = kernels.route_by_score(x[row], gate, bias, 6, 1.5, positions(1))
        assert all(torch.equal(a, b[row]) for a, b in zip(alone, together, strict=True))
    ids = kernels.route_by_hash(x[2:3], gate, table, token_ids[2:3], 1.5, positions(1))[1]
    assert torch.equal(ids, hashed[2:3])


def test_unsupported_arguments_are_refused() -> None:
    x, gate, bias, table, token_ids = inputs_of((3, 100, 37, 6), torch.float32)
    with pytest.raises(ValueError, match="got 38 of 37"):
        kernels.route_by_score(x, gate, bias, 38, 1.0, positions(3))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.route_by_score(x.T.contiguous().T, gate, bias, 6, 1.0, positions(3))
    with pytest.raises(ValueError, match="token_ids must be contiguous"):
        apart = token_ids.repeat_interleave(2)[::2]
        kernels.route_by_hash(x, gate, table, apart, 1.0, positions(3))
