"""A checkpoint in the official FP8 and FP4 layout is the model that its numbers say.

The weights are quantised when the checkpoint is written; the oracle reads what those codes mean as
float32. Nibble order, block edges, scale order and fused projections are all in the comparison.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import (
    random_weights,
    tiny_config,
    write_plain_checkpoint,
    write_quantised_checkpoint,
)
from tests.support.writer import write_checkpoint
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs

from . import transcription
from .oracle import Oracle, relative_error, single_threaded
from .test_mtp import mtp_logits, mtp_streams

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOLERANCE = 1e-5


def twin(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after quantisation, by the formats' definitions: written again, slowly."""
    specs = weight_specs(config_of(config))
    out = {}
    for name, weight in weights.items():
        match specs[name].storage:
            case "fp8_block":
                out[name] = round_fp8_blocks(weight)
            case "fp4":
                out[name] = round_fp4_rows(weight)
            case "bf16":
                out[name] = weight.bfloat16().float()
            case _:
                out[name] = weight
    return out


def power_of_two(amax: Tensor, limit: float) -> Tensor:
    """The smallest power of two s with amax <= limit * s."""
    return torch.exp2(torch.ceil(torch.log2(amax.double() / limit)))


def round_fp8_blocks(weight: Tensor) -> Tensor:
    out = weight.clone()
    for block in (b for rows in out.split(128) for b in rows.split(128, 1)):
        scale = power_of_two(block.abs().max(), 448)
        block.copy_((block / scale).to(torch.float8_e4m3fn).double() * scale)
    return out


def round_fp4_rows(weight: Tensor) -> Tensor:
    # The even codes first: of two values as near, argmin takes the first.
    values = torch.tensor(
        [sign * v for v in (*E2M1[::2], *E2M1[1::2]) for sign in (1, -1)]
    ).double()
    groups = weight.double().unflatten(-1, (-1, 32))
    scale = power_of_two(groups.abs().amax(-1, keepdim=True), 6)
    nearest = (groups / scale)[..., None].sub(values).abs().argmin(-1)
    return (values[nearest] * scale).flatten(-2).float()


@dataclass
class Case:
    path: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    oracle: Oracle

    def prompts(self) -> list[list[int]]:
        draw = random.Random(len(self.weights))
        return [[draw.randrange(self.config["vocab_size"]) for _ in range(n)] for n in (4, 29, 137)]


@pytest.fixture(
    scope="module", params=[0, 3, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    seed: int = request.param
    config = tiny_config(seed, quantised=True)
    weights = random_weights(config, seed)
    path = tmp_path_factory.mktemp("quantised")
    write_quantised_checkpoint(path / "official", config, weights)
    plain = twin(weights, config)
    write_plain_checkpoint(path / "plain", config, plain)
    return Case(path / "official", config, plain, Oracle(path / "plain"))


def test_logits(case: Case) -> None:
    with single_threaded():
        llm = LLM(case.path, device="cpu", dtype="float32", activations="exact")
        stepper = Stepper(llm._engine)
        for prompt in case.prompts():
            found = stepper.logits(stepper.read(prompt))
            assert relative_error(found, case.oracle.logits(prompt)) < TOLERANCE


def test_greedy(case: Case) -> None:
    with single_threaded():
        llm = LLM(case.path, device="cpu", dtype="float32", activations="exact")
        outputs = llm.generate(
            case.prompts(), SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        )
        for prompt, output in zip(case.prompts(), outputs, strict=True):
            assert output.outputs[0].token_ids == case.oracle.greedy(prompt, 32)[0]


def test_mtp_weights(case: Case) -> None:
    """The oracle leaves them out: the transcription stands in."""
    with single_threaded():
        llm = LLM(case.path, device="cpu", dtype="float32", activations="exact")
        stepper, text = Stepper(llm._engine), case.prompts()[1]
        wanted = transcription.mtp_logits(case.weights, case.config, text)
        found = mtp_logits(stepper, mtp_streams(stepper, text))
        assert relative_error(found, wanted) < TOLERANCE


@pytest.mark.parametrize("change", [{"expert_dtype": "fp8"}, {"scale_fmt": None}])
def test_other_storages(tmp_path: Path, change: dict[str, str | None]) -> None:
    """FP8 experts; float32 scales, as the Base checkpoints have them."""
    config = tiny_config(1, quantised=True)
    if "scale_fmt" in change:
        quantisation = {k: v for k, v in config["quantization_config"].items() if k != "scale_fmt"}
        config |= {"quantization_config": quantisation, "expert_dtype": "fp8"}
    else:
        config |= change
    weights = random_weights(config, 1)
    specs = weight_specs(config_of(config))
    scales = torch.float32 if "scale_fmt" in change else torch.float8_e8m0fnu
    write_checkpoint(
        tmp_path, config, weights.items(), specs, scale_dtype=scales, max_shard_bytes=300_000
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with single_threaded():
        stepper = Stepper(LLM(tmp_path, device="cpu", dtype="float32", activations="exact")._engine)
        found = stepper.logits(stepper.read([7, 5, 3, 2, 11]))
        wanted, _ = transcription.forward(weights, config, [7, 5, 3, 2, 11])
        error = relative_error(found, wanted)
        assert 1e-4 < error < 0.2  # only the rounding of the weights
        if "scale_fmt" not in change:
            wanted, _ = transcription.forward(twin(weights, config), config, [7, 5, 3, 2, 11])
            assert relative_error(found, wanted) < TOLERANCE
