"""The functions that are traced into the graphs of one decoder layer.

Each function calls DecoderLayer's own methods with weights and caches as arguments, so layers that
differ only in values share a graph. Attention, compressor and indexer run between the two graphs of
a layer, and the experts after them, because what they compute depends on the sequences' lengths and
on the chosen experts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from finwhale.compiled.graph_store import Argument, Traceable
from finwhale.distributed.collectives import Alone
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.context import LayerContext
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerWeights
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.paging import PageTable, Tokens, contiguous_rows
from finwhale.ops.slots import write_slots
from finwhale.weights.tree import leaves, tensors_of, with_leaves

# Sample values of a graph's dynamic sizes. All differ, so that the tracer does not merge any two.
SAMPLE_TOKENS, SAMPLE_SEQUENCES, SAMPLE_PAGES = 6, 4, 3


class LayerTracer:
    """The traceable functions of one decoder layer.

    Args:
        ops: the operators to trace.
        rows_per_page: rows of a page of the window.
        first: whether the layer starts from the residual streams, without mixes.
    """

    def __init__(
        self,
        model: DeepseekV4,
        ops: Ops,
        layer: DecoderLayer,
        cache: PagedCache,
        rows_per_page: int,
        *,
        first: bool,
    ) -> None:
        self.config = model.config.of_layer(layer.attn.layer)
        self.ops, self.layer, self.first = ops, layer, first
        self.packed, self.rows_per_page = ops.capabilities.packed_cache, rows_per_page
        self.rotary = layer.attn.rotary(model.tables)
        pool = cache.pools["window"][layer.attn.layer]
        # Layers share a graph whatever their pool's stride, so it gets contiguous rows.
        self.window_rows, self.row_step = (pool, 1) if self.packed else contiguous_rows(pool)
        w = layer.weights
        # The experts run after the graph, which does not read them.
        ffn = replace(w.ffn, experts=ExpertWeight(torch.empty(0), torch.empty(0)))
        self.enter_weights = (w.hc_attn, w.attn)
        self.leave_weights = (w.attn.heads.wo_a, w.attn.heads.wo_b, w.hc_ffn, ffn)

    def flat_step(self, inputs: StepInputs, rotary_LR: Tensor) -> list[Tensor]:
        """The tensors of a step that a graph reads. Kernels read page tables; the CPU's operators
        read rotations and slots, which the step's cache keeps.
        """
        tokens, table = inputs.tokens, inputs.tables["window"]
        if self.packed:
            token_tensors = [tokens.positions, tokens.sequence, tokens.query_start]
            return [*token_tensors, table.pages, table.first, rotary_LR]
        written = write_slots(tokens, table) * self.row_step
        return [tokens.positions, tokens.rotation(rotary_LR), written]

    def _step_of(self, tensors: list[Tensor]) -> tuple[Tokens, PageTable, Tensor]:
        """The tokens, the window's page table and the rotary table, from those of `flat_step`."""
        if self.packed:
            positions, sequence, query_start, pages, first, rotary = tensors
            tokens = Tokens(positions, sequence, query_start, max_len=0, max_query=0)
            return tokens, PageTable(pages, first, self.rows_per_page), rotary
        positions, rotation, slots = tensors
        tokens = Tokens(positions, positions, positions, max_len=0, max_query=0)
        table = PageTable(positions, positions, self.rows_per_page)
        # Tokens.rotation and slots.write_slots find these in the cache and never read the tables.
        tokens.cache.rotations[rotation] = rotation
        tokens.cache.slots["write_slots", table] = slots
        return tokens, table, rotation

    def enter(self) -> Traceable:
        """[state.., step.., window pool, weights..] -> mixes, residual, queries, entries' input."""
        w, weights = self.layer.weights, self.enter_weights
        state, step = self._state(), self._step()
        counts = len(state), len(step)

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            x, *mixes = (next(given) for _ in range(counts[0]))
            tokens, table, rotary = self._step_of([next(given) for _ in range(counts[1])])
            pools = {"window": {self.layer.attn.layer: next(given)}}
            cache = PagedCache(pools, {"window": "window"})
            hc, attn = with_leaves(weights, Tensor, lambda _: next(given))
            layer = self._layer(replace(w, hc_attn=hc, attn=attn))
            state = (x, mixes[0], mixes[1], mixes[2]) if mixes else x
            x, post, res, residual = layer.attention_input(state)
            inputs = StepInputs(token_ids=tokens.positions, tokens=tokens, tables={"window": table})
            out = [post, res, residual, layer.attn.project_and_store(x, inputs, rotary, cache)]
            if layer.attn.compressor is not None:
                out.append(layer.attn.compressor.project(x))
            return tuple(t.contiguous() for t in out)

        pool = Argument(self.window_rows, (0,))
        arguments = [*state, *step, pool, *map(Argument, tensors_of(weights))]
        rows = self.layer.attn.compressor
        kind = "window" if rows is None else type(rows).__name__
        kind += " first" if self.first else ""
        return Traceable(f"enter {kind}", fn, arguments, self._constants(weights))

    def leave(self) -> Traceable:
        """[attention's output [N,A,C], mixes, residual, positions, token ids, weights..] -> the
        experts' input, mixes, residual, the shared expert's output, expert ids and their weights.
        """
        w, weights = self.layer.weights, self.leave_weights

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            o_NAC, post, res, residual, positions, token_ids = (next(given) for _ in range(6))
            wo_a, wo_b, hc, ffn = with_leaves(weights, Tensor, lambda _: next(given))
            attn = replace(w.attn, heads=replace(w.attn.heads, wo_a=wo_a, wo_b=wo_b))
            layer = self._layer(replace(w, attn=attn, hc_ffn=hc, ffn=ffn))
            x = layer.attn.heads.output(o_NAC, None)
            x, post, res, residual = layer.experts_input((x, post, res, residual))
            tokens = Tokens(positions, positions, positions, max_len=0, max_query=0)
            inputs = StepInputs(token_ids=token_ids, tokens=tokens, tables={})
            routed = layer.ffn.run_shared_expert(x), *layer.ffn.route(x, inputs)
            return tuple(t.contiguous() for t in (x, post, res, residual, *routed))

        heads = self.layer.attn.heads
        ids = [self._empty(dtype=torch.int64) for _ in range(2)]
        first = self._empty(heads.number, heads.head_dim)
        arguments = [first, *self._mixes(), *ids, *map(Argument, tensors_of(weights))]
        routed = "score" if w.ffn.tid2eid is None else "hash"
        return Traceable(f"leave {routed}", fn, arguments, self._constants(weights))

    def _constants(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        read = (self.config, self.layer.attn.round_kv, self.rows_per_page)
        return *read, *(leaf for leaf in leaves(weights) if not isinstance(leaf, Tensor))

    def _layer(self, weights: LayerWeights) -> DecoderLayer:
        context = LayerContext(
            config=self.config,
            ops=self.ops,
            round_activations=self.layer.attn.round_kv,
            side_streams=SideStreams(torch.device("cpu")),
            ranks=TensorParallel(Alone()),
        )
        return DecoderLayer(context, weights, self.layer.attn.layer)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Argument:
        """A sample [N, ..] of the activations' dtype, or of another."""
        like = self.layer.weights.attn.wq_a_wkv
        dtype = dtype or like.out_dtype or like.weight.dtype
        return Argument(
            torch.zeros(SAMPLE_TOKENS, *shape, dtype=dtype, device=self.window_rows.device), (0,)
        )

    def _state(self) -> list[Argument]:
        H, D = self.config.hc_mult, self.config.hidden_size
        if self.first:
            return [self._empty(H, D)]
        return [self._empty(D), *self._mixes()]

    def _mixes(self) -> list[Argument]:
        """post_mix, res_mix, residual."""
        H, D = self.config.hc_mult, self.config.hidden_size
        return [
            self._empty(H, dtype=torch.float32),
            self._empty(H, H, dtype=torch.float32),
            self._empty(H, D),
        ]

    def _step(self) -> list[Argument]:
        positions = self._empty(dtype=torch.int64)
        if not self.packed:
            rotation = self._empty(*self.rotary.shape[1:], dtype=torch.float32)
            return [positions, rotation, self._empty(dtype=torch.int64)]
        sequence = self._empty(dtype=torch.int32)
        starts, first = (
            Argument(torch.zeros(count, dtype=torch.int32, device=self.window_rows.device), (0,))
            for count in (SAMPLE_SEQUENCES + 1, SAMPLE_SEQUENCES)
        )
        # As in a captured step, the table's rows are not adjacent, and their stride is dynamic.
        pages = first.sample[:, None].repeat(1, 2 * SAMPLE_PAGES + 1)[:, :SAMPLE_PAGES]
        rotary = Argument(self.rotary, (0,))
        return [positions, sequence, starts, Argument(pages, (0, 1)), first, rotary]
