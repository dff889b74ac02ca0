"""Reads config.json, in the official form or in transformers'.

Sources: the config.json files of deepseek-ai/DeepSeek-V4-Flash and -Pro; for the second form,
transformers 5.23 `models/deepseek_v4/configuration_deepseek_v4.py`.
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
from finwhale.models.deepseek_v4.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    POSITIVE,
    POSITIVE_FLOATS,
    DeepseekV4Config,
    DraftHead,
    ExpertDtype,
    ScaleFormat,
)
from finwhale.models.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.rope_config import YarnScaling

_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def config_of(raw: Mapping[str, Any]) -> DeepseekV4Config:
    """Read the contents of a config.json, in the official form or in transformers'.

    Raises:
        CheckpointError: the architecture or a value is not supported, or a field is missing.
    """
    check_architecture(raw, MODEL_TYPE, ARCHITECTURE)
    check_same(raw, FIXED)
    ratios, drafts, draft_head = _layers(raw)
    quantised, expert_dtype, scale_format = _quantisation(raw)
    return DeepseekV4Config(
        **{name: get(raw, name) for name in POSITIVE if name != "qk_rope_head_dim"},
        **_rope(raw),
        qk_rope_head_dim=_rope_head_dim(raw),
        **{name: get(raw, name) for name in POSITIVE_FLOATS if "rope" not in name},
        compress_ratios=ratios,
        num_hash_layers=_num_hash_layers(raw),
        num_nextn_predict_layers=drafts,
        draft_head=draft_head,
        dspark=DsparkConfig.from_dict(raw) if draft_head == "dspark" else None,
        **token_ids(raw),
        quantised=quantised,
        expert_dtype=expert_dtype,
        scale_format=scale_format,
    )


def _layers(raw: Mapping[str, Any]) -> tuple[tuple[int, ...], int, DraftHead | None]:
    """compress_ratios, the number of MTP layers and the kind of draft head."""
    layers = get(raw, "num_hidden_layers")
    if raw.get("compress_ratios") is None:
        # This is transformers' form. It has no MTP layer and drops the weights of one.
        return _ratios_of_layer_types(raw), 0, None
    ratios = tuple(typed(raw, "compress_ratios", list))
    drafts = typed(raw, "num_nextn_predict_layers", int) or 0
    # DSpark has three stages instead of one MTP layer.
    longer = isinstance(layers, int) and len(ratios) == layers + NUM_STAGES and drafts in (0, 1, 3)
    if longer or any(key.startswith("dspark_") for key in raw):
        require(
            drafts in (0, 1, NUM_STAGES),
            f"num_nextn_predict_layers must be 0, 1 or 3 beside a DSpark head, got {shown(drafts)}",
        )
        return ratios, 0, "dspark"
    return ratios, drafts, "mtp" if drafts else None


def _ratios_of_layer_types(raw: Mapping[str, Any]) -> tuple[int, ...]:
    rates = {**_LAYER_TYPES, **(typed(raw, "compress_rates", dict) or {})}
    names = typed(raw, "layer_types", list)
    if names is None:
        raise CheckpointError("config.json has no compress_ratios (nor transformers' layer_types)")
    unknown = sorted({str(name) for name in names if name not in _LAYER_TYPES})
    require(not unknown, f"unknown layer_types {', '.join(unknown)}")
    return tuple(rates[name] for name in names)


def _num_hash_layers(raw: Mapping[str, Any]) -> int:
    if raw.get("num_hash_layers") is not None:
        return int(typed(raw, "num_hash_layers", int))
    kinds = typed(raw, "mlp_layer_types", list)
    if kinds is None:
        raise CheckpointError("config.json has no num_hash_layers (nor mlp_layer_types)")
    count = sum(1 for kind in kinds if kind == "hash_moe")
    require(
        list(kinds) == ["hash_moe"] * count + ["moe"] * (len(kinds) - count),
        f'mlp_layer_types must be "hash_moe" for the first layers, then "moe", got {list(kinds)}',
    )
    return count


def _rope_head_dim(raw: Mapping[str, Any]) -> int:
    factor = typed(raw, "partial_rotary_factor", int, float)
    if raw.get("qk_rope_head_dim") is None and factor is not None:
        rotated: float = (typed(raw, "head_dim", int) or 0) * factor
        return round(rotated)
    return int(typed(raw, "qk_rope_head_dim", int) or get(raw, "qk_rope_head_dim"))


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, compress_rope_theta and rope_scaling from either form."""
    nested = typed(raw, "rope_parameters", dict) or {}
    if isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict):
        main, compress = nested["main"], nested["compress"]
        kind = main.get("rope_type", "default")
        require(kind == "default", f'rope_type of "main" must be "default", got {kind!r}')
        theta, compress_theta = get(main, "rope_theta"), get(compress, "rope_theta")
    else:
        compress = typed(raw, "rope_scaling", dict) or nested
        theta, compress_theta = get(raw, "rope_theta"), get(raw, "compress_rope_theta")
    yarn = YarnScaling.from_dict(compress)
    return {"rope_theta": theta, "compress_rope_theta": compress_theta, "rope_scaling": yarn}


def _quantisation(raw: Mapping[str, Any]) -> tuple[bool, ExpertDtype, ScaleFormat]:
    """quantised, expert_dtype, scale_format."""
    quantisation = typed(raw, "quantization_config", dict)
    if not quantisation:
        return False, "fp4", "ue8m0"
    check_same(quantisation, FIXED_QUANTISATION, "quantization_config.")
    scale_format = quantisation.get("scale_fmt")
    require(
        scale_format in (None, "ue8m0", "float32", "fp32"),
        f'scale_fmt must be "ue8m0" or absent (float32), got {scale_format!r}',
    )
    expert_dtype: Any = raw.get("expert_dtype") or quantisation.get("expert_dtype") or "fp4"
    require(
        expert_dtype in ("fp4", "fp8"), f'expert_dtype must be "fp4" or "fp8", got {expert_dtype!r}'
    )
    block = typed(quantisation, "weight_block_size", list) or [128, 128]
    require(block == [128, 128], f"weight_block_size must be [128, 128], got {block}")
    return True, expert_dtype, "ue8m0" if scale_format == "ue8m0" else "float32"
