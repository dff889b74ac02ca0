"""One decoder layer. Legend: N tokens, R rows of this rank, H residual streams, D hidden."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.attention import Attention, AttentionWeights
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.moe import Moe, MoeWeights
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import PartialSum

BlockInput = tuple[Tensor, Tensor, Tensor, Tensor]
BlockOutput = Tensor | PartialSum | UnreducedExperts
LayerState = tuple[BlockOutput, Tensor, Tensor, Tensor]


class RunLayers(Protocol):
    """Runs residual streams through layers and the last post step: `DeepseekV4.run_layers`."""

    def __call__(
        self,
        layers: "Sequence[DecoderLayer]",
        streams_RHD: Tensor,
        inputs: StepInputs,
        cache: PagedCache,
        segments: Segments,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of a decoder layer. hc_attn and hc_ffn contain attn_norm and ffn_norm."""

    hc_attn: MhcWeight
    attn: AttentionWeights
    hc_ffn: MhcWeight
    ffn: MoeWeights


class DecoderLayer:
    """Maps (x, post_mix, res_mix, residual) to the same four values for the next layer.

    The layer leaves its last block's post step to the next layer. The first layer gets the residual
    streams [N,H,D] as x and no mixes. Every later layer gets the four values that the previous
    layer returned; x is then the output [N,D] of that layer's last block. The layer calls
    `on_residual` with the residual streams at its start. The layers of a draft head are decoder
    layers too.

    A block's output is a partial sum, except that of attention if the rank attends to its own
    tokens with all heads (`Attention.is_token_parallel`). The layer sums it over all ranks, or
    passes its terms to the next mHC operator: a `PartialSum`, or the experts' outputs
    (`TensorParallel`). In steps of many tokens, arguments and results have only this rank's rows,
    and the ranks gather the blocks' inputs.
    """

    def __init__(self, context: LayerContext, weights: LayerWeights, layer: int) -> None:
        ops = context.ops
        self.mhc_pre = ops.mhc_pre
        self.mhc_post_pre = ops.mhc_post_pre
        self.mhc_of_terms = ops.mhc_of_terms
        self.params = mhc_params(context.config)
        self.weights = weights
        self.ranks = context.ranks
        self.attn = Attention(context, weights.attn, layer)
        self.ffn = Moe(context, weights.ffn)

    def __call__(
        self,
        x: BlockOutput,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> LayerState:
        ranks, num_tokens = self.ranks, len(inputs.token_ids)
        y, post_mix, res_mix, residual = self.attention_input(x, post_mix, res_mix, residual)
        if on_residual is not None:
            on_residual(residual)
        if self.attn.is_token_parallel(inputs):
            total: BlockOutput = self.attn(y, inputs, tables, cache, segments)
        else:
            y = ranks.all_gather_rows(y, num_tokens)
            total = ranks.reduce(self.attn(y, inputs, tables, cache, segments), y.dtype)
        y, post_mix, res_mix, residual = self.experts_input(total, post_mix, res_mix, residual)
        y = ranks.all_gather_rows(y, num_tokens)
        ffn = self.ffn.terms if ranks.can_fuse_reduce(*y.shape) else self.ffn
        return ranks.reduce(ffn(y, inputs), y.dtype), post_mix, res_mix, residual

    def attention_input(
        self,
        x: BlockOutput,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> BlockInput:
        """Compute attention's input and mixes from the layer's arguments."""
        w = self.weights.hc_attn
        if residual is None or post_mix is None or res_mix is None:
            assert isinstance(x, Tensor)
            return *self.mhc_pre(x, w, self.params), x
        return self._post_pre(x, post_mix, res_mix, residual, w)

    def experts_input(
        self, x: BlockOutput, post_mix: Tensor, res_mix: Tensor, residual: Tensor
    ) -> BlockInput:
        """Compute the experts' input and mixes from attention's output."""
        return self._post_pre(x, post_mix, res_mix, residual, self.weights.hc_ffn)

    def _post_pre(
        self,
        x: BlockOutput,
        post_mix: Tensor,
        res_mix: Tensor,
        residual: Tensor,
        w: MhcWeight,
    ) -> BlockInput:
        if isinstance(x, Tensor):
            return self.mhc_post_pre(x, post_mix, res_mix, residual, w, self.params)
        assert self.mhc_of_terms is not None
        return self.mhc_of_terms.mhc_post_pre(x, post_mix, res_mix, residual, w, self.params)


def mhc_params(config: DeepseekV4Config) -> MhcParams:
    return MhcParams(
        num_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, rms_eps=config.rms_norm_eps
    )
