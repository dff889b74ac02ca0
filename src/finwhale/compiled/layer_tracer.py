"""The functions that are traced into the graphs of one decoder layer.

Each function calls DecoderLayer's own methods with weights and caches as arguments, so layers that
differ only in values share a graph. Operators that read a sequence's length or choose experts run
between the graphs. On a CPU, where every operator can be plain torch, the second graph contains
attention and the experts, and the indexer has its own graph.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from finwhale.compiled.cpu_ops import columns
from finwhale.compiled.graph_store import Argument, Traceable
from finwhale.compiled.step_tensors import StepTensors
from finwhale.models.cache import PagedCache
from finwhale.models.deepseek_v4.compressor import C4Compressor, C4Weights
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerWeights
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.step_inputs import StepInputs
from finwhale.models.weight_protocol import tensors_of
from finwhale.ops import Ops
from finwhale.ops.attention import Selected
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.paging import contiguous_rows

T = TypeVar("T")
# Sample values of a graph's dynamic sizes. All differ, so that the tracer does not merge any two.
SAMPLE_TOKENS, SAMPLE_SEQUENCES, SAMPLE_PAGES, SAMPLE_ENTRIES, SAMPLE_ROWS = 6, 4, 3, 5, 16
C4_RATIO = 4


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested tuples and data classes, in order."""
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """`value` with its tensors replaced, in the order of `tensors_of`."""
    changed: Any = value
    if isinstance(value, Tensor):
        changed = next(tensors)
    elif isinstance(value, tuple):
        changed = tuple(with_tensors(item, tensors) for item in value)
    elif is_dataclass(value):
        found = {f.name: with_tensors(getattr(value, f.name), tensors) for f in fields(value)}
        changed = replace(changed, **found)
    return cast(T, changed)


class LayerTracer:
    """The traceable functions of one decoder layer.

    Args:
        ops: the operators to trace.
        first: whether the layer starts from the residual streams, without mixes.
    """

    def __init__(
        self,
        model: DeepseekV4,
        ops: Ops,
        layer: DecoderLayer,
        cache: PagedCache,
        step: StepTensors,
        *,
        first: bool,
    ) -> None:
        self.config = model.config.of_layer(layer.attn.layer)
        self.ops = ops
        self.layer = layer
        self.rotary = layer.attn.rotary(model.tables)
        self.cache = cache
        self.pool = cache.pool("window", layer.attn.layer)
        self.window_rows = self.pool if step.packed else contiguous_rows(self.pool)[0]
        self.step = step
        self.first = first
        w = layer.weights
        # A packed table runs the routed experts between the graphs, so no graph reads them.
        none = ExpertWeight(torch.empty(0), torch.empty(0))
        ffn = replace(w.ffn, experts=none if step.packed else columns(w.ffn.experts))
        self.enter_weights = (w.hc_attn, w.attn)
        heads = w.attn.heads
        self.leave_weights = (heads.wo_a, heads.wo_b, heads.attn_sink, w.hc_ffn, ffn)

    def enter(self) -> Traceable:
        """[state.., step.., window pool, weights..] -> mixes, residual, queries, entries' input."""
        w, weights = self.layer.weights, self.enter_weights
        state, step = self._state(), self._step()
        counts = len(state), len(step)

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            x, *mixes = (next(given) for _ in range(counts[0]))
            tokens, table, rotary = self.step.back([next(given) for _ in range(counts[1])])
            cache = PagedCache({"window": {self.layer.attn.layer: next(given)}})
            hc, attn = with_tensors(weights, given)
            layer = self._layer(replace(w, hc_attn=hc, attn=attn))
            x, post, res, residual = layer.attention_input(x, *mixes)
            inputs = StepInputs(token_ids=tokens.positions, tokens=tokens, tables={"window": table})
            out = [post, res, residual, layer.attn.project_and_store(x, inputs, rotary, cache)]
            if layer.attn.compressor is not None:
                out.append(layer.attn.compressor.project(x))
            return tuple(t.contiguous() for t in out)

        arguments = [
            *state,
            *step,
            Argument(self.window_rows, (0,)),
            *map(Argument, tensors_of(weights)),
        ]
        rows = self.layer.attn.compressor
        kind = ("window" if rows is None else type(rows).__name__) + (
            " first" if self.first else ""
        )
        return Traceable(f"enter {kind}", fn, arguments, self._constants(weights))

    def select(self) -> Traceable | None:
        """[queries, entries' input, positions, rotation, slots, counts, key pool] -> the slots of
        the selected entries. None: the layer has no indexer, or it runs between the graphs.
        """
        layer, compressor = self.layer, self.layer.attn.compressor
        if self.step.packed or not isinstance(compressor, C4Compressor):
            return None
        index, ints = layer.attn.layer, torch.int64

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            q_NX, projected, positions, rotation, slots, counts, key_pool = flat
            tokens, table, rotary = self.step.back([positions, rotation, positions])
            tokens = replace(tokens, max_len=C4_RATIO)
            self.step.back_entries([slots, counts], tokens, table)
            inputs = StepInputs(token_ids=positions, tokens=tokens, tables={"c4": table})
            cache = PagedCache({"c4": {index: key_pool}, "index_keys": {index: key_pool}})
            traced = self._layer(layer.weights).attn
            chosen = traced.select_entries(q_NX, projected, inputs, rotary, cache)
            assert isinstance(chosen, Selected)
            return (chosen.slots,)

        w = layer.weights.attn
        assert isinstance(w.compressor, C4Weights)
        key_pool = contiguous_rows(self.cache.pool("index_keys", index))[0]
        slots = Argument(self._empty(2 * compressor.topk, dtype=ints).sample, (0, 1))
        arguments = [
            self._empty(w.heads.wq_b.weight.shape[0]),
            self._empty(w.compressor.proj.weight.shape[0], dtype=torch.float32),
            self._empty(dtype=ints),
            self._empty(*self.rotary.shape[1:], dtype=torch.float32),
            slots,
            self._empty(dtype=ints),
            Argument(key_pool[:SAMPLE_ROWS], (0,)),
        ]
        return Traceable("select", fn, arguments, self._constants(()))

    def leave(self) -> Traceable:
        """[attention's output [N,A,C], mixes, residual, positions, token ids, weights..] -> the
        experts' input, mixes, residual, the shared expert's output, expert ids and their weights.

        With attention and experts in the graph: [queries, mixes, residual, positions, token ids,
        rows.., weights..] -> the layer's results.
        """
        weights = self.leave_weights
        rows = self._rows()

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            o_NAC, post, res, residual, positions, token_ids = (next(given) for _ in range(6))
            read = [next(given) for _ in rows]
            layer = self._layer(self._with_leave_weights(with_tensors(weights, given)))
            step = [positions, *read[:1], positions] if read else [positions] * len(self._step())
            tokens, table, rotary = self.step.back(step)
            if read:
                window, entries = self.step.back_rows(read[1:], tokens, table, layer.attn.window)
                heads = layer.attn.heads
                q_NX, (o_NAC, _) = o_NAC, heads.empty_output(o_NAC)
                layer.attn.attend(heads, q_NX, entries, tokens, rotary, window, o_NAC, None)
            x = layer.attn.heads.output(o_NAC, None)
            x, post, res, residual = layer.experts_input(x, post, res, residual)
            inputs = StepInputs(token_ids=token_ids, tokens=tokens, tables={})
            out = [layer.ffn.run_shared_expert(x), *layer.ffn.route(x, inputs)]
            if not self.step.packed:
                shared, ids, chosen = out
                x, out = layer.ffn.mix(x, ids, chosen, shared), []
            return tuple(t.contiguous() for t in (x, post, res, residual, *out))

        attn = self.layer.attn
        heads = attn.heads
        width = (heads.number, heads.head_dim) if self.step.packed else (heads.width,)
        first = self._empty(*width)
        ids = [self._empty(dtype=torch.int64) for _ in range(2)]
        arguments = [first, *self._mixes(), *ids, *rows, *map(Argument, tensors_of(weights))]
        routed = "score" if self.layer.weights.ffn.tid2eid is None else "hash"
        return Traceable(f"leave {routed}", fn, arguments, self._constants(weights))

    def _rows(self) -> list[Argument]:
        """The rotation and the rows that attention reads, if the graph contains attention."""
        if self.step.packed:
            return []
        rotation = self._empty(*self.rotary.shape[1:], dtype=torch.float32)
        seen = self._empty(self.layer.attn.window, dtype=torch.int64)
        slots = Argument(self._empty(SAMPLE_ENTRIES, dtype=torch.int32).sample, (0, 1))
        pools = (Argument(self.window_rows[:rows], (0,)) for rows in (SAMPLE_ROWS, SAMPLE_ROWS + 1))
        return [rotation, next(pools), seen, next(pools), slots]

    def _with_leave_weights(self, weights: tuple[Any, ...]) -> LayerWeights:
        wo_a, wo_b, attn_sink, hc, ffn = weights
        w = self.layer.weights
        heads = replace(w.attn.heads, wo_a=wo_a, wo_b=wo_b, attn_sink=attn_sink)
        return replace(w, attn=replace(w.attn, heads=heads), hc_ffn=hc, ffn=ffn)

    def _constants(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        read = (self.config, self.layer.attn.round_kv, self.step)
        return *read, *(leaf for leaf in leaves(weights) if not isinstance(leaf, Tensor))

    def _layer(self, weights: LayerWeights) -> DecoderLayer:
        return DecoderLayer(
            self.config,
            self.ops,
            weights,
            self.layer.attn.layer,
            self.layer.attn.round_kv,
            SideStreams(torch.device("cpu")),
        )

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Argument:
        """A sample [N, ..] of the activations' dtype, or of another."""
        like = self.layer.weights.attn.wq_a_wkv
        dtype = dtype or like.out_dtype or like.weight.dtype
        return Argument(
            torch.zeros(SAMPLE_TOKENS, *shape, dtype=dtype, device=self.pool.device), (0,)
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
        if not self.step.packed:
            rotation = self._empty(*self.rotary.shape[1:], dtype=torch.float32)
            return [positions, rotation, self._empty(dtype=torch.int64)]
        sequence = self._empty(dtype=torch.int32)
        starts, first = (
            Argument(torch.zeros(count, dtype=torch.int32, device=self.pool.device), (0,))
            for count in (SAMPLE_SEQUENCES + 1, SAMPLE_SEQUENCES)
        )
        # As in a captured step, the table's rows are not adjacent, and their stride is dynamic.
        pages = first.sample[:, None].repeat(1, 2 * SAMPLE_PAGES + 1)[:, :SAMPLE_PAGES]
        rotary = Argument(self.rotary, (0,))
        return [positions, sequence, starts, Argument(pages, (0, 1)), first, rotary]
