"""The destinations of tensors that are read directly into a model's memory."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, repeat

import torch
from torch import Tensor


class Destinations(Mapping[str, Tensor]):
    """Destinations by name, each uint8 [num_bytes]: the values are views, made when asked for.

    A model has tens of thousands of destinations in some hundred tensors, and making all views
    would delay the first byte.

    Attributes:
        memories: uint8 [num_bytes]: the tensors whose parts are destinations.
        parts: by name, the number of a tensor in `memories`, and the destination's first byte and
            number of bytes in it.
        lookups: by name of a lookup table or its scales, uint8 [num_bytes] in host memory: the rows
            that this rank loads. Iteration leaves them out.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.memories: list[Tensor] = []
        self.parts: dict[str, tuple[int, int, int]] = {}
        self.lookups: dict[str, Tensor] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Let all of a contiguous tensor be a destination."""
        self.divide([name], tensor, [tensor.nbytes])

    def divide(self, names: Collection[str], tensor: Tensor, sizes: Sequence[int]) -> None:
        """Make adjacent parts of a contiguous tensor destinations. `sizes`: the bytes of each."""
        assert len(names) == len(sizes) and sum(sizes) == tensor.nbytes
        if not names:
            return
        begins = accumulate(sizes, initial=0)
        number = len(self.memories)
        self.memories.append(tensor.view(-1).view(torch.uint8))
        self.parts.update(zip(names, zip(repeat(number), begins, sizes, strict=False), strict=True))

    def without(self, names: Collection[str]) -> "Destinations":
        """The same destinations, but for these."""
        left = Destinations()
        left.memories, left.lookups = self.memories, self.lookups
        left.parts = {name: part for name, part in self.parts.items() if name not in names}
        return left

    def __getitem__(self, name: str) -> Tensor:
        if name in self.lookups:
            return self.lookups[name]
        memory, begin, num_bytes = self.parts[name]
        return self.memories[memory][begin : begin + num_bytes]

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
