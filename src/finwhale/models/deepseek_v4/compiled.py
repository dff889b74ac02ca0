"""Decoder layers compiled ahead of time: two graphs a layer, one artefact for layers of one kind.

    (x, post_mix, res_mix, residual) -> [enter] -> compress, select, attend -> [leave] -> experts

What reads a sequence's length or chooses experts runs between the graphs as ever. A graph is traced
from DecoderLayer's own methods, with weights and caches as arguments, so that layers which differ in
their values alone share it. It is compiled by AOTInductor: loading one traces and compiles nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from finwhale.models.deepseek_v4.cache_spec import PagedCache
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.layer import DecoderLayer, LayerState, LayerWeights
from finwhale.models.deepseek_v4.rope import RotaryTables
from finwhale.models.deepseek_v4.step import Segments, StepInputs
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.ops.compiled import TracedTable
from finwhale.ops.compiled.step import StepTensors

T = TypeVar("T")
# Of sizes that stay open in a graph; different, so that none is taken for another.
SAMPLE_TOKENS, SAMPLE_SEQUENCES, SAMPLE_PAGES = 6, 4, 3


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
    """The two graphs of one decoder layer.

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
        self.pool = cache.pool("window", layer.attn.layer)
        self.step = step
        self.first = first
        entries = type(layer.attn.entries).__name__
        routed = "hash" if layer.weights.ffn.tid2eid is not None else "score"
        self.entered = entries + (" first" if first else "")
        self.left = routed

    def enter(self) -> Traceable:
        """[state.., step.., window pool, weights..] -> mixes, residual, queries, entries' input."""
        w = self.layer.weights
        weights = (w.hc_attn, w.attn)
        state, step = self._state(), self._step()
        counts = len(state), len(step)

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            given = iter(flat)
            x, *mixes = (next(given) for _ in range(counts[0]))
            tokens, table, rotary = self.step.back([next(given) for _ in range(counts[1])])
            cache = PagedCache({"window": {self.layer.attn.layer: next(given)}})
            hc, attn = (with_tensors(weight, given) for weight in weights)
            layer = self._layer(replace(w, hc_attn=hc, attn=attn))
            x, post, res, residual = layer.enter(x, *(mixes or (None, None, None)))
            inputs = StepInputs(token_ids=tokens.positions, tokens=tokens, tables={"window": table})
            out = [post, res, residual, layer.attn.project(x, inputs, rotary, cache)]
            if layer.attn.entries is not None:
                out.append(layer.attn.entries.project(x))
            return tuple(t.contiguous() for t in out)

        arguments = [*state, *step, Argument(self.pool, (0,)), *_fixed(weights)]
        return Traceable(f"enter {self.entered}", fn, arguments, self._constants(weights))

    def leave(self) -> Traceable:
        """[attention's output, mixes.., residual, positions, token ids, weights..] ->
        experts' input, mixes, residual, shared expert's output, expert ids, their weights.
        """
        w = self.layer.weights
        # Not the routed experts: they stay outside.
        ffn = replace(w.ffn, experts=replace(w.ffn.shared_experts))
        weights = (w.attn.wo_a, w.attn.wo_b, w.hc_ffn, ffn)

        def fn(flat: list[Tensor]) -> tuple[Tensor, ...]:
            o_NAC, post, res, residual, positions, token_ids, *rest = flat
            given = iter(rest)
            wo_a, wo_b, hc, ffn = (with_tensors(weight, given) for weight in weights)
            attn = replace(w.attn, wo_a=wo_a, wo_b=wo_b)
            layer = self._layer(replace(w, attn=attn, hc_ffn=hc, ffn=ffn))
            x, post, res, residual = layer.cross(layer.attn.output(o_NAC), post, res, residual)
            tokens = self.step.back([positions] * len(self._step()))[0]
            inputs = StepInputs(token_ids=token_ids, tokens=tokens, tables={})
            ids, chosen = layer.ffn.route(x, inputs)
            out = (x, post, res, residual, layer.ffn.share(x), ids, chosen)
            return tuple(t.contiguous() for t in out)

        attn = self.layer.attn
        o_NAC = self._empty(attn.heads, attn.head_dim)
        ids = self._empty(dtype=torch.int64)
        arguments = [o_NAC, *self._mixes(), ids, ids, *_fixed(weights)]
        return Traceable(f"leave {self.left}", fn, arguments, self._constants(weights))

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
            return [positions, rotation, positions]
        sequence = self._empty(dtype=torch.int32)
        ints = {"dtype": torch.int32, "device": self.pool.device}
        return [
            positions,
            sequence,
            Argument(torch.zeros(SAMPLE_SEQUENCES + 1, **ints), (0,)),
            Argument(torch.zeros(SAMPLE_SEQUENCES, SAMPLE_PAGES, **ints), (0, 1)),
            Argument(torch.zeros(SAMPLE_SEQUENCES, **ints), (0,)),
            Argument(self.rotary, (0,)),
        ]


def _fixed(weights: tuple[Any, ...]) -> list[Argument]:
    return [Argument(tensor) for weight in weights for tensor in tensors_of(weight)]


class CompiledLayer(nn.Module):
    """A decoder layer whose two halves are graphs: the same arguments and results.

    Args:
        layer: what runs between the graphs, and alone for steps of many tokens.
        max_tokens: steps of more run `layer` itself, operator by operator.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        enter: Graph,
        leave: Graph,
        cache: PagedCache,
        step: StepTensors,
        max_tokens: int,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.enter = enter
        self.leave = leave
        self.step = step
        self.max_tokens = max_tokens
        w = layer.weights
        ffn = replace(w.ffn, experts=replace(w.ffn.shared_experts))
        pool = cache.pool("window", layer.attn.layer)
        self._enter_weights = [pool, *tensors_of(w.hc_attn), *tensors_of(w.attn)]
        parts = (w.attn.wo_a, w.attn.wo_b, w.hc_ffn, ffn)
        self._leave_weights = [t for part in parts for t in tensors_of(part)]

    def forward(
        self,
        x: Tensor,
        post_mix: Tensor | None,
        res_mix: Tensor | None,
        residual: Tensor | None,
        inputs: StepInputs,
        tables: RotaryTables,
        cache: PagedCache,
        segments: Segments,
    ) -> LayerState:
        if x.shape[0] > self.max_tokens:
            return self.layer(x, post_mix, res_mix, residual, inputs, tables, cache, segments)  # type: ignore[no-any-return]
        attn, ffn = self.layer.attn, self.layer.ffn
        rotary = attn.rotary(tables)
        state = [x.contiguous()]
        if post_mix is not None and res_mix is not None and residual is not None:
            state += [post_mix, res_mix, residual]
        step = self.step.flat(inputs.tokens, inputs.tables["window"], rotary)
        post, res, residual, q_NX, *entered = self.enter([*state, *step, *self._enter_weights])
        projected = entered[0] if entered else None
        if attn.entries is not None and projected is not None:
            attn.entries.write(projected, inputs, rotary, cache)
        o_NAC = attn.empty_output(q_NX)
        segments.eager(attn.attend, q_NX, projected, inputs, rotary, cache, o_NAC)
        mixes = [o_NAC, post, res, residual, inputs.tokens.positions, inputs.token_ids]
        x, post, res, residual, shared, ids, weights = self.leave([*mixes, *self._leave_weights])
        return ffn.mix(x, ids, weights, shared), post, res, residual
