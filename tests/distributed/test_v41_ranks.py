"""Several ranks of DeepSeek-V4.1 compute what one rank computes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.engine.test_v41 import compressed, tokenizer_json
from tests.models.v41_reference import engram_primes
from tests.support.tiny_v41 import random_text, random_weights, tiny_config

from finwhale import LLM, FinwhaleError, SamplingParams
from finwhale.engine.ranks.ranks import first_rank

from .in_slices import add_in_slices
from .rank_engines import Ran
from .rank_processes import RankProcesses
from .test_equal_ranks import alone, assert_equal, given
from .test_lanes import told

pytestmark = pytest.mark.usefixtures("forked_ranks")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "cache_memory_bytes": 2**25,
}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that 4 ranks divide in whole rounding groups. bfloat16 represents its weights,
    as in the released one, so the CPU's GEMMs add in one order, whatever the width.
    """
    path, config = tmp_path_factory.mktemp("v41 ranks"), tiny_config()
    text = config["text_config"]
    text |= {
        "num_attention_heads": 8,
        "o_groups": 4,
        "moe_intermediate_size": 128,
        "max_position_embeddings": 512,
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(text["vocab_size"])))
    text["engram_compressed_vocab_size"] = max(compressed(path, text["vocab_size"])) + 1
    text["engram_num_embeddings"] = [sum(sizes) for sizes in engram_primes(text).values()]
    (path / "config.json").write_text(json.dumps(config))
    weights = {name: w.bfloat16().float() for name, w in random_weights(config, 0).items()}
    save_file(weights, path / "model.safetensors")
    return path


# Some draft after the second one is accepted.
PROMPTS = [random_text(length, seed) for length, seed in ((270, 1), (9, 6), (40, 3))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=6, ignore_eos=True, logprobs=2),
]


CASES = [
    (2, 4, "as-trained"),
    (4, 0, "exact"),
    pytest.param(4, 4, "as-trained", marks=pytest.mark.long),
    pytest.param(2, 0, "exact", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("size", "drafts", "activations"), CASES)
def test_ranks_compute_the_bits_of_one_rank(
    processes: RankProcesses, path: Path, size: int, drafts: int, activations: str
) -> None:
    """Residual streams, logits and tokens, with drafts and cached prefixes."""
    case = given(path, activations, draft_tokens=drafts), PROMPTS, PARAMS
    ran = assert_equal(processes, size, *case, rounds=2)
    assert any(cached for _, _, cached in ran.outputs)
    assert drafts == 0 or ran.accepted
    if activations == "exact":
        one: Ran = alone(1, "generate", given(path, activations), PROMPTS, PARAMS, rounds=2)
        assert ran.outputs == one.outputs


def test_every_lane_computes_the_bits_of_one_rank(path: Path) -> None:
    """Data-parallel ranks that draft. The second time, one has no request, and the other one
    resumes after a cached prefix.
    """
    options: dict[str, Any] = OPTIONS | {"activations": "as-trained"}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]

    def run(llm: LLM) -> list[Any]:
        first = told(llm.generate(prompts, PARAMS))
        again = llm.generate(prompts[:1], PARAMS[:1])
        assert again[0].num_cached_tokens == 256
        return [first, told(again)]

    with LLM(path, data_parallel_size=2, draft_tokens=4, **options) as lanes:
        found = run(lanes)
        assert all(lane.scheduler.counts.prompt_tokens for lane in lanes._engine.lanes)
    with LLM(path, **options) as one:
        model: Any = first_rank(one._engine.executor).runner.model
        add_in_slices(model, 2, whole_from=0)
        assert run(one) == found


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_parallel_size": 8}, "o_groups 4 is not a multiple of 8"),
        ({"tensor_parallel_size": 2, "whole_attention": True}, "leave out whole_attention"),
    ],
)
def test_what_ranks_cannot_do_is_one_line(path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(FinwhaleError, match=match):
        LLM(path, **OPTIONS, **options)
