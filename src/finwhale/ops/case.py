"""A case: one call of an operator. `cases.py` of each family lists them for tests and benchmarks.

A family's `CASES` are calls with plain float32 arguments at many small sizes. Its `model_cases`
are calls of a table with packed rows and weights at the published models' sizes. A step is chunks:
(start, end) of each sequence's tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, chain
from math import log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.attention.layout import pack_rows
from finwhale.ops.compressor import CompressPart
from finwhale.ops.indexer.layout import pack_keys
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.rounding import unscaled_e4m3

Args = tuple[Any, ...]
Chunks = Sequence[tuple[int, int]]  # (start, end) of each sequence's tokens
# A step of a rounding, in units of the largest value: E4M3's is 2^-3 of a value at most. FP4 has 4
# and 6 of a scale beside each other, where the largest value may be just above 5.
E4M3_FLIP, FP4_FLIP = 2.0**-3, 0.4
# Columns beyond a strided tensor's own.
MORE_COLUMNS = 16
# Measured on an H200.
READ_RATE = 4.39e12  # bytes a second
FP8_RATE, BF16_RATE = 1.42e15, 0.79e15  # operations a second; a multiplication and addition are 2
# At the models' sizes, sums of float32 have up to 2^15 terms.
MODEL_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """Arguments for one operator, how its implementations may differ, and what the call costs.

    Attributes:
        operator: its field in Ops, or "experts" for the three of the routed experts (Ops.experts).
        args: makes the arguments. Those of CASES are on the CPU in float32, the same ones each
            time. Where `weight` is given, `args` takes the weight, as loading prepared it.
        weight: makes the projection's or the experts' weight as a checkpoint stores it.
        by_token: positions of the arguments that have a row for each token or its sequence, where
            a token's result depends on its own rows alone; empty where tokens depend on each
            other.
        written: positions of the arguments that the operator writes.
        tolerance: of float results: the largest difference, in units of the largest value. The
            default: implementations add the same terms in another order, so that results differ
            by a few units of 2^-24 of the largest term, times at most the root of their number,
            2^6 here.
        flips: the share of values that may differ more, by `flip` units: a value that falls on
            the other side of a rounding's boundary differs by a step.
        own_bits: whether a token's bits must not depend on the rest of the batch.
        bytes: how many any implementation must move: each input once (once for each chunk, if
            several of its tokens read the same row) and each result once. 0 in CASES, which are
            not timed.
        operations: how many any implementation must compute, at `rate` a second.
    """

    operator: str
    name: str = ""
    args: Callable[..., Args]
    weight: Callable[[], Any] | None = None
    by_token: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    tolerance: float = 8e-6
    flips: float = 0.0
    flip: float = E4M3_FLIP
    own_bits: bool = True
    bytes: float = 0.0
    operations: float = 0.0
    rate: float = FP8_RATE

    def __str__(self) -> str:
        return f"{self.operator} {self.name}"

    @property
    def floor_us(self) -> float:
        """The time that moving the bytes or computing takes, whichever is longer."""
        return max(self.bytes / READ_RATE, self.operations / self.rate) * 1e6


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model that determine its operators' shapes, by the checkpoint's names."""

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


CONFIGS = {
    "flash": Sizes(4096, 64, 512, 1024, 8, 1024, 64, 512, 256, 6, 2048),
    "pro": Sizes(7168, 128, 512, 1536, 16, 1024, 64, 1024, 384, 6, 3072),
    "demo": Sizes(256, 8, 128, 128, 2, 128, 16, 64, 16, 4, 128, vocab_size=4096),
}


def results(fn: Callable[..., Any], args: Args, written: Sequence[int]) -> list[Tensor]:
    """What an operator returns, then what it writes; the arguments are left as they are.

    Values that are written rounded, and their scales behind them, become what they stand for.
    """
    args = tuple(_copied(arg) for arg in args)
    returned = fn(*args)
    if not isinstance(returned, tuple):
        returned = () if returned is None else (returned,)
    return [*returned, *written_tensors(args, written)]


def written_tensors(args: Args, written: Sequence[int]) -> list[Tensor]:
    """What an operator wrote, as `results` gives it."""
    found = list(chain.from_iterable(_written(args[i]) for i in written))
    if found and found[0].dtype == torch.float8_e4m3fn:
        values, scales = found
        return [unscaled_e4m3(values.flatten(1), scales).view(values.shape)]
    return found


def _written(arg: Any) -> list[Tensor]:
    """Those of an argument that an operator writes: itself, or the pools of its parts."""
    if isinstance(arg, Tensor):
        return [arg]
    return [pool for part in arg for pool in (part.state_pool, part.entry_pool)]


def _copied(arg: Any) -> Any:
    """The argument with tensors of its own, of the same strides, where an operator may write."""
    if isinstance(arg, Tensor):
        if 0 in arg.stride():  # an expanded one cannot be written
            return arg
        copy = torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device)
        return copy.copy_(arg)
    if isinstance(arg, tuple):
        return tuple(_copied(part) for part in arg)
    if isinstance(arg, CompressPart):
        state_pool, entry_pool = _copied(arg.state_pool), _copied(arg.entry_pool)
        return replace(arg, state_pool=state_pool, entry_pool=entry_pool)
    return arg


def take_tokens(args: Args, by_token: Sequence[int], start: int, stop: int) -> Args:
    """The arguments of tokens start..stop-1 alone, the chunks cut where they reach further."""
    sequences = slice(0, 0)
    for arg in args:
        if isinstance(arg, Tokens):
            owners = arg.host_sequence[start:stop]
            sequences = slice(int(owners[0]), int(owners[-1]) + 1)
    rows = slice(start, stop)
    return tuple(
        _taken(arg, rows, sequences) if position in by_token else arg
        for position, arg in enumerate(args)
    )


def _taken(arg: Any, rows: slice, sequences: slice) -> Any:
    if isinstance(arg, Tokens):
        starts = arg.query_start[sequences.start : sequences.stop + 1]
        return Tokens(
            positions=arg.positions[rows],
            sequence=arg.sequence[rows] - sequences.start,
            query_start=starts.clamp(rows.start, rows.stop) - rows.start,
            max_len=arg.max_len,
            max_query=arg.max_query,
        )
    if isinstance(arg, PageTable):
        return PageTable(arg.pages[sequences], arg.first[sequences], arg.rows_per_page)
    if isinstance(arg, Window | Complete):
        return replace(arg, table=_taken(arg.table, rows, sequences))
    if isinstance(arg, Selected):
        return replace(arg, slots=arg.slots[rows])
    if isinstance(arg, tuple):
        return tuple(replace(part, projected=part.projected[rows]) for part in arg)
    return None if arg is None else arg[rows]


def step_tokens(chunks: Chunks) -> Tokens:
    """The tokens of a step over chunks, one sequence each."""
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
    """NumPy [N] of each token's position."""
    return np.concatenate([np.arange(*chunk) for chunk in chunks] or [np.arange(0)])


def window_rows(chunks: Chunks, size: int) -> list[tuple[range]]:
    """The rows of a window's pool that each chunk sees."""
    return [(range(max(0, start - size + 1), end),) for start, end in chunks]


def entry_rows(chunks: Chunks, ratio: int) -> list[tuple[range]]:
    """The entries that each sequence has after the step."""
    return [(range(end // ratio),) for _, end in chunks]


def rounded_heads(
    num_tokens: int, heads: int, head_dim: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Where rounded heads are written: E4M3 [N,A,C] and scales [N,S], in columns as DeepGEMM's."""
    num_scales = heads * head_dim // 128
    scales = torch.full((num_scales, -(-num_tokens // 4) * 4), torch.nan, device=device)
    shape = num_tokens, heads, head_dim
    values = torch.full(shape, torch.nan, device=device).to(torch.float8_e4m3fn)
    return values, scales.T[:num_tokens]


class Draw:
    """Random tensors, the same in every run."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def outliers(self, *shape: int) -> Tensor:
        """Normal, one value in about a hundred 300 times as large, and the last row zero."""
        x = self.normal(*shape)
        rare = torch.rand(shape, generator=self.generator) < 0.01
        x = torch.where(rare, 300 * x, x)
        x[-1:] = 0
        return x

    def whole(self, high: int, *shape: int, low: int = 0) -> Tensor:
        """int64 in low..high-1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def distinct(self, high: int, count: int) -> Tensor:
        """[count] distinct int64 in 0..high-1, in no order."""
        return torch.randperm(high, generator=self.generator)[:count]

    def rotation(self, num_rows: int, width: int) -> Tensor:
        """(cos, sin) [rows,R/2,2] of random angles."""
        angle = torch.rand((num_rows, width // 2), generator=self.generator) * 6.28
        return torch.stack((angle.cos(), angle.sin()), -1)

    def quarter_turns(self, num_rows: int, width: int) -> Tensor:
        """(cos, sin) [rows,R/2,2] that rotate without any rounding."""
        turns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
        return turns[self.whole(4, num_rows, width // 2)]

    def tokens(self, chunks: Chunks) -> Tokens:
        tokens: Tokens = to_device(step_tokens(chunks), self.device)
        return tokens

    def rows(self, num_rows: int, rows_per_page: int, width: int, rope: int) -> Tensor:
        """A pool of rows as the cache stores them."""
        return self.normal(num_rows, width)

    def keys(self, num_rows: int, rows_per_page: int, width: int) -> Tensor:
        """A pool of the indexer's keys as the cache stores them."""
        return self.normal(num_rows, width)

    def page_table(
        self, needed: Sequence[Iterable[range]], rows_per_page: int
    ) -> tuple[PageTable, int]:
        """Random pages for the rows that each sequence needs, and the rows of a pool with them.

        Pages lie in no order; the table begins at the first page that is needed, has 0 where none
        is, and its rows are strided, with pages of nobody behind each.
        """
        numbers = [
            sorted({page for rows in each for page in _pages(rows, rows_per_page)})
            for each in needed
        ]
        first = [pages[0] if pages else 0 for pages in numbers]
        width = max((pages[-1] - pages[0] + 1 for pages in numbers if pages), default=1)
        count = sum(map(len, numbers))
        drawn = (1 + self.distinct(count + 4, count)).tolist()
        pages = 1 + self.whole(count + 4, len(numbers), width + 3)
        pages[:, :width] = 0
        for row, owned in enumerate(numbers):
            for number in owned:
                pages[row, number - first[row]] = drawn.pop()
        table = PageTable(
            pages.int()[:, :width], torch.tensor(first, dtype=torch.int32), rows_per_page
        )
        return table, (count + 5) * rows_per_page


class ModelDraw(Draw):
    """Random tensors on a device as a model has them: packed weights, activations with outliers."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(device=device)
        self.dtype = dtype
        self.host = Draw()

    def activation(self, *shape: int) -> Tensor:
        x = self.normal(*shape).to(self.dtype)
        if x.numel():
            x[..., :: max(1, shape[-1] // 3)] *= 100
        return x

    def rotation(self, num_rows: int, width: int) -> Tensor:
        angle = self.normal(num_rows, width // 2, scale=10.0)
        return torch.stack((angle.cos(), angle.sin()), -1)

    def quarter_turns(self, num_rows: int, width: int) -> Tensor:
        return self.host.quarter_turns(num_rows, width).to(self.device)

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
        """[..,M,K] E4M3 and float32 scales of blocks, of values with variance about 1 / K."""
        weight = self.normal(*shape, scale=32.0).to(torch.float8_e4m3fn)
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        exponent = self.whole(2, *blocks) + round(log2(shape[-1] ** -0.5 / 32))
        return weight, torch.exp2(exponent.float())

    def fp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """[E,M,K/2] codes and [E,M,K/32] exponents, of values with variance about 1 / K."""
        codes = self.whole(256, *shape[:-1], shape[-1] // 2).to(torch.uint8)
        exponents = self.whole(2, *shape[:-1], shape[-1] // 32) + 127 - 2
        return codes, (exponents - round(log2(shape[-1] ** 0.5))).to(torch.uint8)


def to_device(value: Any, device: str | torch.device) -> Any:
    """An argument with its tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(to_device(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "memo"}
        return type(value)(**{name: to_device(part, device) for name, part in parts.items()})
    return value


def _pages(rows: range, rows_per_page: int) -> range:
    """The pages of rows that are neighbours."""
    return range(rows.start // rows_per_page, -(-rows.stop // rows_per_page)) if rows else rows


def strided(x: Tensor) -> Tensor:
    """[N,..,W]: the same values with rows that lie apart, NaN between them; between bytes, 255."""
    flat = x.flatten(1)
    between = 255 if x.dtype == torch.uint8 else torch.nan
    wide = flat.new_full((flat.shape[0], flat.shape[1] + MORE_COLUMNS), between)
    wide[:, : flat.shape[1]] = flat
    own: Tensor = wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])
    return own
