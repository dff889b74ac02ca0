"""The Triton kernels of the linear layers in the interpreter, against float64 and the reference."""

import importlib
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from finwhale.ops.linear import LinearWeight, quantise_triton
from finwhale.ops.linear import linear_triton as kernels
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.rounding import round_e4m3, unscaled_e4m3

from .kernels_support import DTYPES, Inputs, assert_close

INVARIANT = kernels.LinearOptions(invariant=True, num_multiprocessors=8)
# By rows (two if the weight is unscaled), by tiles, by tiles of tokens rounded before.
TOKENS = (0, 1, 2, 20, 70)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU wants hundreds at once; the interpreter runs one after the other."""
    monkeypatch.setattr(kernels, "MIN_PROGRAMS", 4)
    for name in ("linear", "grouped_linear", "swiglu_mlp"):
        few = partial(getattr(kernels, name), options=kernels.LinearOptions(num_multiprocessors=8))
        monkeypatch.setattr(kernels, name, few)


def e4m3_weight(inputs: Inputs, *shape: int) -> tuple[LinearWeight, Tensor]:
    """A weight, and its values in float32."""
    *groups, rows, width = shape
    weight = inputs.normal(*shape).to(torch.float8_e4m3fn)
    blocks = (*groups, -(-rows // 128), -(-width // 128))
    scale = 2.0 ** torch.randint(-9, -3, blocks, generator=inputs.generator).float()
    wide = scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)
    return LinearWeight(weight, 128, scale), weight.float() * wide


def product(x: Tensor, weight: Tensor, rounded: bool) -> Tensor:
    """x [.., K] weight [M, K]^T in float64, then float32."""
    x = round_e4m3(x, 128) if rounded else x
    return (x.double() @ weight.double().T).float()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("rows, width", [(384, 256), (200, 384)])
def test_e4m3_weights(num_tokens: int, rows: int, width: int) -> None:
    inputs = Inputs()
    w, wide = e4m3_weight(inputs, rows, width)
    x = inputs.outliers(num_tokens, 2 * width, dtype=torch.bfloat16)[:, :width]
    assert_close(kernels.linear(x, w), product(x, wide, True).bfloat16())


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_groups(num_tokens: int) -> None:
    inputs = Inputs()
    w, wide = e4m3_weight(inputs, 3, 256, 128)
    x = inputs.outliers(num_tokens, 3, 160, dtype=torch.bfloat16)[:, :, :128]
    wanted = [product(x[:, g], wide[g], True) for g in range(3)]
    assert_close(kernels.grouped_linear(x, w), torch.stack(wanted, 1).bfloat16())


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [256, 1664])  # the second is split over K
def test_e4m3_weights_of_bfloat16_inputs(num_tokens: int, width: int) -> None:
    """The input is not rounded: what wo_a_input "bf16" asks for."""
    inputs = Inputs()
    w, wide = e4m3_weight(inputs, 2, 384, width)
    w = replace(w, input_group=0)
    x = inputs.outliers(num_tokens, 2, width + 32, dtype=torch.bfloat16)[:, :, :width]
    wanted = torch.stack([product(x[:, g], wide[g], False) for g in range(2)], 1)
    found = kernels.grouped_linear(x, w)
    assert_close(found, wanted.bfloat16())
    if num_tokens:
        # Rounding would be seen.
        rounded = torch.stack([product(x[:, g], wide[g], True) for g in range(2)], 1)
        assert (rounded - wanted).norm() > 2.0**-6 * wanted.norm()
    # Several tokens have one order of summation, whatever their number.
    if num_tokens >= 2:
        few = kernels.grouped_linear(x[:2], w)
        assert num_tokens > kernels.SPLIT_TOKENS or torch.equal(few, found[:2])


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_shared_expert_of_bfloat16_inputs(num_tokens: int) -> None:
    """No model asks for it, but the kernels take every combination."""
    inputs = Inputs()
    w13, wide13 = e4m3_weight(inputs, 512, 128)
    w2, wide2 = e4m3_weight(inputs, 128, 256)
    x = inputs.outliers(num_tokens, 128, dtype=torch.bfloat16)
    gate, up = product(x, wide13, False).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate.clamp(max=0.3)) * up.clamp(-0.3, 0.3)
    found = kernels.swiglu_mlp(x, ExpertWeight(w13.weight, w2.weight, 0, w13.scale, w2.scale), 0.3)
    wanted = product(hidden.bfloat16(), wide2, False)
    error = (found.float() - wanted).norm()
    assert error < 2.0**-7 * wanted.norm()


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_plain_weights_of_any_width(num_tokens: int, dtype: torch.dtype, rounded: bool) -> None:
    inputs = Inputs()
    weight, x = inputs.normal(37, 200, dtype=dtype), inputs.normal(num_tokens, 200, dtype=dtype)
    found = kernels.linear(x, LinearWeight(weight, 128 * rounded, None, torch.float32))
    assert_close(found, product(x, weight, rounded))
    assert kernels.linear(x, LinearWeight(weight, 128 * rounded)).dtype == dtype


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_shared_expert(num_tokens: int) -> None:
    inputs = Inputs()
    w13, wide13 = e4m3_weight(inputs, 512, 128)
    w2, wide2 = e4m3_weight(inputs, 128, 256)
    x = inputs.outliers(num_tokens, 128, dtype=torch.bfloat16)
    w = ExpertWeight(w13.weight, w2.weight, 128, w13.scale, w2.scale)
    gate, up = product(x, wide13, True).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate.clamp(max=0.3)) * up.clamp(-0.3, 0.3)
    wanted = product(hidden.bfloat16(), wide2, True)
    found = kernels.swiglu_mlp(x, w, 0.3)
    # A hidden value may fall on the other side of a rounding's boundary.
    error = (found.float() - wanted).abs()
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    if num_tokens:
        assert error.max() < 2.0**-6 * wanted.abs().max()
        assert error.norm() < 2.0**-8 * wanted.norm()


def test_shared_expert_of_plain_weights() -> None:
    inputs = Inputs()
    w13, w2 = inputs.normal(80, 24, scale=0.2), inputs.normal(24, 40, scale=0.2)
    for num_tokens in (1, 6, 66):
        x = inputs.normal(num_tokens, 24)
        gate, up = product(x, w13, False).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate.clamp(max=0.3)) * up.clamp(-0.3, 0.3)
        found = kernels.swiglu_mlp(x, ExpertWeight(w13, w2), 0.3)
        assert_close(found, product(hidden, w2, False))


def test_several_blocks_of_rows_a_program_and_several_chunks_of_a_row() -> None:
    inputs = Inputs()
    w, _ = e4m3_weight(inputs, 200, 384)
    p = kernels.LinearProblem.of(inputs.normal(1, 1, 384, dtype=torch.bfloat16), w, kernels.DEFAULT)
    plans = [kernels.RowPlan(b, m, k, 4) for b, m, k in ((1, 32, 128), (4, 8, 128), (2, 64, 512))]
    found = [kernels._run_rows(p, plan) for plan in plans]
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize(
    ("groups", "rows", "width", "blocks", "block_m"),
    [(4, 1024, 4096, 1, 8), (1, 4096, 4096, 1, 8), (8, 1024, 4096, 4, 4), (1, 4096, 8192, 4, 4)],
)
def test_programs_hold_a_weight_that_fits_the_registers(
    groups: int, rows: int, width: int, blocks: int, block_m: int
) -> None:
    """wo_a and wo_b of Flash on two ranks, and on one, where they are too large."""
    weight = torch.empty(groups, rows, width, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(groups, rows // 128, width // 128, device="meta")
    x = torch.empty(1, groups, width, dtype=torch.bfloat16, device="meta")
    plan = kernels.RowPlan.of(kernels.LinearProblem(x, weight, scale, True, torch.bfloat16))
    assert (plan.blocks, plan.block_m) == (blocks, block_m)


def test_a_token_s_bits_do_not_depend_on_the_batch() -> None:
    inputs = Inputs()
    w, _ = e4m3_weight(inputs, 128, 1664)  # long enough to be rounded on the way in, and split
    x = inputs.outliers(64, 1664, dtype=torch.bfloat16)
    found = [kernels.linear(x[:size], w)[:2] for size in (2, 16, 17, 64)]
    assert all(torch.equal(found[0], each) for each in found[1:])
    plain = LinearWeight(inputs.normal(100, 600, dtype=torch.bfloat16))
    for sizes in ((1, 2), (3, 17, 64)):
        found = [kernels.linear(x[:size, :600], plain)[:1] for size in sizes]
        assert all(torch.equal(found[0], each) for each in found[1:])


def test_invariant_gemms_give_a_row_the_same_bits_for_any_number_of_rows() -> None:
    linear, inputs = partial(kernels.linear, options=INVARIANT), Inputs()
    w, _ = e4m3_weight(inputs, 128, 1664)
    x = inputs.outliers(70, 1664, dtype=torch.bfloat16)
    found = [linear(x[:size], w)[:1] for size in (1, 2, 17, 70)]
    assert_close(found[3], kernels.linear(x, w)[:1])
    assert all(torch.equal(found[0], each) for each in found[1:])
    found = [linear(x[:size], replace(w, input_group=0))[:1] for size in (1, 17, 70)]
    assert all(torch.equal(found[0], each) for each in found[1:])
    plain = LinearWeight(inputs.normal(100, 600, dtype=torch.bfloat16))
    found = [linear(x[:size, :600], plain)[:1] for size in (1, 17, 70)]
    assert all(torch.equal(found[0], each) for each in found[1:])
    assert linear(x[:0], w).shape == (0, 128)


def test_unsplit_tiles_have_the_bits_of_tiles_of_many_tokens() -> None:
    inputs = Inputs()
    w, _ = e4m3_weight(inputs, 256, 512)
    assert w.scale is not None
    x, scale = quantise_triton.quantise(inputs.outliers(70, 512, dtype=torch.bfloat16), num_rows=80)
    assert x.shape == (80, 512)
    found = kernels.unsplit((x[:5], scale[:5]), w.weight, w.scale, kernels.DEFAULT)
    assert torch.equal(
        found, kernels.unsplit((x[:70], scale[:70]), w.weight, w.scale, kernels.DEFAULT)[:5]
    )


@pytest.mark.parametrize("shape", [(0, 128), (1, 256), (5, 4224), (9, 3, 200)], ids=str)
def test_quantise(shape: tuple[int, ...]) -> None:
    x = Inputs().outliers(*shape, dtype=torch.bfloat16)
    y, scale = quantise_triton.quantise(x)
    wide = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    assert torch.equal(y.float() * wide, round_e4m3(x, 128).float())
    assert torch.equal(quantise_triton.round_input(x), round_e4m3(x, 128))
    assert scale.numel() == 0 or (scale.stride(0) == 1 and scale.stride(-1) % 4 == 0)


def test_swiglu_quantise() -> None:
    gate_up = 4 * Inputs().outliers(3, 768, dtype=torch.bfloat16)
    y, scale = quantise_triton.swiglu_quantise(gate_up, 10.0)
    gate, up = gate_up.float().chunk(2, -1)
    hidden = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
    found, wanted = (
        y.float() * scale.repeat_interleave(128, -1),
        round_e4m3(hidden.bfloat16().float(), 128),
    )
    assert (found - wanted).norm() < 2.0**-6 * wanted.norm()


@pytest.fixture
def deepgemm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The linear layers by DeepGEMM, on a package that computes its grouped product plainly."""

    def fp8_einsum(expression: str, x: Any, w: Any, out: Tensor) -> None:
        rows, groups, width = x[0].shape
        assert x[1].shape == (rows, groups, width // 128) and len(out) == rows
        assert x[0].is_contiguous()
        assert x[1].stride() == (1, width // 128 * x[1].stride(2), -(-rows // 4) * 4)
        wide = unscaled_e4m3(*(part.flatten(1) for part in x)).view(x[0].shape)
        out.copy_(torch.einsum("bhr,hdr->bhd", wide, w[0].float()))

    stand_in = SimpleNamespace(set_pdl=lambda _: None, fp8_einsum=fp8_einsum)
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    name = "finwhale.ops.linear.linear_deepgemm"
    # A real package may have been found before.
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def with_own_bits(deepgemm: Any) -> Any:
    """The same functions as the batch-invariant table has them."""
    return SimpleNamespace(
        grouped_form=partial(deepgemm.grouped_form, min_tokens=1),
        grouped_linear=partial(deepgemm.grouped_linear, options=INVARIANT),
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 300])
@pytest.mark.parametrize("own_bits", [False, True])
def test_an_input_rounded_before(num_tokens: int, own_bits: bool, deepgemm: Any) -> None:
    """In the memory that the table gives: the same bits as rounding it then."""
    inputs, table = Inputs(), with_own_bits(deepgemm) if own_bits else deepgemm
    w, _ = e4m3_weight(inputs, 2, 128, 256)
    x = inputs.outliers(num_tokens, 2, 256, dtype=torch.bfloat16)
    form = table.grouped_form(w, 128)
    assert form is not None and form.min_tokens == (1 if own_bits else 17)
    if num_tokens < form.min_tokens:
        return
    found, scales = form.empty(num_tokens)
    assert found.shape == x.shape
    values, wanted_scales = quantise_triton.quantise(x)
    found.copy_(values)
    scales.copy_(wanted_scales.flatten(1))
    wanted = table.grouped_linear(x, w)
    assert torch.equal(table.grouped_linear(found, w, scales), wanted)
    assert wanted.shape == (num_tokens, 2, 128)


def test_what_the_projection_cannot_take_rounded(deepgemm: Any) -> None:
    """Groups across heads, and weights that DeepGEMM does not take."""
    inputs = Inputs()
    w, _ = e4m3_weight(inputs, 2, 128, 256)
    plain = LinearWeight(inputs.normal(2, 128, 256, dtype=torch.bfloat16), 128)
    unrounded = replace(w, input_group=0)
    for head_dim, weight in ((64, w), (128, plain), (128, unrounded)):
        for table in (deepgemm, with_own_bits(deepgemm)):
            assert table.grouped_form(weight, head_dim) is None


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 70])
def test_deepgemm_leaves_unrounded_inputs_to_our_kernels(num_tokens: int, deepgemm: Any) -> None:
    """Its package has no product of them: calling it would fail here."""
    inputs = Inputs()
    w, wide = e4m3_weight(inputs, 2, 128, 256)
    w = replace(w, input_group=0)
    x = inputs.outliers(num_tokens, 2, 256, dtype=torch.bfloat16)
    wanted = torch.stack([product(x[:, g], wide[g], False) for g in range(2)], 1).bfloat16()
    deepgemm.deep_gemm.fp8_einsum = None
    for table in (deepgemm, with_own_bits(deepgemm)):
        assert_close(table.grouped_linear(x, w), wanted)


def test_unsupported_arguments_are_refused() -> None:
    w, _ = e4m3_weight(Inputs(), 128, 256)
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(torch.zeros(256, 2).T, w)
    with pytest.raises(ValueError, match="128 values do not fit a weight"):
        kernels.linear(x[:, :128], w)
    with pytest.raises(ValueError, match="without a scale"):
        kernels.linear(x, LinearWeight(w.weight, 128))


def few_tokens(
    x_NGK: Tensor,
    weight_GMK: Tensor,
    scale: Tensor,
    out: Tensor,
    steps: int,
    columns: int,
    early_steps: int,
    early_launch: bool,
) -> None:
    """A stand-in for few_tokens_hopper.py: its contract with torch."""
    num_tokens, _, width = x_NGK.shape
    assert num_tokens <= columns and columns % 8 == 0
    scale = scale.repeat_interleave(128, 1)[:, : weight_GMK.shape[1]].repeat_interleave(128, 2)
    wide, x = weight_GMK.float() * scale, round_e4m3(x_NGK.float(), 128)
    if out.dim() == 3:
        assert steps == width // 128
        out.copy_(torch.einsum("ngk,gmk->ngm", x, wide))
        return
    out.fill_(torch.nan)
    for part in range(out.shape[0]):
        own = slice(part * steps * 128, (part + 1) * steps * 128)
        result = torch.einsum("ngk,gmk->gmn", x[..., own], wide[..., own])
        out[part, ..., :num_tokens] = result


def few_options(called: list[tuple[int, ...]], **options: Any) -> kernels.LinearOptions:
    def launch(*args: Any) -> None:
        called.append((*args[1].shape, *args[4:7]))
        few_tokens(*args)

    return kernels.LinearOptions(num_multiprocessors=8, few_tokens=launch, **options)


@pytest.mark.parametrize("num_tokens, columns", [(2, 8), (8, 8), (9, 16), (16, 16)])
def test_few_tokens_of_parts_and_of_whole_weights(num_tokens: int, columns: int) -> None:
    """The kernel gets the plan of the tiles' kernel, and its parts are added as theirs."""
    inputs, called = Inputs(), list[tuple[int, ...]]()
    options = few_options(called)
    for rows, width in ((256, 1024), (1024, 512), (192, 1152)):
        w, wide = e4m3_weight(inputs, rows, width)
        x = inputs.outliers(num_tokens, width, dtype=torch.bfloat16)
        found = kernels.linear.func(x, w, options=options)  # type: ignore[attr-defined]
        assert_close(found, product(x, wide, True).bfloat16())
    w, wide = e4m3_weight(inputs, 2, 128, 512)
    x = inputs.normal(num_tokens, 2, 512, dtype=torch.bfloat16)
    found = kernels.grouped_linear.func(x, w, options=options)  # type: ignore[attr-defined]
    wanted = [product(x[:, g], wide[g], True).bfloat16() for g in range(2)]
    assert_close(found, torch.stack(wanted, 1))
    steps = [one[3] for one in called]
    assert [one[:3] for one in called] == [
        (1, 256, 1024),
        (1, 1024, 512),
        (1, 192, 1152),
        (2, 128, 512),
    ]
    assert {one[4:] for one in called} == {(columns, kernels.EARLY_STEPS)}
    assert 1 in steps or 2 in steps, "some weight is in parts"
    assert 4 in steps, "some weight is whole"


def test_few_tokens_of_the_shared_expert() -> None:
    inputs, called = Inputs(), list[tuple[int, ...]]()
    w13, _ = e4m3_weight(inputs, 256, 256)
    w2, _ = e4m3_weight(inputs, 192, 128)
    w = ExpertWeight(w13.weight, w2.weight, 128, w13.scale, w2.scale)
    x = inputs.normal(6, 256, dtype=torch.bfloat16)
    found = kernels.swiglu_mlp.func(x, w, 2.0, options=few_options(called))  # type: ignore[attr-defined]
    assert_close(found, kernels.swiglu_mlp(x, w, 2.0))
    assert [one[:3] for one in called] == [(1, 256, 256), (1, 192, 128)]
    assert [one[5] for one in called] == [0, 0], "no weight is requested early"


def test_problems_that_the_kernel_of_few_tokens_does_not_take() -> None:
    inputs, called = Inputs(), list[tuple[int, ...]]()
    w, _ = e4m3_weight(inputs, 128, 512)
    x = inputs.normal(17, 512, dtype=torch.bfloat16)
    linear = kernels.linear.func  # type: ignore[attr-defined]
    options = few_options(called)
    linear(x[:1], w, options=options)  # row_kernel
    linear(x, w, options=options)
    linear(x[:6], w, options=few_options(called, invariant=True))
    linear(x[:6], replace(w, input_group=0), options=options)
    linear(x[:6], LinearWeight(w.weight.bfloat16(), 128), options=options)
    long, _ = e4m3_weight(inputs, 1024, 2048)  # 16 steps in one part
    linear(inputs.normal(6, 2048, dtype=torch.bfloat16), long, options=options)
    narrow, _ = e4m3_weight(inputs, 200, 256)
    linear(x[:6, :256], narrow, options=options)
    assert not called


@pytest.mark.parametrize(
    ("rows", "width", "num_tokens", "split"),
    [
        (2624, 4096, 3, 8),  # the compressors of Flash: C4 and C128
        (1024, 4096, 8, 8),
        (1024, 7168, 8, 14),  # and of Pro
        (2624, 7168, 8, None),  # more programs than fit at once
        (1024, 4096, 9, None),
        (64640, 4096, 6, None),  # the LM head of one of two ranks
        (1000, 4096, 6, None),
        (1024, 512, 6, None),  # one part
        (1024, 4224, 6, None),
    ],
)
def test_small_plain_weights_of_few_tokens(
    rows: int,
    width: int,
    num_tokens: int,
    split: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which unscaled weights `few_tokens` computes, and in how many parts."""
    launched: list[dict[str, Any]] = []

    def few_tokens(x: Tensor, weight: Tensor, scale: Tensor | None, out: Tensor, *how: Any) -> None:
        launched.append({"scale": scale, "parts": out.shape, "how": how})

    options = kernels.LinearOptions(few_tokens=few_tokens, early_launch=False)
    x = torch.empty(num_tokens, 1, width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(1, rows, width, dtype=torch.bfloat16, device="meta")
    p = kernels.LinearProblem(x, weight, None, False, torch.float32, options=options)
    plan = kernels.few_plan(p)
    if split is None:
        assert plan is None
        return
    assert plan is not None and plan.split == split
    assert plan.steps(p) == kernels.PLAIN_STEPS
    monkeypatch.setattr(kernels, "_sum", lambda *_: None)
    kernels.run(p)
    shape = (split, 1, rows, 8)
    assert launched == [{"scale": None, "parts": shape, "how": (4, 8, kernels.EARLY_STEPS, False)}]
