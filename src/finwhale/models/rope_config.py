"""The part of config.json that describes YaRN, for the rope of compressed layers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from finwhale.models.config_checks import check_positive, get, require


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN parameters for the rope of compressed layers. The model has no magnitude factor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_positive(f"rope_scaling {field.name}", getattr(self, field.name), int, float)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "YarnScaling | None":
        """Read rope_scaling; None: plain rope. Raises CheckpointError."""
        kind = raw.get("rope_type", raw.get("type", "default"))
        require(kind in ("default", "yarn"), f'rope scaling must be of type "yarn", got {kind!r}')
        factor = raw.get("attention_factor")
        require(
            factor in (None, 1),
            f"an attention_factor of rope scaling is not supported, got {factor!r}",
        )
        if kind == "default":
            return None
        return cls(
            factor=get(raw, "factor"),
            original_max_position_embeddings=get(raw, "original_max_position_embeddings"),
            beta_fast=raw.get("beta_fast", 32),
            beta_slow=raw.get("beta_slow", 1),
        )
