"""The model's configuration, with the checks of its values."""

from dataclasses import dataclass, field, fields, replace

from finwhale.models.config_checks import (
    check_layer_ids,
    check_multiple,
    check_positive,
    require,
    shown,
)
from finwhale.models.deepseek_config import DSPARK_LAYERS, DeepseekConfig
from finwhale.models.deepseek_v41.engram_config import EngramConfig

ARCHITECTURE = "DeepseekV41ForCausalLM"
MODEL_TYPE = "deepseek_v41"
RATIOS = (0, 1, 2)
# Rows and columns of an FP8 block, values of an FP4 block, and values of the cache and activations
# that are rounded together. Entries have groups of 16.
GROUP = 32

# Integers with their own checks; every other number of a DeepseekV41Config must be positive.
_OWN_CHECK = ("n_shared_experts", "hc_mult", "bos_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV41Config(DeepseekConfig):
    """DeepSeek-V4.1's configuration.

    Attributes:
        kv_source_layer_ids: the layers that write entries and index keys. A layer reads those of
            the last source that is not after it.
        index_source_layer_ids: the layers that select entries, all KV sources among them. A layer
            attends to the entries that the last one selected.
        candidate_source_layer_id: the last KV source, if the index sources after it select only in
            the candidate_topk_blocks blocks of candidate_block_size entries that it finds best.
        engram: the sizes of Engram; None: no layer has one.
        quantised: False if no weight is quantised. Otherwise projections are FP8 in blocks of
            32x32, routed experts FP4, and Engram's tables FP8 in rows of 32, all with E8M0 scales.
        exact_prefill: all layers compute all tokens of a prompt, and the prefix cache keeps windows
            (EngineConfig). It tells no models apart.
    """

    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    rms_norm_eps: float = 1e-20
    engram: EngramConfig | None = None
    weight_block_size: tuple[int, int] = (GROUP, GROUP)
    exact_prefill: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Raises CheckpointError: a value is out of range or does not fit another one."""
        for name in POSITIVE:
            check_positive(name, getattr(self, name), int)
        for name in POSITIVE_FLOATS:
            check_positive(name, getattr(self, name), int, float)
        self._check_ratios(RATIOS, *DSPARK_LAYERS)
        self._check_sources()
        for part in (self.engram, self.dspark):
            if part is not None:
                part.check(self.num_hidden_layers, self.vocab_size)
        self._check_sizes()

    def _check_sources(self) -> None:
        sources, selecting = self.kv_source_layer_ids, self.index_source_layer_ids
        if not any(self.layer_ratios):
            none = not sources and not selecting and self.candidate_source_layer_id is None
            require(none, "no layer has a ratio, so no layer can be a source")
            return
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            check_layer_ids(name, getattr(self, name), self.num_hidden_layers)
            for layer in getattr(self, name):
                require(self.compress_ratios[layer], f"{name}: layer {layer} has the ratio 0")
        other = sorted(set(sources) - set(selecting))
        require(not other, f"kv_source_layer_ids {other} must be in index_source_layer_ids too")
        for layer, ratio in enumerate(self.layer_ratios):
            source = self.kv_source(layer)
            of_source = None if source is None else self.compress_ratios[source]
            require(
                ratio in (0, of_source),
                f"layer {layer} with the ratio {ratio} must follow a layer of kv_source_layer_ids "
                f"with the same ratio, but the last one is {source}",
            )
        candidates = self.candidate_source_layer_id
        require(
            candidates in (None, sources[-1]),
            f"candidate_source_layer_id must be the last KV source, {sources[-1]}, or -1 for none, "
            f"got {shown(candidates)}",
        )

    def _check_sizes(self) -> None:
        self._check_common_sizes()
        for name in ("head_dim", "index_head_dim"):
            check_multiple(name, getattr(self, name), "the group of a cached row", GROUP)
        if self.quantised:
            for name in ("hidden_size", "moe_intermediate_size"):
                check_multiple(name, getattr(self, name), "the FP4 block", GROUP)

    @property
    def model_type(self) -> str:
        return MODEL_TYPE

    # --- Layers ---

    def kv_source(self, layer: int) -> int | None:
        """The layer whose entries a layer with a ratio reads."""
        return max((i for i in self.kv_source_layer_ids if i <= layer), default=None)

    @property
    def first_tail_layer(self) -> int:
        """The first layer that computes only the last sliding_window tokens of a prompt: the last
        KV source, whose entries serve all layers after it.
        """
        layers = (self.num_hidden_layers,) if self.exact_prefill else self.kv_source_layer_ids
        return max(layers, default=self.num_hidden_layers)

    @property
    def replay_tokens(self) -> int:
        """Number of tokens that are computed again after a cached prefix. Those before the last
        sliding_window tokens only leave their ids to Engram; their number is even, because the
        state of a pair is not cached.
        """
        if self.exact_prefill:
            return 0
        ids = 0 if self.engram is None else self.engram.max_ngram_size
        return -(-(self.sliding_window + ids) // 2) * 2

    def with_exact_prefill(self) -> "DeepseekV41Config":
        return replace(self, exact_prefill=True)

    def with_layers(self, num_layers: int) -> "DeepseekV41Config":
        """The same model with its first layers only; it keeps the draft head."""
        candidates = None
        if (self.candidate_source_layer_id or 0) < num_layers:
            candidates = self.candidate_source_layer_id
        return self._with_layers(
            num_layers,
            kv_source_layer_ids=tuple(i for i in self.kv_source_layer_ids if i < num_layers),
            index_source_layer_ids=tuple(i for i in self.index_source_layer_ids if i < num_layers),
            candidate_source_layer_id=candidates,
            engram=None if self.engram is None else self.engram.within(num_layers),
        )

    # --- The draft head ---

    @property
    def draft_head(self) -> str | None:
        return None if self.dspark is None else "dspark"

    def without_draft_head(self) -> "DeepseekV41Config":
        return replace(self, dspark=None, compress_ratios=self.layer_ratios)


POSITIVE = [f.name for f in fields(DeepseekV41Config) if f.type is int and f.name not in _OWN_CHECK]
POSITIVE_FLOATS = [f.name for f in fields(DeepseekV41Config) if f.type is float]
