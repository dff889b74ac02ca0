"""The clock and the power of a GPU while it multiplies, from the real nvidia-smi."""

import time

import torch

from finwhale.bench.gpu_state import watch_gpus
from finwhale.distributed.cuda_ipc import uuid_of


def test_a_busy_gpu() -> None:
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    result: dict[str, float] = {}
    uuid = "GPU-" + uuid_of(x.device).removeprefix("GPU-")
    with watch_gpus([uuid]) as gpus, gpus.during(result):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            x = (x @ x).clamp(-1, 1)
            torch.cuda.synchronize()
    assert result["sm_mhz"] > 500 and result["watts"] > 150
    assert 0 <= result["power_limited"] <= 1
