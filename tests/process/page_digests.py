"""Prints digests of the embedded model's cached rows: `python -m tests.process.page_digests cpu`.

On a CPU, the environment chooses the libraries' kernels (test_numerics_version.py).
"""

import hashlib
import json
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch

from finwhale import LLM, SamplingParams
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.store.fingerprint import NUMERICS_VERSION

PROMPT = [5 + (31 * i * i + 7 * i) % 4000 for i in range(520)]
# With drafts, the state also has the draft layer's window.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"exact": {"activations": "exact"}, "drafts": {"draft_tokens": 1}},
    "cuda": {"default": {}, "drafts": {"draft_tokens": 1, "batch_invariant": True}},
}
# By NUMERICS_VERSION, then by libraries and processor. Changed bits need a new NUMERICS_VERSION and
# new digests; other libraries or processors need digests alone.
DIGESTS = {
    4: {  # attention of 64 heads on Hopper GPUs changed, which the embedded model does not have
        "torch 2.13, numpy 2.4, Intel": {
            "exact": "f0cd0c89f4bc745066de5cc178289989",
            "drafts": "b07c086d9e5cc2e3ac95d0b3f77424ae",
        },
        "torch 2.11, triton 3.6, tokenspeed-deepgemm 2.5.0.post20260629, NVIDIA H200": {
            "default": "47ae18029a981dbd74f5305168422041",
            "drafts": "0d98fdaa4b081580457c4e5c90596482",
        },
    },
}


def wanted(library: str, *others: str) -> dict[str, str]:
    """The digests of this version, with these libraries, optional packages and processor; skips the
    test if they are not known.
    """
    names = ("torch", library)
    versions = (f"{name} {'.'.join(version(name).split('.')[:2])}" for name in names)
    kind = ", ".join([*versions, *others])
    if kind not in DIGESTS[NUMERICS_VERSION]:
        pytest.skip(f"no digests of cached rows are known for {kind}")
    return DIGESTS[NUMERICS_VERSION][kind]


def check(found: dict[str, str], known: dict[str, str]) -> None:
    assert found == known, (
        "the bits of cached rows have changed: raise NUMERICS_VERSION in "
        f"engine/store/fingerprint.py, and keep the new digests: {json.dumps(found)}"
    )


def digest(device: str, **options: Any) -> str:
    """A digest of all blocks and states that a prefix store would save for one request."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = [{"prompt_token_ids": PROMPT}]
    with LLM(device=device, max_num_seqs=1, cache_memory_bytes=2**28, **options) as llm:
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
                        found.update(rows[group][number].cpu().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    device = sys.argv[1]
    print(json.dumps({name: digest(device, **some) for name, some in OPTIONS[device].items()}))
