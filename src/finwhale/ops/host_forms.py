"""Forms of tensors that the CPU table derives once: arrays of their memory, packed weights.

They are found by tensor, not by weight, because the compiled mode's operators get tensors alone.
"""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")
# By id of a tensor object: a reference that deletes the entry when the object ends, and the forms
# by the functions that made them.
_FORMS: dict[int, tuple[weakref.ref[Tensor], dict[Callable[..., Any], Any]]] = {}


def once_per_tensor(make: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """Keep the result of `make` for each tensor until the object ends or `forget_forms` is called.

    The result must not refer to the tensor object, which would then never end.
    """

    @wraps(make)
    def form(tensor: Tensor) -> T:
        try:
            found: T = _FORMS[id(tensor)][1][make]
        except KeyError:
            found = _forms_of(tensor)[make] = make(tensor)
        return found

    return form


def _forms_of(tensor: Tensor) -> dict[Callable[..., Any], Any]:
    key = id(tensor)
    if key not in _FORMS:
        _FORMS[key] = weakref.ref(tensor, lambda _: _FORMS.pop(key, None)), {}
    return _FORMS[key][1]


def forget_forms(tensor: Tensor) -> None:
    """Derive the forms again: the tensor has other values, or its memory is freed."""
    _FORMS.pop(id(tensor), None)
