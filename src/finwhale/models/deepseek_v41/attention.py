"""Attention of one layer: its window, and entries that a KV source wrote and an index source chose.

Legend: N tokens, D hidden, A heads, C head_dim, Q q_lora_rank, I index heads, J index_head_dim.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.weight_classes import AttentionWeights, CompressorWeights
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.attention import TopkEntries, Window
from finwhale.ops.deepseek_v41 import IndexRule, RowRounding, Selection, SharedEntryOps
from finwhale.ops.paging import CacheRows, Tokens


@dataclass(slots=True)
class Published:
    """Results of a step's layers that later layers of the step use.

    Captured steps replay with the object of their capture, so a model has one for all its steps.

    Attributes:
        selection: what the last index source chose; its `blocks` are those of the candidate source.
    """

    selection: Selection | None = None
    blocks: Tensor | None = None


class Attention:
    """Maps x [N,D] to [N,D], and writes the layer's window rows, entries, keys and state."""

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        shared: SharedEntryOps,
        weights: AttentionWeights,
        layer: int,
        *,
        round_activations: bool,
    ) -> None:
        self.config, self.ops, self.shared, self.weights = config, ops, shared, weights
        self.layer, self.ratio = layer, config.compress_ratios[layer]
        self.source = config.kv_source(layer) if self.ratio else None
        self.rounds = round_activations
        source = config.candidate_source_layer_id
        self.within_blocks = source is not None and layer > source
        self.rule = IndexRule(
            ratio=max(self.ratio, 1),
            topk=config.index_topk,
            scale=config.index_head_dim**-0.5 * config.index_n_heads**-0.5,
            round_query=round_activations,
            block=config.candidate_block_size,
            keeps=config.candidate_topk_blocks if layer == source else 0,
        )

    def project_index(
        self, x_ND: Tensor, inputs: StepInputs, writing: Tokens, rotary: Tensor, cache: PagedCache
    ) -> Tensor | None:
        """An index source's projections of its tokens; None: the layer is none. A KV source writes
        the entries of the tokens in `writing` (StepParts).
        """
        w = self.weights
        if w.index_proj is None:
            return None
        projected = self.ops.linear(x_ND, w.index_proj)
        if w.compressor is not None:
            self._write_entries(projected, w.compressor, inputs, writing, rotary, cache)
        return projected

    def __call__(
        self,
        x_ND: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
        published: Published,
        segments: Segments,
    ) -> Tensor:
        """projected: the result of `project_index` for these tokens."""
        config, ops, w, heads = self.config, self.ops, self.weights, self.weights.heads
        q_kv, width = ops.linear(x_ND, w.wq_a_wkv), config.q_lora_rank
        latent_NQ = self.shared.prepare_qkv(
            (q_kv[:, :width], q_kv[:, width:]),
            (w.q_norm, w.kv_norm),
            config.rms_norm_eps,
            cache.rows("window", self.layer, inputs.tables),
            *(rotary, inputs.tokens, "e4m3" if self.rounds else "none"),
        )
        q_NX = ops.linear(latent_NQ, heads.wq_b)
        out_NAC = q_NX.new_empty(len(q_NX), len(heads.attn_sink), config.head_dim)
        step = inputs, rotary, cache, published
        segments.eager(self.select_and_attend, q_NX, projected, *step, out_NAC)
        grouped = ops.grouped_linear(
            out_NAC.view(len(x_ND), len(heads.wo_a.weight), -1), heads.wo_a
        )
        return ops.linear(grouped.flatten(1), heads.wo_b)

    def select_and_attend(
        self,
        q_NX: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
        published: Published,
        out_NAC: Tensor,
    ) -> None:
        """Select entries in an index source, and write attention's output.

        This is the part of the layer that depends on the sequences' lengths.
        """
        config, w = self.config, self.weights.heads
        all_heads, entries = math.prod(out_NAC.shape[1:]), None
        window = cache.rows("window", self.layer, inputs.tables)
        if projected is not None:
            assert self.source is not None
            published.selection = self.shared.select(
                q_NX[:, all_heads:].unflatten(1, (config.index_n_heads, config.index_head_dim)),
                projected[:, -config.index_n_heads :],
                cache.rows(f"c{self.ratio}_keys", self.source, inputs.tables),
                *(rotary, inputs.tokens, self.rule),
                published.blocks if self.within_blocks else None,
            )
            if self.rule.keeps:
                published.blocks = published.selection.blocks
        if self.source is not None:
            assert published.selection is not None
            rows = cache.rows(f"c{self.ratio}", self.source, inputs.tables)
            entries = TopkEntries(rows, published.selection.slots)
        elif inputs.extra_kv_slots is not None:
            entries = TopkEntries(window, inputs.extra_kv_slots)
        q_NAC = q_NX[:, :all_heads].unflatten(1, out_NAC.shape[1:])
        self.ops.sparse_attention(
            *(q_NAC, rotary, None, inputs.tokens, Window(window, config.sliding_window), entries),
            *(w.attn_sink, config.head_dim**-0.5, out_NAC),
        )

    def store_window_row(
        self, kv_NC: Tensor, inputs: StepInputs, rotary: Tensor, cache: PagedCache
    ) -> None:
        """Write the tokens' rows of the window."""
        window = cache.rows("window", self.layer, inputs.tables)
        normed = self.ops.rms_norm(kv_NC, self.weights.kv_norm, self.config.rms_norm_eps)
        self._store(normed, window, rotary, inputs.tokens, 1, "e4m3")

    def _store(
        self,
        values: Tensor,
        rows: CacheRows,
        rotary: Tensor,
        tokens: Tokens,
        ratio: int,
        rounding: RowRounding,
    ) -> None:
        rounding = rounding if self.rounds else "none"
        self.shared.store_rows(values, rows, rotary, tokens, ratio, rounding)

    def _write_entries(
        self,
        projected: Tensor,
        w: CompressorWeights,
        inputs: StepInputs,
        writing: Tokens,
        rotary: Tensor,
        cache: PagedCache,
    ) -> None:
        """Write the entries and index keys that complete, and the state of open pairs."""
        config, ops, ratio = self.config, self.ops, self.ratio
        width, eps = config.head_dim, config.rms_norm_eps

        def rows(field: str) -> CacheRows:
            return cache.rows(field, self.layer, inputs.tables)

        if ratio == 2:
            latents = self.shared.merge_pairs(
                *(projected[:, : 2 * width], w.norm, rows("c2_state"), inputs.tokens, eps),
                config.max_verify_tokens,
            )
        else:
            latents = ops.rms_norm(projected[:, :width], w.norm, eps)
        keys = ops.rms_norm(ops.linear(latents, w.wk), w.k_norm, eps)
        self._store(latents, rows(f"c{ratio}"), rotary, writing, ratio, "fp4")
        self._store(keys, rows(f"c{ratio}_keys"), rotary, writing, ratio, "key")
