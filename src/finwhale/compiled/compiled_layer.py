"""A decoder layer that runs as compiled graphs."""

from collections.abc import Callable

from torch import Tensor

from finwhale.compiled.graph_store import GraphStore
from finwhale.compiled.layer_tracer import LayerTracer
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerState
from finwhale.models.rope import RotaryTables
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.weights.tree import tensors_of

# Largest number of tokens in a step that runs compiled. In larger steps GEMMs take nearly all the
# time, so the graphs, which are compiled for few rows, save nothing.
MAX_TOKENS = {"cpu": 64, "cuda": 512}


class CompiledLayer(DecoderLayer):
    """A DecoderLayer whose small steps run as two graphs. The rest runs between them.

    Args:
        tracer: has the layer to replace, of which this one shares the parts.
        store: compiles or loads the graphs.
    """

    def __init__(self, tracer: LayerTracer, store: GraphStore) -> None:
        vars(self).update(vars(tracer.layer))
        self.flat_step = tracer.flat_step
        self.max_tokens = MAX_TOKENS[tracer.window_rows.device.type]
        self.enter, self.leave = store.graph(tracer.enter()), store.graph(tracer.leave())
        self.enter_tensors = [tracer.window_rows, *tensors_of(tracer.enter_weights)]
        self.leave_tensors = tensors_of(tracer.leave_weights)

    def __call__(
        self,
        state: LayerState | Tensor,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> LayerState:
        x, *mixes = (state,) if isinstance(state, Tensor) else state
        assert isinstance(x, Tensor), "the compiled mode runs on one rank"
        if x.shape[0] > self.max_tokens:
            return super().__call__(state, inputs, tables, cache, segments, on_residual)
        attn, rotary = self.attn, self.attn.rotary(tables)
        given = [x.contiguous(), *mixes, *self.flat_step(inputs, rotary)]
        post, res, residual, q_NX, *rest = self.enter(given + self.enter_tensors)
        if on_residual is not None:
            on_residual(residual)
        projected = None
        if attn.compressor is not None:
            (projected,) = rest
            attn.compressor.write(projected, inputs, rotary, cache)
        o_NAC, scales_NS = attn.heads.empty_output(q_NX)
        assert scales_NS is None, "a graph's input is not rounded"
        segments.eager(attn.select_and_attend, q_NX, projected, inputs, rotary, cache, o_NAC, None)
        given = [o_NAC, post, res, residual, inputs.tokens.positions, inputs.token_ids]
        left = self.leave(given + self.leave_tensors)
        x, post, res, residual, shared, ids, weights = left
        each = self.ffn.run_experts(x, ids, weights)
        return self.ffn.combine(each, ids, shared), post, res, residual
