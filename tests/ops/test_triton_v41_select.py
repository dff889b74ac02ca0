"""DeepSeek-V4.1's selection as Triton kernels in the interpreter, against the reference.

Scores are exact in any order of summation and full of ties, so that selections are compared
exactly. The reference gets what the packed keys stand for.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.support.op_case import Chunks, Draw, step_tokens
from tests.support.ptx import run_ptx
from tests.support.v41_keys import agree, check_selections, selection_call
from triton.runtime import interpreter

from finwhale.number_formats import e2m1_values
from finwhale.ops.deepseek_v41 import IndexRule, ref
from finwhale.ops.deepseek_v41 import select_triton as kernels
from finwhale.ops.indexer import topk_long_triton, topk_triton
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.paging import CacheRows, PageTable, StepCache

from . import kernels_support as kernels_support

STEPS: dict[str, Chunks] = {
    "short": ((0, 5), (3, 4), (10, 11)),
    "decode": ((254, 255), (0, 1), (700, 701), (63, 64), (30, 31)),
    "verification": ((300, 306), (20, 23), (127, 129)),
    "prefill": ((0, 12), (250, 262), (64, 65)),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ONE_PROGRAMS", 8)
    monkeypatch.setattr(kernels, "MANY_PROGRAMS", 8)


def rule_of(ratio: int, topk: int = 11, keeps: int = 0) -> IndexRule:
    return IndexRule(ratio=ratio, topk=topk, scale=0.5, round_query=True, keeps=keeps)


select = partial(kernels.select_shared, num_multiprocessors=1)


@pytest.mark.parametrize("keeps", [0, 5, 24])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_selections(step: str, ratio: int, keeps: int) -> None:
    check_selections(select, selection_call(STEPS[step], ratio), rule_of(ratio), keeps)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_long_rows(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of entries, of blocks and of entries within blocks that one program cannot hold."""
    for name in ("BLOCK", "MIN_BLOCK"):
        monkeypatch.setattr(topk_triton, name, 32)
    for name, value in (("TILE", 128), ("MAXIMA", 64), ("MOST_TOPK", 11), ("BLOCK", 128)):
        monkeypatch.setattr(topk_long_triton, name, value)
    check_selections(select, selection_call(STEPS[step], 1, width=64), rule_of(1), 14)


def test_wide_pages_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_DECODE_BYTES", 2**12)
    for ratio in (1, 2):
        call = selection_call(STEPS["verification"], ratio, width=128, page=256 // ratio)
        check_selections(select, call, rule_of(ratio), 9)


def test_unpacked_values_meet_their_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an emulator of the assembly: it shows the order of columns and rows."""
    words = []

    def emulated(
        text: Any, operands: Any, inputs: list[tl.tensor], dtype: Any, **_: Any
    ) -> tuple[tl.tensor, tl.tensor]:
        codes, scale = (np.ascontiguousarray(x.handle.data) for x in inputs)
        flat, scales = codes.view(np.uint32).ravel(), scale.view(np.uint32).ravel()[::2]
        words.append(len(flat))
        found = run_ptx(text.value, *(torch.from_numpy(x.astype(np.int64)) for x in (flat, scales)))
        results = np.stack([each.numpy().astype(np.uint32) for each in found], -1)
        halves = results.reshape(-1, 2, 2).transpose(1, 0, 2)

        def tensor(half: Any) -> tl.tensor:
            bits = np.ascontiguousarray(half).view(np.uint16).reshape(codes.shape)
            return tl.tensor(interpreter.TensorHandle(bits, tl.bfloat16), inputs[1].type)

        return tensor(halves[0]), tensor(halves[1])

    monkeypatch.setattr(tl, "inline_asm_elementwise", emulated)
    args, dense = selection_call(((79, 80),), 1, width=128)
    found = select(*args, rule_of(1), inline_asm=True)
    wanted = ref.select_shared(args[0], args[1], dense, *args[3:], rule_of(1))
    assert agree(found.slots, wanted.slots) and words == [64 * 16] * 2


def test_padding_tokens_select_nothing() -> None:
    args, _ = selection_call(STEPS["decode"], 1)
    tokens = args[4]
    positions = torch.cat((tokens.positions[:-1], torch.tensor([-1])))
    rule = rule_of(1, keeps=5)
    wanted = select(*args, rule)
    padded = replace(tokens, positions=positions, cache=StepCache())
    found = select(*args[:4], padded, rule)
    within = select(*args[:4], padded, rule_of(1), found.blocks)
    for one, other in ((found.slots, wanted.slots), (found.blocks, wanted.blocks)):
        assert one is not None and other is not None
        assert torch.equal(one[:-1], other[:-1]) and bool((one[-1] == -1).all())
    assert bool((within.slots[-1] == -1).all())


def test_queries_of_bfloat16_are_rounded() -> None:
    """Scores of float32: no two are close enough that the order of a sum matters."""
    (q, weights, keys, _, tokens), dense = selection_call(((600, 601),), 1, width=128)
    draw = Draw(1)
    q = draw.normal(*q.shape).bfloat16()
    rotary = draw.rotation(tokens.max_len, 64)
    rule = rule_of(1, topk=32)
    found = select(q, weights.abs() + 1, keys, rotary, tokens, rule).slots
    wanted = ref.select_shared(q, weights.abs() + 1, dense, rotary, tokens, rule).slots
    assert agree(found, wanted)


class Recorder:
    """In place of a kernel: notes what decides how it is compiled."""

    def __init__(self, kernel: Any, found: list[Any]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            numbers = {
                name: value if value == 1 else value % 16 == 0
                for name, value in named.items()
                if isinstance(value, int) and name not in ("first_token", "num_rows")
            }
            self.found.append((self.kernel.arg_names[0], numbers, options))

        return launch


@pytest.mark.parametrize(("ratio", "keeps", "within"), [(2, 0, 0), (1, 2048, 0), (1, 0, 2048)])
def test_contexts_of_a_class_launch_alike(
    ratio: int, keeps: int, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    for module, name in (
        (kernels, "_prepare_kernel"),
        (kernels, "_scores_kernel"),
        (topk_triton, "_select_kernel"),
        (topk_long_triton, "_select_long_kernel"),
    ):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    pool = torch.empty(9, 64 * 68, dtype=torch.uint8)

    def launches(length: int, num_tokens: int = 1) -> list[Any]:
        found.clear()
        table = PageTable(torch.zeros(1, 64).int(), torch.zeros(1).int(), 64)
        kernels.select_shared(
            *(torch.zeros(num_tokens, 32, 128), torch.zeros(num_tokens, 32)),
            *(CacheRows(pool, table), torch.zeros(1, 32, 2)),
            replace(step_tokens(((0, num_tokens),)), max_len=length, max_query=1),
            rule_of(ratio, 512, keeps),
            torch.zeros(num_tokens, within).int() if within else None,
        )
        return list(found)

    sizes = ModelSizes(
        vocab_size=1, num_heads=64, head_dim=512, window=128, index_topk=512,
        complete_ratios=(), num_experts=384, experts_per_token=6, linears=frozenset(),
    )  # fmt: skip
    ends = sorted(kernels.launch_contexts(sizes, 1, 2**20) | {2**20})
    every = []
    for before, end in itertools.pairwise((0, *ends)):
        every.append(launches(end))
        assert all(launches(n) == every[-1] for n in (before + 1, (before + end + 1) // 2))
        assert all(launches(end, n) == every[-1] for n in (3, 16))
    assert len({str(each) for each in every}) > 5


WORDS = [0x00000000, 0xFFFFFFFF, 0x76543210, 0xFEDCBA98, 0x13579BDF, 0x8F0E7D6C]


@pytest.mark.parametrize("exponent", [66, 127, 130, 192])
def test_the_assembly_that_unpacks_keys(exponent: int) -> None:
    """In an emulator of its instructions."""
    scale = exponent + 62 << 7
    values = e2m1_values(torch.device("cpu")).tolist()
    for word in WORDS:
        both = torch.tensor(scale * 0x10001)
        found = run_ptx(kernels.UNPACK.value, torch.tensor(word), both)
        for k in range(4):
            for half in range(2):
                code = word >> 4 * (k + 4 * half) & 15
                bits = int(found[k]) >> 16 * half & 0xFFFF
                number = torch.tensor([bits]).short().view(torch.bfloat16)
                assert number.item() == values[code] * 2.0 ** (exponent - 127 - 64)
