"""One decoder layer. Legend: N tokens, S recalled ids, H residual streams, D hidden."""

from collections.abc import Callable

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.layer import mhc_params
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
from finwhale.ops.deepseek_v41 import HashTensors, Pending, SharedEntryOps

LayerState = tuple[Pending | None, Tensor, Tensor]


class DecoderLayer:
    """Maps (last block, residual streams before its post step, its mixes) to those after the layer.

    The post step of the last block is left to the next layer. No block comes before the first one.
    """

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
        self.params = mhc_params(config)
        self.attn = Attention(
            config, ops, shared, weights.attn, layer, round_activations=round_activations
        )
        moe, own = SharedMoe if ranks.rank.data_parallel else Moe, config.of_layer(layer)
        self.ffn = moe(ops, ranks, side_streams, weights.ffn, own.moe_sizes)
        self.engram: Engram | None = None
        if weights.engram is not None:
            assert hashes is not None
            self.engram = Engram(config, ops, shared, weights.engram, hashes)

    def __call__(
        self,
        state: LayerState,
        parts: StepParts,
        rotary: Tensor,
        cache: PagedCache,
        published: Published,
        segments: Segments,
        recalled_NS: Tensor | None,
        on_input: Callable[[Tensor], None] | None = None,
        tail: Tail | None = None,
    ) -> LayerState:
        """Calls `on_input` with the residual streams at the attention input.

        Args:
            tail: the layer, a KV source, writes the entries of all tokens, and computes the rest
                for these only.
        """
        w, mhc_pre = self.weights, self.shared.mhc_pre
        if self.engram is not None:
            assert recalled_NS is not None
            state = None, self.engram(self.streams(state), recalled_NS), state[2]
        x, post, res, pre_NH, streams_NHD = mhc_pre(*state, w.hc_attn, self.params)
        if on_input is not None:
            on_input(streams_NHD)
        projected = self.attn.project_index(x, parts.inputs, parts.writing, rotary, cache)
        if tail is not None:
            assert projected is not None
            parts, rows = tail.parts, tail.rows
            x, post, res, pre_NH = x[rows], post[rows], res[rows], pre_NH[rows]
            streams_NHD, projected = streams_NHD[rows], projected[rows]
            if not len(rows):
                return None, streams_NHD, pre_NH
        where = parts.inputs, rotary, cache, published, segments
        total = self.ranks.reduce(self.attn(x, projected, *where), x.dtype)
        state = (total, post, res), streams_NHD, pre_NH
        x, post, res, pre_NH, streams_NHD = mhc_pre(*state, w.hc_ffn, self.params)
        ffn = self.ffn.terms if self.ranks.can_fuse_reduce(*x.shape) else self.ffn
        total = self.ranks.reduce(ffn(x, parts.inputs), x.dtype)
        return (total, post, res), streams_NHD, pre_NH

    def streams(self, state: LayerState) -> Tensor:
        """The residual streams [N,H,D] after the last block's post step."""
        last, streams_NHD, _ = state
        if last is None:
            return streams_NHD
        x, post, res = last
        if isinstance(x, Tensor):
            return self.ops.mhc_post(x, post, res, streams_NHD)
        assert self.ops.mhc_of_terms is not None
        return self.ops.mhc_of_terms.mhc_post(x, post, res, streams_NHD)
