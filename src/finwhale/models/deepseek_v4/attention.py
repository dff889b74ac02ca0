"""Attention of one layer: window, C4 or C128, and the grouped output projection.

The ranks divide the heads. In a step of many tokens they divide the tokens instead, if each rank
holds the weights of all heads: every rank then reads fewer rows of the cache, and no sum over the
ranks follows. All ranks compute and write the rows, entries and states of all tokens.

Legend: N tokens, R tokens whose output this rank computes, D hidden, A heads, C head_dim,
Q q_lora_rank, G output groups, S groups of 128 of A C values.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.compressor import (
    C4Compressor,
    C4Weights,
    C128Compressor,
    C128Weights,
)
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.rope import RotaryTables
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.models.weight_parts import HeadWeights
from finwhale.ops import Ops
from finwhale.ops.attention import AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.indexer import IndexQueries
from finwhale.ops.linear import LinearWeight
from finwhale.ops.paging import MAX_DECODE_QUERY, CacheRows

COMPRESS_STREAM = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of attention. Projections with the same input are one matrix. Norms: float32.

    Attributes:
        wq_a_wkv: [Q + C, D]: the checkpoint's wq_a above its wkv.
        heads: this rank's heads.
        all_heads: all heads, if the rank holds them too.
    """

    wq_a_wkv: LinearWeight
    q_norm: Tensor
    kv_norm: Tensor
    heads: HeadWeights
    all_heads: HeadWeights | None = None
    compressor: C4Weights | C128Weights | None


class Heads:
    """Some heads with their output groups: the shapes and projections that depend on them."""

    def __init__(self, ops: Ops, weights: HeadWeights, head_dim: int) -> None:
        self.linear = ops.linear
        self.grouped_linear = ops.grouped_linear
        self.weights, self.head_dim = weights, head_dim
        self.rounded_output = ops.grouped_form(weights.wo_a, head_dim)
        self.number = len(weights.attn_sink)
        self.width = self.number * head_dim
        self.groups = len(weights.wo_a.weight)

    def queries(self, q_RX: Tensor) -> Tensor:
        """The queries of attention [R,A,C] among those of `Attention.project_and_store`."""
        queries: Tensor = q_RX[:, : self.width].unflatten(1, (self.number, self.head_dim))
        return queries

    def index_queries(self, q_RX: Tensor) -> Tensor:
        """The projected queries of the indexer [R,I*J], which follow those of attention."""
        return q_RX[:, self.width :]

    def empty_output(self, q_RX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Allocate the tensors that `Attention.select_and_attend` writes and `output` reads.

        They are [R,A,C], and scales [R,S]. The scales are None unless the output projection needs a
        rounded input.
        """
        num_tokens, rounded = q_RX.shape[0], self.rounded_output
        if rounded is None or num_tokens < rounded.min_tokens:
            return q_RX.new_empty(num_tokens, self.number, self.head_dim), None
        o_RGK, scales_RS = rounded.empty(num_tokens)
        return o_RGK.view(num_tokens, self.number, self.head_dim), scales_RS

    def output(self, o_RAC: Tensor, scales_RS: Tensor | None) -> Tensor:
        """The grouped output projection: [R,A,C] -> [R,D]."""
        w = self.weights
        o_RGK = o_RAC.view(o_RAC.shape[0], self.groups, self.width // self.groups)
        return self.linear(self.grouped_linear(o_RGK, w.wo_a, scales_RS).flatten(1), w.wo_b)


class Attention:
    """Maps x to [R,D], and writes the layer's window rows, entries and compressor state.

    x and the result are those of all tokens, and the result is the partial sum over the heads of
    this rank. If `is_token_parallel`, both are those of this rank's tokens, and the result is
    complete.
    """

    def __init__(self, context: LayerContext, weights: AttentionWeights, layer: int) -> None:
        config, ops = context.config, context.ops
        self.linear, self.rms_norm = ops.linear, ops.rms_norm
        self.ranks = context.ranks
        self.heads = Heads(ops, weights.heads, config.head_dim)
        self.all_heads: Heads | None = None
        if weights.all_heads is not None:
            self.all_heads = Heads(ops, weights.all_heads, config.head_dim)
        self.prepare_qkv, self.store_window_rows = ops.prepare_qkv, ops.store_window_rows
        self.sparse_attention = ops.sparse_attention
        self.compressor_first = ops.capabilities.compressor_first
        self.side_streams = context.side_streams
        self.weights = weights
        self.layer = layer
        self.round_kv = context.round_activations
        self.eps = config.rms_norm_eps
        self.q_lora_rank = config.q_lora_rank
        self.window = config.sliding_window
        self.scale = config.head_dim**-0.5
        self.compressor: C4Compressor | C128Compressor | None = None
        if isinstance(weights.compressor, C4Weights):
            gathers = self.all_heads is None
            self.compressor = C4Compressor(context, weights.compressor, layer, gathers=gathers)
        elif isinstance(weights.compressor, C128Weights):
            self.compressor = C128Compressor(context, weights.compressor, layer)

    def __call__(
        self,
        x: Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        compressor, streams = self.compressor, self.side_streams
        heads, rotary = self.heads_of(inputs), self.rotary(tables)
        projected = None
        if self.is_token_parallel(inputs):
            q_RX, projected = self.gather_and_store(x, inputs, rotary, cache)
        else:
            if isinstance(compressor, C4Compressor) and len(x) in self.compressor_first:
                projected = compressor.project(x)
                write = partial(compressor.write, projected, inputs, rotary, cache)
                streams.start(COMPRESS_STREAM, write)
            elif compressor is not None:
                projected = streams.start(
                    COMPRESS_STREAM, lambda: store(compressor, x, inputs, rotary, cache)
                )
            q_RX = self.project_and_store(x, inputs, rotary, cache)
        index_q = self.prepare_index_q(q_RX, inputs, rotary)
        if compressor is not None:
            streams.join(COMPRESS_STREAM)
        o_RAC, scales_RS = out = heads.empty_output(q_RX)
        segments.eager(
            self.select_and_attend, q_RX, projected, inputs, rotary, cache, *out, index_q
        )
        return heads.output(o_RAC, scales_RS)

    def is_token_parallel(self, inputs: StepInputs) -> bool:
        """Whether this rank computes all heads, for its own tokens."""
        return self.heads_of(inputs) is not self.heads

    def heads_of(self, inputs: StepInputs) -> Heads:
        """The heads that this rank computes in a step."""
        if inputs.local_tokens is not None and self.all_heads is not None:
            return self.all_heads
        return self.heads

    def rotary(self, tables: RotaryTables) -> Tensor:
        """The rotary table of this kind of layer."""
        return tables.plain if self.compressor is None else tables.compressed

    def project_and_store(
        self, x_ND: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> Tensor:
        """Write the window's rows; returns the queries of attention and indexer: [N,X]."""
        w = self.weights
        q_kv, width = self.linear(x_ND, w.wq_a_wkv), self.q_lora_rank
        q_lora = self.prepare_qkv(
            q_kv[:, :width],
            w.q_norm,
            q_kv[:, width:],
            self.row_form(rotary),
            inputs.tokens,
            self.window_rows(inputs, cache),
        )
        return self.linear(q_lora, self.heads.weights.wq_b)

    def row_form(self, rotary: Tensor) -> RowForm:
        return RowForm(self.weights.kv_norm, rotary, self.eps, self.round_kv)

    def window_rows(self, inputs: StepInputs, cache: PagedCache) -> CacheRows:
        return cache.rows("window", self.layer, inputs.tables)

    def prepare_index_q(
        self, q_RX: Tensor, inputs: StepInputs, rotary: Tensor
    ) -> IndexQueries | None:
        """In a decode, prepare the indexer's queries, which are ready before the entries are.

        A prefill prepares them in `select_and_attend`, the part that may depend on the sequences'
        lengths.
        """
        compressor = self.compressor
        if not isinstance(compressor, C4Compressor) or inputs.tokens.max_query > MAX_DECODE_QUERY:
            return None
        return compressor.prepare(self.heads_of(inputs).index_queries(q_RX), inputs, rotary)

    def gather_and_store(
        self, x_RD: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> tuple[Tensor, Tensor | None]:
        """Write the rows, entries and state of all tokens.

        A rank projects its own tokens, and the ranks gather the results. For Flash, averaged over
        the layers, a token's results take about as many bytes as its x. Meanwhile the rank computes
        its queries.

        Returns:
            The queries [R,X] of this rank's tokens for all heads and the indexer; and the argument
            of `visible`.
        """
        compressor, ranks, w = self.compressor, self.ranks, self.weights
        assert self.all_heads is not None
        num_tokens, both = len(inputs.token_ids), w.wq_a_wkv
        kv_RC = self.linear(x_RD, both.rows(self.q_lora_rank, len(both.weight)))
        gathers = [ranks.collectives.start_all_gather_rows(kv_RC, num_tokens, "window")]
        if compressor is not None:
            own = compressor.project(x_RD)
            gathers.append(ranks.collectives.start_all_gather_rows(own, num_tokens, "compressor"))
        q_lora = self.linear(x_RD, both.rows(0, self.q_lora_rank))
        q_lora = self.rms_norm(q_lora, w.q_norm, self.eps)
        q_RX = self.linear(q_lora, self.all_heads.weights.wq_b)
        # Not before: a kernel that waits for rows would keep a part of that GEMM from starting.
        kv, *projected = [wait() for wait in gathers]
        form, window = self.row_form(rotary), self.window_rows(inputs, cache)
        store_rows = partial(self.store_window_rows, kv, form, inputs.tokens, window)
        self.side_streams.start(COMPRESS_STREAM, store_rows)
        if compressor is not None:
            compressor.write(projected[0], inputs, rotary, cache)
        self.side_streams.join(COMPRESS_STREAM)
        return q_RX, projected[0] if projected else None

    def select_and_attend(
        self,
        q_RX: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
        out_RAC: Tensor,
        scales_RS: Tensor | None,
        index_q: IndexQueries | None = None,
    ) -> None:
        """Select entries and compute attention; writes the tensors from `Heads.empty_output`.

        This is the part of the layer that depends on the sequences' lengths. Each token sees the
        selected entries; in a layer without entries, StepInputs.extra_kv_slots.

        Args:
            index_q: the indexer's queries if `prepare_index_q` has prepared them.
        """
        heads, compressor, slots = self.heads_of(inputs), self.compressor, inputs.extra_kv_slots
        window, tokens = self.window_rows(inputs, cache), inputs.tokens
        if heads is not self.heads:
            assert inputs.local_tokens is not None
            tokens = inputs.local_tokens
            slots = None if slots is None else self.ranks.own_rows(slots)
        entries: TopkEntries | AllEntries | None = None
        if isinstance(compressor, C128Compressor):
            entries = compressor.visible(inputs, cache)
        elif compressor is not None:
            assert projected is not None
            if index_q is None:
                index_q = compressor.prepare(heads.index_queries(q_RX), inputs, rotary)
            entries = compressor.visible(projected, index_q, inputs, rotary, cache)
        elif slots is not None:
            entries = TopkEntries(window, slots)
        self.sparse_attention(
            heads.queries(q_RX),
            rotary,
            self.eps,
            tokens,
            Window(window, self.window),
            entries,
            heads.weights.attn_sink,
            self.scale,
            out_RAC,
            scales_RS,
        )


def store(
    compressor: C4Compressor | C128Compressor,
    x_ND: Tensor,
    inputs: StepInputs,
    rotary: Tensor,
    cache: PagedCache,
) -> Tensor:
    """Project the input and write the entries; returns the argument of `visible`."""
    projected = compressor.project(x_ND)
    compressor.write(projected, inputs, rotary, cache)
    return projected
