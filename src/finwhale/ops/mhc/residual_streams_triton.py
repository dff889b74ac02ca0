"""mHC's first pass as Triton kernels: new residual streams, and the parts of their GEMM with fn.

A program loads a tile of all four residual streams and of x, applies the post step in registers,
stores the new residual streams, and multiplies them with fn on tensor cores. `mhc_triton.py`
describes the passes.

Legend: N tokens, D hidden, M rows of fn, ROWS M + 1 and padding, S parts over D ("slots").
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from finwhale.ops.launch.early_launch import start_next, wait_for_last
from finwhale.ops.ranks_triton import receive, send, sum_values


@triton.jit
def _settle(x, COMPILED: tl.constexpr):
    """Hide the computation of x from the compiler.

    Otherwise it would compute the post step in the layout of a GEMM operand, in which several
    threads hold every value.
    """
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=False,
            pack=32 // x.dtype.primitive_bitwidth,
        )
    else:
        return x


@triton.jit
def _truncate(x):
    """Clear the lower half of a float32, so that bfloat16 can represent it."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _split(fn):
    """Split fn into three bfloat16 values whose sum is fn, the largest first."""
    high = _truncate(fn)
    middle = _truncate(fn - high)
    low = fn - high - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def _times_split(x, high, middle, low):
    """x (high + middle + low)^T, exact products in bfloat16; adds the small terms first."""
    total = tl.dot(x, tl.trans(low))
    total = tl.dot(x, tl.trans(middle), total)
    return tl.dot(x, tl.trans(high), total)


@triton.jit
def _column(res, post, k, is_token):
    """Load the factors of each old residual stream and of x for the new residual stream k.

    res and post point to a token's mixes.
    """
    factors = ()
    for i in tl.static_range(4):
        part = tl.load(res + (4 * i + k), mask=is_token, other=0.0)
        factors += (part,)  # type: ignore[assignment]
    return factors + (tl.load(post + k, mask=is_token, other=0.0),)  # noqa: RUF005


@triton.jit
def _mixed(column, old, x):
    """Compute a new residual stream of a tile."""
    stream = column[0][:, None] * old[0].to(tl.float32)
    for i in tl.static_range(1, 4):
        stream += column[i][:, None] * old[i].to(tl.float32)
    return (stream + column[4][:, None] * x.to(tl.float32)).to(x.dtype)


@triton.jit
def _take_turns(four, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Interleave the columns of four [ROWS, WIDTH] into one [ROWS, 4 WIDTH]."""
    both = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(both, [ROWS, 4 * WIDTH])


@triton.jit
def _squares(four):
    a, b, c, d = four
    square = a.to(tl.float32) * a.to(tl.float32) + b.to(tl.float32) * b.to(tl.float32)
    square += c.to(tl.float32) * c.to(tl.float32) + d.to(tl.float32) * d.to(tl.float32)
    return tl.sum(square, axis=1)


@triton.jit
def _fn_tile(
    fn_ptr,
    row,
    d,
    D,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load the columns d of fn for all residual streams, and prepare them for the GEMM.

    A step of few tokens reads fn once, so it should not displace other data from the L2 cache.
    SPLIT: return three bfloat16 tiles (`_split`); otherwise one in float32.
    """
    mask = (row < M)[:, None] & (d < D)[None, :]
    source = fn_ptr + row[:, None] * (4 * D) + d[None, :]
    four = ()
    for i in tl.static_range(4):
        part = tl.load(source + i * D, mask=mask, other=0.0, eviction_policy="evict_first")
        four += (part,)  # type: ignore[assignment]
    fn = _settle(_take_turns(four, ROWS, BLOCK_D), COMPILED)
    return _split(fn) if SPLIT else (fn,)


@triton.jit
def load_four(source, stride, mask):
    """Load the values of all four residual streams, or of fn's columns for them."""
    values = ()
    for i in tl.static_range(4):
        values += (tl.load(source + i * stride, mask=mask, other=0.0),)  # type: ignore[assignment]
    return values


@triton.jit
def _streams_tile(streams_ptr, token, d, stride_n, stride_h, mask):
    """Load the values at columns d of all four residual streams of a block of tokens."""
    return load_four(streams_ptr + token[:, None] * stride_n + d[None, :], stride_h, mask)


@triton.jit
def _columns(res, post, is_token):
    """Load the factors for each of the four new residual streams (`_column`)."""
    columns = ()
    for k in tl.static_range(4):
        columns += (_column(res, post, k, is_token),)  # type: ignore[assignment]
    return columns


@triton.jit
def _post_tile(out_ptr, columns, streams, x, token, d, D, mask):
    """Apply the post step: store the new residual streams and return them."""
    mixed = ()
    for k in tl.static_range(4):
        mixed += (_mixed(columns[k], streams, x),)  # type: ignore[assignment]
    target = out_ptr + (token * 4)[:, None] * D + d[None, :]
    for k in tl.static_range(4):
        tl.store(target + k * D, mixed[k], mask=mask)
    return mixed


@triton.jit
def _parts_tile(
    parts_ptr,
    fn,
    streams,
    row,
    token,
    is_token,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the tile's part of the GEMM and of the sum of squares."""
    squares = _squares(streams)
    streams = _settle(_take_turns(streams, BLOCK_N, BLOCK_D), COMPILED)
    if streams.dtype == tl.bfloat16:
        total = _times_split(streams, fn[0], fn[1], fn[2])
    else:
        total = tl.dot(streams, tl.trans(fn[0]), input_precision="ieee")
    total = tl.where(row[None, :] == M, squares[:, None], total)
    slot = token * tl.num_programs(0) + tl.program_id(0)
    target = parts_ptr + slot[:, None] * ROWS + row[None, :]
    tl.store(target, total, mask=is_token[:, None])


@triton.jit
def _experts_tile(
    each_ptr, ids_ptr, shared_ptr, stride_shared, token, d, D, is_token, mask, K: tl.constexpr
):
    """Add the outputs of the tokens' K experts and of the shared expert, as combine_triton.py does.

    No kernel writes the rows of unused experts.
    """
    total = tl.zeros(mask.shape, tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        is_used = tl.load(ids_ptr + pair, mask=is_token, other=-1) >= 0
        row = tl.load(each_ptr + (pair * D)[:, None] + d[None, :], mask=mask, other=0.0)
        total += tl.where(is_used[:, None], row, 0.0).to(tl.float32)
    shared = shared_ptr + (token * stride_shared)[:, None] + d[None, :]
    return total + tl.load(shared, mask=mask, other=0.0)


@triton.jit
def streams_few_kernel(
    x_ptr,
    ids_ptr,
    shared_ptr,
    stride_shared,
    post_ptr,
    res_ptr,
    streams_ptr,
    out_ptr,
    fn_ptr,
    parts_ptr,
    N,
    D,
    stride_n,
    stride_h,
    K: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_D columns of BLOCK_N tokens' residual streams, and their part of the GEMM.

    If K > 0, x_ptr points to the outputs of each token's K experts, and the kernel adds them.
    """
    token = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    is_token = token < N
    SPLIT: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    start_next(PDL)
    if M > 0:
        fn = _fn_tile(fn_ptr, row, d, D, M, ROWS, SPLIT, COMPILED, BLOCK_D)
    wait_for_last(PDL)
    mask = is_token[:, None] & (d < D)[None, :]
    streams = _streams_tile(streams_ptr, token, d, stride_n, stride_h, mask)
    if POST:
        if K > 0:
            x = _experts_tile(
                x_ptr, ids_ptr, shared_ptr, stride_shared, token, d, D, is_token, mask, K
            )
            x = x.to(out_ptr.dtype.element_ty)
        else:
            x = tl.load(x_ptr + token[:, None] * D + d[None, :], mask=mask, other=0.0)
        columns = _columns(res_ptr + token * 16, post_ptr + token * 4, is_token)
        streams = _post_tile(out_ptr, columns, streams, x, token, d, D, mask)
    if M > 0:
        _parts_tile(
            parts_ptr, fn, streams, row, token, is_token, M, ROWS, COMPILED, BLOCK_N, BLOCK_D
        )


@triton.jit
def _words(x, BFLOAT16: tl.constexpr, WORDS: tl.constexpr):
    """Round a float32 tile, and return it as words in order of token and column."""
    if BFLOAT16:
        even, odd = tl.split(tl.reshape(x.to(tl.bfloat16), [WORDS, 2]))
        low = even.to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (odd.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.reshape(x, [WORDS]).to(tl.int32, bitcast=True)


# Do not specialise on N: this kernel is not built at start (`FusedReduceMhc`): compile it once.
@triton.jit(do_not_specialize=["N", "rank"])
def sum_streams_few_kernel(
    x_ptr,
    ids_ptr,
    shared_ptr,
    stride_shared,
    buffer_ptr,
    pointers_ptr,
    epochs_ptr,
    limit_ptr,
    faults,
    rank,
    capacity,
    post_ptr,
    res_ptr,
    streams_ptr,
    out_ptr,
    fn_ptr,
    parts_ptr,
    N,
    D,
    stride_n,
    stride_h,
    K: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COMPILED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
    BFLOAT16: tl.constexpr,
    W: tl.constexpr,
    REGION: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Like `streams_few_kernel`, with the sum of all ranks' x. If K is 0, x_ptr points to words.

    The program sends its tile of x to every rank before it loads anything else. It exchanges only
    the words of existing tokens and columns, through its own region of the channel.
    """
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, ROWS)
    is_token = token < N
    WIDE: tl.constexpr = BLOCK_D // 2 if BFLOAT16 else BLOCK_D  # words of a token
    WORDS: tl.constexpr = BLOCK_N * WIDE
    i = tl.arange(0, WORDS)
    word_index = program * REGION + i
    width = D // (BLOCK_D // WIDE)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + i // WIDE
    column = tl.program_id(0) * WIDE + i % WIDE
    is_word = (n < N) & (column < width)
    SPLIT: tl.constexpr = out_ptr.dtype.element_ty == tl.bfloat16
    start_next(PDL)
    if (M > 0) & (LAST == 1):
        fn = _fn_tile(fn_ptr, row, d, D, M, ROWS, SPLIT, COMPILED, BLOCK_D)
    wait_for_last(PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    mask = is_token[:, None] & (d < D)[None, :]
    if K > 0:
        x = _experts_tile(x_ptr, ids_ptr, shared_ptr, stride_shared, token, d, D, is_token, mask, K)
        own = _words(x, BFLOAT16, WORDS)
    else:
        own = tl.load(x_ptr + n * width + column, mask=is_word, other=0)
    if FIRST == 0:
        for j in tl.static_range(1, W):
            send(pointers_ptr, own, is_word, epoch, word_index, rank, rank ^ j, W, capacity)
    if LAST == 1:
        streams = _streams_tile(streams_ptr, token, d, stride_n, stride_h, mask)
        columns = _columns(res_ptr + token * 16, post_ptr + token * 4, is_token)
        words = receive(
            buffer_ptr, limit_ptr, faults, own, is_word, epoch, word_index, rank, capacity, W
        )
        tl.store(epochs_ptr + program, epoch)
        x = tl.reshape(sum_values(words, BFLOAT16, W, WORDS), [BLOCK_N, BLOCK_D])
        x = x.to(out_ptr.dtype.element_ty)
        streams = _post_tile(out_ptr, columns, streams, x, token, d, D, mask)
        if M > 0:
            _parts_tile(
                parts_ptr, fn, streams, row, token, is_token, M, ROWS, COMPILED, BLOCK_N, BLOCK_D
            )


@triton.jit
def planes_kernel(fn_ptr, planes_ptr, D, M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rearrange fn [M,4,D] to [P,M,D,4]: P = 3 bfloat16 values with fn as sum, or 1 float32."""
    row = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    f0, f1, f2, f3 = load_four(fn_ptr + row * (4 * D) + d, D, mask)
    fn = tl.reshape(tl.join(tl.join(f0, f2), tl.join(f1, f3)), [4 * BLOCK_D])
    column = tl.program_id(0) * (4 * BLOCK_D) + tl.arange(0, 4 * BLOCK_D)
    target = planes_ptr + row * (4 * D) + column
    if planes_ptr.dtype.element_ty == tl.bfloat16:
        high, middle, low = _split(fn)
        tl.store(target, high, mask=column < 4 * D)
        tl.store(target + M * 4 * D, middle, mask=column < 4 * D)
        tl.store(target + 2 * M * 4 * D, low, mask=column < 4 * D)
    else:
        tl.store(target, fn, mask=column < 4 * D)


# Do not specialise on N (divisible by 16 or not): another compilation may fuse other
# multiplications with additions, and then give other bits.
@triton.jit(do_not_specialize=["N"])
def streams_many_kernel(
    x_ptr,
    post_ptr,
    res_ptr,
    streams_ptr,
    out_ptr,
    planes_ptr,
    parts_ptr,
    N,
    D,
    stride_n,
    stride_h,
    steps,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    POST: tl.constexpr,
    COMPILED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like `streams_few_kernel`, in a loop over every num_slots-th block of BLOCK_D columns."""
    slot = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    is_token = first + n < N
    row = tl.arange(0, ROWS)
    streams_ptr += first * stride_n
    out_ptr += first * (4 * D)
    x_ptr += first * D
    if POST:
        res = res_ptr + first * 16 + n * 16
        columns = _columns(res, post_ptr + first * 4 + n * 4, is_token)
    plane = M * 4 * D
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for step in tl.range(steps, num_stages=STAGES):
        # Programs that run at the same time read adjacent memory.
        start = (step * tl.num_programs(0) + slot) * BLOCK_D
        d = start + tl.arange(0, BLOCK_D)
        mask = is_token[:, None] if EVEN else is_token[:, None] & (d < D)[None, :]
        streams = load_four(streams_ptr + (n * stride_n)[:, None] + d[None, :], stride_h, mask)
        if M > 0:
            column = start * 4 + tl.arange(0, 4 * BLOCK_D)
            planes = planes_ptr + (row * (4 * D))[:, None] + column[None, :]
            is_column = (row < M)[:, None]
            if not EVEN:
                is_column &= (column < 4 * D)[None, :]
            high = tl.load(planes, mask=is_column, other=0.0)
            if planes_ptr.dtype.element_ty == tl.bfloat16:
                middle = tl.load(planes + plane, mask=is_column, other=0.0)
                low = tl.load(planes + 2 * plane, mask=is_column, other=0.0)
        if POST:
            x = tl.load(x_ptr + (n * D)[:, None] + d[None, :], mask=mask, other=0.0)
            streams = _post_tile(out_ptr, columns, streams, x, n, d, D, mask)
        if M > 0:
            squares += _squares(streams)
            turns = _settle(_take_turns(streams, BLOCK_N, BLOCK_D), COMPILED)
            if planes_ptr.dtype.element_ty == tl.bfloat16:
                total += _times_split(turns, high, middle, low)
            else:
                total += tl.dot(turns, tl.trans(high), input_precision="ieee")
    if M > 0:
        total = tl.where(row[None, :] == M, squares[:, None], total)
        target = parts_ptr + first + n[:, None] + ((slot * ROWS + row) * N)[None, :]
        tl.store(target, total, mask=is_token[:, None])
