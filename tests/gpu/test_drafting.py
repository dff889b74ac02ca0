"""Drafting on a GPU: no token changes, captured or not, where bits do not depend on the step."""

import pytest

from finwhale import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The whale", "A", "In the morning the baker"] * 2
PARAMS = [
    SamplingParams(temperature=0, max_tokens=150, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=150, ignore_eos=True, presence_penalty=0.4),
]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_token_changes(enforce_eager: bool) -> None:
    found = []
    for draft_tokens in (0, 1, 2, 3, "auto"):
        llm = LLM(
            device="cuda",
            batch_invariant=True,
            enforce_eager=enforce_eager,
            max_num_seqs=8,
            max_model_len=1024,
            draft_tokens=draft_tokens,  # type: ignore[arg-type]
        )
        results = llm.generate(PROMPTS, [PARAMS[i % 2] for i in range(len(PROMPTS))])
        found.append([output.token_ids for result in results for output in result.outputs])
        metrics = llm.engine.metrics()
        assert draft_tokens == 0 or metrics.drafts_accepted[0] > 0
        llm.engine.check_integrity()
        del llm
    assert all(tokens == found[0] for tokens in found[1:])
