"""Tensors on a GPU's memory that they do not own."""

import torch
from torch import Tensor


class DeviceMemory:
    """Lets torch see a GPU's memory as a tensor, which keeps this object alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def non_owning_view(tensor: Tensor) -> Tensor:
    """A view of a GPU's tensor that does not own its memory: the caller must keep it as long."""
    if not tensor.numel():
        return tensor
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = DeviceMemory(tensor.data_ptr(), (last + 1) * tensor.itemsize)
    data = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return data.as_strided(tensor.shape, tensor.stride())
