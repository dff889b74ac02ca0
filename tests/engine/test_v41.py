"""DeepSeek-V4.1 in the engine, on a CPU."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.models.oracle import in_float64
from tests.models.v41_reference import forward, text_config
from tests.support.tiny_v41 import random_text, random_weights, tiny_config
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.chat.tokenizer import Tokenizer
from finwhale.cli.main import main
from finwhale.demo import V41_PATH
from finwhale.engine.ranks.ranks import first_rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v41.engram_hash import compress_ids
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.weights.tree import leaves

BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def tokenizer_json(size: int) -> dict[str, Any]:
    """Single letters of which some differ by case only, and two control tokens."""
    letters = [chr(c) for c in range(0x21, 0x7F)][: size - 2]
    return {
        "model": {"type": "BPE", "vocab": {t: i + 2 for i, t in enumerate(letters)}, "merges": []},
        "decoder": {"type": "ByteLevel"} | BYTES,
        "pre_tokenizer": {"type": "ByteLevel"} | BYTES,
        "added_tokens": [
            {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for i, text in enumerate(("<s>", "</s>"))
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in plain float32."""
    folder, config = tmp_path_factory.mktemp("v41"), tiny_config()
    text = config["text_config"]
    text["max_position_embeddings"] = 1024
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(text["vocab_size"])))
    text["engram_compressed_vocab_size"] = max(compressed(folder, text["vocab_size"])) + 1
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, 0), folder / "model.safetensors")
    return folder


def compressed(path: Path, size: int) -> list[int]:
    tokenizer = Tokenizer.open(path)
    found: list[int] = compress_ids(tokenizer.token_text, tokenizer.spelling, size).tolist()
    return found


def check_greedy(path: Path, prompt: list[int], output: list[int]) -> None:
    """Check that each output token has the largest logit by the formulas, in float64."""
    config = json.loads((path / "config.json").read_text())
    weights = in_float64(random_weights(config, 0))
    numbers = compressed(path, text_config(config)["vocab_size"])
    logits = forward(weights, config, [*prompt, *output[:-1]], numbers).logits
    assert logits[len(prompt) - 1 :].argmax(1).tolist() == output


@pytest.mark.parametrize(
    "options, match",
    [
        ({"compile": True}, "for DeepSeek-V4 alone"),
        ({"enable_return_routed_experts": True}, "does not return routed experts"),
        ({"tensor_parallel_size": 2}, "ranks cannot divide"),
    ],
)
def test_what_it_cannot_do_is_one_line(path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(FinwhaleError, match=match):
        LLM(path, device="cpu", cache_memory_bytes=2**26, max_model_len=400, **options)


@pytest.mark.parametrize("drafts", [0, 4])
def test_greedy_tokens_are_those_of_the_formulas(path: Path, drafts: int) -> None:
    """With exact prefill; test_v41_replay.py has the default."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [random_text(length, length) for length in (300, 9, 40)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    options: dict[str, Any] = {"activations": "exact", "draft_tokens": drafts, "max_model_len": 400}
    options |= {"device": "cpu", "exact_prefill": True}
    with LLM(path, cache_memory_bytes=2**26, **options) as llm:
        first = [list(r.outputs[0].token_ids) for r in llm.generate(given, params)]
        for prompt, output in zip(prompts[1:], first[1:], strict=True):
            check_greedy(path, prompt, output)
        again = llm.generate(given, params)
        assert [list(r.outputs[0].token_ids) for r in again] == first
        assert again[0].num_cached_tokens == 256  # a block: with windows, entries, keys and ids


@pytest.mark.parametrize("exact", [False, True])
def test_embedded_model(exact: bool) -> None:
    """Its tokens are the same with drafts and in chunks and, if prefill is exact, from a cached
    prefix.
    """
    assert sum(file.stat().st_size for file in V41_PATH.iterdir()) <= 2_000_000
    text = "Once upon a time, there was a whale. " * 30  # more entries than are selected
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 2048, "exact_prefill": exact}
    for others in ({}, {"draft_tokens": 5, "max_num_batched_tokens": 64}):
        with LLM("demo-v41", **options, **others) as llm:
            for _ in range(2):
                (result,) = llm.generate([text], params)
                found.append(tuple(result.outputs[0].token_ids))
            assert result.num_cached_tokens >= 256
    assert len(set(found)) == 1 if exact else len({*found[::2]}) == len({*found[1::2]}) == 1
    assert len(set(found[0])) > 8  # no constant text


@pytest.mark.parametrize("ranks", [(), ("--tensor-parallel-size", "2")], ids=["one", "two"])
def test_generate_command(ranks: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/v41.md, and two ranks as users start them."""
    given = ["--draft-tokens", "5", "--stats", "--device", "cpu", "--max-tokens", "8", *ranks]
    given.append("--ignore-eos")
    assert main(["generate", "--model", "demo-v41", *given, "Once upon a time"]) == 0
    found = capsys.readouterr()
    assert found.out.strip() and "8 tokens" in found.err


def test_sequences_run_together_in_the_least_cache() -> None:
    """The cache holds max_num_seqs sequences of max_model_len, so none waits."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("demo-v41", device="cpu", max_model_len=94, max_num_seqs=3) as llm:
        given = [{"prompt_token_ids": random_text(60, seed)} for seed in range(3)]
        llm.generate(given, params)
        assert llm.metrics().steps <= 12  # 8, a prefill, and what the engine runs ahead


def test_gemms_of_a_library_are_run_ahead() -> None:
    """Every weight's shape runs with all numbers of rows at which cuBLAS may change its kernel."""
    model = first_rank(
        LLM(V41_PATH, draft_tokens=5, max_model_len=300)._engine.executor
    ).runner.model
    assert isinstance(model, DeepseekV41)
    ran: dict[torch.Size, list[int]] = defaultdict(list)

    def watched(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watching(x: Tensor, w: LinearWeight | ExpertWeight, *more: Any) -> Tensor:
            ran[w.weight.shape if isinstance(w, LinearWeight) else w.w13.shape].append(len(x))
            return run(x, w, *more)

        return watching

    names = "linear", "grouped_linear", "swiglu_mlp"
    model.ops = replace(model.ops, **{name: watched(getattr(model.ops, name)) for name in names})
    with torch.inference_mode():
        model.run_library_gemms(9, 40)
    found = [part for part in leaves(model.weights, LinearWeight) if isinstance(part, LinearWeight)]
    shapes = {weight.weight.shape for weight in found}
    assert ran.keys() == shapes | {model.weights.layers[0].ffn.shared_experts.w13.shape}
    few, many = [1, 8, 9], [1, 8, 9, 16, 17, 24, 25, 32, 33, 40]
    vocabulary = model.config.vocab_size  # rows of the LM head and of DSpark's Markov head
    assert all(rows == (few if shape[0] == vocabulary else many) for shape, rows in ran.items())
