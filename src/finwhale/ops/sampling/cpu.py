"""Sampling on a CPU: numpy for batches that need only values, the reference for all others."""

import numpy as np
import torch
from torch import Tensor

from finwhale.ops.sampling import SampledTokens, SamplingBatch, ref
from finwhale.ops.sampling.noise_cpu import gumbel


def sample(logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Choose a token for each row, in numpy.

    torch would divide the argmax of a row among threads, which is slower here.
    """
    if batch.needs_whole_rows:
        return ref.sample(logits_SV, batch, noise=gumbel)
    logits, filters = logits_SV.numpy(), batch.filters
    # argmax returns the first of equal maxima, or the first NaN.
    ids = logits.argmax(-1)
    finite = np.isfinite(logits[np.arange(len(ids)), ids])
    if filters is not None:
        assert batch.positions_R is not None
        rows_R = slice(None) if filters.rows_R is None else filters.rows_R.numpy()
        noise = gumbel(filters.seeds_R, filters.indices_R, batch.positions_R, logits.shape[1])
        values = noise.numpy()
        values *= filters.temperature_R.numpy()[:, None]
        values += logits[rows_R]
        ids[rows_R] = values.argmax(-1)
    return SampledTokens(ids_S=torch.from_numpy(ids), valid_S=torch.from_numpy(finite))
