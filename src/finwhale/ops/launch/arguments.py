"""Checks of the tensors that kernels take."""

from torch import Tensor


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError with the name of a tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
