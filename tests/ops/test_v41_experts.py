"""DeepSeek-V4.1's FP4 experts: layout, decoder and plans.

test_gluon_experts.py runs their GEMMs, and tests/gpu/test_v41_gemm.py on a GPU.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

import torch
from tests.support.ptx import assembly, halves, run_ptx
from tests.support.v41_weights import fp4, plain_fp4
from torch import Tensor

from finwhale.number_formats import e2m1_values
from finwhale.ops.deepseek_v41 import experts_hopper as experts
from finwhale.ops.deepseek_v41.experts_row_triton import decoder
from finwhale.ops.moe import Dispatched, ExpertWeight


def weights(E: int, D: int, I: int, largest: int = 125) -> ExpertWeight:  # noqa: E741
    generator = torch.Generator().manual_seed(0)
    w13, scale13 = fp4(generator, E, 2 * I, D, largest=largest)
    w2, scale2 = fp4(generator, E, D, I, largest=largest)
    return ExpertWeight(w13, w2, 32, scale13, scale2)


def decoded(w: Tensor, factors: Tensor, width: int) -> Tensor:
    """The weights in the layout's order of rows: what a thread's words hold, column by column."""
    columns = experts.block_columns(width)
    words = w.view(torch.int32).long() & 0xFFFFFFFF
    half = factors.long() << 7
    both = (half | half << 16).view(len(w), -1, width // columns, 64, columns // 32, 1)
    words = words.view(len(w), -1, width // columns, 64, columns // 32, 4)
    pairs = halves(run_ptx(assembly(decoder), words, both))
    # (.., word, pair of eight columns, value) -> columns
    values = pairs.unflatten(-1, (4, 2)).transpose(-3, -2).flatten(-4)
    return values.transpose(2, 3).reshape(len(w), -1, width)


@pytest.mark.parametrize("inner", (64, 96, 128))
@pytest.mark.parametrize("largest", (125, 128, 160, 21))
def test_every_value_is_where_the_kernels_look_for_it(inner: int, largest: int) -> None:
    """Blocks of 64 columns and of 32; scales above 2, and the least."""
    given = weights(2, 128, inner, largest)
    wanted13, wanted2 = plain_fp4(given.w13, given.scale13), plain_fp4(given.w2, given.scale2)
    w = experts.finish_experts(
        replace(
            given,
            **{name: getattr(given, name).clone() for name in ("w13", "w2", "scale13", "scale2")},
        )
    )
    assert w.expert_scale is not None and w.scale13 is not None and w.scale2 is not None
    assert w.expert_scale.tolist() == [[2.0 ** max(0, largest - 128)] * 2] * 2
    found = decoded(w.w2, w.scale2, inner) * w.expert_scale[:, 1, None, None]
    assert torch.equal(found, wanted2)
    found = decoded(w.w13, w.scale13, 128) * w.expert_scale[:, 0, None, None]
    gate, up = wanted13.unflatten(1, (2, -1, 8)).unbind(1)
    assert torch.equal(found, torch.stack((gate, up), 2).flatten(1, 3))


def test_every_code() -> None:
    values = torch.randint(16, (4096, 8), generator=torch.Generator().manual_seed(0))
    group = values.view(-1, 32).to(torch.uint8)
    words = experts._packed(group[:, ::2] | group[:, 1::2] << 4).view(torch.int32)
    half = torch.tensor((127 + 126) << 7)
    found = halves(run_ptx(assembly(decoder), words.long() & 0xFFFFFFFF, half | half << 16))
    wanted = e2m1_values(values.device)[group.long()].view(-1, 4, 4, 2).transpose(1, 2)
    assert torch.equal(found, wanted.flatten(2))


def test_a_scale_of_nan_is_not_lost() -> None:
    w = weights(2, 64, 32)
    assert w.scale13 is not None
    w.scale13[1, 5, 1] = 255
    finished = experts.finish_experts(w)
    assert finished.expert_scale is not None
    assert finished.expert_scale.isnan().tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("inner", (2304, 1152, 576, 288))
def test_programs_share_all_rows(inner: int) -> None:
    for _, plan in experts.PLANS:
        for tiles, cut in ((inner // 32, plan.gate_up), (80, plan.down)):
            programs, options = experts._options(plan.block_rows, tiles, cut)
            assert programs * options["GROUPS"] * options["TILES"] == tiles


def test_unsupported_arguments_are_refused() -> None:
    w = weights(2, 64, 64)
    ids = torch.zeros(2, 2, dtype=torch.int32)
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="layout"):
        experts.compute(x, ids.float(), Dispatched(ids), w, 10.0)
    with pytest.raises(ValueError, match="whole tiles of 64"):
        experts.finish_experts(replace(w, w13=w.w13[:, :96].contiguous()))
    plain = plain_fp4(w.w13, w.scale13)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="FP4"):
        experts.finish_experts(replace(w, w13=plain))
