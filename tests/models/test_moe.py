"""The mixture of experts of a layer: the order of its operators."""

from dataclasses import replace
from typing import Any

import torch
from tests.support.op_case import step_tokens
from tests.support.tiny import tiny_config

from finwhale.distributed.collectives import Alone
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.moe import Moe
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel
from finwhale.models.deepseek_v4.weights import assembler, weight_specs
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import load_ops
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.dummy import DummySource

NAMES = ("swiglu_mlp", "route_by_score", "experts_dispatch", "experts_compute", "experts_combine")


def test_the_shared_expert_is_waited_for_between_compute_and_combine() -> None:
    """Its output is there only after the join, which must not hold compute back."""
    config = config_of(tiny_config(0) | {"num_hash_layers": 0})
    cpu, table = torch.device("cpu"), load_ops(Platform.cpu(), reference=True)
    source = DummySource(weight_specs(config), cpu)
    form = WeightForm(
        storages=source.storages, dtype=torch.float32, round_activations=False, ops=table
    )
    weights = assembler(config, form, cpu).fill(source)
    called: list[str] = []

    def noted(name: str) -> Any:
        def call(*args: Any) -> Any:
            called.append(name)
            return getattr(table, name)(*args)

        return call

    class Streams(SideStreams):
        """Like a GPU's: the output of the shared expert is 0 before the join."""

        def start(self, index: int, work: Any, after: int | None = None) -> Any:
            self.wanted = work()
            self.pending = torch.zeros_like(self.wanted)
            return self.pending

        def join(self, index: int) -> None:
            called.append("join")
            self.pending.copy_(self.wanted)

    sizes = config.n_routed_experts, config.num_experts_per_tok, 1.5, 7.0
    ops = replace(table, **{name: noted(name) for name in NAMES})
    found, wanted = (
        Moe(table_of, TensorParallel(Alone()), streams, weights.layers[0].ffn, sizes)
        for table_of, streams in ((ops, Streams(cpu)), (table, SideStreams(cpu)))
    )
    tokens = step_tokens([(0, 5)])
    inputs = StepInputs(token_ids=tokens.positions, tokens=tokens, tables={})
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(found(x, inputs), wanted(x, inputs))
    assert called == [*NAMES[:4], "join", NAMES[4]]
