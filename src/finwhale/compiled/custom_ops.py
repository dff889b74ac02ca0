"""Custom operators of torch.library, which a graph calls in place of a table's functions.

A schema of torch.library allows only tensors and numbers, so an operator gets the fields of its
data class arguments. The schema and both conversions follow from the contract's signature in `Ops`.
This module states only the shapes of the results.

Legend as in the operator families' packages.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.moe import ExpertWeight

Parameter = inspect.Parameter
# Each operator, and the argument that it writes.
OPERATORS = {
    "mhc_pre": (),
    "mhc_post_pre": (),
    "linear": (),
    "grouped_linear": (),
    "prepare_qkv": ("window_pool",),
    "route_by_score": (),
    "route_by_hash": (),
    "swiglu_mlp": (),
}


def namespace(ops: Ops) -> str:
    """The namespace of a table's operators. Each table has its own, equal in every process."""
    digest = hashlib.sha256(repr(ops.implementations()).encode()).hexdigest()
    return f"finwhale_{ops.linear.__module__.rpartition('.')[2]}_{digest[:8]}"


@cache
def register(ops: Ops) -> Library:
    """Register a table's operators. torch keeps them until the process ends."""
    library = Library(namespace(ops), "DEF")
    results = _results(ops.capabilities.expert_id_dtype)
    for name, written in OPERATORS.items():
        flat = FlatSignature(name)
        library.define(name + flat.schema(written), tags=torch.Tag.needs_exact_strides)
        library.impl(name, flat.taking_flat(getattr(ops, name)), "CompositeExplicitAutograd")
        library._register_fake(name, flat.taking_flat(results[name]))
    return library


def custom(ops: Ops) -> Ops:
    """Register `ops`; returns it with the functions of OPERATORS replaced by custom operators."""
    register(ops)
    space = getattr(torch.ops, namespace(ops))
    calls: dict[str, Any] = {name: FlatSignature(name).call_of(space, name) for name in OPERATORS}
    return replace(ops, **calls)


class FlatSignature:
    """An operator's signature with each data class replaced by its fields.

    Args:
        name: the operator's field in `Ops`, whose annotation is the contract.
    """

    def __init__(self, name: str) -> None:
        call = get_type_hints(Ops)[name].__call__
        hints = get_type_hints(call)
        self.returned = hints.pop("return")
        bound = list(inspect.signature(call).parameters.values())[1:]
        self.signature = inspect.Signature(bound)
        self.flat: list[Parameter] = []
        self.forms = [self._add(name, hint) for name, hint in hints.items()]

    def _add(self, name: str, hint: Any) -> Any:
        """Add an argument to `flat`. Returns (data class, the same for its fields) or None."""
        if not is_dataclass(hint):
            self.flat.append(Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=hint))
            return None
        kinds = get_type_hints(hint)
        names = [field.name for field in _passed(hint)]
        return hint, [self._add(f"{name}_{field}", kinds[field]) for field in names]

    def schema(self, written: tuple[str, ...]) -> str:
        """The signature in the schema language of torch.library."""

        def prototype() -> None: ...

        prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            self.flat, return_annotation=self.returned
        )
        # Every integer is a constant of the graph.
        return infer_schema(prototype, mutates_args=written).replace("SymInt", "int")

    def taking_flat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the flat arguments that calls `fn` with the contract's arguments."""
        forms = self.forms

        def made(form: Any, flat: Iterator[Any]) -> Any:
            return next(flat) if form is None else form[0](*(made(f, flat) for f in form[1]))

        def flat_fn(*flat: Any) -> Any:
            given = iter(flat)
            return fn(*(made(form, given) for form in forms))

        return flat_fn

    def call_of(self, space: Any, name: str) -> Callable[..., Any]:
        """A function of the contract's arguments that calls a custom operator of a namespace."""

        def contract_fn(*args: Any, **named: Any) -> Any:
            bound = self.signature.bind(*args, **named)
            bound.apply_defaults()
            return getattr(space, name)(*_flattened(bound.arguments.values()))

        return contract_fn


def _passed(data_class: Any) -> list[Field[Any]]:
    """The fields of a data class, without caches that the object fills later."""
    return [field for field in fields(data_class) if field.default_factory is MISSING]


def _flattened(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if is_dataclass(value):
            yield from _flattened(getattr(value, field.name) for field in _passed(value))
        else:
            yield value


def _results(id_dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Functions that return empty tensors with the shapes and dtypes of the operators' results.

    Args:
        id_dtype: dtype of expert ids.
    """

    def mhc_pre(residual: Tensor, w: MhcWeight, params: MhcParams) -> tuple[Tensor, Tensor, Tensor]:
        N, H, D = residual.shape
        mix = residual.new_empty(N, H, dtype=torch.float32)
        return residual.new_empty(N, D), mix, mix.new_empty(N, H, H)

    def mhc_post_pre(
        x: Tensor, post: Tensor, res: Tensor, residual: Tensor, w: MhcWeight, params: MhcParams
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *mhc_pre(residual, w, params), residual.new_empty(residual.shape)

    def linear(x: Tensor, w: LinearWeight, *_: Any) -> Tensor:
        weight = w.weight
        dtype = w.out_dtype or (torch.bfloat16 if weight.itemsize == 1 else weight.dtype)
        return x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=dtype)

    def prepare_qkv(q_lora: Tensor, *_: Any) -> Tensor:
        return q_lora.new_empty(q_lora.shape)

    def routed(x: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        shape = (x.shape[0], topk)
        return x.new_empty(shape, dtype=id_dtype), x.new_empty(shape, dtype=torch.float32)

    def route_by_score(x: Tensor, gate: Tensor, bias: Tensor, topk: int, *_: Any) -> Any:
        return routed(x, topk)

    def route_by_hash(x: Tensor, gate: Tensor, tid2eid: Tensor, *_: Any) -> Any:
        return routed(x, tid2eid.shape[1])

    def swiglu_mlp(x: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        dtype = x.dtype if w.w2.itemsize == 1 else w.w2.dtype
        return x.new_empty(x.shape, dtype=dtype)

    made: list[Callable[..., Any]] = [mhc_pre, mhc_post_pre, linear, prepare_qkv, swiglu_mlp]
    made += [route_by_score, route_by_hash]
    return {fn.__name__: fn for fn in made} | {"grouped_linear": linear}
