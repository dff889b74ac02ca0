"""Forms of tensors that only the CPU table reads, kept by the data class that has the tensors."""

from dataclasses import fields
from functools import cached_property
from typing import Any

from torch import Tensor


class HostForms:
    """Base of frozen data classes without slots. A cached property of such a class is a form."""

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The memory of the tensors as arrays, in the order of the fields."""
        return tuple(value.numpy() for value in vars(self).values() if isinstance(value, Tensor))

    def forget_forms(self) -> None:
        """Derive the forms again: the tensors have other values, or their memory is freed."""
        names = {field.name for field in fields(self)}  # type: ignore[arg-type]
        for form in vars(self).keys() - names:
            del vars(self)[form]
