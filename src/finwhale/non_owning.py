"""Tensors on a GPU's memory that they do not own."""

import torch
from torch import Tensor


class _Memory:
    """Describes a tensor's memory to torch, so that another tensor shares it without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.__cuda_array_interface__ = {
            "shape": ((last + 1) * tensor.itemsize,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def non_owning_view(tensor: Tensor) -> Tensor:
    """A view of a GPU's tensor that does not own its memory: the caller must keep it as long."""
    if not tensor.numel():
        return tensor
    data = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
    return data.as_strided(tensor.shape, tensor.stride())
