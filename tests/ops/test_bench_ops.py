"""The cases of `finwhale bench ops`: their bytes and operations."""

import pytest
from tests.support.op_case import CONFIGS, Chunks, ModelDraw, OpCase

from finwhale.errors import FinwhaleError
from tools import operators as bench

RANKS = [
    *[(name, size) for name in ("flash", "pro") for size in (1, 2, 4, 8)],
    *[("demo", size) for size in (1, 2, 4)],
]


@pytest.mark.parametrize("name, ranks", RANKS)
def test_floors(name: str, ranks: int) -> None:
    """Bytes and operations grow with the step, and no floor is zero."""
    few, many = (model_cases(name, ((8191, 8192),) * count, ranks) for count in (1, 32))
    for one, other in zip(few, many, strict=True):
        assert 0 < one.floor_us <= other.floor_us
        assert other.bytes <= 32 * one.bytes
        assert other.operations == 32 * one.operations


def test_the_ranks_share_the_operations() -> None:
    """Each rank of two computes half of what is cut, and all of the rest."""
    step = ((8191, 8192),) * 32
    for whole, one in zip(model_cases("flash", step), model_cases("flash", step, 2), strict=True):
        cut = whole.operator in ("grouped_linear", "sparse_attention", "experts", "swiglu_mlp")
        cut |= whole.operator == "linear" and whole.name in ("wq_b", "wo_b", "head")
        if whole.name == "wq_b of C4":  # the indexer's rows of it are not cut
            assert whole.operations - one.operations == 2.0 * 32 * 1024 * 32 * 512
        else:
            assert one.operations == whole.operations / (2 if cut else 1)


def test_sizes_that_ranks_cannot_share() -> None:
    with pytest.raises(FinwhaleError, match="o_groups 4 does not divide by 8 ranks"):
        CONFIGS["demo"].of_rank(8)
    with pytest.raises(FinwhaleError, match="o_groups 8 does not divide by 16 ranks"):
        CONFIGS["flash"].of_rank(16)


def model_cases(config: str, step: Chunks, ranks: int = 1) -> list[OpCase]:
    return list(bench.model_cases(CONFIGS[config].of_rank(ranks), ModelDraw("cpu"), step))


def flash_cases(operator: str, step: Chunks) -> list[OpCase]:
    return [case for case in model_cases("flash", step) if case.operator == operator]


def test_bytes_by_hand() -> None:
    """Flash, decodes at position 8191."""
    step = ((8191, 8192),) * 2
    window, c4, c128, rounded = flash_cases("sparse_attention", step)
    heads = 2 * 2 * 64 * 512 * 2  # read and written, bfloat16
    assert window.bytes == heads + 2 * 128 * 584
    assert c4.bytes == heads + 2 * (128 + 512) * 584
    assert c128.bytes == heads + 2 * (128 + 64) * 584
    assert c128.bytes - rounded.bytes == heads // 4 - 2 * 64 * 512 // 32
    assert c4.operations == 2 * 64 * (128 + 512) * 512 * 4
    (select,) = flash_cases("select_entries", step)
    assert select.operations == 2 * 2048 * 64 * 128 * 2
    assert select.bytes == 2 * (2 * 64 * 128 + 4 * 64 + 4 * 512 + 2048 * 68)
    (experts,) = flash_cases("experts", step[:1])
    one = 3 * 2048 * 4096
    assert experts.operations == 2 * 6 * one
    assert experts.bytes == pytest.approx(6 * one * 17 / 32 + 6 * 4096 + 48)
