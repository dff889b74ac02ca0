"""How kernels are launched.

- early_launch: options for a kernel that starts while the kernel before it ends.
- gluon_functions: the instructions of such a kernel for Gluon, and Gluon's renamed functions.
- sizes: the sizes at which the launch signatures of kernels change.
- streamed_loads: lets TMA loads leave the rest of the L2 cache alone.
"""

from torch import Tensor


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError with the name of a tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
