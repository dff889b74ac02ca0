"""Evaluates the few PTX instructions that kernels use."""

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def run_ptx(source: str, *inputs: Tensor) -> list[Tensor]:
    """What PTX instructions compute of 32-bit registers, int64 here."""
    lines = _instructions(source)
    outputs = len({target for _, target, *_ in lines if target[0] == "$"})
    values = {f"${outputs + i}": word for i, word in enumerate(inputs)}
    for name, target, *operands in lines:
        found = (values[x] if x in values else _constant(x) for x in operands)
        values[target] = INSTRUCTIONS[name](*found)
    return [values[f"${i}"] for i in range(outputs)]


@cache
def _instructions(source: str) -> list[list[str]]:
    """Lists of an instruction's name and its operands, of which the first one is its result."""
    texts = re.sub(r"[{},]", " ", source).split(";")
    lines = [text.split() for text in texts if text.strip()]
    return [line for line in lines if line[0] != ".reg"]


@cache
def _constant(text: str) -> Tensor:
    return torch.tensor(int(text, 0))


def _prmt(x: Tensor, y: Tensor, selector: Tensor) -> Tensor:
    both = x | y << 32
    found = torch.zeros_like(both | selector)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        found |= torch.where(nibble & 8 > 0, (byte >> 7) * 255, byte) << 8 * i
    return found


def _lop3(x: Tensor, y: Tensor, z: Tensor, table: Tensor) -> Tensor:
    """Bit n of the table is the result of three bits that are the binary number n."""
    found = torch.zeros_like(x | y | z)
    for n in range(8):
        if table >> n & 1:
            a, b, c = (w if n >> i & 1 else ~w for i, w in ((2, x), (1, y), (0, z)))
            found |= a & b & c & 0xFFFFFFFF
    return found


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    pairs = zip(_bfloat16_halves(x), _bfloat16_halves(y), strict=True)
    low, high = (_bits(a.double() * b.double(), torch.bfloat16) for a, b in pairs)
    return low | high << 16


def _bfloat16_halves(word: Tensor) -> list[Tensor]:
    return [(word >> shift & 0xFFFF).to(torch.uint16).view(torch.bfloat16) for shift in (0, 16)]


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded, as unsigned bits."""
    rounded = x.to(dtype)
    if dtype == torch.float32:
        return rounded.view(torch.int32).long() & 0xFFFFFFFF
    return rounded.view(torch.uint16).long()


def _float32(word: Tensor) -> Tensor:
    return word.to(torch.uint32).view(torch.float32)


def _exp2(x: Tensor) -> Tensor:
    """Results below the normal numbers are 0."""
    found = _float32(x).double().exp2()
    return _bits(torch.where(found < 2.0**-126, 0.0, found), torch.float32)


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda x: x,
    "shr.u32": lambda x, y: x >> y,
    "shl.b32": lambda x, y: x << y & 0xFFFFFFFF,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "mad.lo.s32": lambda x, y, z: x * y + z & 0xFFFFFFFF,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _multiply,
    "ex2.approx.ftz.f32": _exp2,
    "cvt.rn.bf16x2.f32": lambda high, low: (
        _bits(_float32(high), torch.bfloat16) << 16 | _bits(_float32(low), torch.bfloat16)
    ),
}


def halves(words: list[Tensor]) -> Tensor:
    """The bfloat16 values of pairs: [words, values of a word]."""
    parts = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(parts, -1).to(torch.uint16).view(torch.bfloat16).float()


def assembly(function: Any) -> str:
    """The instructions in a decoder's source."""
    found = re.search(r'"""(\{.*?\})"""', inspect.getsource(function.fn), re.DOTALL)
    assert found is not None
    return found[1]
