"""Every implementation of the collectives against its reference."""

import pytest
import torch

from finwhale.distributed import ref
from finwhale.distributed.collectives import Alone, Collectives

from .ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16)


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def test_the_sum_is_a_tree_of_pairs() -> None:
    large, small = torch.tensor([1.0]), torch.tensor([2.0**-24])
    # In rank order each small value would be rounded away.
    assert ref.all_reduce([large, small, small, small]).item() == 1 + 2.0**-23
    assert ref.all_reduce([large.bfloat16(), small.bfloat16()] * 2).item() == 2
    with pytest.raises(ValueError, match="got 3"):
        ref.all_reduce([large] * 3)


@pytest.mark.parametrize("size", (1, 2, 4, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gloo_equals_the_reference(size: int, dtype: torch.dtype) -> None:
    given = parts(size, (3, 5, 8), dtype)
    kept = [part.clone() for part in given]

    def work(collectives: Collectives) -> list[torch.Tensor]:
        x = given[collectives.rank.index]
        gathered = [collectives.all_gather(x, dim) for dim in (0, 1, -1)]
        return [collectives.all_reduce(x), *gathered, *collectives.all_gather_each([x, x[:1]])]

    wanted = [ref.all_reduce(kept), *(ref.all_gather(kept, dim) for dim in (0, 1, -1))]
    wanted += [ref.all_gather(kept, 0), ref.all_gather([part[:1] for part in kept], 0)]
    for found in run_ranks(size, work):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


@pytest.mark.parametrize("size", (1, 2, 4, 8))
@pytest.mark.parametrize("num_rows", (0, 1, 9, 16))
def test_rows_are_those_of_the_sum(size: int, num_rows: int) -> None:
    given = parts(size, (num_rows, 3, 2), torch.bfloat16)

    def work(collectives: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
        x = given[collectives.rank.index]
        rows = collectives.reduce_scatter_rows(x)
        again = collectives.reduce_scatter_parts(
            lambda index, some: x[collectives.rank.rows(len(x), index)][some], x.shape, x.dtype
        )
        assert torch.equal(again, rows)
        gathered = collectives.start_all_gather_rows(rows, num_rows, "experts")
        whole = collectives.all_gather_rows(rows, num_rows)
        assert torch.equal(gathered(), whole)
        return rows, whole

    found, wanted = run_ranks(size, work), ref.all_reduce(given)
    share = -(-num_rows // size)
    for index, (rows, whole) in enumerate(found):
        assert torch.equal(rows, wanted[index * share : (index + 1) * share])
        assert torch.equal(whole, wanted)
    assert torch.equal(torch.cat([rows for rows, _ in found]), wanted)


def test_gloo_takes_no_rows_and_any_dtype() -> None:
    def work(collectives: Collectives) -> tuple[torch.Tensor, ...]:
        index = torch.tensor([collectives.rank.index])
        empty = torch.empty(0, 4)
        return (
            collectives.all_gather(index, 0),
            collectives.all_reduce(empty),
            collectives.all_gather(empty, 1),
        )

    for index, total, gathered in run_ranks(2, work):
        assert index.tolist() == [0, 1]
        assert total.shape == (0, 4)
        assert gathered.shape == (0, 8)


def test_one_rank_returns_its_input() -> None:
    x = torch.ones(2)
    assert Alone().all_reduce(x) is x
    assert Alone().all_gather(x, 0) is x
    assert Alone().reduce_scatter_rows(x).data_ptr() == x.data_ptr()
    assert Alone().all_gather_rows(x, 2).data_ptr() == x.data_ptr()
