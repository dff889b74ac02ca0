"""The part of config.json that describes Engram, the memory that n-grams of tokens address."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from finwhale.models.config_checks import check_layer_ids, check_positive, get, require, typed

_SIZES = ("vocab_size", "n_heads", "head_dim", "compressed_vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """Sizes of Engram. In config.json, the names begin with `engram_`.

    Attributes:
        layer_ids: the layers that read the memory before they compute.
        num_embeddings: rows of each layer's table, the sum of its hash functions' primes.
        max_ngram_size: n-grams of 2 to so many tokens address the memory.
        vocab_size: each hash function's prime is at least so large.
        n_heads: hash functions for each size of n-grams.
        head_dim: values in a row.
        pad_token_id: the token before the first one.
        compressed_vocab_size: number of tokens that differ after normalisation of their text.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_rows(self) -> int:
        """Number of rows that a token reads in each layer."""
        return (self.max_ngram_size - 1) * self.n_heads

    def check(self, num_layers: int, vocab_size: int) -> None:
        """Check the values against the model's sizes. Raises CheckpointError."""
        check_layer_ids("engram_layer_ids", self.layer_ids, num_layers)
        for name in _SIZES:
            check_positive(f"engram_{name}", getattr(self, name), int)
        check_positive("engram_max_ngram_size", self.max_ngram_size, int)
        require(self.max_ngram_size >= 2, "engram_max_ngram_size must be at least 2, got 1")
        for rows in self.num_embeddings:
            check_positive("engram_num_embeddings", rows, int)
        tables, layers = len(self.num_embeddings), len(self.layer_ids)
        require(
            tables == layers,
            f"engram_num_embeddings has {tables} entries, wanted {layers}: one for each layer of "
            "engram_layer_ids",
        )
        pad = self.pad_token_id
        require(
            type(pad) is int and 0 <= pad < vocab_size,
            f"engram_pad_token_id must be a token id below {vocab_size} (vocab_size), got {pad!r}",
        )
        require(
            self.compressed_vocab_size <= vocab_size,
            f"engram_compressed_vocab_size {self.compressed_vocab_size} is more than vocab_size "
            f"{vocab_size}",
        )
        require(
            self.head_dim % 32 == 0,
            f"engram_head_dim {self.head_dim} must be a multiple of the FP8 block 32",
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "EngramConfig | None":
        """Read a text_config; None: engram_layer_ids is empty. Raises CheckpointError."""
        values = {field.name: get(raw, f"engram_{field.name}") for field in fields(cls)}
        for name in ("layer_ids", "num_embeddings"):
            values[name] = tuple(typed(raw, f"engram_{name}", list))
        return cls(**values) if values["layer_ids"] else None

    def within(self, num_layers: int) -> "EngramConfig | None":
        """The part of the first layers; None: none of them reads the memory."""
        count = sum(layer < num_layers for layer in self.layer_ids)
        first = slice(0, count)
        rows = self.num_embeddings[first]
        return replace(self, layer_ids=self.layer_ids[first], num_embeddings=rows) if rows else None
