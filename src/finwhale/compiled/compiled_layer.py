"""A decoder layer that runs as compiled graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from finwhale.compiled.graph_store import GraphStore
from finwhale.compiled.layer_tracer import LayerTracer
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.compressor import C4Compressor
from finwhale.models.deepseek_v4.layer import BlockOutput, LayerState
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.step_inputs import Segments, StepInputs
from finwhale.models.weight_protocol import tensors_of
from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.paging import contiguous_rows

# Largest number of tokens in a step that runs compiled. In larger steps GEMMs take nearly all the
# time, so the graphs, which are compiled for few rows, save nothing.
MAX_TOKENS = {"cpu": 64, "cuda": 512}


class CompiledLayer:
    """A DecoderLayer with the same arguments and results, whose two halves are graphs.

    Args:
        store: compiles or loads the graphs.
    """

    def __init__(self, tracer: LayerTracer, store: GraphStore) -> None:
        self.layer = tracer.layer
        self.step = tracer.step
        self.max_tokens = MAX_TOKENS[tracer.pool.device.type]
        self.window_pool = tracer.pool
        select = tracer.select()
        self.select = None if select is None else store.graph(select)
        self.enter, self.leave = store.graph(tracer.enter()), store.graph(tracer.leave())
        self.enter_tensors = [tracer.window_rows, *tensors_of(tracer.enter_weights)]
        self.leave_tensors = tensors_of(tracer.leave_weights)

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
        assert isinstance(x, Tensor), "the compiled mode runs on one rank"
        if x.shape[0] > self.max_tokens:
            return self.layer(
                x, inputs, tables, cache, segments, post_mix, res_mix, residual, on_residual
            )
        attn = self.layer.attn
        tokens, rotary = inputs.tokens, attn.rotary(tables)
        given = [x.contiguous()]
        if post_mix is not None and res_mix is not None and residual is not None:
            given += [post_mix, res_mix, residual]
        given += self.step.flat(tokens, inputs.tables["window"], rotary, self.window_pool)
        post, res, residual, q_NX, *rest = self.enter(given + self.enter_tensors)
        if on_residual is not None:
            on_residual(residual)
        projected = None
        if attn.compressor is not None:
            (projected,) = rest
            attn.compressor.write(projected, inputs, rotary, cache)
        mixes = [post, res, residual, tokens.positions, inputs.token_ids]
        if not self.step.packed:
            entries = self._choose(q_NX, projected, inputs, rotary, cache)
            window = Window(self.window_pool, inputs.tables["window"], attn.window)
            rows = [tokens.rotation(rotary), *self.step.flat_rows(tokens, window, entries)]
            query = q_NX[:, : attn.heads.width].contiguous()
            x, post, res, residual = self.leave([query, *mixes, *rows, *self.leave_tensors])
            return x, post, res, residual
        o_NAC, scales_NS = attn.heads.empty_output(q_NX)
        assert scales_NS is None, "a graph's input is not rounded"
        segments.eager(attn.select_and_attend, q_NX, projected, inputs, rotary, cache, o_NAC, None)
        x, post, res, residual, *routed = self.leave([o_NAC, *mixes, *self.leave_tensors])
        shared, ids, weights = routed
        return self.layer.ffn.mix(x, ids, weights, shared), post, res, residual

    def _choose(
        self,
        q_NX: Tensor,
        projected: Tensor | None,
        inputs: StepInputs,
        rotary: Tensor,
        cache: PagedCache,
    ) -> Selected | Complete | None:
        """Select the entries that each token sees. If the indexer has a graph, call the graph."""
        attn = self.layer.attn
        if self.select is None or projected is None:
            return attn.select_entries(q_NX, projected, inputs, rotary, cache)
        assert isinstance(attn.compressor, C4Compressor)
        tokens, table = inputs.tokens, inputs.tables["c4"]
        keys, row_step = contiguous_rows(cache.pool("index_keys", attn.layer))
        entry_tensors = self.step.flat_entries(tokens, table, attn.compressor.topk, row_step)
        given = [q_NX, projected, tokens.positions, tokens.rotation(rotary), *entry_tensors, keys]
        (chosen,) = self.select(given)
        slots = torch.div(chosen, row_step, rounding_mode="floor")  # -1 stays -1
        return Selected(cache.pool("c4", attn.layer), slots, table.rows_per_page)
