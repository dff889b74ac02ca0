"""One decoder layer. Legend: N tokens, S recalled ids, H residual streams, D hidden."""

from collections.abc import Callable

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v41.attention import Attention, Published
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.engram import Engram
from finwhale.models.deepseek_v41.engram_hash import EngramHash
from finwhale.models.deepseek_v41.step_parts import StepParts, Tail
from finwhale.models.deepseek_v41.weight_classes import LayerWeights, MoeWeights
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import Ops
from finwhale.ops.deepseek_v41 import SharedEntryOps
from finwhale.ops.mhc import MhcParams


class DecoderLayer:
    """Maps (residual streams, mixes of the block before) to those after the layer."""

    def __init__(
        self,
        config: DeepseekV41Config,
        ops: Ops,
        shared: SharedEntryOps,
        weights: LayerWeights,
        layer: int,
        hashes: EngramHash | None,
        *,
        round_activations: bool,
    ) -> None:
        self.ops, self.shared, self.weights = ops, shared, weights
        self.config = config.of_layer(layer)
        self.params = MhcParams(
            num_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, rms_eps=config.rms_norm_eps
        )
        self.attn = Attention(
            config, ops, shared, weights.attn, layer, round_activations=round_activations
        )
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
        x = self.attn(x, projected, parts.inputs, rotary, cache, published)
        streams_NHD = ops.mhc_post(x, post, res, streams_NHD)
        x, post, res, pre_NH = self.shared.mhc_pre(streams_NHD, pre_NH, w.hc_ffn, self.params)
        return ops.mhc_post(self._experts(x, w.ffn, parts.inputs), post, res, streams_NHD), pre_NH

    def _experts(self, x_ND: Tensor, w: MoeWeights, inputs: StepInputs) -> Tensor:
        config, ops = self.config, self.ops
        ids, weights = ops.route_by_score(
            *(x_ND, w.gate, w.bias, config.num_experts_per_tok, config.routed_scaling_factor),
            inputs.tokens.positions,
        )
        shared = ops.swiglu_mlp(x_ND, w.shared_experts, config.swiglu_limit)
        return ops.experts(x_ND, ids, weights, w.experts, config.swiglu_limit, shared)
