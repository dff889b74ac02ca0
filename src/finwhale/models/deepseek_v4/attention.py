"""Attention of one layer: window, C4 or C128, and the grouped output projection.

Legend: N tokens, D hidden, A heads, C head_dim, Q q_lora_rank, G output groups,
S groups of 128 of A C values.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from finwhale.models.deepseek_v4.compressor import (
    C4Entries,
    C4Weights,
    C128Entries,
    C128Weights,
)
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.rank_links import RankLinks
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.protocol import PagedCache, Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.indexer import IndexQueries
from finwhale.ops.linear import LinearWeight
from finwhale.ops.paging import MAX_DECODE_QUERY, Tokens

COMPRESS_STREAM = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Weights of attention. Projections with the same input are one matrix. Norms, sink: float32.

    Attributes:
        wq_a_wkv: [Q + C, D]: the checkpoint's wq_a above its wkv.
        wq_b: [A*C, Q]; in C4 layers followed by the indexer's wq_b [I*J, Q].
        wo_a: [G, o_lora_rank, A*C/G].
    """

    wq_a_wkv: LinearWeight
    q_norm: Tensor
    wq_b: LinearWeight
    kv_norm: Tensor
    wo_a: LinearWeight
    wo_b: LinearWeight
    attn_sink: Tensor
    compressor: C4Weights | C128Weights | None


class Attention:
    """Maps x [N,D] to [N,D], and writes the layer's window rows, entries and compressor state.

    The result is the partial sum over the heads of this rank.

    Args:
        config: the sizes of this rank's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: AttentionWeights,
        layer: int,
        round_activations: bool,
        side_streams: SideStreams,
        links: RankLinks,
    ) -> None:
        if links.partial_dtype is not None:
            wo_b = replace(weights.wo_b, out_dtype=links.partial_dtype)
            weights = replace(weights, wo_b=wo_b)
        self.linear = ops.linear
        self.grouped_linear = ops.grouped_linear
        self.prepare_qkv = ops.prepare_qkv
        self.sparse_attention = ops.sparse_attention
        self.side_streams = side_streams
        self.weights = weights
        self.rounded_output = ops.grouped_form(weights.wo_a, config.head_dim)
        self.layer = layer
        self.round_kv = round_activations
        self.eps = config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.q_lora_rank = config.q_lora_rank
        self.window = config.sliding_window
        self.groups = config.o_groups
        self.scale = config.head_dim**-0.5
        self.entries: C4Entries | C128Entries | None = None
        if isinstance(weights.compressor, C4Weights):
            self.entries = C4Entries(
                config, ops, weights.compressor, layer, round_activations, links
            )
        elif isinstance(weights.compressor, C128Weights):
            self.entries = C128Entries(config, ops, weights.compressor, layer, round_activations)

    def __call__(
        self,
        x_ND: Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor:
        compressor, streams = self.entries, self.side_streams
        rotary = self.rotary(tables)
        projected = None
        if compressor is not None:
            projected = streams.start(
                COMPRESS_STREAM, lambda: store(compressor, x_ND, inputs, rotary, cache)
            )
        q_NX = self.project(x_ND, inputs, rotary, cache)
        index_q = self.prepare_index_q(q_NX, inputs, rotary)
        if compressor is not None:
            streams.join(COMPRESS_STREAM)
        o_NAC, scales_NS = out = self.empty_output(q_NX)
        segments.eager(self.attend, q_NX, projected, inputs, rotary, cache, *out, index_q)
        return self.output(o_NAC, scales_NS)

    def rotary(self, tables: RotaryTables) -> Tensor:
        """The rotary table of this kind of layer."""
        return tables.plain if self.entries is None else tables.compressed

    def project(
        self, x_ND: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> Tensor:
        """Write the window's rows; returns the queries of attention and indexer: [N,X]."""
        w = self.weights
        q_kv = self.linear(x_ND, w.wq_a_wkv)
        q_lora = self.prepare_qkv(
            q_kv[:, : self.q_lora_rank],
            w.q_norm,
            q_kv[:, self.q_lora_rank :],
            w.kv_norm,
            rotary,
            self.eps,
            self.round_kv,
            inputs.tokens,
            cache.pool("window", self.layer),
            inputs.tables["window"],
        )
        return self.linear(q_lora, w.wq_b)

    def prepare_index_q(
        self, q_NX: Tensor, inputs: StepInputs, rotary: Tensor
    ) -> IndexQueries | None:
        """In a decode, prepare the indexer's queries, which are ready before the entries are.

        A prefill prepares them in `attend`, the part that may depend on the sequences' lengths.
        """
        entries = self.entries
        if not isinstance(entries, C4Entries) or inputs.tokens.max_query > MAX_DECODE_QUERY:
            return None
        return entries.prepare(self._index_q(q_NX), inputs, rotary)

    def _index_q(self, q_NX: Tensor) -> Tensor:
        return q_NX[:, self.heads * self.head_dim :]

    def empty_output(self, q_NX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Allocate the tensors that `attend` writes and `output` reads: [N,A,C], and scales [N,S].

        The scales are None unless the output projection needs a rounded input.
        """
        num_tokens, rounded = q_NX.shape[0], self.rounded_output
        if rounded is None or num_tokens < rounded.min_tokens:
            return q_NX.new_empty(num_tokens, self.heads, self.head_dim), None
        o_NGK, scales_NS = rounded.empty(num_tokens)
        return o_NGK.view(num_tokens, self.heads, self.head_dim), scales_NS

    def output(self, o_NAC: Tensor, scales_NS: Tensor | None) -> Tensor:
        """The grouped output projection: [N,A,C] -> [N,D]."""
        w = self.weights
        o_NGK = o_NAC.view(o_NAC.shape[0], self.groups, -1)
        return self.linear(self.grouped_linear(o_NGK, w.wo_a, scales_NS).flatten(1), w.wo_b)

    def attend(
        self,
        q_NX: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
        out_NAC: Tensor,
        scales_NS: Tensor | None,
        index_q: IndexQueries | None = None,
    ) -> None:
        """Select entries and compute attention; writes the tensors from `empty_output`.

        This is the part of the layer that depends on the sequences' lengths.

        Args:
            index_q: the indexer's queries if `prepare_index_q` has prepared them.
        """
        entries = self.choose(q_NX, projected, inputs, rotary, cache, index_q)
        window = Window(cache.pool("window", self.layer), inputs.tables["window"], self.window)
        self.read(q_NX, entries, inputs.tokens, rotary, window, out_NAC, scales_NS)

    def choose(
        self,
        q_NX: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
        index_q: IndexQueries | None = None,
    ) -> Selected | Complete | None:
        """Select the entries that each token sees; without entries, StepInputs.further_slots."""
        if self.entries is None or projected is None:
            if inputs.further_slots is None:
                return None
            rows_per_page = inputs.tables["window"].rows_per_page
            return Selected(cache.pool("window", self.layer), inputs.further_slots, rows_per_page)
        if isinstance(self.entries, C128Entries):
            return self.entries.visible(inputs, cache)
        if index_q is None:
            index_q = self.entries.prepare(self._index_q(q_NX), inputs, rotary)
        return self.entries.visible(projected, index_q, inputs, rotary, cache)

    def read(
        self,
        q_NX: Tensor,
        entries: Selected | Complete | None,
        tokens: Tokens,
        rotary: Tensor,
        window: Window,
        out_NAC: Tensor,
        scales_NS: Tensor | None,
    ) -> None:
        """Attend to the window and the entries; writes the tensors from `empty_output`."""
        width = self.heads * self.head_dim
        self.sparse_attention(
            q_NX[:, :width].unflatten(1, (self.heads, self.head_dim)),
            rotary,
            self.eps,
            tokens,
            window,
            entries,
            self.weights.attn_sink,
            self.scale,
            out_NAC,
            scales_NS,
        )


def store(
    compressor: C4Entries | C128Entries,
    x_ND: Tensor,
    inputs: StepInputs,
    rotary: Tensor,
    cache: PagedCache,
) -> Tensor:
    """Project the input and write the entries; returns the argument of `visible`."""
    projected = compressor.project(x_ND)
    compressor.write(projected, inputs, rotary, cache)
    return projected
