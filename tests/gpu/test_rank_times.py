"""The measured times of a rank's steps on a GPU, beside the host's clock."""

import time

import pytest
import torch

from finwhale import LLM, SamplingParams


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Generate for one prompt after the other."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for prompt in prompts:
        llm.generate([prompt], params)
    torch.cuda.synchronize()
    return time.perf_counter() - began


@pytest.mark.alone
def test_the_times_of_captured_steps() -> None:
    llm = LLM(device="cuda", max_num_seqs=4, max_model_len=1024, cache_memory_bytes=2**28)
    (state,) = llm._engine.executor.rank_states()
    assert state.times.step_seconds is None, "the warm-up does not count"
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    # Eight prefills, of which the LM head measures every fourth.
    seconds = seconds_of(llm, [[0, number + 5, 7] * 20 for number in range(8)], params)
    (state,) = llm._engine.executor.rank_states()
    step, head = state.times.step_seconds, state.times.head_seconds
    assert step is not None and head is not None
    # One sequence: a step gives one token.
    mean = seconds / (8 * 200)
    assert 0.2 * mean < step < 2 * mean
    # The host launches a prefill, and so small a model's GPU waits for it: also within the LM head.
    params = SamplingParams(temperature=0, max_tokens=1)
    prefill = seconds_of(llm, [[0, number + 50, 7] * 20 for number in range(8)], params) / 8
    assert 1e-6 < head < prefill
    assert not sum(llm._engine.metrics().late_compilations.values())
