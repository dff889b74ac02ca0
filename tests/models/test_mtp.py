"""The MTP layer against the transcription: transformers has none."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM
from finwhale.config import Activations
from finwhale.engine.ranks.ranks import first_rank

from . import transcription
from .oracle import assert_texts_agree, in_float64, relative_error, single_threaded

TOLERANCE = 1e-5


@torch.inference_mode()
def mtp_streams(stepper: Stepper, text: list[int], cuts: Sequence[int] = ()) -> Tensor:
    """The MTP layer's streams for every token of a text but the last, read in chunks."""
    runner = stepper.runner
    layer = runner.model.draft_head
    assert layer is not None
    sequence = stepper.sequence(text[:-1])
    out = []
    for start, end in pairwise(sorted({0, *cuts, len(text) - 1})):
        (streams,) = stepper.step([(sequence, end - start)])
        following = torch.tensor(text[start + 1 : end + 1])
        out.append(layer(stepper.inputs, streams, following, runner.cache, runner.segments))
    stepper.release(sequence)
    return torch.cat(out)


@torch.inference_mode()
def mtp_logits(stepper: Stepper, streams: Tensor) -> Tensor:
    layer = stepper.runner.model.draft_head
    assert layer is not None
    return torch.cat([layer.compute_logits(row) for row in torch.split(streams, 1)])


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
@pytest.mark.parametrize(
    "seed", [0, 16, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 3, 7, 14))]
)
def test_logits(tmp_path: Path, seed: int, reference: bool) -> None:
    """Texts shorter and longer than the window, whole and in chunks."""
    config = tiny_config(seed)
    weights = random_weights(config, seed)
    write_plain_checkpoint(tmp_path, config, weights)
    draw = random.Random(seed)
    with single_threaded():
        llm = LLM(tmp_path, device="cpu", dtype="float32", activations="exact", reference=reference)
        stepper = Stepper(llm._engine)
        for length in (2, 6, 150):
            text = [draw.randrange(config["vocab_size"]) for _ in range(length)]
            wanted = transcription.mtp_logits(weights, config, text)
            whole = mtp_streams(stepper, text)
            assert relative_error(mtp_logits(stepper, whole), wanted) < TOLERANCE
            chunked = mtp_streams(stepper, text, range(1, length - 1, 3))
            if reference:
                assert relative_error(chunked, whole) < TOLERANCE
            else:
                assert torch.equal(chunked, whole)


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.long)])
def test_rounds_as_trained(tmp_path: Path, seed: int) -> None:
    """e_proj and h_proj are FP8 too. Why not every token agrees: see test_as_trained.py."""
    config = tiny_config(seed)
    weights = random_weights(config, seed)
    write_plain_checkpoint(tmp_path, config, weights)
    draw = random.Random(seed)
    mode: Activations = "as-trained"
    wide, errors = in_float64(weights), list[float]()
    with single_threaded():
        stepper = Stepper(LLM(tmp_path, device="cpu", dtype="float32", activations=mode)._engine)
        for _ in range(16):
            text = [draw.randrange(config["vocab_size"]) for _ in range(8)]
            found = mtp_logits(stepper, mtp_streams(stepper, text))
            wanted = transcription.mtp_logits(wide, config | {"as_trained": True}, text)
            errors += ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()
            exact = transcription.mtp_logits(weights, config, text)
            assert relative_error(found, exact) > 1e-2
    assert_texts_agree(errors, 7)


def test_without_an_mtp_layer(tmp_path: Path) -> None:
    """A checkpoint without one loads, and the model is the same."""
    config = tiny_config(0)
    weights = random_weights(config, 0)
    write_plain_checkpoint(tmp_path / "with", config, weights)
    config |= {"num_nextn_predict_layers": 0, "compress_ratios": config["compress_ratios"][:-1]}
    plain = {name: w for name, w in weights.items() if not name.startswith("mtp.")}
    write_plain_checkpoint(tmp_path / "without", config, plain)
    with single_threaded():
        streams = []
        for name in ("with", "without"):
            llm = LLM(tmp_path / name, device="cpu", dtype="float32", activations="exact")
            streams.append(Stepper(llm._engine).read([4, 2, 9]))
    assert first_rank(llm._engine.executor).runner.model.draft_head is None
    assert torch.equal(*streams)
