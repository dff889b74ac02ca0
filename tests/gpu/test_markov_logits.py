"""The Markov head's kernels have the bits of a gather, a linear layer and a sum.

The sizes are those of Flash on one, two, four and eight ranks, and one that no block divides.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from finwhale.ops.drafts import markov_triton as kernels
from finwhale.ops.drafts.ref import corrected_logits
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear.linear_triton import Options, linear
from finwhale.ops.sampling import SamplingBatch
from finwhale.ops.sampling import sample_triton as sampling

VOCAB_SIZE, WIDTH, DRAFTS = 129280, 256, 5
EARLY = Options(early_launch=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [VOCAB_SIZE, 64640, 32320, 16160, 9001])
@torch.inference_mode()
def test_same_bits(num_tokens: int, dtype: torch.dtype) -> None:
    """For any number of drafts, with and without early launches."""
    draw = torch.Generator("cuda").manual_seed(num_tokens)
    w1 = torch.randn(VOCAB_SIZE, WIDTH, device="cuda", generator=draw).to(dtype)
    w2 = torch.randn(num_tokens, WIDTH, device="cuda", generator=draw).to(dtype)
    weight = LinearWeight(w2, out_dtype=torch.float32)
    logits = torch.randn(20, DRAFTS, num_tokens, device="cuda", generator=draw)
    ids = torch.randint(VOCAB_SIZE, (20, 6), device="cuda", generator=draw)
    ids[0] = VOCAB_SIZE - 1
    for rows in range(21):
        args = logits[:rows, rows % DRAFTS], ids[:rows, rows % 6], w1, weight
        for options in (EARLY, Options(), replace(EARLY, invariant=True)):
            found = kernels.markov_logits(*args, options=options)
            wanted = corrected_logits(*args, partial(linear, options=options))
            assert found.dtype == torch.float32 and torch.equal(found, wanted), (rows, options)


@torch.inference_mode()
def test_drafts_in_a_graph() -> None:
    """Each draft reads the one before it, which a kernel has just written, in early launches."""
    draw = torch.Generator("cuda").manual_seed(0)
    w1 = torch.randn(VOCAB_SIZE, WIDTH, device="cuda", generator=draw).bfloat16()
    w2 = torch.randn(64640, WIDTH, device="cuda", generator=draw).bfloat16()
    weight = LinearWeight(w2, out_dtype=torch.float32)
    for rows in (1, 2, 3, 16):
        logits = torch.randn(rows, DRAFTS, 64640, device="cuda", generator=draw)
        newest = torch.randint(VOCAB_SIZE - 1, (rows,), device="cuda", generator=draw)
        run = partial(drafts, logits, newest, w1, weight)
        wanted = run(early_launch=False)
        run(early_launch=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(early_launch=True)
        for _ in range(20):
            newest += 1
            graph.replay()
            newest -= 1
            graph.replay()
            assert torch.equal(found, wanted)


def drafts(
    logits: torch.Tensor,
    newest: torch.Tensor,
    w1: torch.Tensor,
    weight: LinearWeight,
    early_launch: bool,
) -> torch.Tensor:
    """The largest logits, as two ranks with the same logits would choose them."""
    batch, ids = SamplingBatch(), [newest]
    options = Options(early_launch=early_launch)
    for k in range(DRAFTS):
        corrected = kernels.markov_logits(logits[:, k], ids[-1], w1, weight, options=options)
        parts = [
            sampling.best_candidates(corrected, batch, first, early_launch=early_launch)
            for first in (0, 64640)
        ]
        merged = sampling.merge_candidates(torch.cat(parts, 1), early_launch=early_launch)
        ids.append(merged.ids_S)
    return torch.stack(ids[1:], 1)
