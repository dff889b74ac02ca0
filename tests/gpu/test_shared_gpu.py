"""Two ranks that share a GPU, for development. test_several_gpus.py tests them on two GPUs.

The ranks take turns on the GPU, so a step takes as long as some dozens of turns.
"""

from functools import partial

import pytest
import torch

from finwhale.bench.engine import call_ranks_collectively
from finwhale.engine.ranks.ranks import Ranks

from . import test_several_gpus as several

pytestmark = pytest.mark.alone


def test_two_ranks_of_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and batches change no bit, a second run gives the same tokens, and both ranks fit."""
    monkeypatch.syspath_prepend(str(several.ROOT))  # the ranks import that module
    engine = several.new_engine(2, device="cuda:0,0")
    try:
        found = call_ranks_collectively(engine.executor, partial(several.decodes, [700, 3, 129]))
        assert found == [[], []]
        assert several.tokens(engine) == several.tokens(engine)
        free, total = torch.cuda.mem_get_info(0)
        assert free > 0.05 * total
    finally:
        assert isinstance(engine.executor, Ranks)
        engine.executor.close()
