"""The push kernels in Triton's interpreter: several ranks' buffers in this process.

Each phase of a kernel runs on all ranks in turn.
"""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are for the GPU in this process", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")

import torch
import triton
import triton.language as tl
from tests.ops import triton_interpreter as triton_interpreter
from torch import Tensor

from finwhale.distributed import push_triton, ref, self_check
from finwhale.distributed.push import Push
from finwhale.distributed.push_copies import Copies
from finwhale.distributed.push_sizes import SIZES as SIZES_OF
from finwhale.distributed.push_sizes import PushSizes
from finwhale.distributed.rank import ALONE, Rank
from finwhale.errors import EngineDeadError
from finwhale.ops.ranks import Channel
from finwhale.ops.ranks_triton import report
from tools import collectives

SIZES = PushSizes(one_shot=2**11, two_shot=2**12, gather=2**11, bulk=2**14)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


class Nothing:
    rank = ALONE

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} of NCCL was called")


class Memories:
    """Memory of several ranks: allocations of equal number have equal size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.made: list[list[Tensor]] = []

    def of(self, index: int):
        count = iter(range(10))

        def allocate(num_bytes: int) -> list[Tensor]:
            i = next(count)
            if i == len(self.made):
                self.made.append(
                    [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.size)]
                )
            memories = self.made[i]
            assert len(memories[index]) == num_bytes
            return memories

        return allocate


def ranks(size: int, sizes: PushSizes = SIZES) -> list[Push]:
    memories = Memories(size)
    pushes = [
        Push(Rank(i, size), CPU, memories.of(i), lambda: None, Nothing(), sizes=sizes)
        for i in range(size)
    ]
    for push in pushes:
        push.set_timeout(1e-5)
    return pushes


def parts(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def words(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)


def sum_over(
    pushes: list[Push], shot: str, given: list[Tensor], lost: int | None = None
) -> list[Tensor]:
    """Run an all-reduce phase by phase on all ranks; rank `lost` does nothing."""
    outs = [torch.full_like(x, 7) for x in given]
    launch = push_triton.one_shot if shot == "one" else push_triton.two_shot
    for phase in range(2 if shot == "one" else 3):
        for push, x, out in zip(pushes, given, outs, strict=True):
            if push.rank.index != lost:
                channel = push._bulk if shot == "bulk" else push._small
                bfloat16 = x.dtype == torch.bfloat16
                launch(words(x), words(out), channel, bfloat16, False, (phase, phase))
    return outs


@pytest.mark.parametrize("size", (2, 4, 8))
@pytest.mark.parametrize("shot", ("one", "two", "bulk"))
def test_sums_equal_the_reference(size: int, shot: str) -> None:
    pushes = ranks(size)
    # Epochs alternate between the halves of a buffer; programs make different numbers of exchanges.
    for turn, (dtype, length) in enumerate(
        [(torch.float32, 300), (torch.bfloat16, 600), (torch.float32, 16), (torch.bfloat16, 1024)]
    ):
        given = parts(size, (length,), dtype, turn)
        kept = [x.clone() for x in given]
        wanted = ref.all_reduce(given)
        for found in sum_over(pushes, shot, given):
            assert torch.equal(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    for push in pushes:
        push.check()
        channel = push._bulk if shot == "bulk" else push._small
        assert channel.epochs[0] == (4 if shot == "one" else 8)


@pytest.mark.parametrize("size", (2, 4))
def test_gathers_equal_the_reference(size: int) -> None:
    pushes = ranks(size)
    for turn, (shape, dim) in enumerate([((3, 10), 0), ((3, 10), 1), ((4, 2, 24), 1), ((64,), 0)]):
        given = parts(size, shape, torch.float32, turn)
        wanted = ref.all_gather(given, dim)
        outs = [torch.empty_like(wanted) for _ in range(size)]
        width = given[0][(0,) * dim].numel()
        for phase in range(2):
            for push, x, out in zip(pushes, given, outs, strict=True):
                channel = push._small
                push_triton.all_gather(words(x), words(out), width, channel, False, (phase, phase))
        for out in outs:
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("size", (2, 4))
def test_gathers_of_three_equal_the_reference(size: int) -> None:
    """Of lengths that end inside of a block and at its end."""
    pushes = ranks(size)
    for turn, lengths in enumerate([(200, 128, 3), (1, 1, 1), (128, 5, 200)]):
        given = [[torch.randn(n) + 10 * turn for n in lengths] for _ in range(size)]
        outs = [[torch.empty(size * n) for n in lengths] for _ in range(size)]
        for phase in range(2):
            for push, xs, found in zip(pushes, given, outs, strict=True):
                channel, each = push._small, (list(map(words, xs)), list(map(words, found)))
                assert push_triton.can_gather_each(each[0], channel)
                push_triton.gather_each(*each, channel, False, (phase, phase))
        for found in outs:
            for number, out in enumerate(found):
                assert torch.equal(out, ref.all_gather([xs[number] for xs in given], 0))


def test_what_is_gathered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three x, if the channel has room for them; others one after the other."""
    (push, _) = ranks(2)
    calls: list[object] = []

    def together(xs: list[Tensor], outs: list[Tensor], *_: object) -> None:
        calls.append([(len(x), len(out)) for x, out in zip(xs, outs, strict=True)])

    monkeypatch.setattr(push_triton, "gather_each", together)
    monkeypatch.setattr(push_triton, "all_gather", lambda x, *_: calls.append(len(x)))
    xs = [torch.zeros(4, 8).bfloat16(), torch.zeros(4, 3).int(), torch.zeros(4, 3)]
    assert [out.shape for out in push.all_gather_each(xs)] == [(8, 8), (8, 3), (8, 3)]
    programs = len(push._small.epochs)
    full = torch.zeros(128 * (programs - 2))
    push.all_gather_each([full, *xs[1:]])
    push.all_gather_each([torch.zeros(len(full) - 128, 1), torch.zeros(129), xs[2]])
    push.all_gather_each(xs[:2])
    assert calls == [
        [(16, 32), (12, 24), (12, 24)],
        [(len(full), 2 * len(full)), (12, 24), (12, 24)],
        [(len(full) - 128, 2 * len(full) - 256), (129, 258), (12, 24)],
        *(16, 12),
    ]
    calls.clear()
    monkeypatch.setattr(push, "all_gather_rows", lambda x, rows: calls.append((len(x), rows)))
    push.all_gather_each([torch.zeros(128 * programs), *xs[1:]])
    assert calls == [128 * programs, 12, 12]


def by_rows(pushes: list[Push], given: list[Tensor], lost: int | None = None) -> list[Tensor]:
    """Reduce-scatter and all-gather rows, phase by phase and piece by piece."""
    size, bfloat16 = len(pushes), given[0].dtype == torch.bfloat16
    num_rows, width = given[0].shape[0], words(given[0][0]).numel()
    part = -(-num_rows // size) * width
    sums = [torch.full_like(given[0][push.rank.rows(num_rows)], 7) for push in pushes]
    outs = [torch.full_like(x, 7) for x in given]
    running = [push for push in pushes if push.rank.index != lost]
    capacity = pushes[0]._bulk.capacity
    for start in range(0, part, capacity):
        for phase in (0, 1):
            for push in running:
                i = push.rank.index
                pair = words(given[i]), words(sums[i])
                push_triton.reduce_scatter(
                    *pair, part, start, push._bulk, bfloat16, False, (phase, phase)
                )
    for start in range(0, part, capacity):
        for phase in (0, 1):
            for push in running:
                pair = words(sums[push.rank.index]), words(outs[push.rank.index])
                push_triton.gather_parts(*pair, part, start, push._bulk, False, (phase, phase))
    return outs


@pytest.mark.parametrize("size", (2, 4, 8))
def test_rows_equal_the_reference(size: int) -> None:
    pushes = ranks(size)
    # Equal shares, a smaller last one, ranks without rows, and several pieces.
    cases = [(8, 32, torch.float32), (13, 20, torch.bfloat16), (5, 6, torch.bfloat16)]
    for turn, (num_rows, width, dtype) in enumerate([*cases, (size * 40, 256, torch.float32)]):
        given = parts(size, (num_rows, width), dtype, turn)
        kept, wanted = [x.clone() for x in given], ref.all_reduce(given)
        for found in by_rows(pushes, given):
            assert torch.equal(found, wanted)
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
        for found in sum_over(pushes, "bulk", [x[:1] for x in given]):
            assert torch.equal(found, wanted[:1])
    for push in pushes:
        push.check()


def test_rows_of_a_missing_rank_are_nan() -> None:
    pushes = ranks(4)
    outs = by_rows(pushes, parts(4, (8, 64), torch.float32), lost=2)
    for index in (0, 1, 3):
        assert outs[index].isnan().all()
        with pytest.raises(EngineDeadError, match=r"timed out waiting for rank 2$"):
            pushes[index].check()


def beside_work(pushes: list[Push], given: list[Tensor], lost: int | None = None) -> list[Tensor]:
    """Reduce-scatter and all-gather rows with copies; rank `lost` does nothing."""
    running = [push for push in pushes if push.rank.index != lost]

    def add(push: Push) -> Tensor:
        x, (num_rows, width) = given[push.rank.index], given[0].shape
        asked: list[int] = []

        def part(index: int, some: slice) -> Tensor:
            rows = push.rank.rows(num_rows, index)
            asked.extend(range(num_rows)[rows][some])
            return x[rows][some].clone()

        total = push.reduce_scatter_parts(part, (num_rows, width), x.dtype)
        assert sorted(asked) == list(range(num_rows))
        return total

    for push in running:  # as ranks do at the same time
        for reader in ("sum", "experts"):
            push._can_copy(reader, len(given[0]), given[0][0].nbytes)
    with pytest.MonkeyPatch.context() as patch:  # First, all ranks send.
        patch.setattr(Copies, "_arrive", lambda *_: None)
        for push in running:
            add(push)
    sums = [(push, add(push)) for push in running]
    for push in running:  # which has flags of later ranks' second calls
        push._copies._flags("sum", push.rank.index)[push.rank.others()] = 0
    num_rows = len(given[0])
    begun = [push.start_all_gather_rows(total, num_rows, "experts") for push, total in sums]
    return [finish() for finish in begun]


@pytest.mark.parametrize("size", (2, 4, 8))
def test_copied_rows_equal_the_reference(size: int) -> None:
    pushes = ranks(size, replace(SIZES, copied=64))
    # A smaller last share, equal ones, and more than the memory had room for.
    cases = [(13, 64, torch.bfloat16), (16, 32, torch.float32), (24, 64, torch.bfloat16)]
    for turn, (num_rows, width, dtype) in enumerate(cases):
        given = parts(size, (num_rows, width), dtype, turn)
        for found in beside_work(pushes, given):
            assert torch.equal(found, ref.all_reduce(given))
    for push in pushes:
        push.check()
        assert set(push._copies._memory) == {"sum", "experts"}


def test_a_rank_whose_copies_are_missing_is_named() -> None:
    pushes = ranks(4, replace(SIZES, copied=64))
    beside_work(pushes, parts(4, (16, 32), torch.float32), lost=2)
    for index in (0, 1, 3):
        with pytest.raises(EngineDeadError, match=r"timed out waiting for rank 2$"):
            pushes[index].check()


def test_few_rows_are_not_copied() -> None:
    (push, _) = ranks(2, replace(SIZES, copied=2**12))
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Push, "all_gather_rows", lambda *_: calls.append("gather"))
        patch.setattr(Push, "reduce_scatter_rows", lambda *_: calls.append("sum"))
        x = torch.zeros(31, 64).bfloat16()
        push.start_all_gather_rows(x, 62, "experts")
        push.reduce_scatter_parts(lambda index, some: x[some], (62, 64), x.dtype)
        odd = torch.zeros(2048, 3).bfloat16()
        push.reduce_scatter_parts(lambda index, some: odd[some], (4096, 3), odd.dtype)
        ints = torch.zeros(64, 64).int()
        push.reduce_scatter_parts(lambda index, some: ints[some], (128, 64), ints.dtype)
    assert calls == ["gather", "sum", "sum", "sum"]
    assert not push._copies._memory


@triton.jit
def _report_nobody(limit_ptr, faults, W: tl.constexpr):
    report(limit_ptr, faults, tl.arange(0, W) < 0, 0, W)


def test_the_host_s_memory_may_lie_below_2_to_the_31() -> None:
    """As an interpreter's sometimes does. No rank is missing, so nothing is stored there."""
    limit = torch.ones(1, dtype=torch.int32)
    _report_nobody[(1,)](limit, 2**20, W=2)
    assert limit.item() == 0


@pytest.mark.parametrize("shot", ("one", "two", "bulk"))
def test_a_missing_rank_is_named_and_its_sum_is_nan(shot: str) -> None:
    pushes = ranks(4)
    given = parts(4, (300,), torch.float32)
    outs = sum_over(pushes, shot, given, lost=2)
    for index in (0, 1, 3):
        whole = outs[index] if shot == "one" else outs[index][2 * 80 : 240]
        assert whole.isnan().all()
        with pytest.raises(EngineDeadError, match=f"rank {index} timed out waiting for rank 2$"):
            pushes[index].check()
        assert pushes[index]._limit.item() == 0
    pushes[2].check()


@pytest.mark.parametrize("shot", ("one", "two", "bulk"))
def test_a_rank_that_is_late_after_a_fault_is_not_named(shot: str) -> None:
    """Once a rank is missing, kernels do not wait, so they may find others late."""
    pushes = ranks(4)
    given = parts(4, (300,), torch.float32)
    sum_over(pushes, shot, given, lost=2)
    pushes[3]._limit.fill_(1)
    sum_over(pushes, shot, given, lost=1)
    for index, missing in ((0, "2"), (3, "1, 2")):
        with pytest.raises(EngineDeadError, match=f"timed out waiting for rank {missing}$"):
            pushes[index].check()


def test_flags_wrap_around() -> None:
    pushes = ranks(2)
    for push in pushes:
        for channel in (push._small, push._bulk):
            channel.epochs.fill_(2**31 - 2)
            if channel.flags is not None:
                channel.flags.fill_(2**31 - 2)
    given = parts(2, (300,), torch.float32)
    for shot in ("one", "two", "bulk", "one"):
        for found in sum_over(pushes, shot, given):
            assert torch.equal(found, ref.all_reduce(given))


def test_the_size_chooses_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    (push, _) = ranks(2, replace(SIZES, nccl=2**16))
    calls: list[tuple[str, int, bool]] = []

    def one(x: Tensor, out: Tensor, channel: Channel, *_: bool) -> None:
        calls.append(("one", len(x), channel.flags is None))

    def two(x: Tensor, out: Tensor, channel: Channel, *_: bool) -> None:
        calls.append(("two", len(x), channel.flags is None))

    def gather(x: Tensor, out: Tensor, width: int, *_: object) -> None:
        assert (len(x), len(out)) == (30, 60)
        calls.append(("gather", width, True))

    monkeypatch.setattr(push_triton, "one_shot", one)
    monkeypatch.setattr(push_triton, "two_shot", two)
    monkeypatch.setattr(push_triton, "all_gather", gather)
    pieces: list[tuple[str, int, int]] = []

    def note(name: str, x: Tensor, out: Tensor, part: int, start: int, *_: object) -> None:
        pieces.append((name, part, start))

    for name in ("reduce_scatter", "gather_parts"):
        monkeypatch.setattr(push_triton, name, partial(note, name))
    rows = torch.zeros(257, 40)
    assert push.reduce_scatter_rows(rows).shape == (129, 40)
    assert push.all_gather_rows(rows[:129], 257).shape == (257, 40)
    assert push.reduce_scatter_rows(rows.bfloat16()).dtype == torch.bfloat16
    assert push.all_gather(rows[:129], 0).shape == (258, 40)
    assert pieces == [
        *(("reduce_scatter", 129 * 40, start) for start in (0, 2048, 4096)),
        *(("gather_parts", 129 * 40, start) for start in (0, 2048, 4096)),
        *(("reduce_scatter", 129 * 20, start) for start in (0, 2048)),
        *(("gather_parts", 129 * 40, start) for start in (0, 2048, 4096)),
    ]
    x = torch.zeros(2**15)
    for length in (1, 512, 513, 1024, 1025, 2**12 + 1):
        assert push.all_reduce(x[:length]).shape == (length,)
    assert push.all_reduce(x.bfloat16()[:1024]).dtype == torch.bfloat16
    assert push.all_gather(x[:30].view(5, 6), -1).shape == (5, 12)
    assert push.all_gather(x[:30].view(5, 6), 0).shape == (10, 6)
    assert calls == [
        ("one", 1, True),
        ("one", 512, True),
        ("two", 513, True),
        ("two", 1024, True),
        ("two", 1025, False),
        ("two", 4096, False),
        ("two", 1, False),
        ("one", 512, True),
        ("gather", 6, True),
        ("gather", 30, True),
    ]


def test_nccl_serves_what_push_does_not() -> None:
    (push, _) = ranks(2, replace(SIZES, nccl=2**16))
    x = torch.zeros(2**15)
    for large_or_odd in (x, x[:0], x.bfloat16()[:3]):
        with pytest.raises(AssertionError, match="all_reduce of NCCL"):
            push.all_reduce(large_or_odd)
    for large_or_odd in (x.view(4, -1), x[:0].view(0, 4), x[:12].view(4, 3).byte()):
        with pytest.raises(AssertionError, match="all_gather of NCCL"):
            push.all_gather(large_or_odd, 1)
    with pytest.raises(AssertionError, match="reduce_scatter_rows of NCCL"):
        push.reduce_scatter_rows(x.bfloat16()[:15].view(5, 3))
    with pytest.raises(AssertionError, match="all_gather_rows of NCCL"):
        push.all_gather_rows(x[:0].view(0, 4), 0)
    for sums in (push.all_reduce, push.reduce_scatter_rows):
        with pytest.raises(ValueError, match=r"got torch\.int64"):
            sums(x.long())


@pytest.mark.parametrize("size", (2, 4, 8))
def test_the_self_check_compiles_what_models_need(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch signature: Triton specialises on integers that are 1 or multiples of 16."""
    launched: set[tuple[object, ...]] = set()

    def noting(name: str) -> Any:
        def launch(x: Tensor, out: Tensor, *args: Any) -> None:
            numbers = [len(x), *(arg for arg in args if type(arg) is int)]
            others = [arg for arg in args if type(arg) is bool]
            channel = next(arg for arg in args if isinstance(arg, Channel))
            kinds = [(n == 1, n % 16 == 0) for n in numbers]
            launched.add((name, channel.flags is None, *kinds, *others))

        return launch

    for name in ("one_shot", "two_shot", "all_gather", "reduce_scatter", "gather_parts"):
        monkeypatch.setattr(push_triton, name, noting(name))
    copied: list[torch.dtype] = []
    monkeypatch.setattr(push_triton, "await_copies", lambda *_: None)
    monkeypatch.setattr(push_triton, "sum_landed", lambda x, *_: copied.append(x.dtype))
    (push, *_) = ranks(size, SIZES_OF[size])
    # NCCL does what is too large, and its results do not matter here either.
    push._nccl = SimpleNamespace(  # type: ignore[assignment]
        all_reduce=lambda x, overwrite: x, all_gather=lambda x, dim: x
    )
    monkeypatch.setattr(self_check, "_compare", lambda *args: None)
    self_check.self_check(push, CPU)
    assert copied == (list(DTYPES) if push.beside_bytes < 2**62 else [])
    compiled = set(launched)
    for width in (4096, 7168):
        for rows in (1, 2, 3, 17, 128, 1000, 1024):
            for dtype in DTYPES:
                push.all_reduce(torch.empty((rows, width), dtype=dtype))
                push.reduce_scatter_rows(torch.empty((rows + 1152, width), dtype=dtype))
                shared = torch.empty((push.rank.rows_per_rank(rows + 1152), width), dtype=dtype)
                push.all_gather_rows(shared, rows + 1152)
    for rows in (1, 3, 17):
        push.all_gather(torch.empty(rows, 129280 // size), 1)
    assert launched == compiled


def test_the_benchmark_measures_mhc_s_own_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other measurements have ordered sums, for which Push keeps no channel."""
    memories = Memories(2)

    def make_push(rank: Rank, device: torch.device, *_: Any, **options: Any) -> Push:
        return Push(rank, device, memories.of(0), lambda: None, Nothing(), **options)

    monkeypatch.setattr(collectives, "Nccl", lambda *_, **__: Nothing())
    monkeypatch.setattr("finwhale.distributed.connect.make_push", make_push)
    given: Any = SimpleNamespace(rank=Rank(0, 2), device=CPU, group=object())
    sizes = collectives.fused_sizes(given)
    assert collectives.make_push(given, sizes, fused=True).channel(128, 2048) is not None
    memories = Memories(2)
    assert collectives.make_push(given, sizes).channel(1, 1) is None
