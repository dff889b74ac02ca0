"""The embedded model's byte-level BPE tokenizer: DeepSeek-V4's special tokens and splitting rules, a vocabulary of 4,096.

It differs from DeepSeek's in one rule: digits stand alone, which makes sums learnable for a small model.
"""

# ruff: noqa: E501, RUF001  (DeepSeek's markers and splitting rule)

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
BOS, EOS, PAD = 0, 1, 2
CONTROL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
MARKERS = [
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜System｜>", "<｜latest_reminder｜>",
    "<｜image｜>", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>", "<｜polygon｜>", "<｜/polygon｜>",
]  # fmt: skip
SPLIT = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"""\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learns the merges from texts. CONTROL and MARKERS take the first ids, in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in CONTROL + MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json. As in DeepSeek's file, markers are added tokens but not special ones,
    so that decoding keeps them for the parser of the output."""
    values = json.loads(tokenizer.to_str())
    for token in values["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False))
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": CONTROL[BOS],
        "eos_token": CONTROL[EOS],
        "pad_token": CONTROL[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    )
