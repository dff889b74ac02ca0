"""One decoder layer. Legend: N tokens, R rows of this rank, H residual streams, D hidden."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_config import DeepseekConfig
from finwhale.models.deepseek_v4.attention import Attention, AttentionWeights
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.moe import Moe, MoeWeights, SharedMoe
from finwhale.models.rope import RotaryTables
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import PartialSum

# x, post_mix, res_mix and residual.
BlockInput = tuple[Tensor, Tensor, Tensor, Tensor]
BlockOutput = Tensor | PartialSum | UnreducedExperts
LayerState = tuple[BlockOutput, Tensor, Tensor, Tensor]


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
    streams [N,H,D] alone. Every later layer gets the four values that the previous layer returned;
    x is then the output [N,D] of that layer's last block. The layer calls
    `on_residual` with the residual streams at its start. The layers of a draft head are decoder
    layers too.

    A block's output is a partial sum, except that of attention if the rank attends to its own
    tokens with all heads (`Attention.is_token_parallel`), and that of the experts if they exchange
    rows beside other work (`Moe.of_own_tokens`). The layer sums it over all ranks, or
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
        self.ranks, c = context.ranks, context.config
        self.attn = Attention(context, weights.attn, layer)
        moe = SharedMoe if context.ranks.rank.data_parallel else Moe
        self.ffn = moe(ops, context.ranks, context.side_streams, weights.ffn, c.moe_sizes)

    def __call__(
        self,
        state: LayerState | Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> LayerState:
        ranks, num_tokens = self.ranks, len(inputs.token_ids)
        y, post_mix, res_mix, residual = self.attention_input(state)
        if on_residual is not None:
            on_residual(residual)
        if self.attn.is_token_parallel(inputs):
            total: BlockOutput = self.attn(y, inputs, tables, cache, segments)
        else:
            y = ranks.all_gather_rows(y, num_tokens)
            total = ranks.reduce(self.attn(y, inputs, tables, cache, segments), y.dtype)
        y, post_mix, res_mix, residual = self.experts_input((total, post_mix, res_mix, residual))
        if ranks.divides_tokens(num_tokens) and ranks.exchanges_beside(num_tokens, y):
            return self.ffn.of_own_tokens(y, inputs), post_mix, res_mix, residual
        y = ranks.all_gather_rows(y, num_tokens)
        ffn = self.ffn.terms if ranks.can_fuse_reduce(*y.shape) else self.ffn
        return ranks.reduce(ffn(y, inputs), y.dtype), post_mix, res_mix, residual

    def attention_input(self, state: LayerState | Tensor) -> BlockInput:
        """Compute attention's input and mixes from the layer's argument."""
        if isinstance(state, Tensor):
            return *self.mhc_pre(state, self.weights.hc_attn, self.params), state
        return self._post_pre(state, self.weights.hc_attn)

    def experts_input(self, state: LayerState) -> BlockInput:
        """Compute the experts' input and mixes from attention's output and mixes."""
        return self._post_pre(state, self.weights.hc_ffn)

    def _post_pre(self, state: LayerState, w: MhcWeight) -> BlockInput:
        x, post_mix, res_mix, residual = state
        if isinstance(x, Tensor):
            return self.mhc_post_pre(x, post_mix, res_mix, residual, w, self.params)
        assert self.mhc_of_terms is not None
        return self.mhc_of_terms.mhc_post_pre(x, post_mix, res_mix, residual, w, self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts of the model that a draft head uses, too.

    Attributes:
        first_layer: the number of the head's first layer.
        embed, head: the model's embedding [V,D], and this rank's rows of its LM head.
        run_layers: DeepseekV4.run_layers.
    """

    first_layer: int
    embed: Tensor
    head: LinearWeight
    run_layers: Callable[[Sequence[DecoderLayer], Tensor, StepInputs, PagedCache, Segments], Tensor]


class DraftLayers:
    """The layers of a draft head, and the logits of their residual streams."""

    def __init__(
        self,
        context: LayerContext,
        layers: Sequence[LayerWeights],
        hc_head: HcHeadWeight,
        shared: SharedParts,
    ) -> None:
        self.ranks, self.params = context.ranks, mhc_params(context.config)
        self.linear, self.hc_head = context.ops.linear, context.ops.hc_head
        self.embed, self.head, self.run_layers = shared.embed, shared.head, shared.run_layers
        self.hc_head_weight = hc_head
        self.layers = [
            DecoderLayer(context.of_layer(number), layer, number)
            for number, layer in enumerate(layers, shared.first_layer)
        ]

    def compute_logits(self, streams_MHD: Tensor) -> Tensor:
        """This rank's logits [M,X] float32 of the layers' residual streams, without Markov head."""
        hidden = self.hc_head(streams_MHD, self.hc_head_weight, self.params)
        return self.linear(hidden, self.head).float()

    def serve_layers(self, lane_rows: int) -> None:
        """Take part in a forward in which this data-parallel rank has no tokens."""
        serve_others((layer.ffn for layer in self.layers), self.embed[:0], lane_rows)


def serve_others(ffns: Iterable[Moe], x_0D: Tensor, lane_rows: int) -> None:
    """Run a data-parallel rank's part of the layers' experts, without tokens of its own."""
    for ffn in ffns:
        assert isinstance(ffn, SharedMoe)
        ffn.serve_others(x_0D, lane_rows)


def post_step(ops: Ops, x: BlockOutput, post: Tensor, res: Tensor, residual: Tensor) -> Tensor:
    """The residual streams after a block with the output x: mhc.MhcPost."""
    if isinstance(x, Tensor):
        return ops.mhc_post(x, post, res, residual)
    assert ops.mhc_of_terms is not None
    return ops.mhc_of_terms.mhc_post(x, post, res, residual)


def mhc_params(config: DeepseekConfig) -> MhcParams:
    return MhcParams(
        num_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, rms_eps=config.rms_norm_eps
    )
