"""The supported models: for each `model_type` of config.json, a module with the model's functions.

`__all__` of `deepseek_v4/architecture.py` lists the functions that every such module has.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4 import architecture as deepseek_v4
from finwhale.models.deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4_TYPE
from finwhale.models.protocol import ModelConfig

ARCHITECTURES: Mapping[str, ModuleType] = {DEEPSEEK_V4_TYPE: deepseek_v4}


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
    config: ModelConfig = ARCHITECTURES[model_type].read_config(raw)
    return config


def architecture_of(config: ModelConfig) -> ModuleType:
    """The module with the functions of the model that a configuration describes."""
    return ARCHITECTURES[config.model_type]
