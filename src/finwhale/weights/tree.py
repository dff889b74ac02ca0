"""A model's weights as trees of data classes and tuples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from torch import Tensor

from finwhale.ops.moe import ExpertWeight

T = TypeVar("T")


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested data classes, tuples and lists, in a fixed order."""
    return _parts_of(value, Tensor)


def routed_experts(weights: object) -> list[ExpertWeight]:
    """The routed experts of all layers, in a fixed order."""
    return [w for w in _parts_of(weights, ExpertWeight) if w.w13.dim() == 3]


def with_routed_experts(weights: T, change: Callable[[ExpertWeight], ExpertWeight]) -> T:
    """The weights with other routed experts; `change` is called in the order of routed_experts."""
    return _replaced(weights, {id(w): change(w) for w in routed_experts(weights)})


def _parts_of(value: object, kind: type[T]) -> list[T]:
    if isinstance(value, kind):
        return [value]
    parts: Sequence[object] = ()
    if is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif isinstance(value, tuple | list):
        parts = value
    return [found for part in parts for found in _parts_of(part, kind)]


def _replaced(value: T, others: Mapping[int, ExpertWeight]) -> T:
    """Copy a tree of data classes and tuples; `others` replaces some experts, by their `id`."""
    if id(value) in others:
        return others[id(value)]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_replaced(part, others) for part in value)  # type: ignore[return-value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    old = {field.name: getattr(value, field.name) for field in fields(value)}
    new = {name: _replaced(part, others) for name, part in old.items()}
    changed = {name: part for name, part in new.items() if part is not old[name]}
    return replace(value, **changed) if changed else value
