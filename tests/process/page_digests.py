"""Prints digests of the cached rows of the embedded model: `python -m tests.process.page_digests`.

The environment chooses the libraries' kernels (test_numerics_version.py).
"""

import hashlib
import json
from typing import Any

import torch

from finwhale import LLM, SamplingParams
from finwhale.engine.ranks.ranks import first_rank

PROMPT = [5 + (31 * i * i + 7 * i) % 4000 for i in range(520)]
# With drafts, the state also has the draft layer's window.
OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"activations": "exact"},
    "drafts": {"draft_tokens": 1},
}


def digest(**options: Any) -> str:
    """A digest of all blocks and states that a prefix store would save for one request."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = [{"prompt_token_ids": PROMPT}]
    with LLM(device="cpu", max_num_seqs=1, **options) as llm:
        (result,) = llm.generate(prompt, params, show_progress=False)
        token_ids = PROMPT + list(result.outputs[0].token_ids[:-1])
        rows = first_rank(llm._engine.executor).runner.cache.pages
        prefix = llm._engine.scheduler.prefix
        assert prefix is not None
        keys: list[bytes] = []
        prefix.extend_keys(keys, token_ids)
        blocks, resumable = prefix.match(keys)
        assert len(blocks) == resumable == 2
        found = hashlib.blake2b(digest_size=16)
        for block in blocks:
            for pages in (block.pages, block.state or {}):
                for group, numbers in sorted(pages.items()):
                    for number in numbers:
                        found.update(rows[group][number].numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: digest(**options) for name, options in OPTIONS.items()}))
