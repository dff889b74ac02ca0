"""One decoder layer. Legend: N tokens, X values of Engram's rows, H residual streams, D hidden."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.layer import mhc_params, post_step
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
from finwhale.ops.mhc import MhcWeight

MIXES_STREAM = 0  # of SideStreams
Mixes = tuple[Tensor, Tensor, Tensor]
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
        self.side_streams, self.params = side_streams, mhc_params(config)
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
        rows_NX: Tensor | None,
        on_input: Callable[[Tensor], None] | None = None,
        tail: Tail | None = None,
    ) -> LayerState:
        """Calls `on_input` with the residual streams at the attention input.

        Args:
            rows_NX: those that Engram looked up for this layer, if it has one.
            tail: the layer, a KV source, writes the entries of all tokens, and computes the rest
                for these only.
        """
        if self.engram is not None:
            assert rows_NX is not None
            state = None, self.engram(self.streams(state), rows_NX), state[2]
        x, streams_NHD, mixes = self._input(state, self.weights.hc_attn)
        if on_input is not None:
            on_input(streams_NHD)
        projected = self.attn.project_index(x, parts.inputs, parts.writing, rotary, cache)
        if tail is not None:
            assert projected is not None
            self.side_streams.join(MIXES_STREAM)
            parts, rows = tail.parts, tail.rows
            x, streams_NHD, projected = x[rows], streams_NHD[rows], projected[rows]
            mixes = mixes[0][rows], mixes[1][rows], mixes[2][rows]
            if not len(rows):
                return None, streams_NHD, mixes[0]
        if segments.breaks:
            self.side_streams.join_all()
        where = parts.inputs, rotary, cache, published, segments
        total = self.ranks.reduce(self.attn(x, projected, *where), x.dtype)
        state = (total, *mixes[1:]), streams_NHD, mixes[0]
        x, streams_NHD, mixes = self._input(state, self.weights.hc_ffn)
        ffn = self.ffn.terms if self.ranks.can_fuse_reduce(*x.shape) else self.ffn
        total = self.ranks.reduce(ffn(x, parts.inputs), x.dtype)
        return (total, *mixes[1:]), streams_NHD, mixes[0]

    def _input(self, state: LayerState, w: MhcWeight) -> tuple[Tensor, Tensor, Mixes]:
        """A block's input and residual streams, and its mixes (pre, post, res).

        Use the mixes after a join of MIXES_STREAM: if `mhc_input` returns no parts (few tokens),
        they are computed there, beside the block.
        """
        self.side_streams.join(MIXES_STREAM)
        x, streams_NHD, parts = self.shared.mhc_input(*state, w, self.params)
        mix = partial(self.shared.mhc_mixes, streams_NHD, parts, w, self.params)
        mixes = self.side_streams.start(MIXES_STREAM, mix) if parts is None else mix()
        return x, streams_NHD, mixes

    def streams(self, state: LayerState) -> Tensor:
        """The residual streams [N,H,D] after the last block's post step."""
        last, streams_NHD, _ = state
        self.side_streams.join(MIXES_STREAM)
        return streams_NHD if last is None else post_step(self.ops, *last, streams_NHD)
