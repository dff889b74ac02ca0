"""The model's configuration, read from a config.json in the official or in transformers' form.

Sources: the config.json files of deepseek-ai/DeepSeek-V4-Flash and -Pro; for the second form,
transformers 5.23 `models/deepseek_v4/configuration_deepseek_v4.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v4.dspark_config import NUM_STAGES, DsparkConfig

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)

DraftHead = Literal["mtp", "dspark"]
# The MTP layer is trained to predict one more token. Each further draft is accepted less often.
MTP_DRAFT_TOKENS = 3
ExpertDtype = Literal["fp4", "fp8"]
ScaleFormat = Literal["ue8m0", "float32"]

# Limits far above any DeepSeek-V4. They refuse a broken or hostile config.json before it causes
# large allocations or loops.
_MAX_SIZE = 1 << 20
_MAX_NUMBER = 1e9
_MAX = {
    "vocab_size": 1 << 24,
    "num_hidden_layers": 1 << 10,
    "n_routed_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "sliding_window": 1 << 16,
    "index_topk": 1 << 16,
    "head_dim": 1 << 14,
    "index_head_dim": 1 << 14,
    "num_attention_heads": 1 << 14,
    "index_n_heads": 1 << 14,
    "hc_sinkhorn_iters": 1000,
    "max_position_embeddings": 1 << 30,
    "rope_scaling original_max_position_embeddings": 1 << 30,
}

# The code supports only these values. A config may omit the key or repeat the value.
_FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hc_mult": 4,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
# Integers with their own checks; every other number of a DeepseekV4Config must be positive.
_OWN_CHECK = (
    "n_shared_experts",
    "hc_mult",
    "num_hash_layers",
    "num_nextn_predict_layers",
    "bos_token_id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN parameters for the rope of compressed layers. The model has no magnitude factor."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_positive(f"rope_scaling {field.name}", getattr(self, field.name), int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """Sizes and constants of one model, under the checkpoint's names.

    Attributes:
        compress_ratios: 0, 4 or 128 for each layer, then 0 for each layer of the draft head.
        num_hash_layers: number of first layers that route by token id (tid2eid), not by score.
        rope_scaling: YaRN for the layers with a ratio; None: these layers use plain rope too.
        num_nextn_predict_layers: number of loaded MTP layers; 0 unless draft_head is "mtp".
        draft_head: the checkpoint's draft head.
        dspark: the sizes of a DSpark draft head; None unless draft_head is "dspark".
        quantised: False if no weight is quantised, as in checkpoints that transformers writes.
        expert_dtype, scale_format: stored formats of routed experts and FP8 scales, if quantised.

    Raises:
        CheckpointError: a value is out of range or does not fit another one.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    rope_theta: float
    compress_rope_theta: float
    max_position_embeddings: int
    n_shared_experts: int = 1
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_scaling: YarnScaling | None = None
    num_nextn_predict_layers: int = 0
    draft_head: DraftHead | None = None
    dspark: DsparkConfig | None = None
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    quantised: bool = True
    expert_dtype: ExpertDtype = "fp4"
    scale_format: ScaleFormat = "ue8m0"
    weight_block_size: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _check_positive(name, getattr(self, name), int)
        for name in _POSITIVE_FLOATS:
            _check_positive(name, getattr(self, name), int, float)
        self._check_layers()
        self._check_sizes()
        self._check_quantisation()

    def _check_layers(self) -> None:
        layers, drafts = self.num_hidden_layers, self.num_nextn_predict_layers
        if type(drafts) is not int or drafts not in (0, 1):
            raise CheckpointError(
                f"config: num_nextn_predict_layers must be 0 or 1, got {_shown(drafts)}"
            )
        if (self.draft_head == "dspark") != (self.dspark is not None):
            raise CheckpointError(f"config: draft_head {self.draft_head!r} does not fit its sizes")
        wanted = layers + self.num_draft_layers
        if len(self.compress_ratios) != wanted:
            kind = "DSpark stages" if self.dspark else "MTP layers"
            raise CheckpointError(
                f"config: compress_ratios has {len(self.compress_ratios)} entries, wanted "
                f"{wanted}: one for each of {layers} layers and {self.num_draft_layers} {kind}"
            )
        unknown = sorted(
            {str(r) for r in self.compress_ratios if not isinstance(r, int) or r not in RATIOS}
        )
        if unknown:
            raise CheckpointError(
                f"config: compress_ratios may hold 0, 4 and 128, got {', '.join(unknown)}"
            )
        if any(self.compress_ratios[layers:]):
            what = "the MTP layer's entry of compress_ratios (the last)"
            if self.dspark:
                what = "the DSpark stages' entries of compress_ratios (the last three)"
            raise CheckpointError(
                f"config: {what} must be 0, got "
                f"{', '.join(map(str, self.compress_ratios[layers:]))}"
            )
        if not isinstance(self.num_hash_layers, int) or not 0 <= self.num_hash_layers <= layers:
            raise CheckpointError(
                f"config: num_hash_layers must be between 0 and {layers} (num_hidden_layers), got "
                f"{self.num_hash_layers!r}"
            )
        if (self.draft_head == "mtp") != (drafts > 0):
            raise CheckpointError(
                f"config: draft_head {self.draft_head!r} does not fit {drafts} MTP layers"
            )
        if self.dspark is not None:
            self.dspark.check(layers, self.vocab_size)

    def _check_sizes(self) -> None:
        _check_multiple("num_attention_heads", self.num_attention_heads, "o_groups", self.o_groups)
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) < self.qk_rope_head_dim:
                raise CheckpointError(
                    f"config: {name} {getattr(self, name)} must be at least qk_rope_head_dim "
                    f"{self.qk_rope_head_dim}"
                )
        if self.qk_rope_head_dim % 2:
            raise CheckpointError(
                f"config: qk_rope_head_dim must be even, got {self.qk_rope_head_dim}"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise CheckpointError(
                f"config: num_experts_per_tok {self.num_experts_per_tok} is more than "
                f"n_routed_experts {self.n_routed_experts}"
            )
        top, experts = self.stage_experts
        if top > experts:
            raise CheckpointError(
                f"config: {top} experts per token of the DSpark stages are more than their "
                f"{experts} routed experts"
            )
        if not self.eos_token_ids:
            raise CheckpointError("config: eos_token_id is an empty list")
        for token in (self.bos_token_id, *self.eos_token_ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise CheckpointError(
                    f"config: token id {token!r} is outside the vocabulary of {self.vocab_size}"
                )
        for name, fixed in (("n_shared_experts", 1), ("hc_mult", 4)):
            _check_fixed(name, getattr(self, name), fixed)

    def check_index_rotation(self) -> None:
        """Raise CheckpointError if the indexer cannot round as trained at this width."""
        width = self.index_head_dim
        if 4 in self.compress_ratios and width & (width - 1):
            raise CheckpointError(
                f"config: index_head_dim {width} must be a power of two where activations are "
                "as-trained, since the indexer's keys are rotated by a Hadamard matrix: use "
                'activations "exact"'
            )

    def _check_quantisation(self) -> None:
        if self.quantised and self.expert_dtype == "fp4":
            for name in ("hidden_size", "moe_intermediate_size"):
                _check_multiple(name, getattr(self, name), "the FP4 block", 32)

    @property
    def model_type(self) -> str:
        return MODEL_TYPE

    # --- Layers ---

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """The compression ratio of each layer of the model, without the draft head."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def num_draft_layers(self) -> int:
        """Number of decoder layers of the draft head."""
        return NUM_STAGES if self.dspark else self.num_nextn_predict_layers

    @property
    def stage_experts(self) -> tuple[int, int]:
        """num_experts_per_tok and n_routed_experts of a DSpark stage."""
        top, experts = self.num_experts_per_tok, self.n_routed_experts
        if self.dspark is None:
            return top, experts
        return self.dspark.num_experts_per_tok or top, self.dspark.n_routed_experts or experts

    def of_stage(self) -> "DeepseekV4Config":
        """The model's configuration with the experts of a DSpark stage."""
        top, experts = self.stage_experts
        return replace(self, num_experts_per_tok=top, n_routed_experts=experts)

    def of_layer(self, layer: int) -> "DeepseekV4Config":
        """The configuration of a layer. The draft head's layers follow the model's."""
        return self if layer < self.num_hidden_layers else self.of_stage()

    def is_hash_layer(self, layer: int) -> bool:
        """Whether a layer picks its experts by token id."""
        return layer < self.num_hash_layers

    # --- Construction ---

    @classmethod
    def preset(cls, name: str) -> "DeepseekV4Config":
        """The published "flash" or "pro" configuration."""
        if name not in _PRESETS:
            raise CheckpointError(
                f"unknown configuration {name!r}; there are {', '.join(sorted(_PRESETS))}"
            )
        return _PRESETS[name]

    def with_layers(self, num_layers: int) -> "DeepseekV4Config":
        """The same model with its first layers only; it keeps the draft head."""
        if not 1 <= num_layers <= self.num_hidden_layers:
            raise CheckpointError(
                f"cannot cut to {num_layers} layers: the model has {self.num_hidden_layers}"
            )
        drafts, dspark = self.compress_ratios[self.num_hidden_layers :], self.dspark
        if dspark is not None:
            targets = dspark.within(self.num_hidden_layers, num_layers)
            dspark = replace(dspark, target_layer_ids=targets)
        return replace(
            self,
            dspark=dspark,
            num_hidden_layers=num_layers,
            compress_ratios=self.compress_ratios[:num_layers] + drafts,
            num_hash_layers=min(self.num_hash_layers, num_layers),
        )

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts that the draft head makes at once; 0 without a draft head."""
        if self.dspark is not None:
            return self.dspark.block_size
        return MTP_DRAFT_TOKENS if self.draft_head == "mtp" else 0

    @property
    def draft_block_tokens(self) -> int:
        """See protocol.DeepseekV4Config."""
        return 0 if self.dspark is None else self.dspark.num_rows

    @property
    def max_verify_tokens(self) -> int:
        """The most tokens of a sequence in a step that verifies drafts."""
        return 1 + self.max_draft_tokens

    def without_draft_head(self) -> "DeepseekV4Config":
        """The same model without its draft head."""
        return replace(
            self,
            num_nextn_predict_layers=0,
            draft_head=None,
            dspark=None,
            compress_ratios=self.layer_ratios,
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DeepseekV4Config":
        """Read the contents of a config.json, in the official form or in transformers'.

        Raises:
            CheckpointError: the architecture or a value is not supported, or a field is missing.
        """
        _check_architecture(raw)
        for name, wanted in _FIXED.items():
            if name in raw:
                _check_fixed(name, raw[name], wanted)
        ratios, drafts, draft_head = _layers(raw)
        quantised, expert_dtype, scale_format = _quantisation(raw)
        bos, eos = raw.get("bos_token_id"), raw.get("eos_token_id")
        return cls(
            **{name: _get(raw, name) for name in _POSITIVE if name != "qk_rope_head_dim"},
            **_rope(raw),
            qk_rope_head_dim=_rope_head_dim(raw),
            **{name: _get(raw, name) for name in _POSITIVE_FLOATS if "rope" not in name},
            compress_ratios=ratios,
            num_hash_layers=_num_hash_layers(raw),
            num_nextn_predict_layers=drafts,
            draft_head=draft_head,
            dspark=DsparkConfig.from_dict(raw) if draft_head == "dspark" else None,
            bos_token_id=0 if bos is None else bos,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (1 if eos is None else eos,),
            quantised=quantised,
            expert_dtype=expert_dtype,
            scale_format=scale_format,
        )

    def to_dict(self) -> dict[str, Any]:
        """The contents of an official config.json, from which `from_dict` makes an equal object."""
        eos = self.eos_token_ids
        out: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        out.update({name: getattr(self, name) for name in (*_POSITIVE, *_POSITIVE_FLOATS)})
        out.update(_FIXED)
        out.update(
            bos_token_id=self.bos_token_id,
            eos_token_id=eos[0] if len(eos) == 1 else list(eos),
            compress_ratios=list(self.compress_ratios),
            num_hash_layers=self.num_hash_layers,
            num_nextn_predict_layers=self.num_nextn_predict_layers,
            torch_dtype="bfloat16",
        )
        if self.dspark is not None:
            out.update(self.dspark.to_dict())
        if self.rope_scaling is not None:
            yarn = self.rope_scaling
            out["rope_scaling"] = {
                "type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_position_embeddings,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
            }
        if self.quantised:
            out["expert_dtype"] = self.expert_dtype
            out["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.weight_block_size),
            }
            if self.scale_format == "ue8m0":
                out["quantization_config"]["scale_fmt"] = "ue8m0"
        return out


_POSITIVE = [f.name for f in fields(DeepseekV4Config) if f.type is int and f.name not in _OWN_CHECK]
_POSITIVE_FLOATS = [f.name for f in fields(DeepseekV4Config) if f.type is float]


# --- Reading a config.json ----------------------------------------------------------------------


def _get(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise CheckpointError(f"config.json has no {name}")
    return raw[name]


def _typed(raw: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A value that is absent, null or of one of the types `kinds`."""
    value = raw.get(name)
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise CheckpointError(f"config: {name} must be a {wanted}, got {value!r}")
    return value


def _check_fixed(name: str, found: object, wanted: object) -> None:
    if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise CheckpointError(f"config: {name} {found!r} is not supported, only {wanted!r} is")


def _check_positive(name: str, value: Any, *kinds: type) -> None:
    number: Any = value if type(value) in kinds else 0  # a bool does not count as a number
    if not 0 < number < math.inf:
        what = "number" if float in kinds else "integer"
        raise CheckpointError(f"config: {name} must be a positive {what}, got {_shown(value)}")
    limit = _MAX.get(name, _MAX_SIZE if float not in kinds else _MAX_NUMBER)
    if number > limit:
        raise CheckpointError(f"config: {name} must be at most {limit}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise CheckpointError(
            f"config: {name} {value} must be a multiple of {divisor_name} {divisor}"
        )


def _check_architecture(raw: Mapping[str, Any]) -> None:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    known = architectures is None or ARCHITECTURE in str(architectures)
    if model_type != MODEL_TYPE or not known:
        raise CheckpointError(
            f"config.json describes another model: model_type {model_type!r}, architectures "
            f"{architectures!r}; Finwhale serves model_type {MODEL_TYPE!r}, architecture "
            f"{ARCHITECTURE!r} only"
        )


def _layers(raw: Mapping[str, Any]) -> tuple[tuple[int, ...], int, DraftHead | None]:
    """compress_ratios, the number of MTP layers and the kind of draft head."""
    layers = _get(raw, "num_hidden_layers")
    if raw.get("compress_ratios") is None:
        # This is transformers' form. It has no MTP layer and drops the weights of one.
        return _ratios_of_layer_types(raw), 0, None
    ratios = tuple(_typed(raw, "compress_ratios", list))
    drafts = _typed(raw, "num_nextn_predict_layers", int) or 0
    # DSpark has three stages instead of one MTP layer.
    longer = isinstance(layers, int) and len(ratios) == layers + NUM_STAGES and drafts in (0, 1, 3)
    if longer or any(key.startswith("dspark_") for key in raw):
        if drafts not in (0, 1, NUM_STAGES):
            raise CheckpointError(
                "config: num_nextn_predict_layers must be 0, 1 or 3 beside a DSpark head, got "
                f"{_shown(drafts)}"
            )
        return ratios, 0, "dspark"
    return ratios, drafts, "mtp" if drafts else None


def _ratios_of_layer_types(raw: Mapping[str, Any]) -> tuple[int, ...]:
    rates = {**_LAYER_TYPES, **(_typed(raw, "compress_rates", dict) or {})}
    names = _typed(raw, "layer_types", list)
    if names is None:
        raise CheckpointError("config.json has no compress_ratios (nor transformers' layer_types)")
    unknown = sorted({str(name) for name in names if name not in _LAYER_TYPES})
    if unknown:
        raise CheckpointError(f"config: unknown layer_types {', '.join(unknown)}")
    return tuple(rates[name] for name in names)


def _num_hash_layers(raw: Mapping[str, Any]) -> int:
    if raw.get("num_hash_layers") is not None:
        return int(_typed(raw, "num_hash_layers", int))
    kinds = _typed(raw, "mlp_layer_types", list)
    if kinds is None:
        raise CheckpointError("config.json has no num_hash_layers (nor mlp_layer_types)")
    count = sum(1 for kind in kinds if kind == "hash_moe")
    if list(kinds) != ["hash_moe"] * count + ["moe"] * (len(kinds) - count):
        raise CheckpointError(
            'config: mlp_layer_types must be "hash_moe" for the first layers, then "moe", got '
            f"{list(kinds)}"
        )
    return count


def _rope_head_dim(raw: Mapping[str, Any]) -> int:
    factor = _typed(raw, "partial_rotary_factor", int, float)
    if raw.get("qk_rope_head_dim") is None and factor is not None:
        rotated: float = (_typed(raw, "head_dim", int) or 0) * factor
        return round(rotated)
    return int(_typed(raw, "qk_rope_head_dim", int) or _get(raw, "qk_rope_head_dim"))


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, compress_rope_theta and rope_scaling from either form."""
    nested = _typed(raw, "rope_parameters", dict) or {}
    if isinstance(nested.get("main"), dict) and isinstance(nested.get("compress"), dict):
        main, compress = nested["main"], nested["compress"]
        kind = main.get("rope_type", "default")
        if kind != "default":
            raise CheckpointError(f'config: rope_type of "main" must be "default", got {kind!r}')
        theta, compress_theta = _get(main, "rope_theta"), _get(compress, "rope_theta")
    else:
        compress = _typed(raw, "rope_scaling", dict) or nested
        theta, compress_theta = _get(raw, "rope_theta"), _get(raw, "compress_rope_theta")
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise CheckpointError(f'config: rope scaling must be of type "yarn", got {kind!r}')
    if compress.get("attention_factor") not in (None, 1, 1.0):
        raise CheckpointError(
            "config: an attention_factor of rope scaling is not supported, got "
            f"{compress['attention_factor']!r}"
        )
    yarn = None
    if kind == "yarn":
        yarn = YarnScaling(
            factor=_get(compress, "factor"),
            original_max_position_embeddings=_get(compress, "original_max_position_embeddings"),
            beta_fast=compress.get("beta_fast", 32),
            beta_slow=compress.get("beta_slow", 1),
        )
    return {
        "rope_theta": theta,
        "compress_rope_theta": compress_theta,
        "rope_scaling": yarn,
    }


def _quantisation(
    raw: Mapping[str, Any],
) -> tuple[bool, ExpertDtype, ScaleFormat]:
    """quantised, expert_dtype, scale_format."""
    quantisation = _typed(raw, "quantization_config", dict)
    if not quantisation:
        return False, "fp4", "ue8m0"
    for name, wanted in (
        ("quant_method", "fp8"),
        ("fmt", "e4m3"),
        ("activation_scheme", "dynamic"),
    ):
        _check_fixed(f"quantization_config.{name}", quantisation.get(name, wanted), wanted)
    scale_format = quantisation.get("scale_fmt")
    if scale_format not in (None, "ue8m0", "float32", "fp32"):
        raise CheckpointError(
            f'config: scale_fmt must be "ue8m0" or absent (float32), got {scale_format!r}'
        )
    expert_dtype: Any = raw.get("expert_dtype") or quantisation.get("expert_dtype") or "fp4"
    if expert_dtype not in ("fp4", "fp8"):
        raise CheckpointError(f'config: expert_dtype must be "fp4" or "fp8", got {expert_dtype!r}')
    block = tuple(_typed(quantisation, "weight_block_size", list) or (128, 128))
    if block != (128, 128):
        raise CheckpointError(f"config: weight_block_size must be [128, 128], got {list(block)}")
    return True, expert_dtype, "ue8m0" if scale_format == "ue8m0" else "float32"


# --- The published configurations -----------------------------------------------------------------

_FLASH = DeepseekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
    num_hash_layers=3,
    swiglu_limit=10.0,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=YarnScaling(factor=16.0, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    num_nextn_predict_layers=1,
    draft_head="mtp",
)
_PRO = replace(
    _FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
    index_topk=1024,
    n_routed_experts=384,
    moe_intermediate_size=3072,
    routed_scaling_factor=2.5,
)


def _with_dspark(config: DeepseekV4Config, markov_rank: int) -> DeepseekV4Config:
    layers = config.num_hidden_layers
    head = DsparkConfig(
        block_size=5,
        noise_token_id=128799,
        markov_rank=markov_rank,
        target_layer_ids=tuple(range(layers - 3, layers)),
    )
    return replace(
        config,
        num_nextn_predict_layers=0,
        draft_head="dspark",
        dspark=head,
        compress_ratios=(*config.layer_ratios, 0, 0, 0),
    )


_PRESETS = {
    "flash": _FLASH,
    "pro": _PRO,
    "flash-0731": _with_dspark(_FLASH, 256),
    "pro-0813": _with_dspark(_PRO, 512),
}
