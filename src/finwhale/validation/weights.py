"""Checks of the stored weights: values that are not finite, and FP4 experts that kernels round."""

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from finwhale.checkpoint.formats import not_finite
from finwhale.checkpoint.reader import Checkpoint, TensorReader
from finwhale.ops.moe import EXPONENT_SPREAD
from finwhale.validation.report import Check, CheckVerdict

_EXPERT = re.compile(r"^(?P<layer>.+)\.ffn\.experts\.(?P<expert>\d+)\.(?P<which>w[123])\.scale$")
_SHOWN = 5


def check_weights(checkpoint: Checkpoint) -> list[Check]:
    """Find NaN and infinity in any tensor, and experts whose FP4 scales lie too far apart.

    FP4 values are always finite, so of these only the scales are read.
    """
    bad: list[str] = []
    experts: set[tuple[str, str]] = set()
    far: dict[tuple[str, str], int] = Counter()
    with checkpoint.reader() as reader:
        for file, names in checkpoint.shards():
            for name in names:
                if checkpoint.tensors[name].dtype in (torch.int8, torch.int64):
                    continue
                tensor = reader.read(name)
                if not_finite(tensor):
                    bad.append(f"{name} in {file}")
                match = _EXPERT.match(name)
                if match is not None and tensor.dtype == torch.float8_e8m0fnu:
                    key = match["layer"], match["expert"]
                    experts.add(key)
                    far[key] += _count_far(reader, name, tensor)
            reader.close_all()
    verdict: CheckVerdict = "failed" if bad else "ok"
    name = "weights: tensors with NaN or infinity"
    finite = Check(name, str(len(bad)), "0", verdict, _first(bad))
    far = {key: count for key, count in far.items() if count}
    return [finite, _check_exponents(len(experts), far)]


def count_far_values(codes: Tensor, exponents: Tensor) -> int:
    """Number of FP4 values that lie too far below their row's largest for the kernels.

    Args:
        codes: [rows, K/2] int8: two values a byte.
        exponents: [rows, K/32] uint8: the E8M0 scale of each 32 values.
    """
    rows, groups = exponents.shape
    values = (codes.view(torch.uint8) & 0x77).view(rows, groups, -1)
    used = (values > 0).any(-1)
    largest = torch.where(used, exponents, 0).amax(-1, keepdim=True)
    far = used & (largest.int() - exponents.int() > EXPONENT_SPREAD)
    found = values[far]
    return int(((found & 7) > 0).sum() + ((found >> 4) > 0).sum())


def _count_far(reader: TensorReader, name: str, scale: Tensor) -> int:
    exponents = scale.view(torch.uint8)
    # For most experts, the scales alone show that no value is too far.
    wide = (exponents.amax(-1) - exponents.amin(-1)) > EXPONENT_SPREAD
    if not bool(wide.any()):
        return 0
    codes = reader.read(f"{name.removesuffix('.scale')}.weight")
    return count_far_values(codes[wide], exponents[wide])


def _check_exponents(num_experts: int, far: dict[tuple[str, str], int]) -> Check:
    name = "weights: experts that the kernels round"
    if not num_experts:
        return Check(name, "", "", "skipped", "the experts are not FP4")
    layers = Counter(layer for layer, _ in far)
    listed = [f"{layer}: {count}" for layer, count in layers.items()]
    reason = ""
    if far:
        reason = f"{sum(far.values()):,} values in {_first(listed)}"
    found = f"{len(far):,} of {num_experts:,}"
    return Check(name, found, "0", "unusual" if far else "ok", reason)


def _first(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
