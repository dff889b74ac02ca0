"""The roundings that the model was trained with, against the transcription's.

A last bit of a float32 sum can decide whether a value rounds up or down, and what follows from it
is as far from the other result as two roundings are: so two right implementations agree to 1e-6
until the first such value, and only roughly afterwards (oracle.assert_texts_agree). A rounding too
many, too few or in another place spares no text, and one that is wrong in a tenth of the tokens
spares few.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM
from finwhale.config import Activations

from . import transcription
from .oracle import assert_texts_agree, in_float64, single_threaded


@dataclass
class Comparison:
    """Relative error of each token's logits, and whether the most likely token is the same."""

    errors: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self.errors += ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()
        self.same_top += (found.argmax(1) == wanted.argmax(1)).tolist()


def compare(path: Path, seed: int, lengths: list[int], reference: bool) -> list[Comparison]:
    """As trained against the transcription as trained, and against the transcription exact."""
    config = tiny_config(seed)
    return compare_weights(path, config, random_weights(config, seed), lengths, reference)


def compare_weights(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    lengths: list[int],
    reference: bool,
) -> list[Comparison]:
    write_plain_checkpoint(path, config, weights)
    mode: Activations = "as-trained"
    llm = LLM(path, device="cpu", dtype="float32", activations=mode, reference=reference)
    stepper, draw = Stepper(llm._engine), random.Random(sum(lengths))
    trained, exact = Comparison(), Comparison()
    # The formulas in float64: which values round otherwise then depends on this engine alone.
    wide = in_float64(weights)
    for length in lengths:
        text = [draw.randrange(config["vocab_size"]) for _ in range(length)]
        found = stepper.logits(stepper.read(text))
        wanted, _ = transcription.forward(wide, config | {"as_trained": True}, text)
        unrounded, _ = transcription.forward(wide, config, text)
        trained.add(found, wanted)
        exact.add(found, unrounded)
    return [trained, exact]


def seeds(count: int, core: int = 1) -> list[Any]:
    """All but the first `core` are marked long."""
    first = range(core)
    return [*first, *(pytest.param(n, marks=pytest.mark.long) for n in range(len(first), count))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded(), torch.inference_mode():
        yield


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize("seed", seeds(8, 2))
def test_short_texts(tmp_path: Path, seed: int, reference: bool) -> None:
    trained, exact = compare(tmp_path, seed, [10] * 16, reference)
    assert_texts_agree(trained.errors, 10)
    assert sum(trained.same_top) / len(trained.same_top) > 0.95
    # Rounding is a thousand times what the test can see: it did happen, in every token.
    assert min(exact.errors) > 1e-2


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("seed", seeds(4, 2))
def test_entries_and_the_indexer(tmp_path: Path, seed: int, ratio: int, reference: bool) -> None:
    """A long text in one layer with a short window: a value that rounds otherwise stays local.

    There are more entries of 4 than index_topk. An indexer that does not round its queries or its
    keys selects others for a fifth of the tokens or more.
    """
    config = tiny_config(seed) | {
        "num_hidden_layers": 1,
        "compress_ratios": [ratio, 0],
        "num_hash_layers": seed % 2,
        "sliding_window": 8,
        "index_topk": 16,
    }
    weights = random_weights(config, seed)
    trained, _ = compare_weights(tmp_path, config, weights, [290], reference)
    late = trained.errors[128:]
    assert sum(error < 1e-5 for error in late) / len(late) > 0.9, late


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
def test_groups_of_64_in_the_cache(tmp_path: Path, reference: bool) -> None:
    """Scales are powers of two: their groups show only where magnitudes lie far apart.

    The first 64 values of every cached row are a thousand times the others, and wo_a takes that
    back: with one scale for both, most of the others would round to a few steps, or to nothing.
    """
    config = tiny_config(0) | {"head_dim": 160, "qk_rope_head_dim": 16}
    weights = random_weights(config, 0)
    for name, weight in weights.items():
        if name.endswith(("attn.kv_norm.weight", "attn.compressor.norm.weight")):
            weight[:64] *= 1024
        if name.endswith("wo_a.weight"):
            weight.unflatten(1, (-1, 160))[..., :64] /= 1024
    trained, exact = compare_weights(tmp_path, config, weights, [10] * 16, reference)
    assert_texts_agree(trained.errors, 10)
    assert min(exact.errors) > 1e-2


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize("seed", seeds(3))
def test_wo_a_of_inputs_that_are_not_rounded(tmp_path: Path, seed: int, reference: bool) -> None:
    """wo_a_input "bf16" leaves out one rounding in every layer, and no other."""
    config = tiny_config(seed)
    weights = random_weights(config, seed)
    write_plain_checkpoint(tmp_path, config, weights)
    llm = LLM(tmp_path, device="cpu", dtype="float32", wo_a_input="bf16", reference=reference)
    stepper, draw, wide = Stepper(llm._engine), random.Random(seed), in_float64(weights)
    found, others = Comparison(), Comparison()
    for _ in range(16):
        text = [draw.randrange(config["vocab_size"]) for _ in range(10)]
        logits = stepper.logits(stepper.read(text))
        for wo_a_input, comparison in (("bf16", found), ("fp8", others)):
            options = {"as_trained": True, "wo_a_input": wo_a_input}
            comparison.add(logits, transcription.forward(wide, config | options, text)[0])
    assert_texts_agree(found.errors, 10)
    # The option does what it says, in every token.
    assert min(others.errors) > 1e-3
