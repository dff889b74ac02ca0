"""Routed experts on a GPU: captured steps and drafts return what the routers chose."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.integrity import check_engine
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.step_inputs import StepInputs
from finwhale.models.weight_sources import Weights
from finwhale.request import ExpertIds

PARAMS = SamplingParams(
    temperature=0, max_tokens=32, ignore_eos=True, return_routed_experts=True, n=2
)
PROMPTS = [[0, *range(20, 320)], [0, 21, 22], [0, *range(30, 95)]]
Found = list[tuple[list[int], ExpertIds]]


def open_engine(kind: str, **options: Any) -> Engine:
    """The embedded model, or four layers of Flash with random weights and the MTP layer."""
    chosen = {
        "device": "cuda",
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "batch_invariant": True,
        "cache_memory_bytes": 2**30,
        "enable_return_routed_experts": True,
        **options,
    }
    if kind == "demo":
        return LLM(**chosen)._engine
    model = published("flash").with_layers(4)
    return start_engine(EngineConfig(**chosen), model, Weights(model), None)


def outputs(engine: Engine, prompts: list[list[int]]) -> Found:
    """Each continuation's tokens, and the experts of the prompt's and its own tokens."""
    results = [engine.add_request(str(i), ids, PARAMS) for i, ids in enumerate(prompts)]
    while not all(result.finished for result in results):
        engine.step()
    found = []
    for result in results:
        for output in result.outputs:
            assert result.prompt_routed_experts is not None and output.routed_experts is not None
            ids = np.concatenate([result.prompt_routed_experts, output.routed_experts])
            assert len(ids) == len(result.prompt_token_ids) + len(output.token_ids) - 1
            found.append((output.token_ids, ids))
    return found


class Routers:
    """Notes what the routers of an eager engine return."""

    def __init__(self, engine: Engine) -> None:
        model = first_rank(engine.executor).runner.model
        assert isinstance(model, DeepseekV4)
        self.ids: list[list[Tensor]] = [[] for _ in model.layers]
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            self._watch(layer, self.ids[number])

    def _watch(self, layer: DecoderLayer, ids: list[Tensor]) -> None:
        route = layer.ffn.route

        def noted(x: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor]:
            found = route(x, inputs)
            ids.append(found[0].clone())
            return found

        layer.ffn.route = noted  # type: ignore[method-assign,assignment]

    def taken(self, count: int) -> Tensor:
        """The first `count` rows [count, layers, top-k]; forgets all rows."""
        found = torch.stack([torch.cat(rows)[:count] for rows in self.ids], 1).cpu()
        for rows in self.ids:
            rows.clear()
        return found


@pytest.mark.parametrize("kind", ["demo", "flash"])
def test_captured_steps_and_drafts_return_what_the_routers_choose(kind: str) -> None:
    eager = open_engine(kind, enforce_eager=True)
    routers, wanted = Routers(eager), []
    for prompt in PROMPTS:
        # One sequence alone: the rows of its steps, one after the other.
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        eager.reset_prefix_cache()
        result = eager.add_request("alone", prompt, params)
        while eager.has_work:
            eager.step()
        wanted.append((result.outputs[0].token_ids, routers.taken(len(prompt) + 31)))
    del eager, routers
    for options in ({}, {"enforce_eager": True}, {"draft_tokens": 2}, {"draft_tokens": "auto"}):
        engine = open_engine(kind, **options)
        found = outputs(engine, PROMPTS)
        assert len(found) == 2 * len(PROMPTS)
        for index, (tokens, ids) in enumerate(found):
            right_tokens, right = wanted[index // 2]
            assert tokens == right_tokens, options
            assert np.array_equal(ids, right.numpy()), options
        assert not sum(engine.metrics().late_compilations.values())
        check_engine(engine)
        del engine
