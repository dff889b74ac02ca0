"""The supported models, by the `model_type` of config.json.

Configurations and chat dialects need no torch, and the server reads them without it. The rest is in
the model's architecture: `__all__` of `deepseek_v4/architecture.py` lists its functions.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finwhale.chat.deepseek_v41 import DeepseekV41
from finwhale.chat.dialect import Dialect
from finwhale.chat.effort import effort_ladder
from finwhale.errors import CheckpointError
from finwhale.models.config_checks import preset
from finwhale.models.deepseek_v4 import config_json as v4_json
from finwhale.models.deepseek_v4 import presets as v4_presets
from finwhale.models.deepseek_v4.config import MODEL_TYPE as DEEPSEEK_V4
from finwhale.models.deepseek_v41 import config_json as v41_json
from finwhale.models.deepseek_v41 import presets as v41_presets
from finwhale.models.deepseek_v41.config import MODEL_TYPE as DEEPSEEK_V41

if TYPE_CHECKING:
    from finwhale.models.protocol import ModelConfig

CONFIGS: Mapping[str, Callable[[Mapping[str, Any]], "ModelConfig"]] = {
    DEEPSEEK_V4: v4_json.config_of,
    DEEPSEEK_V41: v41_json.config_of,
}
DIALECTS: Mapping[str, Callable[[Path], Dialect]] = {
    DEEPSEEK_V4: lambda directory: Dialect(effort_ladder(directory)),
    DEEPSEEK_V41: lambda directory: DeepseekV41(),
}
ARCHITECTURES = {model_type: f"finwhale.models.{model_type}.architecture" for model_type in CONFIGS}
PUBLISHED: Mapping[str, "ModelConfig"] = {**v4_presets.PUBLISHED, **v41_presets.PUBLISHED}


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
    """A published configuration, such as "flash" or "v4.1-flash". Raises CheckpointError."""
    return preset(PUBLISHED, name)


def architecture_of(config: "ModelConfig") -> ModuleType:
    """The module with the functions of the model that a configuration describes."""
    return import_module(ARCHITECTURES[config.model_type])
