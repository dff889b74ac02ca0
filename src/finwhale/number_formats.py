"""The small number formats of weights and activations, E4M3 and FP4 (e2m1), in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Magnitudes of the codes 0..7. Bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, E2M1_MAX)


def e2m1_codes(magnitudes: Tensor) -> Tensor:
    """Codes 0..7 (uint8) of the nearest e2m1 values. A tie rounds to the even code."""
    codes = torch.zeros_like(magnitudes, dtype=torch.uint8)
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        codes += magnitudes >= middle if code % 2 else magnitudes > middle
    return codes


def e2m1_values(device: torch.device) -> Tensor:
    """float32 [16]: the value of each code."""
    magnitudes = torch.tensor(E2M1_VALUES, device=device)
    return torch.cat((magnitudes, -magnitudes))
