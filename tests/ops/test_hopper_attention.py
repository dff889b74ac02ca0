"""When attention on Hopper prepares a query before it waits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
from finwhale.ops.attention import TopkEntries
from finwhale.ops.attention.sparse_attention_hopper import ready_from
from finwhale.ops.attention.sparse_attention_triton import SELECTED


def problem(num_tokens: int, entries: Any, invariant: bool = False) -> Any:
    q = torch.empty(num_tokens, 16, 512, device="meta")
    return SimpleNamespace(q=q, entries=entries, invariant=invariant, kind=SELECTED)


def test_only_a_single_token_of_a_decode_is_prepared_early() -> None:
    pool, slots = torch.empty(0), torch.empty(0)
    scored = TopkEntries(pool, slots, 64, scored_from=2051)
    assert ready_from(problem(1, scored)) == 2051
    assert ready_from(problem(2, scored)) is None
    assert ready_from(problem(1, scored, invariant=True)) is None
    assert ready_from(problem(1, TopkEntries(pool, slots, 64))) is None
