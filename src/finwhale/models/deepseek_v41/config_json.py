"""Reads config.json: the model is in its text_config.

`vision_config` and `image_token_id` have no effect, because only text is served. Source: the
config.json of deepseek-ai/DeepSeek-V4.1-Flash.
"""

from collections.abc import Mapping
from typing import Any

from finwhale.errors import CheckpointError
from finwhale.models.config_checks import (
    FIXED,
    FIXED_QUANTISATION,
    check_architecture,
    check_same,
    get,
    require,
    shown,
    token_ids,
    typed,
)
from finwhale.models.deepseek_v41.config import (
    ARCHITECTURE,
    GROUP,
    MODEL_TYPE,
    POSITIVE,
    POSITIVE_FLOATS,
    DeepseekV41Config,
)
from finwhale.models.deepseek_v41.engram_config import EngramConfig
from finwhale.models.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.rope_config import YarnScaling

FIXED_BLOCKS: dict[str, object] = {
    **FIXED_QUANTISATION,
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
    "weight_block_size": [GROUP, GROUP],
}


def config_of(raw: Mapping[str, Any]) -> DeepseekV41Config:
    """Read the contents of a config.json.

    Raises:
        CheckpointError: the architecture or a value is not supported, or a field is missing.
    """
    check_architecture(raw, MODEL_TYPE, ARCHITECTURE)
    text, quantisation = typed(raw, "text_config", dict), typed(raw, "quantization_config", dict)
    if text is None:
        raise CheckpointError("config.json has no text_config")
    check_same(raw, {"tie_word_embeddings": False})
    check_same(text, FIXED)
    if quantisation:
        check_same(quantisation, FIXED_BLOCKS, "quantization_config.")
    candidates = get(text, "candidate_source_layer_id")
    return DeepseekV41Config(
        **{name: get(text, name) for name in (*POSITIVE, *POSITIVE_FLOATS)},
        compress_ratios=_numbers(text, "compress_ratios"),
        kv_source_layer_ids=_numbers(text, "kv_source_layer_ids"),
        index_source_layer_ids=_numbers(text, "index_source_layer_ids"),
        candidate_source_layer_id=None if candidates == -1 else candidates,
        rope_scaling=YarnScaling.from_dict(typed(text, "rope_scaling", dict) or {}),
        engram=EngramConfig.from_dict(text),
        dspark=_draft_head(text),
        **token_ids(raw),
        quantised=bool(quantisation),
    )


def _numbers(text: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    get(text, name)
    return tuple(typed(text, name, list))


def _draft_head(text: Mapping[str, Any]) -> DsparkConfig | None:
    stages = get(text, "num_nextn_predict_layers")
    require(
        type(stages) is int and stages in (0, NUM_STAGES),
        f"num_nextn_predict_layers must be 0 or {NUM_STAGES}, got {shown(stages)}",
    )
    return DsparkConfig.from_dict(text) if stages else None
