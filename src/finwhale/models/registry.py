"""The supported models, by the `model_type` of config.json.

Configurations and chat dialects need no torch, and the server reads them without it. The rest is in
the model's architecture: `__all__` of `deepseek_v4/architecture.py` lists its functions.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finwhale.chat.effort import EffortLadder, effort_ladder
from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.presets import published

if TYPE_CHECKING:
    from finwhale.models.protocol import ModelConfig

CONFIGS: Mapping[str, Callable[[Mapping[str, Any]], "ModelConfig"]] = {DEEPSEEK_V4: config_of}
DIALECTS: Mapping[str, Callable[[Path], EffortLadder]] = {DEEPSEEK_V4: effort_ladder}
ARCHITECTURES = {DEEPSEEK_V4: "finwhale.models.deepseek_v4.architecture"}


def parse_config(raw: Mapping[str, Any]) -> "ModelConfig":
    """Read a configuration from the contents of a config.json.

    Raises:
        CheckpointError: the model type is not supported, or a value is missing or unsupported.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIGS:
        served = ", ".join(map(repr, sorted(CONFIGS)))
        raise CheckpointError(
            f"config.json describes another model: model_type {model_type!r}, architectures "
            f"{raw.get('architectures')!r}; Finwhale serves model_type {served} only"
        )
    return CONFIGS[model_type](raw)


def published_config(name: str) -> "ModelConfig":
    """The published "flash", "flash-0731", "pro" or "pro-0813". Raises CheckpointError."""
    return published(name)


def chat_dialect(config: "ModelConfig", directory: Path) -> EffortLadder:
    """The chat dialect of the checkpoint in a directory. Raises CheckpointError."""
    return DIALECTS[config.model_type](directory)


def architecture_of(config: "ModelConfig") -> ModuleType:
    """The module with the functions of the model that a configuration describes."""
    return import_module(ARCHITECTURES[config.model_type])
