"""mHC operators that add the ranks' partial sums, in Triton's interpreter.

Several ranks' buffers are in this process. First every rank sends its words, then every rank makes
the whole call, which sends the same words once more.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are for the GPU in this process", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

import torch
from tests.ops.kernels_support import Inputs
from tests.ops.test_triton_mhc import PARAMS, state, terms, weight
from torch import Tensor

from finwhale.distributed import ref
from finwhale.distributed.collectives import Alone
from finwhale.distributed.push import Push
from finwhale.errors import EngineDeadError
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.ops.mhc import FusedReduceMhc, mhc_triton
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.ranks import PartialSum

from .test_push import SIZES, ranks

FUSED = replace(SIZES, fused_tokens=40, fused_programs=40)
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
HOW = mhc_triton.DEFAULT


def given(inputs: Inputs, size: int, N: int, D: int, partial: torch.dtype, own: torch.dtype):
    """The ranks' partial sums, and (post, res, residual)."""
    _, *mixes = state(inputs, N, D, own)
    return [inputs.normal(N, D, dtype=partial) for _ in range(size)], tuple(mixes)


def run(
    push: Push,
    x: Tensor | UnreducedExperts,
    mixes: tuple[Tensor, ...],
    fn: Tensor | None,
    phases: tuple[int, int] = (0, 1),
) -> tuple[Tensor, Tensor]:
    """mHC's first pass on one rank: the new residual streams and, with fn, parts of its GEMM."""
    post, res, residual = mixes
    num_tokens, width = x.shape
    channel = push.channel(num_tokens, mhc_triton.num_programs(num_tokens, width))
    assert channel is not None
    partial_sum = PartialSum(x, channel)
    return mhc_triton.run_streams(residual, (partial_sum, post, res), fn, HOW, phases)


def send(
    pushes: list[Push],
    parts: Sequence[Tensor | UnreducedExperts],
    mixes: tuple[Tensor, ...],
    fn: Tensor | None,
    lost: int | None = None,
) -> None:
    for push, x in zip(pushes, parts, strict=True):
        if push.rank.index != lost:
            run(push, x, mixes, fn, (0, 0))


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.long), 8))
def test_bits_are_those_of_the_sum(size: int) -> None:
    """Different numbers of tokens, widths, dtypes and operators use one channel in turn."""
    inputs = Inputs()
    pushes = ranks(size, FUSED)
    cases = [
        (1, 64, BFLOAT16, BFLOAT16),
        (17, 40, FLOAT32, BFLOAT16),
        (3, 100, BFLOAT16, FLOAT32),
        (2, 32, FLOAT32, FLOAT32),
        (1, 520, BFLOAT16, BFLOAT16),
    ]
    exchanges = 0
    for N, D, partial, own in cases if size == 2 else cases[:2]:
        parts, mixes = given(inputs, size, N, D, partial, own)
        kept = [x.clone() for x in parts]
        post, res, residual = mixes
        total = ref.all_reduce(parts).to(own)
        for fn in (weight(inputs, D).fn, None):
            wanted = mhc_triton.run_streams(residual, (total, post, res), fn, HOW)
            send(pushes, parts, mixes, fn)
            for push, x in zip(pushes, parts, strict=True):
                for one, other in zip(run(push, x, mixes, fn), wanted, strict=True):
                    assert torch.equal(one[..., :25], other[..., :25])
            exchanges += 1
        assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))
    for push in pushes:
        push.check()
        assert push._fused is not None
        # Only the largest launches have the last programs.
        assert push._fused.epochs[0] == exchanges > push._fused.epochs[-1]


@pytest.mark.parametrize("partial", (BFLOAT16, FLOAT32))
def test_each_rank_adds_its_experts_outputs_first(partial: torch.dtype) -> None:
    """The exchanged words are those of the rank's own sum."""
    inputs = Inputs()
    for N, D in ((1, 64), (17, 40)):
        parts = [terms(inputs, N, D, partial) for _ in range(2)]
        totals = [combine(x.each, x.ids, x.shared, partial) for x in parts]
        _, mixes = given(inputs, 2, N, D, partial, BFLOAT16)
        for fn in (weight(inputs, D).fn, None):
            pushes = ranks(2, FUSED)
            send(pushes, totals, mixes, fn)
            wanted = [run(push, x, mixes, fn) for push, x in zip(pushes, totals, strict=True)]
            pushes = ranks(2, FUSED)
            send(pushes, parts, mixes, fn)
            found = [run(push, x, mixes, fn) for push, x in zip(pushes, parts, strict=True)]
            for one, other in zip(found, wanted, strict=True):
                for a, b in zip(one, other, strict=True):
                    assert torch.equal(a[..., :25], b[..., :25])


def test_flags_wrap_around() -> None:
    inputs = Inputs()
    pushes = ranks(2, FUSED)
    for push in pushes:
        assert push._fused is not None
        push._fused.epochs.fill_(2**31 - 2)
    for N in (2, 1, 5, 5):
        parts, mixes = given(inputs, 2, N, 64, BFLOAT16, BFLOAT16)
        wanted = mhc_triton.mhc_post(ref.all_reduce(parts), *mixes)
        send(pushes, parts, mixes, None)
        for push, x in zip(pushes, parts, strict=True):
            assert torch.equal(run(push, x, mixes, None)[0], wanted)


@pytest.mark.filterwarnings("ignore:All-NaN")  # a maximum in the interpreter
def test_a_missing_rank_is_named_and_the_results_are_nan() -> None:
    inputs = Inputs()
    pushes = ranks(4, FUSED)
    parts, mixes = given(inputs, 4, 2, 64, BFLOAT16, BFLOAT16)
    w = weight(inputs, 64)
    send(pushes, parts, mixes, w.fn, lost=2)
    for index in (0, 1, 3):
        channel = pushes[index].channel(2, 2)
        assert channel is not None
        partial_sum = PartialSum(parts[index], channel)
        post, res, residual = mixes
        found = mhc_triton.mhc_post_pre(partial_sum, post, res, residual, w, PARAMS)
        y, *_, streams = found
        assert y.isnan().all()
        assert streams.isnan().all()
        with pytest.raises(EngineDeadError, match=f"rank {index} timed out waiting for rank 2$"):
            pushes[index].check()
        assert pushes[index]._limit.item() == 0
    pushes[2].check()


def test_the_shape_decides_which_kernel_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    def links(fused_tokens: int, fused_programs: int) -> TensorParallel:
        sizes = replace(SIZES, nccl=0, fused_tokens=fused_tokens, fused_programs=fused_programs)
        (push, _) = ranks(2, sizes)
        push._nccl = Alone()
        mhc = FusedReduceMhc(
            18, mhc_triton.num_programs, mhc_triton.mhc_post, mhc_triton.mhc_post_pre
        )
        return TensorParallel(push, mhc)

    def fused(links: TensorParallel, num_tokens: int, width: int = 64) -> bool:
        total = links.reduce(torch.zeros(num_tokens, width), BFLOAT16)
        assert isinstance(total, PartialSum) or total.dtype == BFLOAT16
        return isinstance(total, PartialSum)

    some = links(20, 24)
    assert [fused(some, n) for n in (0, 1, 20, 21)] == [False, True, True, False]
    assert [fused(some, 16, width) for width in (768, 769)] == [False, False]
    assert [fused(some, 1, width) for width in (768, 769)] == [True, False]
    assert not fused(links(0, 24), 1)
    assert [some.can_fuse_reduce(n, 64) for n in (0, 1, 18, 19)] == [False, True, True, False]
    assert not links(0, 24).can_fuse_reduce(1, 64)
    assert isinstance(some.reduce(terms(Inputs(), 1, 64, BFLOAT16), BFLOAT16), PartialSum)
    with some.without_collectives():
        assert not fused(some, 1)
    monkeypatch.setattr(mhc_triton, "FEW_TOKENS", 4)
    assert [fused(some, n) for n in (4, 5)] == [True, False]


def test_what_the_operators_do_not_take_is_refused() -> None:
    inputs = Inputs()
    (push, _) = ranks(2, FUSED)

    def post(N: int, D: int, dtype: torch.dtype) -> None:
        (x, _), mixes = given(inputs, 2, N, D, dtype, BFLOAT16)
        assert push._fused is not None
        mhc_triton.mhc_post(PartialSum(x, push._fused), *mixes)

    with pytest.raises(ValueError, match=r"got 33 torch\.bfloat16"):
        post(1, 33, BFLOAT16)
    with pytest.raises(ValueError, match=r"got torch\.float16"):
        post(1, 32, torch.float16)
    with pytest.raises(ValueError, match=r"does not fit partial sums \(41, 32\)"):
        post(41, 32, FLOAT32)
