"""Texts on which nemo-automodel's DeepSeek-V4.1 and the formulas are compared.

data/v41_nemo.safetensors is what nemo-automodel 0.7.0 computed, in float32 with torch 2.13.0 and
transformers 5.23.0 (tests/long/v41_nemo.py). It has these tensors of each case:

    logits             [T,V]
    selections         [layers with entries, T, index_topk]: the numbers of entries, filled with -1
    features           [anchor, 3D]: what DSpark reads of the tokens before the block
    draft_hidden       [G,D], after the last norm
    draft_logits       [G,V]
    draft_confidences  [G]
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.support.tiny_v41 import compressed_ids, random_text, random_weights, tiny_config
from torch import Tensor

from .oracle import in_float64, relative_error
from .v41_reference import Output, Roundings, draft, forward, rms_norm, text_config

RECORD = Path(__file__).parent / "data/v41_nemo.safetensors"
SEED = 0
# The largest difference seen is 2e-6: the order of nemo-automodel's float32 sums.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One text.

    Attributes:
        seed: of its token ids.
        anchor: the token that the drafted block begins with.
        image: which tokens belong to an image span; none if empty.
    """

    name: str
    seed: int
    length: int
    anchor: int
    roundings: Roundings = Roundings.NONE
    image: tuple[bool, ...] = ()


CASES = (
    Case("long", seed=1, length=61, anchor=30),
    Case("short", seed=2, length=13, anchor=3),
    Case(
        "image",
        seed=3,
        length=30,
        anchor=20,
        image=tuple(9 <= i < 14 or i == 20 for i in range(30)),
    ),
    # In most texts, some value lies so near the middle of two FP4 or E4M3 values that the last bits
    # decide. In these, 15 random changes of the weights by 3e-7 moved no value to another one.
    Case("caches", seed=5, length=18, anchor=10, roundings=Roundings.CACHES),
    Case("caches too", seed=12, length=18, anchor=10, roundings=Roundings.CACHES),
    Case("trained", seed=42, length=14, anchor=5, roundings=Roundings.ALL),
    Case("trained too", seed=46, length=14, anchor=5, roundings=Roundings.ALL),
)


def text_of(case: Case) -> list[int]:
    return random_text(case.length, case.seed)


def check(case: Case, record: Mapping[str, Tensor]) -> None:
    """The formulas give what a record says, and take every discrete choice as it does."""
    config = text_config(tiny_config())
    weights = in_float64(random_weights(tiny_config(), SEED))
    ids, compressed = text_of(case), compressed_ids()
    found = forward(weights, config, ids, compressed, case.roundings, case.image or None)
    wanted = {
        name.removeprefix(f"{case.name}."): value
        for name, value in record.items()
        if name.startswith(f"{case.name}.")
    }
    assert relative_error(found.logits, wanted["logits"]) < TOLERANCE
    assert found.logits.argmax(1).tolist() == wanted["logits"].argmax(1).tolist()
    assert selected(found) == [
        [[entry for entry in row if entry >= 0] for row in layer]
        for layer in wanted["selections"].tolist()
    ]
    features = found.features[: case.anchor]
    assert relative_error(features, wanted["features"]) < TOLERANCE

    newest, *drafts = ids[case.anchor : case.anchor + config["dspark_block_size"] + 1]
    block = draft(weights, config, features, newest, drafts, case.roundings)
    normed = rms_norm(block.hidden, weights["mtp.2.norm.weight"], config)
    assert relative_error(normed, wanted["draft_hidden"]) < TOLERANCE
    assert relative_error(block.logits, wanted["draft_logits"]) < TOLERANCE
    assert block.logits.argmax(1).tolist() == wanted["draft_logits"].argmax(1).tolist()
    # The authors' confidence head reads the collapsed hidden values as they are. nemo-automodel's
    # reads them after the norm, as its training code says on purpose.
    proj = weights["mtp.2.confidence_head.proj.weight"][0, : normed.shape[1]]
    as_nemo = block.confidences + (normed - block.hidden) @ proj
    assert relative_error(as_nemo, wanted["draft_confidences"]) < TOLERANCE


def selected(found: Output) -> list[list[list[int]]]:
    """The numbers of the entries that each token of each layer with entries attends to."""
    layers = [layer for layer in found.selections if layer is not None]
    return [[torch.nonzero(row)[:, 0].tolist() for row in layer] for layer in layers]
