"""The first step of a size takes no longer than the second: nothing that it needs makes it wait."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from finwhale.config import EngineConfig
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.runner import ModelRunner
from finwhale.models.deepseek_v4.compressor import C4Compressor, C128Compressor
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

pytestmark = pytest.mark.alone
NUM_SEQS, NUM_TOKENS = 192, 4096
BUSY_S = 0.05  # at least; the GPU has this much work when a GEMM is launched
LONG_S = 0.02


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = published("flash").without_draft_head().with_layers(4)
    config = EngineConfig(
        device="cuda:0",
        max_num_seqs=NUM_SEQS,
        max_model_len=8192,
        max_num_batched_tokens=NUM_TOKENS,
        graph_sizes=(1, 8),
        cache_memory_bytes=2**31,
    )
    engine = start_engine(config, model, Weights(model), None)
    return first_rank(engine.executor).runner


def waits(run: Callable[[], object], square: torch.Tensor) -> bool:
    """Whether the host waits for the GPU's work in `run`."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(60):
        torch.mm(square, square)
    end.record()
    start = time.perf_counter()
    run()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) > 1000 * BUSY_S
    return took > LONG_S


@torch.inference_mode()
def test_no_gemm_waits_for_the_gpu(runner: ModelRunner) -> None:
    model = runner.model
    assert isinstance(model, DeepseekV4)
    square = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=model.device)
    torch.mm(square, square)
    streams = torch.zeros(NUM_SEQS, *model.residual_shape, dtype=model.dtype, device=model.device)
    x_ND = torch.zeros(NUM_TOKENS, streams.shape[2], dtype=model.dtype, device=model.device)
    late = [
        rows
        for rows in range(1, NUM_SEQS + 1)
        if waits(partial(model.compute_logits, streams[:rows]), square)
    ]
    assert late == []
    compressors = {}
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        compressors[type(layer.attn.compressor)] = layer.attn.compressor
    for kind in (C4Compressor, C128Compressor):
        entries = compressors[kind]
        assert entries is not None
        late = [
            rows
            for rows in range(2049, NUM_TOKENS + 1, 37)
            if waits(partial(entries.project, x_ND[:rows]), square)
        ]
        assert late == []


@torch.inference_mode()
def test_no_transfer_waits_for_the_gpu(runner: ModelRunner) -> None:
    """torch asks the driver for pinned memory when it has no free block of a size."""
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for power in range(3, 20):
        for size in (2**power - 8, 2**power):
            send(runner.device, torch.zeros(size // 8, dtype=torch.int64).numpy())
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
