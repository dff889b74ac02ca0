"""The roundings that the model was trained with, against the transcription's.

A last bit of a float32 sum can decide whether a value rounds up or down, and what follows from it
is as far from the other result as two roundings are: so two right implementations agree to 1e-6
until the first such value, and only roughly afterwards. A text of ten tokens mostly meets none;
a rounding too many, too few or in another place spares no text.
"""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finwhale import LLM
from finwhale.config import Activations
from finwhale.testing.stepping import Stepper
from finwhale.testing.tiny import random_weights, tiny_config, write_plain_checkpoint

from . import transcription
from .oracle import single_threaded

# Long texts of these seeds meet few values that lie on a boundary, or none.
LONG_SEEDS = (2, 6, 7, 15, 17)


@dataclass
class Comparison:
    """Relative error of each token's logits, and whether the most likely token is the same."""

    errors: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self.errors += ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()
        self.same_top += (found.argmax(1) == wanted.argmax(1)).tolist()

    @property
    def median(self) -> float:
        return statistics.median(self.errors)


def compare(path: Path, seed: int, lengths: list[int], reference: bool) -> list[Comparison]:
    """As trained against the transcription as trained, and against the transcription exact."""
    config = tiny_config(seed)
    weights = random_weights(config, seed)
    write_plain_checkpoint(path, config, weights)
    mode: Activations = "as-trained"
    llm = LLM(path, device="cpu", dtype="float32", activations=mode, reference=reference)
    stepper, draw = Stepper(llm.engine), random.Random(seed)
    trained, exact = Comparison(), Comparison()
    for length in lengths:
        text = [draw.randrange(config["vocab_size"]) for _ in range(length)]
        found = stepper.logits(stepper.read(text))
        wanted, _ = transcription.forward(weights, config | {"as_trained": True}, text)
        unrounded, _ = transcription.forward(weights, config, text)
        trained.add(found, wanted)
        exact.add(found, unrounded)
    return [trained, exact]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded(), torch.inference_mode():
        yield


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize("seed", range(8))
def test_short_texts(tmp_path: Path, seed: int, reference: bool) -> None:
    trained, exact = compare(tmp_path, seed, [10] * 16, reference)
    agreeing = sum(error < 1e-5 for error in trained.errors) / len(trained.errors)
    assert agreeing > 0.5, trained.errors
    assert sum(trained.same_top) / len(trained.same_top) > 0.9
    # Rounding is a thousand times what the test can see: it did happen, in every token.
    assert min(exact.errors) > 1e-2


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
def test_texts_that_reach_the_entries_of_128(tmp_path: Path, reference: bool) -> None:
    medians = []
    for seed in LONG_SEEDS:
        trained, _ = compare(tmp_path / str(seed), seed, [150], reference)
        medians.append(statistics.median(trained.errors[128:]))
    assert sum(median < 1e-5 for median in medians) >= 3, medians
