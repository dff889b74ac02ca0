"""Evaluates the few PTX instructions of the decoders of packed weights."""

import inspect
import re
from typing import Any

import torch
from torch import Tensor


def run_ptx(source: str, *inputs: Tensor) -> list[Tensor]:
    """What the decoders' few PTX instructions compute of 32-bit words, int64 here."""
    texts = (line.strip() for line in source.splitlines())
    lines = [text.rstrip(";").replace(",", "").split() for text in texts if text]
    outputs = len({word for line in lines for word in line[1:2] if word[0] == "$"})
    values = {f"${outputs + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> Tensor:
        return values[name] if name in values else torch.tensor(int(name, 0))

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        halves = [
            (word >> 16 * i & 0xFFFF).to(torch.uint16).view(torch.bfloat16)
            for word in (x, y)
            for i in (0, 1)
        ]
        pair = halves[0].double() * halves[2].double(), halves[1].double() * halves[3].double()
        bits = [half.bfloat16().view(torch.uint16).long() for half in pair]
        return bits[0] | bits[1] << 16

    for name, *operands in lines:
        if name in ("{", "}", ".reg"):
            continue
        x, *rest = map(value, operands[1:])
        if name == "prmt.b32":
            both = x | rest[0] << 32
            found = torch.zeros_like(x)
            for i in range(4):
                nibble = int(rest[1]) >> 4 * i & 15
                byte = both >> 8 * (nibble & 7) & 255
                found |= (byte >> 7) * 255 << 8 * i if nibble & 8 else byte << 8 * i
        elif name == "lop3.b32":
            assert rest[2] == 0xEA
            found = x & rest[0] | rest[1]
        else:
            operations = {
                "shr.u32": lambda x, y: x >> y,
                "shl.b32": lambda x, y: x << y & 0xFFFFFFFF,
                "and.b32": lambda x, y: x & y,
                "mul.rn.bf16x2": multiply,
            }
            found = operations[name](x, *rest)
        values[operands[0]] = found
    return [values[f"${i}"] for i in range(outputs)]


def halves(words: list[Tensor]) -> Tensor:
    """The bfloat16 values of pairs: [words, values of a word]."""
    parts = [word >> shift & 0xFFFF for word in words for shift in (0, 16)]
    return torch.stack(parts, -1).to(torch.uint16).view(torch.bfloat16).float()


def assembly(function: Any) -> str:
    """The instructions in a decoder's source."""
    found = re.search(r'"""(\{.*?\})"""', inspect.getsource(function.fn), re.DOTALL)
    assert found is not None
    return found[1]
