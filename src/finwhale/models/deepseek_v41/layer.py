"""One decoder layer. Legend: N tokens, S recalled ids, H residual streams, D hidden."""

from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.moe import Moe, SharedMoe
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.models.deepseek_v41.attention import Attention, Published
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.engram import Engram
from finwhale.models.deepseek_v41.step_parts import StepParts, Tail
from finwhale.models.deepseek_v41.weight_classes import LayerWeights
from finwhale.models.step_inputs import Segments
from finwhale.ops import Ops
from finwhale.ops.deepseek_v41 import HashTensors, SharedEntryOps
from finwhale.ops.mhc import MhcParams


class DecoderLayer:
    """Maps (residual streams, mixes of the block before) to those after the layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        shared: SharedEntryOps,
        ranks: TensorParallel,
        side_streams: SideStreams,
        weights: LayerWeights,
        layer: int,
        hashes: HashTensors | None,
        *,
        round_activations: bool,
    ) -> None:
        self.ops, self.shared, self.ranks, self.weights = ops, shared, ranks, weights
        self.params = MhcParams(
            num_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, rms_eps=config.rms_norm_eps
        )
        self.attn = Attention(
            config, ops, shared, weights.attn, layer, round_activations=round_activations
        )
        own, moe = config.of_layer(layer), SharedMoe if ranks.rank.data_parallel else Moe
        sizes = (
            own.n_routed_experts,
            own.num_experts_per_tok,
            own.routed_scaling_factor,
            own.swiglu_limit,
        )
        self.ffn = moe(ops, ranks, side_streams, weights.ffn, sizes)
        self.engram: Engram | None = None
        if weights.engram is not None:
            assert hashes is not None
            self.engram = Engram(config, ops, shared, weights.engram, hashes)

    def __call__(
        self,
        streams_NHD: Tensor,
        pre_NH: Tensor,
        parts: StepParts,
        rotary: Tensor,
        cache: PagedCache,
        published: Published,
        segments: Segments,
        recalled_NS: Tensor | None,
        on_input: Callable[[Tensor], None] | None = None,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Calls `on_input` with the residual streams at the attention input.

        Args:
            tail: the layer, a KV source, writes the entries of all tokens, and computes the rest
                for these only.
        """
        ops, w = self.ops, self.weights
        if self.engram is not None:
            assert recalled_NS is not None
            streams_NHD = self.engram(streams_NHD, recalled_NS)
        if on_input is not None:
            on_input(streams_NHD)
        x, post, res, pre_NH = self.shared.mhc_pre(streams_NHD, pre_NH, w.hc_attn, self.params)
        projected = self.attn.project_index(x, parts.inputs, parts.writing, rotary, cache)
        if tail is not None:
            assert projected is not None
            parts, rows = tail.parts, tail.rows
            x, post, res, pre_NH = x[rows], post[rows], res[rows], pre_NH[rows]
            streams_NHD, projected = streams_NHD[rows], projected[rows]
            if not len(rows):
                return streams_NHD, pre_NH
        where = parts.inputs, rotary, cache, published, segments
        x = self._sum(self.attn(x, projected, *where), x.dtype)
        streams_NHD = ops.mhc_post(x, post, res, streams_NHD)
        x, post, res, pre_NH = self.shared.mhc_pre(streams_NHD, pre_NH, w.hc_ffn, self.params)
        x = self._sum(self.ffn(x, parts.inputs), x.dtype)
        return ops.mhc_post(x, post, res, streams_NHD), pre_NH

    def _sum(self, partial_ND: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over the ranks, which divide attention's heads and the experts' widths."""
        total = self.ranks.reduce(partial_ND, dtype)
        assert isinstance(total, Tensor)
        return total
