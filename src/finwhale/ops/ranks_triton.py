"""Exchange of words between Triton kernels on several ranks, for sums over ranks.

Each rank writes its words into the other ranks' memory. A word is 4 bytes: a float32 or two
bfloat16. Each word travels with a flag in one 8-byte store (NCCL's "LL" protocol). The receiver
polls the words themselves, so the protocol needs no barrier or fence between data and flag: 8-byte
accesses are single-copy atomic at system scope, also as parts of 16-byte vector accesses. The
stores are write-through and the loads volatile, so both are strong operations at system scope.

Program b of a rank exchanges words only with program b of every other rank, in a region of the
channel's buffers that no other program uses. The program counts its exchanges; this count, the
epoch, is the flag. An exchange uses the half of the region that the parity of its epoch selects.

- **When a region may be overwritten.** A rank cannot be two exchanges ahead of another: exchange
  e + 1 needs at least one word from program b of every rank, and that program sends the words of
  exchange e + 1 only after it has read all words of exchange e.
- **Launches of different sizes**, and different kernels, may share a channel. Each epoch belongs to
  a program, not to a launch, and all ranks make the same launches in the same order. So program b
  has the same epoch on all ranks even if only some launches have a program b.
- **Which words are sent** may differ from exchange to exchange, as long as all ranks send the same
  ones and every program sends some. A word that is not sent keeps an old flag. That flag would
  equal the epoch again only after a multiple of 2^32 exchanges of this program.

The programs of a launch wait for programs with the same number. They need not all run at once, as
long as each GPU starts them in order: then the first unfinished program runs on all ranks.

A sum is a tree of pairs: rank r computes ((x[r] + x[r^1]) + (x[r^2] + x[r^3])) + ... Addition is
commutative, so all ranks get the bits of ((x[0] + x[1]) + (x[2] + x[3])) + ...

Each wait is bounded. If a wait gives up, the kernel marks the missing ranks in `faults`, returns
NaN for the missing words, and sets `limit` to 0. Later kernels then do not wait at all, and mark
no rank: one that is only late is not missing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

# Every byte of a new buffer. Its flags match no early epoch; its values are NaN in float32 and in
# bfloat16.
POISON = 0xFF


@triton.jit
def peer_memory(pointers_ptr, peer, offsets, element: tl.constexpr):
    """Pointers into the memory of rank `peer`, whose address is loaded from pointers_ptr."""
    base = tl.load(pointers_ptr + peer).to(tl.pointer_type(element))
    return tl.multiple_of(base + offsets, 16)


@triton.jit
def _with_flag(words, epoch):
    return (epoch.to(tl.int64) << 32) | words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def send(pointers_ptr, words, mask, epoch, word_index, rank, peer, W, capacity):
    """Write words to a peer's memory, each with the epoch as a flag of its arrival.

    word_index: the index of each word in the exchange.
    """
    offsets = ((epoch & 1) * W + rank) * capacity + word_index
    target = peer_memory(pointers_ptr, peer, offsets, tl.int64)
    tl.store(target, _with_flag(words, epoch), mask=mask, cache_modifier=".wt")


@triton.jit
def receive(
    buffer_ptr, limit_ptr, faults, own, mask, epoch, word_index, rank, capacity, W: tl.constexpr
):
    """Wait for the words of all ranks: [W, words], row j from rank ^ j, row 0 this rank's own."""
    j = tl.arange(0, W)[:, None]
    source = buffer_ptr + ((epoch & 1) * W + (rank ^ j)) * capacity + word_index[None, :]
    other = _with_flag(own, epoch)[None, :]
    is_peer = (j > 0) & (word_index >= 0)[None, :] if mask is None else (j > 0) & mask[None, :]
    limit = tl.load(limit_ptr)
    packed = tl.load(source, mask=is_peer, other=other, volatile=True)
    missing = tl.sum(((packed >> 32).to(tl.int32) != epoch).to(tl.int32))
    polls = 0
    while (missing > 0) & (polls < limit):
        packed = tl.load(source, mask=is_peer, other=other, volatile=True)
        missing = tl.sum(((packed >> 32).to(tl.int32) != epoch).to(tl.int32))
        polls += 1
    arrived = (packed >> 32).to(tl.int32) == epoch
    if (missing > 0) & (limit > 0):
        report(limit_ptr, faults, tl.min(arrived.to(tl.int32), axis=1) == 0, rank, W)
    return tl.where(arrived, packed.to(tl.int32), -1)


@triton.jit
def report(limit_ptr, faults, is_missing, rank, W: tl.constexpr):
    """Mark each missing rank for the host. Set the limit to 0, so that no later kernel waits."""
    peer = rank ^ tl.arange(0, W)
    # Triton passes an address below 2^31 as int32, which cannot become a pointer.
    faults_ptr = faults.to(tl.int64).to(tl.pointer_type(tl.int32))
    tl.store(faults_ptr + peer, 1, mask=is_missing)
    tl.store(limit_ptr, 0)


@triton.jit
def _by_pairs(x, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum [W, BLOCK] over W as a tree of pairs."""
    x = tl.trans(x)
    if W == 8:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 4, 2]))
        x = even + odd
    if W >= 4:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        x = even + odd
    even, odd = tl.split(tl.reshape(x, [BLOCK, 1, 2]))
    return tl.reshape(even + odd, [BLOCK])


@triton.jit
def _sum_halves(words, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the two bfloat16 of [W, BLOCK] words over W in float32, and round once."""
    low = _by_pairs((words << 16).to(tl.float32, bitcast=True), W, BLOCK)
    high = _by_pairs((words & -65536).to(tl.float32, bitcast=True), W, BLOCK)
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def sum_words(words, BFLOAT16: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the values of [W, BLOCK] words over W in float32, round once; returns words [BLOCK]."""
    if BFLOAT16:
        low, high = _sum_halves(words, W, BLOCK)
        low = low.to(tl.uint16, bitcast=True).to(tl.int32)
        high = high.to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high << 16)
    else:
        total = _by_pairs(words.to(tl.float32, bitcast=True), W, BLOCK)
        return total.to(tl.int32, bitcast=True)


@triton.jit
def sum_values(words, BFLOAT16: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Like `sum_words`, but returns the values in order: [BLOCK] or [2 BLOCK]."""
    if BFLOAT16:
        low, high = _sum_halves(words, W, BLOCK)
        return tl.reshape(tl.join(low, high), [2 * BLOCK])
    else:
        return _by_pairs(words.to(tl.float32, bitcast=True), W, BLOCK)
