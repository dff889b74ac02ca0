"""A model's weights as trees of data classes and tuples."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import Tensor

from finwhale.ops.moe import ExpertWeight
from finwhale.weights.table import LookupTable

T = TypeVar("T")
K = TypeVar("K")


def leaves(value: Any, kind: type = Tensor) -> Iterator[Any]:
    """All values in nested data classes, tuples and lists, in order. `kind` is not entered."""
    if is_dataclass(value) and not isinstance(value, kind):
        value = tuple(getattr(value, field.name) for field in fields(value))
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part, kind)
    else:
        yield value


def with_leaves(value: T, kind: type[K], change: Callable[[K], K]) -> T:
    """Copy nested data classes and tuples, and change the leaves of `kind`, in order."""
    changed: Any = value
    if isinstance(value, kind):
        changed = change(value)
    elif isinstance(value, tuple):
        changed = tuple(with_leaves(part, kind, change) for part in value)
    elif is_dataclass(value):
        parts = {f.name: with_leaves(getattr(value, f.name), kind, change) for f in fields(value)}
        changed = replace(changed, **parts)
    return cast(T, changed)


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested data classes, tuples and lists, in a fixed order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def device_tensors(weights: object) -> list[Tensor]:
    """The same without lookup tables, which are in host memory."""
    return [leaf for leaf in leaves(weights, LookupTable) if isinstance(leaf, Tensor)]


def routed_experts(weights: object) -> list[ExpertWeight]:
    """The routed experts of all layers, in a fixed order."""
    found = (w for w in leaves(weights, ExpertWeight) if isinstance(w, ExpertWeight))
    return [w for w in found if w.w13.dim() == 3]


def with_routed_experts(weights: T, change: Callable[[ExpertWeight], ExpertWeight]) -> T:
    """The weights with other routed experts; `change` is called in the order of routed_experts."""
    return with_leaves(weights, ExpertWeight, lambda w: change(w) if w.w13.dim() == 3 else w)
