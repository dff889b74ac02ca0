"""One decoder layer. Legend: N tokens, H residual streams, D hidden."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from finwhale.distributed.collectives import Alone
from finwhale.models.deepseek_v4.attention import Attention, AttentionWeights
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.moe import Moe, MoeWeights
from finwhale.models.deepseek_v4.rank_links import RankLinks
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.protocol import PagedCache, Segments, StepInputs
from finwhale.ops import Ops
from finwhale.ops.mhc import MhcParams, MhcWeight

ALONE = RankLinks(Alone())
LayerState = tuple[Tensor, Tensor, Tensor, Tensor]


class Layer(Protocol):
    """A decoder layer, compiled (finwhale.compiled) or not."""

    def __call__(
        self,
        x: Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> LayerState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of a decoder layer. hc_attn and hc_ffn contain attn_norm and ffn_norm."""

    hc_attn: MhcWeight
    attn: AttentionWeights
    hc_ffn: MhcWeight
    ffn: MoeWeights


class DecoderLayer:
    """Maps (x, post_mix, res_mix, residual) to the same four values for the next layer.

    The last block's post step stays pending. The first layer gets the residual streams [N,H,D] as x
    and no mixes. Every later layer gets the four values that the previous layer returned; x is then
    the output [N,D] of that layer's last block. The MTP layer is a decoder layer too.

    A block's output is a partial sum; the layer adds those of all ranks before anything reads it.
    In steps of many tokens, arguments and results have the rows of this rank only, and the blocks'
    inputs are gathered (`RankLinks`).

    Args:
        config: the sizes of this rank's part.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        weights: LayerWeights,
        layer: int,
        round_activations: bool,
        side_streams: SideStreams,
        links: RankLinks = ALONE,
    ) -> None:
        self.mhc_pre = ops.mhc_pre
        self.mhc_post_pre = ops.mhc_post_pre
        self.params = mhc_params(config)
        self.weights = weights
        self.links = links
        partial_dtype = links.partial_dtype
        self.attn = Attention(
            config, ops, weights.attn, layer, round_activations, side_streams, partial_dtype
        )
        self.ffn = Moe(config, ops, weights.ffn, side_streams, partial_dtype)

    def __call__(
        self,
        x: Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> LayerState:
        links, num_tokens = self.links, len(inputs.token_ids)
        x, post_mix, res_mix, residual = self.enter(x, post_mix, res_mix, residual)
        x = links.whole(x, num_tokens)
        x = links.sum(self.attn(x, inputs, tables, cache, segments), x.dtype)
        x, post_mix, res_mix, residual = self.cross(x, post_mix, res_mix, residual)
        x = links.whole(x, num_tokens)
        return links.sum(self.ffn(x, inputs), x.dtype), post_mix, res_mix, residual

    def enter(
        self,
        x: Tensor,
        post_mix: Tensor | None = None,
        res_mix: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> LayerState:
        """Compute attention's input and its mixes from the layer's arguments."""
        w = self.weights.hc_attn
        if residual is None or post_mix is None or res_mix is None:
            return *self.mhc_pre(x, w, self.params), x
        return self.mhc_post_pre(x, post_mix, res_mix, residual, w, self.params)

    def cross(self, x: Tensor, post_mix: Tensor, res_mix: Tensor, residual: Tensor) -> LayerState:
        """Compute the experts' input and its mixes from attention's output."""
        return self.mhc_post_pre(x, post_mix, res_mix, residual, self.weights.hc_ffn, self.params)


def mhc_params(config: ModelConfig) -> MhcParams:
    return MhcParams(
        num_iters=config.hc_sinkhorn_iters, eps=config.hc_eps, rms_eps=config.rms_norm_eps
    )
