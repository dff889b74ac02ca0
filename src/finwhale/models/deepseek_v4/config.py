"""The model's configuration, with the checks of its values."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from finwhale.errors import FinwhaleError
from finwhale.models.config_checks import (
    check_multiple,
    check_positive,
    require,
    shown,
)
from finwhale.models.deepseek_config import DSPARK_LAYERS, DeepseekConfig
from finwhale.models.dspark_config import NUM_STAGES

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
RATIOS = (0, 4, 128)

DraftHead = Literal["mtp", "dspark"]
# The MTP layer is trained to predict one more token. Each further draft is accepted less often.
MTP_DRAFT_TOKENS = 3
ExpertDtype = Literal["fp4", "fp8"]
ScaleFormat = Literal["ue8m0", "float32"]

# Integers with their own checks; every other number of a DeepseekV4Config must be positive.
_OWN_CHECK = (
    "n_shared_experts",
    "hc_mult",
    "num_hash_layers",
    "num_nextn_predict_layers",
    "bos_token_id",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(DeepseekConfig):
    """DeepSeek-V4's configuration.

    Attributes:
        compress_ratios: 0, 4 or 128 for each layer, then 0 for each layer of the draft head.
        num_hash_layers: number of first layers that route by token id (tid2eid), not by score.
        num_nextn_predict_layers: number of loaded MTP layers; 0 unless draft_head is "mtp".
        draft_head: the checkpoint's draft head; "dspark" if and only if `dspark` is not None.
        expert_dtype, scale_format: stored formats of routed experts and FP8 scales, if quantised.

    Raises:
        CheckpointError: a value is out of range or does not fit another one.
    """

    num_hash_layers: int
    num_nextn_predict_layers: int = 0
    draft_head: DraftHead | None = None
    expert_dtype: ExpertDtype = "fp4"
    scale_format: ScaleFormat = "ue8m0"

    def __post_init__(self) -> None:
        for name in POSITIVE:
            check_positive(name, getattr(self, name), int)
        for name in POSITIVE_FLOATS:
            check_positive(name, getattr(self, name), int, float)
        self._check_layers()
        self._check_sizes()

    def _check_layers(self) -> None:
        layers, drafts = self.num_hidden_layers, self.num_nextn_predict_layers
        require(
            type(drafts) is int and drafts in (0, 1),
            f"num_nextn_predict_layers must be 0 or 1, got {shown(drafts)}",
        )
        fits = (self.draft_head == "dspark") == (self.dspark is not None)
        require(fits, f"draft_head {self.draft_head!r} does not fit its sizes")
        mtp = "MTP layers", "the MTP layer's entry of compress_ratios (the last)"
        self._check_ratios(RATIOS, *(DSPARK_LAYERS if self.dspark else mtp))
        require(
            isinstance(self.num_hash_layers, int) and 0 <= self.num_hash_layers <= layers,
            f"num_hash_layers must be between 0 and {layers} (num_hidden_layers), got "
            f"{self.num_hash_layers!r}",
        )
        fits = (self.draft_head == "mtp") == (drafts > 0)
        require(fits, f"draft_head {self.draft_head!r} does not fit {drafts} MTP layers")
        if self.dspark is not None:
            self.dspark.check(layers, self.vocab_size)

    def _check_sizes(self) -> None:
        self._check_common_sizes()
        if self.quantised and self.expert_dtype == "fp4":
            for name in ("hidden_size", "moe_intermediate_size"):
                check_multiple(name, getattr(self, name), "the FP4 block", 32)

    def check_index_rotation(self) -> None:
        """Raise CheckpointError if the indexer cannot round as trained at this width."""
        width = self.index_head_dim
        require(
            4 not in self.compress_ratios or width & (width - 1) == 0,
            f"index_head_dim {width} must be a power of two where activations are as-trained, "
            "since the indexer's keys are rotated by a Hadamard matrix: use activations "
            '"exact"',
        )

    @property
    def model_type(self) -> str:
        return MODEL_TYPE

    # --- Layers ---

    @property
    def num_draft_layers(self) -> int:
        """Number of decoder layers of the draft head."""
        return NUM_STAGES if self.dspark else self.num_nextn_predict_layers

    def is_hash_layer(self, layer: int) -> bool:
        """Whether a layer picks its experts by token id."""
        return layer < self.num_hash_layers

    def with_layers(self, num_layers: int) -> "DeepseekV4Config":
        """The same model with its first layers only; it keeps the draft head."""
        num_hash_layers = min(self.num_hash_layers, num_layers)
        return self._with_layers(num_layers, num_hash_layers=num_hash_layers)

    @property
    def max_draft_tokens(self) -> int:
        if self.dspark is not None:
            return self.dspark.block_size
        return MTP_DRAFT_TOKENS if self.draft_head == "mtp" else 0

    def with_exact_prefill(self) -> "DeepseekV4Config":
        raise FinwhaleError("exact_prefill: DeepSeek-V4's prefill is always exact; leave it out")

    def without_draft_head(self) -> "DeepseekV4Config":
        return replace(
            self,
            num_nextn_predict_layers=0,
            draft_head=None,
            dspark=None,
            compress_ratios=self.layer_ratios,
        )


POSITIVE = [f.name for f in fields(DeepseekV4Config) if f.type is int and f.name not in _OWN_CHECK]
POSITIVE_FLOATS = [f.name for f in fields(DeepseekV4Config) if f.type is float]
