"""Functions of the attention kernel for Hopper GPUs, in Gluon: load rows, prepare and store heads.

sparse_attention_hopper.py describes the kernel.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from finwhale.ops.attention.sparse_attention_hopper_unpack import NOT_UNPACKED
from finwhale.ops.launch.gluon_functions import wait_for_last

UP = gl.constexpr(18446744073709551616.0)  # 2^64
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _log2(x):
    return x.bit_length() - 1


@gluon.constexpr_function
def _rows_layout(words, warps):
    """The layout of rows of which each thread holds `words` adjacent words at a time."""
    return gl.BlockedLayout([1, words], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def _dequantise(x, scales, GROUP0: gl.constexpr):
    """Convert words of four E4M3 bytes, x [K,X] int32, to their values times 2^-64.

    scales [K] int32: four exponent bytes of each row; x begins at group GROUP0 of them. Returns
    [K,2X] int32 words of two bfloat16.
    """
    X: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    scales = gl.convert_layout(scales, gl.SliceLayout(1, layout), assert_trivial=True)
    group = GROUP0 + gl.arange(0, X, gl.SliceLayout(0, layout)) // 16
    exponent = (gl.expand_dims(scales, 1) >> gl.expand_dims(8 * group, 0)) & 255
    # 2^(byte - 127) * 2^120 * 2^-64 as a bfloat16, twice.
    factor = exponent * 0x00800080 + 56 * 0x00800080
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        shr.u32 d, b, 4;
        and.b32 c, c, 0x07f007f0;
        and.b32 d, d, 0x07f007f0;
        lop3.b32 a, a, 0x80008000, c, 0xea;
        lop3.b32 b, b, 0x80008000, d, 0xea;
        mul.rn.bf16x2 $0, a, $3;
        mul.rn.bf16x2 $1, b, $3;
        }
        """,
        "=r,=r,r,r",
        [x, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [x.shape[0], 2 * X])


@gluon.jit
def _piece(row_ptr, valid, FIRST: gl.constexpr, X: gl.constexpr, WORDS: gl.constexpr):
    """Load X words of each row, from word FIRST on; a thread loads WORDS at a time."""
    layout: gl.constexpr = _rows_layout(WORDS, gl.num_warps())
    column = FIRST + gl.arange(0, X, gl.SliceLayout(0, layout))
    row_ptr = gl.convert_layout(row_ptr, gl.SliceLayout(1, layout), assert_trivial=True)
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout), assert_trivial=True)
    pointer = gl.expand_dims(row_ptr, 1) + gl.expand_dims(column, 0)
    return gl.load(pointer, mask=gl.expand_dims(valid, 1), other=0)


@gluon.jit
def _load_words(row_ptr, word_ptr, valid):
    """Load the words of rows: 256, 128 and 64 nope bytes, the rope, and the scales' two halves."""
    row_ptr = row_ptr.to(gl.pointer_type(gl.int32))
    word = gl.load(word_ptr.to(gl.pointer_type(gl.int64)), mask=valid, other=0)
    low, high = word.to(gl.int32), (word >> 32).to(gl.int32)
    wide = _piece(row_ptr, valid, 0, 64, 4)
    half = _piece(row_ptr, valid, 64, 32, 2)
    narrow = _piece(row_ptr, valid, 96, 16, 1)
    rope = _piece(row_ptr, valid, 112, 32, 2)
    return wide, half, narrow, rope, low, high


@gluon.jit
def _keys(rows, key0, W: gl.constexpr, K: gl.constexpr):
    """The numbers of K keys from key0 on, and whether the token sees each one."""
    position, num_entries = rows[0], rows[1]
    layout: gl.constexpr = gl.SliceLayout(1, _rows_layout(4, gl.num_warps()))
    key = key0 + gl.arange(0, K, layout)
    return key, (key >= W - 1 - position) & (key < W + num_entries)


@gluon.jit
def find_rows(
    rows,
    key0,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    K: gl.constexpr,
):
    """Load the page numbers of K keys from key0 on, or the slots of selected entries."""
    position, _, _, window_pages_ptr, window_first, _, entry_rows_ptr, entry_first, _, _ = rows
    key, valid = _keys(rows, key0, W, K)
    if ENTRIES == 0 or key0 < W:
        row = position - (W - 1) + key
        source_ptr = window_pages_ptr + ((row >> _log2(WINDOW_ROWS)) - window_first)
    elif ENTRIES == 1:
        source_ptr = entry_rows_ptr + (key - W)
    else:
        source_ptr = entry_rows_ptr + (((key - W) >> _log2(ENTRY_ROWS)) - entry_first)
    return gl.load(source_ptr, mask=valid, other=0)


@gluon.jit
def load_found(
    rows,
    found,
    key0,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    K: gl.constexpr,
):
    """Load the words of the rows that `find_rows` found."""
    position, _, window_ptr, _, _, entry_ptr, _, _, stride_window_page, stride_entry_page = rows
    key, valid = _keys(rows, key0, W, K)
    if ENTRIES == 0 or key0 < W:
        offset = (position - (W - 1) + key) & (WINDOW_ROWS - 1)
        page_ptr = window_ptr + found.to(gl.int64) * stride_window_page
        word_ptr = page_ptr + WINDOW_ROWS * 576 + offset * 8
    else:
        page = found
        offset = (key - W) & (ENTRY_ROWS - 1)
        if ENTRIES == 1:
            page = found >> _log2(ENTRY_ROWS)
            offset = found & (ENTRY_ROWS - 1)
        page_ptr = entry_ptr + page.to(gl.int64) * stride_entry_page
        word_ptr = page_ptr + ENTRY_ROWS * 576 + offset * 8
    return _load_words(page_ptr + offset * 576, word_ptr, valid)


@gluon.jit
def store_rows(words, loaded):
    """Dequantise K rows and store them as bfloat16 in shared memory: words [K,256] int32."""
    wide, half, narrow, rope, low, high = loaded
    words.slice(0, 128, dim=1).store(_dequantise(wide, low, 0))
    words.slice(128, 64, dim=1).store(_dequantise(half, high, 0))
    words.slice(192, 32, dim=1).store(_dequantise(narrow, high, 2))
    words.slice(224, 32, dim=1).store(rope)


@gluon.jit
def _rotation(rotary_ptr, PAIRS: gl.constexpr):
    """Load cos and sin [1,32] of a token's position."""
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, PAIRS)), 0)
    return gl.load(rotary_ptr + 2 * pair), gl.load(rotary_ptr + 2 * pair + 1)


@gluon.jit
def _rotate(word, factor, cos, sin):
    """Rotate pairs, and multiply them by `factor`. A word holds a pair of bfloat16."""
    even = (word << 16).to(gl.float32, bitcast=True) * factor
    odd = (word & -65536).to(gl.float32, bitcast=True) * factor
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;",
        "=r,f,f",
        [odd * cos + even * sin, even * cos - odd * sin],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _round_heads(x):
    """x [H,512] bfloat16 -> (E4M3 of x / scale [H,512], scales [H,4]); see quantise_triton."""
    grouped = gl.reshape(x.to(gl.float32), [x.shape[0], x.shape[1] // 128, 128])
    amax = gl.maximum(gl.max(gl.abs(grouped), axis=2), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = gl.expand_dims((0x7F000000 - bits).to(gl.float32, bitcast=True), 2)
    rounded = gl.reshape((grouped * inverse).to(gl.float8e4nv), x.shape)
    return rounded, bits.to(gl.float32, bitcast=True)


@gluon.jit
def prepare_query(q_shared, q_words, head0, num_heads, query):
    """Write the query to q_shared: RMSNorm per head without weight, nope times 2^64, then rope.

    q_words: q_shared [H,512] as words [H,256] of one pair each.
    """
    q_ptr, rotary_ptr, eps, stride_qa = query
    H: gl.constexpr = q_shared.shape[0]
    C: gl.constexpr = 512
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    head = head0 + gl.arange(0, H, gl.SliceLayout(1, HEADS))
    column = gl.arange(0, C, gl.SliceLayout(0, HEADS))
    q_at = q_ptr + gl.expand_dims(head, 1) * stride_qa + gl.expand_dims(column, 0)
    is_head = gl.expand_dims(head < num_heads, 1)
    q = gl.load(q_at, mask=is_head, other=0.0)
    # These loads do not need the sums, so they come first.
    pair_head = gl.expand_dims(head0 + gl.arange(0, H, gl.SliceLayout(1, PAIRS)), 1)
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, PAIRS)), 0)
    rope = (q_ptr + pair_head * stride_qa + 448).to(gl.pointer_type(gl.int32)) + pair
    word = gl.load(rope, mask=pair_head < num_heads, other=0)
    cos, sin = _rotation(rotary_ptr, PAIRS)
    q = q.to(gl.float32)
    rstd = gl.rsqrt(gl.sum(q * q, 1) / C + eps)
    q_shared.store((q * gl.expand_dims(rstd * UP, 1)).to(gl.bfloat16))
    rstd = gl.expand_dims(gl.convert_layout(rstd, gl.SliceLayout(1, PAIRS)), 1)
    q_words.slice(224, 32, dim=1).store(_rotate(word, rstd, cos, sin))
    fence_async_shared()


@gluon.jit
def store_heads(
    out_shared, words, head0, num_heads, out_at, COLUMN0: gl.constexpr, ROUND: gl.constexpr
):
    """Rotate columns COLUMN0 .. of a token's heads [H,X] back, round them if ROUND, and store them.

    words: all 512 columns as words [H,256] of one pair each.
    """
    rotary_ptr, out_ptr, scales_ptr, stride_oa, stride_ss = out_at
    H: gl.constexpr = out_shared.shape[0]
    X: gl.constexpr = out_shared.shape[1]
    C: gl.constexpr = 512
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    if COLUMN0 + X == C:
        cos, sin = _rotation(rotary_ptr, PAIRS)
        rope = words.slice(224, 32, dim=1)
        rope.store(_rotate(rope.load(PAIRS), 1.0, cos, -sin))
    head = head0 + gl.arange(0, H, gl.SliceLayout(1, HEADS))
    column = COLUMN0 + gl.arange(0, X, gl.SliceLayout(0, HEADS))
    out = out_shared.load(HEADS)
    if ROUND:
        out, scales = _round_heads(out)
        group_layout: gl.constexpr = scales.type.layout
        scale_head = head0 + gl.arange(0, H, gl.SliceLayout(1, group_layout))
        group = COLUMN0 // 128 + gl.arange(0, X // 128, gl.SliceLayout(0, group_layout))
        scale = gl.expand_dims(scale_head, 1) * (C // 128) + gl.expand_dims(group, 0)
        is_scale = gl.expand_dims(scale_head < num_heads, 1)
        gl.store(scales_ptr + scale * stride_ss, scales, mask=is_scale)
        out = gl.convert_layout(out, HEADS)
    target = out_ptr + gl.expand_dims(head, 1) * stride_oa + gl.expand_dims(column, 0)
    gl.store(target, out, mask=gl.expand_dims(head < num_heads, 1))


@gluon.jit
def produce(
    work,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    FIRST: gl.constexpr,
    OWN: gl.constexpr,
    STEP: gl.constexpr,
    ARRIVALS: gl.constexpr,
    WAIT: gl.constexpr,
):
    """The work of a group of producers: OWN rows of tiles begin .. end - 1, from row FIRST on.

    They load STEP rows at a time, and the page numbers of the STEP rows after them.

    ARRIVALS: how often the group arrives at `ready` for a tile.
    WAIT: wait for the previous kernel before the first rows, but not before their page numbers.
    """
    words, ready, free, begin, end, rows = work
    STEPS: gl.constexpr = OWN // STEP
    key0 = begin * BLOCK_K + FIRST
    found = find_rows(rows, key0, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP)
    wait_for_last(WAIT)
    loaded = load_found(rows, found, key0, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP)
    key0 += STEP if STEPS > 1 else BLOCK_K
    found = find_rows(rows, key0, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP)
    for tile in range(begin, end):
        buffer = (tile - begin) & 1
        mbarrier.wait(free.index(buffer), ((tile - begin) >> 1 & 1) ^ 1)
        for step in gl.static_range(STEPS):
            store_rows(words.index(buffer).slice(FIRST + step * STEP, STEP, dim=0), loaded)
            if step == STEPS - 1:
                fence_async_shared()
                mbarrier.arrive(ready.index(buffer), count=ARRIVALS)
            loaded = load_found(rows, found, key0, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP)
            # These are the first rows of the next tile if the last ones of this tile were loaded.
            key0 += BLOCK_K - OWN + STEP if (step + 2) % STEPS == 0 else STEP
            found = find_rows(rows, key0, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, STEP)


@gluon.jit
def _unpacked_rows(
    copied,
    rows,
    key0,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    K: gl.constexpr,
    ROW: gl.constexpr,
):
    """Pointers to the unpacked rows of K keys from key0 on, and whether the token sees each one."""
    _, window_ptr, window_page, entries_ptr, entry_page, copies_ptr = copied
    position, num_entries, _, _, _, _, entry_rows_ptr, _, _, _ = rows
    key = key0 + gl.arange(0, K, ROW)
    valid = (key >= W - 1 - position) & (key < W + num_entries)
    pool_ptr = entries_ptr
    if ENTRIES == 0 or key0 < W:
        pool_ptr = window_ptr
        row = window_page * WINDOW_ROWS + position - (W - 1) + key
    elif ENTRIES == 1:
        slot = gl.load(entry_rows_ptr + (key - W), mask=valid, other=0)
        page = gl.load(copies_ptr + (slot >> _log2(ENTRY_ROWS)), mask=valid, other=0)
        row = page * ENTRY_ROWS + (slot & (ENTRY_ROWS - 1))
    else:
        row = entry_page * ENTRY_ROWS + key - W
    return pool_ptr + row.to(gl.int64) * 512, valid


@gluon.jit
def _copy(rows, found, COPY: gl.constexpr):
    """Begin to copy rows to shared memory [K,512]; those that the token does not see become 0."""
    row_ptr, valid = found
    column = gl.arange(0, 512, gl.SliceLayout(0, COPY))
    at = gl.expand_dims(row_ptr, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(rows, at, mask=gl.expand_dims(valid, 1))


@gluon.jit
def _copy_unpacked(
    work,
    copied,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
):
    """The work of producers for a token with unpacked rows: copy them to shared memory.

    A thread arrives at `ready` when its copies are complete. The copies are ordinary writes, so
    their readers need a fence before an MMA.
    """
    _, ready, free, begin, end, rows = work
    buffers = copied[0]
    BLOCK_K: gl.constexpr = buffers.shape[1]
    HALF: gl.constexpr = BLOCK_K // 2  # more rows at once would spill registers
    COPY: gl.constexpr = gl.BlockedLayout([4, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    key = begin * BLOCK_K
    first = _unpacked_rows(copied, rows, key, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, HALF, ROW)
    key += HALF
    second = _unpacked_rows(copied, rows, key, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, HALF, ROW)
    for tile in range(begin, end):
        buffer = (tile - begin) & 1
        mbarrier.wait(free.index(buffer), ((tile - begin) >> 1 & 1) ^ 1)
        _copy(buffers.index(buffer).slice(0, HALF, dim=0), first, COPY)
        _copy(buffers.index(buffer).slice(HALF, HALF, dim=0), second, COPY)
        async_copy.mbarrier_arrive(ready.index(buffer), increment_count=False)
        # Find the rows of the next tile.
        key += HALF
        first = _unpacked_rows(copied, rows, key, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, HALF, ROW)
        key += HALF
        second = _unpacked_rows(copied, rows, key, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, HALF, ROW)


@gluon.jit
def produce_tiles(
    work,
    copied,
    W: gl.constexpr,
    WINDOW_ROWS: gl.constexpr,
    ENTRY_ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STEP: gl.constexpr,
    ARRIVALS: gl.constexpr,
    WAIT: gl.constexpr,
    UNPACKED: gl.constexpr,
):
    """The work of producers of whole tiles.

    UNPACKED: the token's rows may be unpacked.
    """
    is_unpacked = False
    if UNPACKED:
        _, _, window_page, _, entry_page, _ = copied
        is_unpacked = gl.minimum(window_page, entry_page) > NOT_UNPACKED
    if UNPACKED and is_unpacked:
        _copy_unpacked(work, copied, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES)
    else:
        produce(
            work, W, WINDOW_ROWS, ENTRY_ROWS, ENTRIES, BLOCK_K, 0, BLOCK_K, STEP, ARRIVALS, WAIT
        )
