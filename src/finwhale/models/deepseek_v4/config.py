"""The model's configuration, with the checks of its values."""

import math
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
        for name in POSITIVE:
            _check_positive(name, getattr(self, name), int)
        for name in POSITIVE_FLOATS:
            _check_positive(name, getattr(self, name), int, float)
        self._check_layers()
        self._check_sizes()
        self._check_quantisation()

    def _check_layers(self) -> None:
        layers, drafts = self.num_hidden_layers, self.num_nextn_predict_layers
        if type(drafts) is not int or drafts not in (0, 1):
            raise CheckpointError(
                f"config: num_nextn_predict_layers must be 0 or 1, got {shown(drafts)}"
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
            check_fixed(name, getattr(self, name), fixed)

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


POSITIVE = [f.name for f in fields(DeepseekV4Config) if f.type is int and f.name not in _OWN_CHECK]
POSITIVE_FLOATS = [f.name for f in fields(DeepseekV4Config) if f.type is float]


def check_fixed(name: str, found: object, wanted: object) -> None:
    if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
        raise CheckpointError(f"config: {name} {found!r} is not supported, only {wanted!r} is")


def _check_positive(name: str, value: Any, *kinds: type) -> None:
    number: Any = value if type(value) in kinds else 0  # a bool does not count as a number
    if not 0 < number < math.inf:
        what = "number" if float in kinds else "integer"
        raise CheckpointError(f"config: {name} must be a positive {what}, got {shown(value)}")
    limit = _MAX.get(name, _MAX_SIZE if float not in kinds else _MAX_NUMBER)
    if number > limit:
        raise CheckpointError(f"config: {name} must be at most {limit}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        raise CheckpointError(
            f"config: {name} {value} must be a multiple of {divisor_name} {divisor}"
        )
