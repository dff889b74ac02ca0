"""Operators at the published models' sizes: a packed table's arguments, and their floors.

A step is chunks, (start, end) of each sequence's tokens. Bytes are what any implementation must
move: each input once, a row that several tokens of a chunk see once a chunk, results once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.bench.packing import to_device
from finwhale.ops.attention import Complete, Selected, Window
from finwhale.ops.attention.cases import ROUNDED_FLIPS
from finwhale.ops.attention.layout import pack_rows, page_bytes
from finwhale.ops.case import (
    E4M3_FLIP,
    FP4_FLIP,
    Args,
    Chunks,
    entry_rows,
    rounded_heads,
    step_tokens,
    window_rows,
)
from finwhale.ops.case import Draw as HostDraw
from finwhale.ops.compressor import CompressorWeight, CompressPart
from finwhale.ops.compressor.cases import MAX_VERIFY_TOKENS, state_rows
from finwhale.ops.indexer.layout import pack_keys
from finwhale.ops.indexer.layout import page_bytes as key_page_bytes
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.sampling import SamplingBatch

# Measured on an H200.
READ_RATE = 4.39e12  # bytes a second
FP8_RATE, BF16_RATE = 1.42e15, 0.79e15  # operations a second; a multiplication and addition are 2
EPS = 1e-6
WINDOW = 128
STATE_PAGE, ENTRY_PAGE = {4: 8, 128: 128}, {4: 64, 128: 2}
# Kernels may round hidden values to bfloat16 before E4M3: one in about thirty then falls a step, a
# tenth of itself, off; sums of thousands of them differ by a hundredth or two of the largest.
HIDDEN_TOLERANCE = 2.0**-5
FP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the operators' shapes follow from, by the checkpoint's names."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator at the model's sizes.

    Attributes:
        args: makes its arguments for a step's chunks, with the weight that `weight` made.
        weight: makes its projection or experts, as stored; None: it has none.
        bytes, operations: what a step must move and compute; `rate` operations a second.
        by_token: positions of the arguments with a row for each token or its sequence.
        written: positions of the arguments that it writes.
        flips, flip: the share of results that may lie a step off (a rounding's boundary), and the
            step, as OpCase has them.
        tolerance: what other results may differ by, in units of the largest.
        own_bits: whether a token's bits must not depend on the rest of the batch.
    """

    operator: str
    name: str
    args: Callable[[Chunks, Any], Args]
    bytes: Callable[[Chunks], float]
    operations: Callable[[Chunks], float] = lambda _: 0.0
    rate: float = FP8_RATE
    weight: Callable[[], Any] | None = None
    by_token: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    flips: float = 0.0
    flip: float = E4M3_FLIP
    tolerance: float = 2e-5
    own_bits: bool = True

    def floor_us(self, chunks: Chunks) -> float:
        """The longer of moving the bytes and computing, in microseconds."""
        return max(self.bytes(chunks) / READ_RATE, self.operations(chunks) / self.rate) * 1e6


class Draw:
    """Random tensors on a device, the same ones each time; activations hold rare outliers."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)
        self.host = HostDraw()

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def activation(self, *shape: int) -> Tensor:
        x = self.normal(*shape).to(self.dtype)
        if x.numel():
            x[..., :: max(1, shape[-1] // 3)] *= 100
        return x

    def whole(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device)

    def rotary(self, num_positions: int, width: int) -> Tensor:
        angle = self.normal(num_positions, width // 2, scale=10.0)
        return torch.stack((angle.cos(), angle.sin()), -1)

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

    def rows(self, num_rows: int, rows_per_page: int, width: int, rope: int) -> Tensor:
        return pack_rows(self.normal(num_rows, width), rows_per_page, rope)

    def table(self, needed: Sequence[Any], rows_per_page: int) -> tuple[PageTable, int]:
        table, num_rows = self.host.page_table(needed, rows_per_page)
        return to_device(table, self.device), num_rows

    def tokens(self, chunks: Chunks) -> Tokens:
        tokens: Tokens = to_device(step_tokens(chunks), self.device)
        return tokens


def works(sizes: Sizes, draw: Draw) -> tuple[Work, ...]:
    """Every operator of a layer, and the LM head."""
    return (
        *_norms(sizes, draw),
        *_mhc(sizes, draw),
        *_linears(sizes, draw),
        *_prepare(sizes, draw),
        *_compress(sizes, draw),
        *_index(sizes, draw),
        *_attend(sizes, draw),
        *_router(sizes, draw),
        *_experts(sizes, draw),
        *_sample(sizes, draw),
    )


def num_tokens(chunks: Chunks) -> int:
    return sum(end - start for start, end in chunks)


def _positions(chunks: Chunks) -> Any:
    return np.concatenate([np.arange(*chunk) for chunk in chunks] or [np.arange(0)])


def _each(token_bytes: float, once_bytes: float = 0) -> Callable[[Chunks], float]:
    return lambda chunks: num_tokens(chunks) * token_bytes + once_bytes


def _norms(s: Sizes, draw: Draw) -> Iterator[Work]:
    D = s.hidden_size
    yield Work(
        operator="rms_norm",
        name="",
        args=lambda chunks, _: (draw.activation(num_tokens(chunks), D), draw.normal(D), EPS),
        bytes=_each(2 * D * draw.dtype.itemsize, 4 * D),
        by_token=(0,),
    )


def _mhc(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, size = s.hidden_size, draw.dtype.itemsize
    params = MhcParams(num_iters=20, eps=EPS, rms_eps=EPS)

    def weight() -> MhcWeight:
        fn = draw.normal(24, 4 * D, scale=(4 * D) ** -0.5)
        return MhcWeight(fn, draw.normal(24).abs(), draw.normal(24), draw.normal(D))

    def post(chunks: Chunks, _: Any) -> Args:
        N = num_tokens(chunks)
        res = draw.normal(N, 4, 4).softmax(-1)
        return draw.activation(N, D), draw.normal(N, 4).abs(), res, draw.activation(N, 4, D)

    def head(chunks: Chunks, _: Any) -> Args:
        fn = draw.normal(4, 4 * D, scale=(4 * D) ** -0.5)
        w = HcHeadWeight(fn, draw.normal(1).abs(), draw.normal(4), draw.normal(D))
        return draw.activation(num_tokens(chunks), 4, D), w, params

    fn_bytes = 24 * 4 * D * 4
    yield Work(
        operator="mhc_post_pre",
        name="",
        args=lambda chunks, _: (*post(chunks, None), weight(), params),
        bytes=_each(10 * D * size + 160, fn_bytes + 4 * D),
        by_token=(0, 1, 2, 3),
        # A new stream that is rounded the other way moves what is mixed from it.
        tolerance=1e-4 if draw.dtype == torch.bfloat16 else 2e-5,
    )
    yield Work(
        operator="mhc_pre",
        name="",
        args=lambda chunks, _: (draw.activation(num_tokens(chunks), 4, D), weight(), params),
        bytes=_each(5 * D * size + 80, fn_bytes + 4 * D),
        by_token=(0,),
    )
    yield Work(
        operator="mhc_post",
        name="",
        args=post,
        bytes=_each(9 * D * size + 80),
        by_token=(0, 1, 2, 3),
    )
    yield Work(
        operator="hc_head",
        name="",
        args=head,
        bytes=_each(5 * D * size, fn_bytes // 6 + 4 * D),
        by_token=(0,),
    )


def _linears(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, A, C, Q = s.hidden_size, s.num_attention_heads, s.head_dim, s.q_lora_rank
    I, J, G, O = s.index_n_heads, s.index_head_dim, s.o_groups, s.o_lora_rank  # noqa: E741

    def linear(name: str, K: int, M: int, fp8: bool = True) -> Work:
        def weight() -> LinearWeight:
            if fp8:
                return LinearWeight(*_with_scale(draw.fp8(M, K)), draw.dtype)
            w = draw.normal(M, K, scale=K**-0.5).to(draw.dtype)
            return LinearWeight(w, out_dtype=torch.float32)

        # A last bit of tensor cores' sums of FP8 products is 2^-13 of the largest.
        return Work(
            operator="linear",
            name=name,
            args=lambda chunks, w: (draw.activation(num_tokens(chunks), K), w),
            weight=weight,
            bytes=_each(2 * K + (2 if fp8 else 4) * M, M * K * (1 if fp8 else 2)),
            operations=lambda chunks: 2.0 * num_tokens(chunks) * M * K,
            rate=FP8_RATE if fp8 else BF16_RATE,
            by_token=(0,),
            tolerance=1e-3 if fp8 else 1e-4,
            own_bits=False,
        )

    yield linear("wq_a_wkv", D, Q + C)
    yield linear("wq_b", Q, A * C)
    yield linear("wq_b of C4", Q, A * C + I * J)
    yield linear("wo_b", G * O, D)
    yield linear("compress C4", D, 4 * C + 4 * J + I, fp8=False)
    yield linear("compress C128", D, 2 * C, fp8=False)
    yield linear("head", D, s.vocab_size, fp8=False)
    K = A * C // G

    def grouped(name: str, round_input: bool) -> Work:
        def weight() -> LinearWeight:
            w = LinearWeight(*_with_scale(draw.fp8(G, O, K)), draw.dtype)
            return replace(w, round_input=round_input)

        return Work(
            operator="grouped_linear",
            name=name,
            args=lambda chunks, w: (draw.activation(num_tokens(chunks), G, K), w),
            weight=weight,
            bytes=_each(2 * G * (K + O), G * O * K),
            operations=lambda chunks: 2.0 * num_tokens(chunks) * G * O * K,
            rate=FP8_RATE if round_input else BF16_RATE,
            by_token=(0,),
            tolerance=1e-3,
            own_bits=False,
        )

    yield grouped("wo_a", True)
    yield grouped("wo_a of bfloat16", False)


def _with_scale(packed: tuple[Tensor, Tensor]) -> tuple[Tensor, bool, Tensor]:
    weight, scale = packed
    return weight, True, scale


def _row_bytes(s: Sizes) -> float:
    return page_bytes(64, s.head_dim, s.qk_rope_head_dim) / 64


def _key_bytes(s: Sizes) -> float:
    return key_page_bytes(64, s.index_head_dim) / 64


def _prepare(s: Sizes, draw: Draw) -> Iterator[Work]:
    C, Q, R = s.head_dim, s.q_lora_rank, s.qk_rope_head_dim

    def args(chunks: Chunks, _: Any) -> Args:
        tokens = draw.tokens(chunks)
        fused = draw.activation(num_tokens(chunks), Q + C)
        table, num_rows = draw.table(window_rows(chunks, WINDOW), 64)
        return (
            fused[:, :Q],
            draw.normal(Q),
            fused[:, Q:],
            draw.normal(C),
            draw.rotary(tokens.max_len, R),
            EPS,
            True,
            tokens,
            draw.rows(num_rows, 64, C, R),
            table,
        )

    yield Work(
        operator="prepare_qkv",
        name="",
        args=args,
        bytes=_each(4 * Q + 2 * C + _row_bytes(s) + 4 * R, 4 * (Q + C)),
        by_token=(0, 2, 7, 9),
        written=(8,),
        flips=0.01,
    )


def _compress(s: Sizes, draw: Draw) -> Iterator[Work]:
    R = s.qk_rope_head_dim

    def work(ratio: Any, widths: tuple[int, ...], extra: int) -> Work:
        share = 4 if ratio == 4 else 2
        columns = [share * width for width in widths]

        def args(chunks: Chunks, _: Any) -> Args:
            tokens = draw.tokens(chunks)
            projected = draw.normal(num_tokens(chunks), sum(columns) + extra)
            states, num_states = draw.table(state_rows(chunks, ratio), STATE_PAGE[ratio])
            entries, num_rows = draw.table(entry_rows(chunks, ratio), ENTRY_PAGE[ratio])
            pools = (
                draw.rows(num_rows, ENTRY_PAGE[ratio], widths[0], R),
                pack_keys(draw.normal(num_rows, s.index_head_dim), ENTRY_PAGE[ratio]),
            )
            mixed = 8 if ratio == 4 else 128
            parts = tuple(
                CompressPart(
                    part,
                    CompressorWeight(draw.normal(mixed, width), draw.normal(width), ratio),
                    draw.normal(num_states, share * width),
                    pool,
                    "nope" if pool is pools[0] else "key",
                )
                for part, width, pool in zip(
                    torch.split(projected, [*columns, extra], 1), widths, pools, strict=False
                )
            )
            rotary = draw.rotary(tokens.max_len, R)
            return parts, tokens, rotary, EPS, states, entries, MAX_VERIFY_TOKENS

        entry_bytes = _row_bytes(s) + (_key_bytes(s) if len(widths) > 1 else 0)

        def moved(chunks: Chunks) -> float:
            """New rows, kept rows read and written, entries."""
            found = left = entries = 0
            for (start, end), (before, *after) in zip(
                chunks, state_rows(chunks, ratio), strict=True
            ):
                completes = end // ratio - start // ratio
                found += len(before) if completes else 0
                left += sum(map(len, after))
                entries += completes
            values = num_tokens(chunks) + found + left
            return values * sum(columns) * 4 + entries * entry_bytes

        return Work(
            operator="compress",
            name=f"C{ratio}",
            args=args,
            bytes=moved,
            written=(0,),
            flips=0.01,
            flip=FP4_FLIP if ratio == 4 else E4M3_FLIP,
            tolerance=1e-4,
        )

    yield work(4, (s.head_dim, s.index_head_dim), s.index_n_heads)
    yield work(128, (s.head_dim,), 0)


def _index(s: Sizes, draw: Draw) -> Iterator[Work]:
    I, J, R = s.index_n_heads, s.index_head_dim, s.qk_rope_head_dim  # noqa: E741
    key_bytes = _key_bytes(s)

    def args(chunks: Chunks, _: Any) -> Args:
        """Whole numbers and quarter turns, whose scores are exact in any order."""
        tokens, N = draw.tokens(chunks), num_tokens(chunks)
        table, num_rows = draw.table(entry_rows(chunks, 4), 64)
        keys = draw.whole(2, num_rows, J, low=-1).float()
        rotary = draw.host.quarter_turns(tokens.max_len, R).to(draw.device)
        return (
            draw.whole(4, N, I, J, low=-3).to(draw.dtype),
            draw.whole(3, N, I, low=-2).float(),
            pack_keys(keys, 64),
            rotary,
            tokens,
            table,
            s.index_topk,
            2.0**-6,
            True,
        )

    def moved(chunks: Chunks) -> float:
        scored = sum(end // 4 for _, end in chunks if end // 4 > s.index_topk)
        token_bytes = 2 * I * J + 4 * I + 4 * s.index_topk
        return num_tokens(chunks) * token_bytes + scored * key_bytes

    def operations(chunks: Chunks) -> float:
        entries = (_positions(chunks) + 1) // 4
        return float(entries[entries > s.index_topk].sum()) * 2 * I * J

    yield Work(
        operator="select_entries",
        name="",
        args=args,
        bytes=moved,
        operations=operations,
        by_token=(0, 1, 4, 5),
    )


def _attend(s: Sizes, draw: Draw) -> Iterator[Work]:
    A, C, R, K = s.num_attention_heads, s.head_dim, s.qk_rope_head_dim, s.index_topk

    def work(name: str, ratio: int, rounded: bool = False) -> Work:
        def args(chunks: Chunks, _: Any) -> Args:
            tokens, N = draw.tokens(chunks), num_tokens(chunks)
            table, num_rows = draw.table(window_rows(chunks, WINDOW), 64)
            out: tuple[Tensor, ...]
            if rounded:
                out = rounded_heads(N, A, C, draw.device)
            else:
                out = (torch.full((N, A, C), torch.nan, dtype=draw.dtype, device=draw.device),)
            fused = draw.activation(N, A * C + s.index_n_heads * s.index_head_dim)
            window = Window(draw.rows(num_rows, 64, C, R), table, WINDOW)
            return (
                fused[:, : A * C].unflatten(1, (A, C)),
                draw.rotary(tokens.max_len, R),
                EPS,
                tokens,
                window,
                entries(chunks, tokens),
                draw.normal(A),
                C**-0.5 * 3,
                *out,
            )

        def entries(chunks: Chunks, tokens: Tokens) -> Selected | Complete | None:
            if not ratio:
                return None
            rows_per_page = ENTRY_PAGE[ratio]
            table, num_rows = draw.table(entry_rows(chunks, ratio), rows_per_page)
            pool = draw.rows(num_rows, rows_per_page, C, R)
            if ratio == 128:
                return Complete(pool, table, 128)
            slots = _selected(tokens, table, K).to(draw.device)
            return Selected(pool, slots, rows_per_page)

        def keys(chunks: Chunks) -> Any:
            """The entries that each token attends to."""
            seen = (_positions(chunks) + 1) // ratio if ratio else 0 * _positions(chunks)
            return np.minimum(seen, K) if ratio == 4 else seen

        def moved(chunks: Chunks) -> float:
            rows = sum(end - max(0, start - WINDOW + 1) for start, end in chunks)
            if ratio:
                widest = K if ratio == 4 else 2**62
                rows += sum(min(end // ratio, (end - start) * widest) for start, end in chunks)
            written = 1 + 4 / 128 if rounded else 2
            return num_tokens(chunks) * (2 + written) * A * C + rows * _row_bytes(s)

        def operations(chunks: Chunks) -> float:
            seen = np.minimum(_positions(chunks) + 1, WINDOW) + keys(chunks)
            return float(seen.sum()) * A * C * 4

        return Work(
            operator="sparse_attention",
            name=name,
            args=args,
            bytes=moved,
            operations=operations,
            rate=BF16_RATE,
            by_token=(0, 3, 4, 5, 8, 9),
            written=(8, 9) if rounded else (8,),
            flips=ROUNDED_FLIPS if rounded else 0.0,
            tolerance=2.0**-7,
            own_bits=False,
        )

    yield work("window", 0)
    yield work("C4", 4)
    yield work("C128", 128)
    yield work("C128 rounded", 128, rounded=True)


def _selected(tokens: Tokens, table: PageTable, topk: int) -> Tensor:
    """[N,topk] int32: slots of evenly spread entries that each token sees, all if they are few."""
    seen = ((tokens.host_positions + 1) // 4)[:, None]
    place = np.arange(topk)
    chosen = np.where(seen > topk, place * seen // topk, place)
    visible = chosen < seen
    slots = table.slots(tokens.host_sequence[:, None], np.where(visible, chosen, 0))
    return torch.from_numpy(np.where(visible, slots, -1).astype(np.int32))


def _router(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, E, K = s.hidden_size, s.n_routed_experts, s.num_experts_per_tok

    def score(chunks: Chunks, _: Any) -> Args:
        N = num_tokens(chunks)
        gate, bias = draw.normal(E, D, scale=D**-0.5).to(draw.dtype), draw.normal(E, scale=0.1)
        positions = draw.tokens(chunks).positions
        return draw.normal(N, D).to(draw.dtype), gate, bias, K, 1.5, positions

    def hashed(chunks: Chunks, _: Any) -> Args:
        x, gate, _, _, scaling, positions = score(chunks, None)
        first = draw.whole(E, s.vocab_size, 1)
        table = (first + torch.arange(K, device=draw.device) * (E // K)) % E
        return x, gate, table, draw.whole(s.vocab_size, len(x)), scaling, positions

    size = draw.dtype.itemsize
    token_bytes = D * size + 8 * K + 8
    yield Work(
        operator="route_by_score",
        name="",
        args=score,
        bytes=_each(token_bytes, size * E * D),
        by_token=(0, 5),
    )
    yield Work(
        operator="route_by_hash",
        name="",
        args=hashed,
        bytes=_each(token_bytes + 8, size * K * D),
        by_token=(0, 3, 5),
    )


def _experts(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, E, K = s.hidden_size, s.n_routed_experts, s.num_experts_per_tok
    I = s.moe_intermediate_size  # noqa: E741
    limit = 10.0

    def routed() -> ExpertWeight:
        (w13, scale13), (w2, scale2) = draw.fp4(E, 2 * I, D), draw.fp4(E, D, I)
        return ExpertWeight(w13, w2, True, scale13, scale2)

    def shared() -> ExpertWeight:
        (w13, scale13), (w2, scale2) = draw.fp8(2 * I, D), draw.fp8(D, I)
        return ExpertWeight(w13, w2, True, scale13, scale2)

    def args(chunks: Chunks, w: Any) -> Args:
        N = num_tokens(chunks)
        noise = torch.rand(N, E, generator=draw.generator, device=draw.device)
        ids = noise.topk(K, 1).indices.int()
        weights = draw.normal(N, K).abs()
        return (
            draw.normal(N, D).to(draw.dtype),
            ids,
            weights,
            w,
            limit,
            draw.normal(N, D).to(draw.dtype),
        )

    def moved(chunks: Chunks) -> float:
        """As many experts as N tokens that choose evenly are expected to reach."""
        N = num_tokens(chunks)
        reached = E * (1 - (1 - K / E) ** N)
        return reached * 3 * I * D * FP4_BYTES + N * (6 * D + 8 * K)

    yield Work(
        operator="experts",
        name="",
        args=args,
        weight=routed,
        bytes=moved,
        operations=lambda chunks: 6.0 * num_tokens(chunks) * K * I * D,
        by_token=(0, 1, 2, 5),
        tolerance=HIDDEN_TOLERANCE,
        own_bits=False,
    )
    yield Work(
        operator="swiglu_mlp",
        name="",
        args=lambda chunks, w: (draw.normal(num_tokens(chunks), D).to(draw.dtype), w, limit),
        weight=shared,
        bytes=_each(4 * D, 3 * I * D),
        operations=lambda chunks: 6.0 * num_tokens(chunks) * I * D,
        by_token=(0,),
        tolerance=HIDDEN_TOLERANCE,
        own_bits=False,
    )


def _sample(s: Sizes, draw: Draw) -> Iterator[Work]:
    yield Work(
        operator="sample",
        name="greedy",
        args=lambda chunks, _: (draw.normal(max(1, len(chunks)), s.vocab_size), SamplingBatch()),
        bytes=lambda chunks: len(chunks) * 4.0 * s.vocab_size,
    )
