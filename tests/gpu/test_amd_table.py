"""The AMD table on an NVIDIA GPU, with what is NVIDIA's alone switched off: the embedded model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper

import finwhale.engine.start.decisions as decisions
import finwhale.engine.start.kernels as kernels
from finwhale import LLM, SamplingParams
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.step_inputs import Inline
from finwhale.ops import load_ops
from finwhale.ops.builds import Builds
from finwhale.platform import Platform

from .near_ties import assert_part_at_near_ties

AMD = Platform("amd", "gfx942")
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "cache_memory_bytes": 2**28,
}
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPTS = ["Call me Ishmael.", "Once upon a time there was a little girl who", "The whale"]


@pytest.fixture(scope="module")
def amd() -> Iterator[LLM]:
    """No early launches, no inline assembler, no kernels for Hopper alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "choose_device", lambda name: (AMD, torch.device("cuda")))
        patch.setattr(kernels, "load_builds", lambda *args: Builds())
        yield LLM(**OPTIONS)


@pytest.fixture(scope="module")
def nvidia() -> LLM:
    return LLM(**OPTIONS)


@torch.inference_mode()
def read(llm: LLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after each token, of the model and of the MTP layer."""
    stepper, run = Stepper(llm._engine), first_rank(llm._engine.executor).runner
    mtp = run.model.draft_head
    assert mtp is not None
    sequence = stepper.sequence(ids[:-1])
    (streams,) = stepper.step([(sequence, len(ids) - 1)])
    assert stepper.inputs is not None
    following = torch.tensor(ids[1:], device="cuda")
    drafts = mtp(stepper.inputs, streams, following, run.cache, Inline())
    stepper.release(sequence)
    return run.model.compute_logits(streams).float(), mtp.compute_logits(drafts).float()


def test_no_side_streams_and_no_nvidia_package(amd: LLM) -> None:
    run = first_rank(amd._engine.executor).runner
    assert run.ops is load_ops(AMD)
    assert isinstance(run.model, DeepseekV4)
    assert run.model.side_streams.streams == ()
    assert not [where for _, where in run.ops.implementations() if "deepgemm" in where]
    assert run.graphs is not None, "decodes are captured as on any GPU"


def test_text_is_the_nvidia_table_s(amd: LLM, nvidia: LLM) -> None:
    """Sums are taken in other orders: the same best token wherever one leads by 1 or more."""
    ids = amd.encode(" ".join(PROMPTS * 30))
    for found, wanted in zip(read(amd, ids), read(nvidia, ids), strict=True):
        top = wanted.topk(2, dim=-1).values
        sure = top[:, 0] - top[:, 1] >= 1.0
        same = found.argmax(-1) == wanted.argmax(-1)
        print(f"sure: {sure.float().mean():.1%}; same best token: {same.float().mean():.1%}")
        assert sure.float().mean() > 0.3
        assert same[sure].float().mean() >= 0.995
        assert same.float().mean() >= 0.95


def test_the_engine_runs(amd: LLM, nvidia: LLM) -> None:
    """Captured decodes."""
    params = replace(GREEDY, logprobs=5)
    assert_part_at_near_ties(amd.generate(PROMPTS, params), nvidia.generate(PROMPTS, params))
