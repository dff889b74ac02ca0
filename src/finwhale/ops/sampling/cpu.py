"""Sampling on a CPU: the plain greedy step in numpy, everything else as defined."""

import numpy as np
import torch
from torch import Tensor

from finwhale.ops.sampling import SampledTokens, SamplingBatch
from finwhale.ops.sampling import ref as definition


def sample(logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
    """torch shares a row's maximum between threads, which costs more than it saves here."""
    if not batch.plain:
        return definition.sample(logits_SV, batch)
    logits = logits_SV.numpy()
    # The first of equal maxima; of a row with a NaN, the NaN.
    ids = logits.argmax(-1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    return SampledTokens(ids_S=torch.from_numpy(ids), valid_S=torch.from_numpy(finite))
