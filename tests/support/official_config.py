"""Writes a configuration as an official config.json."""

from dataclasses import asdict, fields
from typing import Any

from finwhale.models.config_checks import FIXED, FIXED_QUANTISATION
from finwhale.models.deepseek_v4.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    POSITIVE,
    POSITIVE_FLOATS,
    DeepseekV4Config,
)
from finwhale.models.dspark_config import DsparkConfig, key_of


def config_json(config: DeepseekV4Config) -> dict[str, Any]:
    """The contents of an official config.json, from which `config_of` makes an equal object."""
    eos = config.eos_token_ids
    out: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
    out.update({name: getattr(config, name) for name in (*POSITIVE, *POSITIVE_FLOATS)})
    out.update(FIXED)
    out.update(
        bos_token_id=config.bos_token_id,
        eos_token_id=eos[0] if len(eos) == 1 else list(eos),
        compress_ratios=list(config.compress_ratios),
        num_hash_layers=config.num_hash_layers,
        num_nextn_predict_layers=config.num_nextn_predict_layers,
        torch_dtype="bfloat16",
    )
    if config.dspark is not None:
        out.update(_dspark(config.dspark))
    if config.rope_scaling is not None:
        out["rope_scaling"] = {"type": "yarn", **asdict(config.rope_scaling)}
    if config.quantised:
        out["expert_dtype"] = config.expert_dtype
        block = list(config.weight_block_size)
        out["quantization_config"] = FIXED_QUANTISATION | {"weight_block_size": block}
        if config.scale_format == "ue8m0":
            out["quantization_config"]["scale_fmt"] = "ue8m0"
    return out


def _dspark(config: DsparkConfig) -> dict[str, Any]:
    values = {key_of(field.name): getattr(config, field.name) for field in fields(config)}
    values["dspark_target_layer_ids"] = list(config.target_layer_ids)
    return {key: value for key, value in values.items() if value is not None}
