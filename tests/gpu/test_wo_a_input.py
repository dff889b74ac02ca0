"""wo_a_input "bf16" on a GPU: kernels of E4M3 weights and bfloat16 inputs, and engines on it."""

from typing import Any

import pytest
import torch
from tests.support.model_cases.linear import model_cases
from tests.support.op_case import CONFIGS, ModelDraw
from tests.support.stepping import Stepper
from tools.operators import ready

from finwhale import LLM, SamplingParams
from finwhale.config import WoAInput
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.ops import load_ops
from finwhale.ops.linear import LinearWeight
from finwhale.platform import Platform

PROMPTS = ["Once upon a time", "The whale", "A", "In the morning the baker"] * 2
HOPPER = Platform("nvidia", "sm90")
# One row a program; tiles of 16, 32 and 64 tokens split over K; tiles of 128 tokens.
TOKENS = (1, 2, 16, 17, 33, 64, 65, 128, 1000, 4096)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("config", ["flash", "pro"])
@torch.inference_mode()
def test_the_projection(config: str, invariant: bool) -> None:
    """Against a float64 product with the values that weight and scale mean.

    Tensor cores add in float32 or better, and the result is rounded to bfloat16 once.
    """
    ops, draw = load_ops(HOPPER, batch_invariant=invariant), ModelDraw("cuda")
    found_cases = model_cases(CONFIGS[config], draw, ())
    (case,) = (one for one in found_cases if one.name == "wo_a of bfloat16")
    assert case.weight is not None
    w = ready(ops, case.weight())
    assert isinstance(w, LinearWeight) and w.scale is not None and not w.input_group
    groups, rows, width = w.weight.shape
    wide = w.scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :width]
    values = w.weight.float() * wide
    for count in TOKENS:
        x = draw.activation(4096, groups, width)[:count]
        found = ops.grouped_linear(x, w)
        wanted = torch.einsum("ngk,gmk->ngm", x[:65].double(), values.double()).float()
        assert found.shape == (count, groups, rows) and found.dtype == torch.bfloat16
        error = (found[:65].float() - wanted).abs()
        # Half a unit in bfloat16's last place, and what sums of outliers leave.
        assert (error <= 2.0**-8 * wanted.abs() + 2.0**-10 * wanted.abs().max()).all()
        again = ops.grouped_linear(x, w)
        assert torch.equal(again, found)
        if invariant:
            alone = ops.grouped_linear(x[:1], w)
            assert torch.equal(alone, found[:1])


def load(wo_a_input: WoAInput, **options: Any) -> LLM:
    return LLM(
        device="cuda",
        wo_a_input=wo_a_input,
        max_num_seqs=8,
        max_model_len=1024,
        cache_memory_bytes=2**28,
        **options,
    )


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_captured_is_eager_and_nothing_compiles_late(draft_tokens: int) -> None:
    found = []
    for enforce_eager in (False, True):
        llm = load(
            "bf16", batch_invariant=True, enforce_eager=enforce_eager, draft_tokens=draft_tokens
        )
        model = first_rank(llm._engine.executor).runner.model
        assert isinstance(model, DeepseekV4)
        wo_a = model.weights.layers[0].attn.heads.wo_a
        assert isinstance(wo_a, LinearWeight) and not wo_a.input_group
        found.append(tokens(llm))
        long = [[5 + i % 900 for i in range(n)] for n in (17, 65, 300, 900)]
        llm.generate(long, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert not any(llm._engine.metrics().late_compilations.values())
    assert found[0] == found[1]


def test_it_is_the_cpu_s_option() -> None:
    """The demo's logits with "bf16" are nearer to the CPU's with "bf16" than to those with "fp8",
    and as near to them as with "fp8" on both.
    """
    ids = [0, *(7 + 13 * i % 3900 for i in range(300))]
    logits: dict[tuple[str, WoAInput], torch.Tensor] = {}
    options: tuple[WoAInput, ...] = ("fp8", "bf16")
    for option in options:
        cpu = Stepper(LLM(device="cpu", wo_a_input=option, max_num_seqs=8)._engine)
        logits["cpu", option] = cpu.logits(cpu.read(ids)).float()
        stepper = Stepper(load(option)._engine)
        logits["gpu", option] = stepper.logits(stepper.read(ids)).float().cpu()

    def distance(gpu: WoAInput, cpu: WoAInput) -> float:
        found, wanted = logits["gpu", gpu], logits["cpu", cpu]
        return float((found - wanted).norm() / wanted.norm())

    print({(gpu, cpu): round(distance(gpu, cpu), 5) for gpu in options for cpu in options})
    assert distance("bf16", "bf16") < distance("bf16", "fp8")
    assert distance("bf16", "bf16") < 4 / 3 * distance("fp8", "fp8")
