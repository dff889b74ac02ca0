"""The message sizes for which `Push` uses each algorithm, and the launch sizes of its kernels."""

from dataclasses import dataclass
from typing import Literal

Shot = Literal["one", "two", "bulk"]


@dataclass(frozen=True, slots=True)
class PushSizes:
    """The largest messages of each algorithm, in bytes of x.

    Attributes:
        one_shot: largest all-reduce in one shot.
        two_shot: largest all-reduce in two shots with flags in the words.
        gather: largest all-gather, in bytes of one rank.
        bulk: largest piece of a message with a flag for each program, in bytes of all ranks.
        copied: the fewest bytes of a rank's rows that copy engines exchange, if other work runs
            beside them. On two H200s, 4 MiB take 21 us by kernels, and 8 MB 34 and by copies 30.
        nccl: all-reduces from this size on use NCCL, unless sums are ordered.
        block: words of a program whose words carry flags; one warp checks them without a barrier.
        bulk_block: words of a program that sends flags for itself.
        fused_tokens: the most tokens for which the next operator adds the partial sums itself
            (`Collectives.channel`); 0: none. Not used if sums are ordered, because the last bits of
            such an operator differ from those of the same operator after an all-reduce.
        fused_programs: the most programs of such an operator. All of them run at once on an H200.
        fused_block: the most words of such a program.
    """

    one_shot: int
    two_shot: int
    gather: int = 2**20
    bulk: int = 2**26
    copied: int = 2**62
    nccl: int = 2**24
    block: int = 128
    warps: int = 1
    bulk_block: int = 2048
    bulk_warps: int = 8
    fused_tokens: int = 0
    fused_programs: int = 256
    fused_block: int = 512

    def shot(self, num_bytes: int) -> Shot:
        """The algorithm of an all-reduce."""
        if num_bytes <= self.one_shot:
            return "one"
        return "two" if num_bytes <= self.two_shot else "bulk"


SIZES = {
    # On two H200s NCCL is never faster. Fused sums are faster at fused_tokens and at all fewer
    # tokens, on two also at more. On four, those of bfloat16 are faster at 16 tokens and slower at
    # 24. Copies have run on two only.
    2: PushSizes(one_shot=2**19, two_shot=2**19, copied=2**22, nccl=2**62, fused_tokens=32),
    4: PushSizes(one_shot=2**17, two_shot=2**20, fused_tokens=16),
    8: PushSizes(one_shot=2**16, two_shot=2**20),
}
