"""The fields, checks and properties that the configurations of DeepSeek-V4 and V4.1 share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from finwhale.errors import CheckpointError
from finwhale.models.config_checks import (
    check_experts,
    check_fixed,
    check_heads,
    check_token_ids,
    require,
)
from finwhale.models.dspark_config import NUM_STAGES, DsparkConfig
from finwhale.models.rope_config import YarnScaling

# How errors name DSpark's layers, and their entries of compress_ratios.
DSPARK_LAYERS = "DSpark stages", "the DSpark stages' entries of compress_ratios (the last three)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """Sizes and constants of one model, under the checkpoint's names (a protocol.ModelConfig).

    Attributes:
        compress_ratios: tokens per entry for each layer, 0 for one without entries; then 0 for each
            layer of the draft head.
        rope_scaling: YaRN for the layers with a ratio; None: these layers use plain rope too.
        dspark: the sizes of a DSpark draft head; None: there is none.
        quantised: False if no weight is quantised.
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
    dspark: DsparkConfig | None = None
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    quantised: bool = True
    weight_block_size: tuple[int, int] = (128, 128)

    def _check_common_sizes(self) -> None:
        widths = {"head_dim": self.head_dim, "index_head_dim": self.index_head_dim}
        check_heads(self.num_attention_heads, self.o_groups, self.qk_rope_head_dim, widths)
        check_experts(self.num_experts_per_tok, self.n_routed_experts, self.stage_experts)
        check_token_ids(self.bos_token_id, self.eos_token_ids, self.vocab_size)
        for name, fixed in (("n_shared_experts", 1), ("hc_mult", 4)):
            check_fixed(name, getattr(self, name), fixed)

    def _check_ratios(self, known: tuple[int, ...], layers_of_head: str, entries: str) -> None:
        layers, drafts, ratios = self.num_hidden_layers, self.num_draft_layers, self.compress_ratios
        require(
            len(ratios) == layers + drafts,
            f"compress_ratios has {len(ratios)} entries, wanted {layers + drafts}: one for each of "
            f"{layers} layers and {drafts} {layers_of_head}",
        )
        unknown = sorted({str(r) for r in ratios if type(r) is not int or r not in known})
        *first, last = map(str, known)
        wanted = f"{', '.join(first)} and {last}"
        require(not unknown, f"compress_ratios may hold {wanted}, got {', '.join(unknown)}")
        of_head = ratios[layers:]
        require(not any(of_head), f"{entries} must be 0, got {', '.join(map(str, of_head))}")

    @property
    def num_draft_layers(self) -> int:
        """Number of decoder layers of the draft head."""
        return NUM_STAGES if self.dspark else 0

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """The compress_ratios of the model's own layers; the draft head's are left out."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def stage_experts(self) -> tuple[int, int]:
        """num_experts_per_tok and n_routed_experts of a DSpark stage."""
        top, experts = self.num_experts_per_tok, self.n_routed_experts
        return (top, experts) if self.dspark is None else self.dspark.experts_or(top, experts)

    def of_stage(self) -> Self:
        """The model's configuration with the experts of a DSpark stage."""
        top, experts = self.stage_experts
        return replace(self, num_experts_per_tok=top, n_routed_experts=experts)

    def of_layer(self, layer: int) -> Self:
        """The configuration of a layer. The draft head's layers follow the model's."""
        return self if layer < self.num_hidden_layers else self.of_stage()

    def _with_layers(self, num_layers: int, **changes: Any) -> Self:
        """The same model with its first layers only, and other changes. It keeps the draft head."""
        layers, dspark = self.num_hidden_layers, self.dspark
        if not 1 <= num_layers <= layers:
            raise CheckpointError(f"cannot cut to {num_layers} layers: the model has {layers}")
        if dspark is not None:
            dspark = replace(dspark, target_layer_ids=dspark.within(layers, num_layers))
        return replace(
            self,
            dspark=dspark,
            num_hidden_layers=num_layers,
            compress_ratios=self.compress_ratios[:num_layers] + self.compress_ratios[layers:],
            **changes,
        )

    @property
    def moe_sizes(self) -> tuple[int, int, float, float]:
        return (
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.routed_scaling_factor,
            self.swiglu_limit,
        )

    def describe_layers(self, kinds: Mapping[int, str]) -> str:
        """For `finwhale inspect`. kinds: names of the ratios."""
        ratios = self.layer_ratios
        parts = (f"{ratios.count(r)} {name}" for r, name in kinds.items() if r in ratios)
        return f"{self.num_hidden_layers}: {', '.join(parts)}"

    def describe_sizes(self, entries: str) -> dict[str, str]:
        """For `finwhale inspect`. entries: those of which attention selects."""
        return {
            "hidden size": f"{self.hidden_size} in {self.hc_mult} residual streams",
            "attention": f"{self.num_attention_heads} heads of {self.head_dim}, window "
            f"{self.sliding_window}, top {self.index_topk} of the {entries}",
            "experts": f"{self.num_experts_per_tok} of {self.n_routed_experts} and "
            f"{self.n_shared_experts} shared, width {self.moe_intermediate_size}",
            "vocabulary": f"{self.vocab_size:,}",
            "context": f"{self.max_position_embeddings:,} tokens",
        }

    @property
    def draft_block_tokens(self) -> int:
        return 0 if self.dspark is None else self.dspark.num_rows

    @property
    def max_draft_tokens(self) -> int:
        return 0 if self.dspark is None else self.dspark.block_size

    @property
    def max_verify_tokens(self) -> int:
        """The most tokens of a sequence in a step that verifies drafts."""
        return 1 + self.max_draft_tokens
