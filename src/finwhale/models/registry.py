"""The registry of supported models, by the `model_type` of config.json."""

from collections.abc import Mapping
from typing import Any

from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.architecture import DEEPSEEK_V4
from finwhale.models.deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4_TYPE
from finwhale.models.protocol import Architecture, ModelConfig

ARCHITECTURES: Mapping[str, Architecture] = {DEEPSEEK_V4_TYPE: DEEPSEEK_V4}


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a configuration from the contents of a config.json.

    Raises:
        CheckpointError: the model type is not supported, or a value is missing or unsupported.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        served = ", ".join(map(repr, sorted(ARCHITECTURES)))
        raise CheckpointError(
            f"config.json describes another model: model_type {model_type!r}, architectures "
            f"{raw.get('architectures')!r}; Finwhale serves model_type {served} only"
        )
    return ARCHITECTURES[model_type].read_config(raw)


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture that a configuration belongs to."""
    return ARCHITECTURES[config.model_type]
