"""The Markov head's correction on a CPU; the other operators around drafts are the references."""

from torch import Tensor

from finwhale.ops.drafts import ref
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear.cpu import linear


def markov_logits(
    logits_BX: Tensor, newest_B: Tensor, markov_w1: Tensor, markov_w2: LinearWeight
) -> Tensor:
    return ref.corrected_logits(logits_BX, newest_B, markov_w1, markov_w2, linear)
