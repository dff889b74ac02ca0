"""What an engine holds on a GPU beside weights and cache."""

import torch

from finwhale.checkpoint.dummy import DummySource
from finwhale.config import EngineConfig
from finwhale.engine.engine import Engine
from finwhale.engine.memory import GRAPH_BYTES, MemoryUse
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.weights import weight_specs


def held(num_layers: int) -> MemoryUse:
    model = ModelConfig.preset("flash").without_draft_head().with_layers(num_layers)
    config = EngineConfig(
        device="cuda", max_num_seqs=16, max_model_len=8192, cache_memory_bytes=2**30
    )
    source = DummySource(weight_specs(model), torch.device("cuda"))
    return Engine(config, model, source, None).runner.memory


def test_workspace_does_not_grow_with_the_layers() -> None:
    """Layers follow each other: captured or not, one's temporaries may lie where the last one's
    lay, and what a captured prefill hands to attention too.
    """
    few, many = held(4).workspace, held(12).workspace
    assert many - few + 2**20 > 0
    # What the driver keeps for a node of a graph does.
    assert many - few < 8 * GRAPH_BYTES
