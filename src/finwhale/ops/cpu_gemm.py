"""GEMMs x @ weight^T of the CPU table: no bit of a row depends on the other rows.

The first use of a weight chooses one of two implementations:

- FBGEMM of torch, with the weight packed as float16 and float32 accumulation. Checkpoints store
  FP8, FP4 and bfloat16, whose values float16 usually holds exactly, for some weights after the
  whole matrix is multiplied by a power of two. FBGEMM reads half the bytes, and eight rows take two
  to three times as long as one. Its kernels take 1 to 14 rows at a time, and all of them add the
  terms of an output in order; `_rows_are_independent` checks that before the first use.
- One GEMV per row (`cpu_math.matmul_rows`), for every other weight.

Legend: N rows, K input width, M output width, G matrices.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_math import F32
from finwhale.ops.host_forms import once_per_tensor

# torch has deprecated these functions since 1.11 and still has them in 2.15.
_PACK: Any = torch.fbgemm_pack_gemm_matrix_fp16
_MULTIPLY: Any = torch.fbgemm_linear_fp16_weight_fp32_activation
# The exponent of float16's highest power of two.
_TOP = 15


# A GEMM with one weight: x [N,K] float32 -> x @ weight^T [N,M] float32.
Gemm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Half:
    """A float16 weight.

    Attributes:
        packed: the weight in FBGEMM's format.
        numel: K * M.
        width: M.
        scale: the power of two to multiply the input by; None: 1.
    """

    packed: Tensor
    numel: int
    width: int
    scale: F32 | None

    def __call__(self, x_NK: Tensor) -> Tensor:
        if self.scale is not None:
            x_NK = torch.from_numpy(x_NK.numpy() * self.scale)
        num_rows = x_NK.shape[0]
        if num_rows > 0 and num_rows * self.numel < 2 * cpu_math.PARALLEL_WORK:
            return _MULTIPLY(x_NK, self.packed, None)
        out_NM = np.empty((num_rows, self.width), np.float32)

        def run(rows: slice) -> None:
            if num_rows:
                out_NM[rows] = _MULTIPLY(x_NK[rows], self.packed, None).numpy()

        cpu_math.split_rows(num_rows, self.numel, run)
        return torch.from_numpy(out_NM)


@once_per_tensor
def gemm(weight_MK: Tensor) -> Gemm:
    """The GEMM with a weight that no longer changes."""
    return _half(weight_MK) or partial(_multiply_rows, weight_MK.mT.numpy())


@once_per_tensor
def gemms(weight_GMK: Tensor) -> tuple[Gemm, ...]:
    """The GEMMs with G matrices that no longer change."""
    return tuple(gemm(weight_MK) for weight_MK in weight_GMK)


def _multiply_rows(matrix_KM: F32, x_NK: Tensor) -> Tensor:
    return torch.from_numpy(cpu_math.matmul_rows(x_NK.numpy(), matrix_KM))


def _half(weight_MK: Tensor) -> Gemm | None:
    """The GEMM in float16; None if float16 cannot hold every value or FBGEMM is not usable."""
    if weight_MK.numel() == 0 or not _rows_are_independent():
        return None
    weight = weight_MK.contiguous()
    low, high = weight.aminmax()
    _, top = math.frexp(max(float(high), -float(low)))
    for shift in (0, min(_TOP - top, 100)):  # Inputs scaled by 2^-100 stay normal float32.
        shifted = weight * 2.0**shift if shift else weight
        if torch.equal(shifted.half().float(), shifted):
            scale = cpu_math.constant(2.0**-shift) if shift else None
            return _Half(_packed(shifted), weight.numel(), len(weight), scale)
    return None


def _packed(weight_MK: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the function is deprecated.
        packed: Tensor = _PACK(weight_MK)
    return packed


@lru_cache(maxsize=1)
def _rows_are_independent() -> bool:
    """Whether FBGEMM works here and gives a row the same bits alone and among any number of rows.

    The check uses widths of several FBGEMM blocks (512 by 16) and a rest.
    """
    generator = torch.Generator().manual_seed(0)
    num_rows = 250
    x_NK = torch.randn(num_rows, 1100, generator=generator)
    weight_MK = torch.randn(75, 1100, generator=generator).half().float()
    try:
        packed = _packed(weight_MK)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            whole_NM = _MULTIPLY(x_NK, packed, None)
    except RuntimeError:  # torch has no FBGEMM, or FBGEMM does not support this processor.
        return False
    return all(
        torch.equal(_MULTIPLY(x_NK[start:end], packed, None), whole_NM[start:end])
        for size in (*range(1, 33), 64, 121)
        for start, end in ((0, size), (num_rows - size, num_rows))
    ) and torch.allclose(whole_NM, x_NK @ weight_MK.T, rtol=0, atol=1e-2)
