"""The part of config.json that describes a DSpark draft head (paper: arXiv 2607.05147)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from finwhale.errors import CheckpointError
from finwhale.models.config_checks import check_layer_ids, check_positive, require

NUM_STAGES = 3
_OPTIONAL_SIZES = ("n_routed_experts", "num_experts_per_tok")
_FLAGS = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DsparkConfig:
    """Sizes of a DSpark draft head. In config.json, the first six names begin with `dspark_`.

    Attributes:
        block_size: g, the most drafts that one pass makes.
        noise_token_id: the token at the drafts' positions in the block.
        markov_rank: r, width of the Markov head.
        target_layer_ids: the layers of the model whose residual streams the head reads.
        n_routed_experts, num_experts_per_tok: sizes of the stages' experts; None: the model's.
        enable_confidence_head: the head estimates how likely each draft is accepted.
        confidence_head_with_markov: the confidence also reads the Markov embedding.
        sample_from_anchor: the row of the newest token predicts the first draft. Otherwise the
            block has one row more, and draft k comes from row k.
    """

    block_size: int
    noise_token_id: int
    markov_rank: int
    target_layer_ids: tuple[int, ...]
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True

    @property
    def num_rows(self) -> int:
        """Number of rows of a block."""
        return self.block_size + (not self.sample_from_anchor)

    @property
    def confidence_width(self) -> int:
        """Number of values of the Markov embedding that a confidence reads."""
        return self.markov_rank if self.confidence_head_with_markov else 0

    def describe(self) -> str:
        return (
            f"DSpark: blocks of {self.block_size} tokens in {NUM_STAGES} stages, Markov rank "
            f"{self.markov_rank}, reads layers {', '.join(map(str, self.target_layer_ids))}"
        )

    def experts_or(self, num_experts_per_tok: int, n_routed_experts: int) -> tuple[int, int]:
        """num_experts_per_tok and n_routed_experts of a stage, given those of the model."""
        own = self.num_experts_per_tok, self.n_routed_experts
        return own[0] or num_experts_per_tok, own[1] or n_routed_experts

    def check(self, num_layers: int, vocab_size: int) -> None:
        """Raise CheckpointError if a value is impossible in a model of these sizes."""
        for name in ("block_size", "markov_rank", *_OPTIONAL_SIZES):
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_SIZES:
                check_positive(f"dspark_{name}", value, int)
        require(
            _is_int(self.noise_token_id, 0) and self.noise_token_id < vocab_size,
            f"dspark_noise_token_id must be a token id below {vocab_size} (vocab_size), got "
            f"{self.noise_token_id!r}",
        )
        check_layer_ids("dspark_target_layer_ids", self.target_layer_ids, num_layers)
        for name in _FLAGS:
            value = getattr(self, name)
            require(type(value) is bool, f"{name} must be true or false, got {value!r}")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DsparkConfig":
        """Read the contents of a config.json. Raises CheckpointError: a key is missing."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            key = key_of(field.name)
            if raw.get(key) is not None:
                values[field.name] = raw[key]
            elif field.name not in (*_OPTIONAL_SIZES, *_FLAGS):
                raise CheckpointError(f"config.json describes a DSpark draft head without {key}")
        ids = values["target_layer_ids"]
        require(isinstance(ids, list), f"dspark_target_layer_ids must be a list, got {ids!r}")
        return cls(**values | {"target_layer_ids": tuple(ids)})

    def within(self, num_layers: int, cut_to: int) -> tuple[int, ...]:
        """The target layers after a model of `num_layers` layers is cut to its first `cut_to`.

        They keep their distance to the last layer. Raises CheckpointError: too few layers are left.
        """
        moved = tuple(i - num_layers + cut_to for i in self.target_layer_ids)
        if moved[0] < 0:
            raise CheckpointError(
                f"cannot cut to {cut_to} layers: the DSpark head reads "
                f"{num_layers - self.target_layer_ids[0]} layers from the last one on"
            )
        return moved


def key_of(field: str) -> str:
    """The key of a field in config.json."""
    return field if field in _FLAGS else f"dspark_{field}"


def _is_int(value: object, least: int) -> bool:
    return type(value) is int and value >= least
