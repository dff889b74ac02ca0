"""Compressed entries of one layer: C4 with its lightning indexer, and C128.

Legend: N tokens, D hidden, C head_dim, I index heads, J index_head_dim.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.step_inputs import StepInputs
from finwhale.ops.attention import AllEntries, TopkEntries
from finwhale.ops.compressor import CompressorWeight, CompressPart, Rounding
from finwhale.ops.indexer import RATIO, IndexQueries
from finwhale.ops.linear import LinearWeight
from finwhale.ops.paging import CacheRows, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class C128Weights:
    """proj: [2C, D], the checkpoint's wkv followed by its wgate; float32 results."""

    proj: LinearWeight
    mix: CompressorWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class C4Weights:
    """proj: [4C + 4J + I, D], float32 results. Its rows are wkv and wgate of attention's entries
    ([Ca | Cb] each), wkv and wgate of the indexer's keys, and the indexer's weights_proj.
    """

    proj: LinearWeight
    mix: CompressorWeight
    index_mix: CompressorWeight


class Compressor:
    """What both kinds of compressors have: their projection, and the options of `compress`."""

    def __init__(self, context: LayerContext, weights: C128Weights | C4Weights, layer: int) -> None:
        self.linear = context.ops.linear
        self.compress = context.ops.compress
        self.proj = weights.proj
        self.layer = layer
        self.eps = context.config.rms_norm_eps
        self.max_verify_tokens = context.config.max_verify_tokens
        self.round_entries = context.round_activations

    def project(self, x_ND: Tensor) -> Tensor:
        """Project x to [N,2C] or [N, 4C + 4J + I], the argument of `write` and `visible`."""
        return self.linear(x_ND, self.proj)


class C128Compressor(Compressor):
    """Writes the entries that complete in a step. A token sees every complete entry before it."""

    def __init__(self, context: LayerContext, weights: C128Weights, layer: int) -> None:
        super().__init__(context, weights, layer)
        self.weights = weights

    def write(
        self, projected: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> None:
        """Write the entries that complete, and the state that later steps need."""
        part = CompressPart(
            projected,
            self.weights.mix,
            cache.rows("c128_state", self.layer, inputs.tables),
            cache.rows("c128", self.layer, inputs.tables),
            "nope" if self.round_entries else "none",
        )
        self.compress((part,), inputs.tokens, rotary, self.eps, self.max_verify_tokens)

    def visible(self, inputs: StepInputs, cache: PagedCache) -> AllEntries:
        return AllEntries(cache.rows("c128", self.layer, inputs.tables), 128)


class C4Compressor(Compressor):
    """Writes the entries and keys that complete in a step. A token sees the index_topk entries with
    the best scores.

    Every rank has all keys and all index heads. In a step of many tokens, each rank selects for its
    rows of the tokens.

    Args:
        gathers: the ranks then gather the selected slots, because each of them attends to all
            tokens.
    """

    def __init__(
        self, context: LayerContext, weights: C4Weights, layer: int, *, gathers: bool
    ) -> None:
        super().__init__(context, weights, layer)
        config, ops = context.config, context.ops
        self.ranks, self.gathers = context.ranks, gathers
        self.prepare_index_queries = ops.prepare_index_queries
        self.select_entries = ops.select_entries
        self.weights = weights
        self.heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.topk = config.index_topk
        self.score_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.widths = (4 * config.head_dim, 4 * config.index_head_dim, config.index_n_heads)

    def write(
        self, projected: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> None:
        """Write the entries that complete, and the state that later steps need."""
        w = self.weights
        entries, keys, _ = projected.split(self.widths, 1)
        row: Rounding = "nope" if self.round_entries else "none"
        key: Rounding = "key" if self.round_entries else "none"

        def rows(field: str) -> CacheRows:
            return cache.rows(field, self.layer, inputs.tables)

        parts = (
            CompressPart(entries, w.mix, rows("c4_state"), rows("c4"), row),
            CompressPart(keys, w.index_mix, rows("index_state"), rows("index_keys"), key),
        )
        self.compress(parts, inputs.tokens, rotary, self.eps, self.max_verify_tokens)

    def prepare(self, index_q: Tensor, inputs: StepInputs, rotary: Tensor) -> IndexQueries:
        """Prepare the indexer's projected queries of the rows that this rank scores.

        Args:
            index_q: [N, I*J]; only this rank's rows [R, I*J] if it attends to its tokens only.
        """
        own = self._own_tokens(inputs)
        if own is not None and self.gathers:
            index_q = self.ranks.own_rows(index_q)
        return self.prepare_index_queries(
            index_q.unflatten(1, (self.heads, self.head_dim)),
            rotary,
            inputs.tokens if own is None else own,
            self.topk,
            self.round_entries,
        )

    def _own_tokens(self, inputs: StepInputs) -> Tokens | None:
        """The tokens that this rank scores, if the ranks divide them."""
        own = inputs.local_tokens
        if own is not None and self.gathers and own.max_len // RATIO <= self.topk:
            return None  # every token gets all entries that it sees, without scores
        return own

    def visible(
        self,
        projected: Tensor,
        queries: IndexQueries,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
    ) -> TopkEntries:
        """Select entries. queries: the result of `prepare`."""
        own = self._own_tokens(inputs)
        num_tokens, weights = projected.shape[0], projected[:, -self.heads :]
        if own is not None:
            weights = self.ranks.own_rows(weights)
        slots = self.select_entries(
            queries,
            weights,
            cache.rows("index_keys", self.layer, inputs.tables),
            rotary,
            inputs.tokens if own is None else own,
            self.topk,
            self.score_scale,
            self.round_entries,
        )
        if own is not None and self.gathers:
            # If a rank's tokens see few entries, its slots have fewer columns than other ranks'.
            missing = self.topk - slots.shape[1]
            slots = pad(slots, (0, missing), value=-1) if missing else slots
            slots = self.ranks.all_gather_rows(slots, num_tokens)
        return TopkEntries(cache.rows("c4", self.layer, inputs.tables), slots)
