"""The measured times of a rank's steps on a GPU, beside the host's clock."""

import time

import pytest
import torch

from finwhale import LLM, SamplingParams


@pytest.mark.alone
def test_the_times_of_captured_steps() -> None:
    llm = LLM(device="cuda", max_num_seqs=4, max_model_len=1024, cache_memory_bytes=2**28)
    (state,) = llm.engine.executor.rank_states()
    assert state.times.step_seconds is None, "the warm-up does not count"
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(8):  # eight prefills, of which the LM head measures every fourth
        llm.generate([[0, number + 5, 7] * 20], params)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    (state,) = llm.engine.executor.rank_states()
    step, head = state.times.step_seconds, state.times.head_seconds
    assert step is not None and head is not None
    # One sequence: a step gives one token.
    mean = seconds / (8 * 200)
    assert 0.2 * mean < step < 2 * mean
    assert 1e-6 < head < step
    assert not sum(llm.engine.executor.late_compilations().values())
