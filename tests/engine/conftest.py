"""Small models with every kind of layer, for thousands of steps bit for bit."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forked_ranks import forked_ranks
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint

__all__ = ["forked_ranks"]
# Seed, window, activations. Only the CPU table promises bits, so the references are not here.
MODELS = ((3, 13, "exact"), (4, 128, "as-trained"))


def in_core(of_core: int) -> pytest.MarkDecorator:
    """One of the two models; the other one runs with the long tests."""
    models = [
        pytest.param(model, id=model[2], marks=[] if number == of_core else pytest.mark.long)
        for number, model in enumerate(MODELS)
    ]
    return pytest.mark.parametrize("small", models, indirect=True)


EXACT_IN_CORE, AS_TRAINED_IN_CORE = in_core(0), in_core(1)


@pytest.fixture(scope="module", params=MODELS, ids=["exact", "as-trained"])
def small(request: pytest.FixtureRequest) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A checkpoint and options of an LLM that runs it; on one thread."""
    seed, window, activations = request.param
    config = tiny_config(seed) | {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "o_groups": 2,
        "head_dim": 48,
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "compress_ratios": [128, 4, 4, 0],
        "index_topk": 16,
        "sliding_window": window,
        "max_position_embeddings": 2048,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        write_plain_checkpoint(path, config, random_weights(config, seed))
        yield (
            path,
            {
                "device": "cpu",
                "activations": activations,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 2048,
            },
        )
    torch.set_num_threads(threads)
