"""Decoder layers compiled ahead of time: graphs that layers of one kind share.

    (x, post_mix, res_mix, residual) -> [enter] -> compress, select, attend -> [leave] -> experts

What reads a sequence's length or chooses experts runs between them as ever. A graph is traced
from DecoderLayer's own methods, with weights and caches as arguments, so that layers which differ
in their values alone share it. It is compiled by inductor (engine/rank/compiled.py): loading one
traces and compiles nothing.

Where every operator can be plain torch (a CPU), attention and the experts are in the second graph,
and the indexer's choice is a graph of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from finwhale.models.deepseek_v4.cache_spec import PagedCache
from finwhale.models.deepseek_v4.compressor import C4Entries, C4Weights
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerState, LayerWeights
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.deepseek_v4.step import Segments, StepInputs
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.compiled import TracedTable
from finwhale.ops.compiled.step import StepTensors
from finwhale.ops.moe import ExpertWeight

T = TypeVar("T")
# Of sizes that stay open in a graph; different, so that none is taken for another.
SAMPLE_TOKENS, SAMPLE_SEQUENCES, SAMPLE_PAGES, SAMPLE_ENTRIES, SAMPLE_ROWS = 6, 4, 3, 5, 16
C4_RATIO = 4
NO_EXPERTS = ExpertWeight(torch.empty(0), torch.empty(0))


class Graph(Protocol):
    """A compiled graph: flat arguments, which it takes out of the list, to flat results."""

    def __call__(self, arguments: list[Tensor]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument as the graph is traced with it, and the dimensions whose sizes stay open."""

    sample: Tensor
    open_dims: tuple[int, ...] = ()

    def signature(self) -> str:
        """What a graph's code depends on."""
        t = self.sample
        shape = ["*" if i in self.open_dims else str(n) for i, n in enumerate(t.shape)]
        strides = [] if self.open_dims else list(t.stride())
        return f"{t.dtype} {t.device.type} {','.join(shape)} {strides}"


@dataclass(frozen=True, slots=True)
class Traceable:
    """A function of flat tensors, and what it is traced with.

    Attributes:
        name: says which graph of which kind of layer it is.
        constants: every other value that the function reads.
    """

    name: str
    fn: Callable[[list[Tensor]], tuple[Tensor, ...]]
    arguments: list[Argument]
    constants: tuple[Any, ...]

    def __post_init__(self) -> None:
        # Tracing takes two arguments that are one tensor for one argument.
        assert len({id(a.sample) for a in self.arguments}) == len(self.arguments)

    def signature(self) -> str:
        constants = [repr(value) for value in self.constants]
        return "\n".join([self.name, *constants, *(a.signature() for a in self.arguments)])


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested data classes, in order."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def constants_of(value: Any) -> Iterator[Any]:
    """What else is in nested data classes, in order."""
    if is_dataclass(value):
        for field in fields(value):
            yield from constants_of(getattr(value, field.name))
    elif not isinstance(value, Tensor):
        yield value


def with_tensors(value: T, tensors: Iterator[Tensor]) -> T:
    """`value` with the tensors that `tensors_of` gave replaced, in order."""
    if isinstance(value, Tensor):
        return next(tensors)  # type: ignore[return-value]
    if is_dataclass(value):
        found = {f.name: with_tensors(getattr(value, f.name), tensors) for f in fields(value)}
        return replace(value, **found)  # type: ignore[type-var]
    return value


class LayerTracer:
    """The graphs of one decoder layer.

    Args:
        table: the operators to trace.
    """

    def __init__(
        self,
        config: ModelConfig,
        table: TracedTable,
        layer: DecoderLayer,
        tables: RotaryTables,
        cache: PagedCache,
        step: StepTensors,
        *,
        first: bool,
    ) -> None:
        self.config = config
        self.table = table
        self.layer = layer
        self.rotary = layer.attn.rotary(tables)
        self.cache = cache
        self.pool = cache.pool("window", layer.attn.layer)
        self.step = step
        self.first = first
        rows = layer.attn.entries
        entries = "window" if rows is None else type(rows).__name__
        routed = "hash" if layer.weights.ffn.tid2eid is not None else "score"
        self.entered = entries + (" first" if first else "")
        self.left = routed
        w = layer.weights
        # Experts outside the graph are not among its arguments.
        experts = table.expert_weight(w.ffn.experts) if table.whole else NO_EXPERTS
        ffn = replace(w.ffn, experts=experts)
        self.entered_weights = (w.hc_attn, w.attn)
        self.left_weights = (w.attn.wo_a, w.attn.wo_b, w.attn.attn_sink, w.hc_ffn, ffn)

    def enter(self) -> Traceable:
        """[state.., step.., window pool, weights..] -> mixes, residual, queries, entries' input."""
        w = self.layer.weights
        weights = self.entered_weights
        state, step = self._state(), self._step()
        counts = len(state), len(step)

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            x, *mixes = (next(given) for _ in range(counts[0]))
            tokens, table, rotary = self.step.back([next(given) for _ in range(counts[1])])
            cache = PagedCache({"window": {self.layer.attn.layer: next(given)}})
            hc, attn = with_tensors(w.hc_attn, given), with_tensors(w.attn, given)
            layer = self._layer(replace(w, hc_attn=hc, attn=attn))
            x, post, res, residual = layer.enter(x, *mixes)
            inputs = StepInputs(token_ids=tokens.positions, tokens=tokens, tables={"window": table})
            out = [post, res, residual, layer.attn.project(x, inputs, rotary, cache)]
            if layer.attn.entries is not None:
                out.append(layer.attn.entries.project(x))
            return tuple(t.contiguous() for t in out)

        arguments = [*state, *step, Argument(self.pool, (0,)), *_fixed(weights)]
        return Traceable(f"enter {self.entered}", fn, arguments, self._constants(weights))

    def select(self) -> Traceable | None:
        """[queries, entries' input, positions, rotation, slots, counts, key pool] -> the slots of
        the entries that the indexer chooses; None where another way is taken.
        """
        layer, entries = self.layer, self.layer.attn.entries
        if not self.table.whole or not isinstance(entries, C4Entries):
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
            chosen = traced.choose(q_NX, projected, inputs, rotary, cache)
            assert isinstance(chosen, Selected)
            return (chosen.slots,)

        w = layer.weights.attn
        assert isinstance(w.compressor, C4Weights)
        key_pool = self.cache.pool("index_keys", index)
        slots = Argument(self._empty(2 * entries.topk, dtype=ints).sample, (0, 1))
        arguments = [
            self._empty(w.wq_b.weight.shape[0]),
            self._empty(w.compressor.proj.weight.shape[0], dtype=torch.float32),
            self._empty(dtype=ints),
            self._empty(*self.rotary.shape[1:], dtype=torch.float32),
            slots,
            self._empty(dtype=ints),
            Argument(key_pool[:SAMPLE_ROWS], (0,)),
        ]
        return Traceable("select", fn, arguments, self._constants(()))

    def leave(self) -> Traceable:
        """Attention's output [N,A,C], or what gives it; mixes, residual, positions, token ids,
        weights.. -> experts' input, mixes, residual, shared expert's output, expert ids and their
        weights; or the layer's own results, where the experts are in the graph as well.
        """
        weights = self.left_weights
        rows = self._rows()

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            o_NAC, post, res, residual, positions, token_ids = (next(given) for _ in range(6))
            read = [next(given) for _ in rows]
            layer = self._layer(self._with_left([with_tensors(w, given) for w in weights]))
            step = [positions, *read[:1], positions] if read else [positions] * len(self._step())
            tokens, table, rotary = self.step.back(step)
            if read:
                window, entries = self.step.back_rows(read[1:], tokens, table, layer.attn.window)
                q_NX, (o_NAC, _) = o_NAC, layer.attn.empty_output(o_NAC)
                layer.attn.read(q_NX, entries, tokens, rotary, window, o_NAC, None)
            x = layer.attn.output(o_NAC, None)
            x, post, res, residual = layer.cross(x, post, res, residual)
            inputs = StepInputs(token_ids=token_ids, tokens=tokens, tables={})
            out = [layer.ffn.share(x), *layer.ffn.route(x, inputs)]
            if self.table.whole:
                shared, ids, chosen = out
                x, out = layer.ffn.mix(x, ids, chosen, shared), []
            return tuple(t.contiguous() for t in (x, post, res, residual, *out))

        attn = self.layer.attn
        if self.table.whole:
            first = self._empty(attn.heads * attn.head_dim)
        else:
            first = self._empty(attn.heads, attn.head_dim)
        ids = [self._empty(dtype=torch.int64) for _ in range(2)]
        arguments = [first, *self._mixes(), *ids, *rows, *_fixed(weights)]
        return Traceable(f"leave {self.left}", fn, arguments, self._constants(weights))

    def _rows(self) -> list[Argument]:
        """Where attention is in the graph: the rotation, and what it reads."""
        if not self.table.whole:
            return []
        rotation = self._empty(*self.rotary.shape[1:], dtype=torch.float32)
        seen = self._empty(self.layer.attn.window, dtype=torch.int64)
        slots = Argument(self._empty(SAMPLE_ENTRIES, dtype=torch.int32).sample, (0, 1))
        pools = (Argument(self.pool[:rows], (0,)) for rows in (SAMPLE_ROWS, SAMPLE_ROWS + 1))
        return [rotation, next(pools), seen, next(pools), slots]

    def _with_left(self, parts: list[Any]) -> LayerWeights:
        wo_a, wo_b, attn_sink, hc, ffn = parts
        w = self.layer.weights
        attn = replace(w.attn, wo_a=wo_a, wo_b=wo_b, attn_sink=attn_sink)
        return replace(w, attn=attn, hc_ffn=hc, ffn=ffn)

    def _constants(self, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        read = (self.config, self.layer.attn.round_kv, self.step, self.table.namespace)
        return *read, *(c for weight in weights for c in constants_of(weight))

    def _layer(self, weights: LayerWeights) -> DecoderLayer:
        return DecoderLayer(
            self.config,
            self.table.ops,
            weights,
            self.layer.attn.layer,
            self.layer.attn.round_kv,
            SideStreams(torch.device("cpu")),
        )

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Argument:
        """[N, ..] of the activations' dtype, or another."""
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
        # Rows apart, as in a captured step's tables: how far stays open as well.
        pages = first.sample[:, None].repeat(1, 2 * SAMPLE_PAGES + 1)[:, :SAMPLE_PAGES]
        rotary = Argument(self.rotary, (0,))
        return [positions, sequence, starts, Argument(pages, (0, 1)), first, rotary]


def _fixed(weights: tuple[Any, ...]) -> list[Argument]:
    return [Argument(tensor) for tensor in _tensors(weights)]


class CompiledLayer(nn.Module):
    """A decoder layer whose two halves are graphs: the same arguments and results.

    Args:
        tracer: what the graphs were traced from.
        max_tokens: steps of more run the layer itself, operator by operator.
    """

    def __init__(
        self,
        tracer: LayerTracer,
        enter: Graph,
        select: Graph | None,
        leave: Graph,
        max_tokens: int,
    ) -> None:
        super().__init__()
        self.layer = tracer.layer
        self.max_tokens = max_tokens
        entered = [tracer.pool, *_tensors(tracer.entered_weights)]
        attn = self.layer.attn
        # Read at once: a module's attributes are slow to look up one by one.
        self._parts = attn, attn.entries, tracer.step, tracer.table.whole
        self._graphs = enter, entered, leave, _tensors(tracer.left_weights)
        self._query_width = attn.heads * attn.head_dim
        self._window = tracer.pool, attn.window
        self._select: tuple[Graph, int, Tensor, Tensor] | None = None
        if select is not None and isinstance(attn.entries, C4Entries):
            pools = tracer.cache.pool("c4", attn.layer), tracer.cache.pool("index_keys", attn.layer)
            self._select = select, attn.entries.topk, *pools

    def forward(
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
        if x.shape[0] > self.max_tokens:
            state: LayerState = self.layer(
                x, inputs, tables, cache, segments, post_mix, res_mix, residual
            )
            return state
        attn, compressor, step, whole = self._parts
        enter, entered, leave, left = self._graphs
        tokens, table = inputs.tokens, inputs.tables["window"]
        rotary = tables.plain if compressor is None else tables.compressed
        given = [x.contiguous()]
        if post_mix is not None and res_mix is not None and residual is not None:
            given += [post_mix, res_mix, residual]
        results = enter(given + step.flat(tokens, table, rotary) + entered)
        post, res, residual, q_NX = results[:4]
        projected = None
        if compressor is not None:
            projected = results[4]
            compressor.write(projected, inputs, rotary, cache)
        mixes = [post, res, residual, tokens.positions, inputs.token_ids]
        if whole:
            entries: Selected | Complete | None = None
            if self._select is not None and projected is not None:
                select, topk, entry_pool, key_pool = self._select
                places = step.flat_entries(tokens, inputs.tables["c4"], topk)
                given = [q_NX, projected, tokens.positions, tokens.rotation(rotary)]
                (slots,) = select([*given, *places, key_pool])
                entries = Selected(entry_pool, slots, inputs.tables["c4"].rows_per_page)
            elif compressor is not None:
                entries = attn.choose(q_NX, projected, inputs, rotary, cache)
            pool, size = self._window
            rows = step.flat_rows(tokens, Window(pool, table, size), entries)
            query = q_NX[:, : self._query_width].contiguous()
            x, post, res, residual = leave([query, *mixes, tokens.rotation(rotary), *rows, *left])
            return x, post, res, residual
        o_NAC, scales_NS = attn.empty_output(q_NX)
        assert scales_NS is None, "a graph's input is not rounded"
        segments.eager(attn.attend, q_NX, projected, inputs, rotary, cache, o_NAC, None)
        x, post, res, residual, shared, ids, weights = leave([o_NAC, *mixes, *left])
        return self.layer.ffn.mix(x, ids, weights, shared), post, res, residual


def _tensors(weights: tuple[Any, ...]) -> list[Tensor]:
    return [tensor for weight in weights for tensor in tensors_of(weight)]
