"""Cases: calls of operators at the published models' sizes, for tests and tools/operators.py.

`model_cases/` lists those of each operator family, with packed rows and weights. Small cases in
plain float32 are in `cases/`. A step is given by its chunks: (start, end) of each sequence's
tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from math import log2
from typing import Any

import numpy as np
import torch
from tests.support.packed_pools import pack_keys, pack_rows
from torch import Tensor

from finwhale.bench.floors import FP8_RATE, READ_RATE
from finwhale.errors import FinwhaleError
from finwhale.ops.paging import PageTable, Tokens

Args = tuple[Any, ...]
Chunks = Sequence[tuple[int, int]]  # (start, end) of each sequence's tokens
WEIGHT_BLOCK = 128  # rows and columns of an E4M3 weight that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """The arguments of one call, and its minimum bytes and operations.

    Attributes:
        operator: name of the operator's field in Ops, or "experts" for the three operators of the
            routed experts together (Ops.experts).
        name: distinguishes the cases of an operator.
        args: makes the arguments. In small cases they are float32 on the CPU, and every call makes
            the same values. If `weight` is set, `args` takes the weight that loading has prepared.
        weight: makes the weight of the projection or the experts, as a checkpoint stores it.
        bytes: the bytes that any implementation must move: each input once (once for each chunk, if
            several of its tokens read the same row) and each result once. 0 in small cases, which
            are not timed.
        operations: the operations that any implementation must compute.
        rate: operations per second of the device, in the precision of this operator.
    """

    operator: str
    name: str = ""
    args: Callable[..., Args]
    weight: Callable[[], Any] | None = None
    bytes: float = 0.0
    operations: float = 0.0
    rate: float = FP8_RATE

    def __str__(self) -> str:
        return f"{self.operator} {self.name}"

    @property
    def floor_us(self) -> float:
        """The minimum time in microseconds: for moving the bytes or computing, the longer one."""
        return max(self.bytes / READ_RATE, self.operations / self.rate) * 1e6


@dataclass(frozen=True, slots=True)
class OpSizes:
    """The sizes of a model that determine its operators' shapes. The names are the checkpoint's.

    head_rows: number of the LM head's rows on this rank; 0: the whole vocabulary.
    """

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_n_heads: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    vocab_size: int = 129280
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    head_rows: int = 0

    def of_rank(self, tensor_parallel_size: int) -> "OpSizes":
        """The sizes on one rank. Raises FinwhaleError if a size does not divide evenly."""
        units = {"num_attention_heads": 1, "o_groups": 1, "moe_intermediate_size": WEIGHT_BLOCK}
        units["vocab_size"] = 1
        shares = {}
        for name, unit in units.items():
            size = getattr(self, name)
            shares[name] = size // tensor_parallel_size
            if size % (unit * tensor_parallel_size):
                raise FinwhaleError(
                    f"{name} {size} does not divide by {tensor_parallel_size} ranks"
                    + (f" in blocks of {unit}" if unit > 1 else "")
                )
        return replace(self, head_rows=shares.pop("vocab_size"), **shares)


CONFIGS = {
    "flash": OpSizes(4096, 64, 512, 1024, 8, 1024, 64, 512, 256, 6, 2048),
    "pro": OpSizes(7168, 128, 512, 1536, 16, 1024, 64, 1024, 384, 6, 3072),
    "demo": OpSizes(256, 8, 128, 128, 4, 128, 16, 64, 6, 2, 512, vocab_size=4096),
}


def step_tokens(chunks: Chunks) -> Tokens:
    """The tokens of a step. Each chunk belongs to a different sequence."""
    lengths = [end - start for start, end in chunks]
    positions = [position for start, end in chunks for position in range(start, end)]
    owners = [owner for owner, length in enumerate(lengths) for _ in range(length)]
    return Tokens(
        positions=torch.tensor(positions, dtype=torch.int64),
        sequence=torch.tensor(owners, dtype=torch.int32),
        query_start=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
        max_len=max((end for _, end in chunks), default=0),
        max_query=max(lengths, default=0),
    )


def num_tokens(chunks: Chunks) -> int:
    return sum(end - start for start, end in chunks)


def token_positions(chunks: Chunks) -> Any:
    """The position of each token: a numpy array [N]."""
    return np.concatenate([np.arange(*chunk) for chunk in chunks] or [np.arange(0)])


def window_rows(chunks: Chunks, size: int) -> list[tuple[range]]:
    """The rows of a window's pool that each chunk reads."""
    return [(range(max(0, start - size + 1), end),) for start, end in chunks]


def entry_rows(chunks: Chunks, ratio: int) -> list[tuple[range]]:
    """The entries that each sequence has after the step."""
    return [(range(end // ratio),) for _, end in chunks]


def rounded_heads(
    num_tokens: int, heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Outputs for rounded heads: E4M3 [N,A,C] and scales [N,S], column-major as DeepGEMM needs."""
    num_scales = heads * head_dim // 128
    scales = torch.full((num_scales, -(-num_tokens // 4) * 4), torch.nan, device=device)
    shape = num_tokens, heads, head_dim
    values = torch.full(shape, torch.nan, device=device).to(torch.float8_e4m3fn)
    return values, scales.T[:num_tokens]


class Draw:
    """Makes random tensors, the same in every run."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """Random int64 values in low..high-1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def distinct(self, high: int, count: int) -> Tensor:
        """[count] distinct random int64 values in 0..high-1."""
        return torch.randperm(high, generator=self.generator)[:count]

    def rotation(self, num_rows: int, width: int) -> Tensor:
        """(cos, sin) [rows,R/2,2] of random angles."""
        shape = (num_rows, width // 2)
        angle = torch.rand(shape, generator=self.generator, device=self.device) * 6.28
        return torch.stack((angle.cos(), angle.sin()), -1)

    def quarter_turns(self, num_rows: int, width: int) -> Tensor:
        """(cos, sin) [rows,R/2,2] of random multiples of 90 degrees, which rotate exactly."""
        turns = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]
        return torch.tensor(turns, device=self.device)[self.integers(4, num_rows, width // 2)]

    def tokens(self, chunks: Chunks) -> Tokens:
        return to_device(step_tokens(chunks), self.device)

    def rows(self, num_rows: int, rows_per_page: int, width: int, rope: int) -> Tensor:
        """A pool of rows as the cache stores them."""
        return self.normal(num_rows, width)

    def keys(self, num_rows: int, rows_per_page: int, width: int) -> Tensor:
        """A pool of the indexer's keys as the cache stores them."""
        return self.normal(num_rows, width)

    def page_table(
        self, needed: Sequence[Iterable[range]], rows_per_page: int
    ) -> tuple[PageTable, int]:
        """Allocate random pages for the rows that each sequence needs.

        A sequence's table begins at its first needed page and has 0 for a page that it does not
        need. The table's rows are strided, with arbitrary page numbers between them.

        Returns:
            The page table, and the number of rows of a pool that has all pages.
        """
        numbers = [
            sorted({page for rows in each for page in _pages(rows, rows_per_page)})
            for each in needed
        ]
        first = [pages[0] if pages else 0 for pages in numbers]
        width = max((pages[-1] - pages[0] + 1 for pages in numbers if pages), default=1)
        count = sum(map(len, numbers))
        drawn = (1 + self.distinct(count + 4, count)).tolist()
        pages = 1 + self.integers(count + 4, len(numbers), width + 3)
        pages[:, :width] = 0
        for row, owned in enumerate(numbers):
            for number in owned:
                pages[row, number - first[row]] = drawn.pop()
        table = PageTable(
            pages.int()[:, :width], torch.tensor(first, dtype=torch.int32), rows_per_page
        )
        return table, (count + 5) * rows_per_page


class ModelDraw(Draw):
    """Makes random tensors like a model's: packed weights, and activations with outliers."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(device=device)
        self.dtype = dtype
        self.host = Draw()

    def activation(self, *shape: int) -> Tensor:
        x = self.normal(*shape).to(self.dtype)
        if x.numel():
            x[..., :: max(1, shape[-1] // 3)] *= 100
        return x

    def page_table(
        self, needed: Sequence[Iterable[range]], rows_per_page: int
    ) -> tuple[PageTable, int]:
        table, num_rows = self.host.page_table(needed, rows_per_page)
        return to_device(table, self.device), num_rows

    def rows(self, num_rows: int, rows_per_page: int, width: int, rope: int) -> Tensor:
        return pack_rows(self.normal(num_rows, width), rows_per_page, rope)

    def keys(self, num_rows: int, rows_per_page: int, width: int) -> Tensor:
        return pack_keys(self.normal(num_rows, width), rows_per_page)

    def fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Weights with variance about 1 / K: E4M3 [..,M,K] and the float32 scales of its blocks."""
        weight = self.normal(*shape, scale=32.0).to(torch.float8_e4m3fn)
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        exponent = self.integers(2, *blocks) + round(log2(shape[-1] ** -0.5 / 32))
        return weight, torch.exp2(exponent.float())

    def fp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """FP4 weights with variance about 1 / K: codes [E,M,K/2] and exponents [E,M,K/32]."""
        codes = self.integers(256, *shape[:-1], shape[-1] // 2).to(torch.uint8)
        exponents = self.integers(2, *shape[:-1], shape[-1] // 32) + 127 - 2
        return codes, (exponents - round(log2(shape[-1] ** 0.5))).to(torch.uint8)


def to_device(value: Any, device: str | torch.device) -> Any:
    """Move the tensors of an argument to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "cache"}
        return type(value)(**{name: to_device(part, device) for name, part in parts.items()})
    return value


def _pages(rows: range, rows_per_page: int) -> range:
    """The page numbers of adjacent rows."""
    return range(rows.start // rows_per_page, -(-rows.stop // rows_per_page)) if rows else rows
