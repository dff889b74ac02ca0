"""A script that test_builds.py runs without TRITON_INTERPRET, as builds_probe.py: it records the
launches of DeepSeek-V4.1's table for sm90.

The script prints a JSON object: for several kinds of engines, the launches of whole steps that are
not built ahead, and the number of those that are.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from tests.ops.builds_probe import (
    DRAFTING,
    EAGER,
    LARGEST,
    DraftingSample,
    Sample,
    names,
    pretend_to_be_hopper,
)

from finwhale.distributed.collectives import Alone
from finwhale.distributed.rank import ALONE, Rank
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.deepseek_v4.tensor_parallel import NoCollectives
from finwhale.models.deepseek_v41 import architecture
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.models.step_inputs import Inline
from finwhale.ops import load_ops
from finwhale.ops.builds.launches import collect
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm

OPS = load_ops(Platform("nvidia", "sm90"), group=architecture.GROUP)
CONTEXT = 2**20


class WholeModel(LaunchEnumerator):
    """Runs all layers in each step, with one bound: later layers read what earlier ones select."""

    def _launch_step(self, num_tokens: int, max_query: int, bounds: Any) -> None:
        for max_len, query in bounds:
            inputs = self._inputs(num_tokens, self.largest.max_len, max_query)
            self.model(inputs.bounded(max_len, query), self.cache, Inline())


class Steps(WholeModel, Sample):
    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        for tokens, query, bounds in islice(super().steps(), 0, None, 11):
            yield tokens, query, bounds[:2]


class DraftingSteps(WholeModel, DraftingSample):
    pass


def narrow_flash() -> DeepseekV41Config:
    """Flash's layers, heads and experts, with small matrices."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128}
    return replace(PUBLISHED["v4.1-flash"], **sizes, o_lora_rank=128)  # type: ignore[arg-type]


def new_model(config: DeepseekV41Config, rank: Rank = ALONE) -> DeepseekV41:
    """A model whose tensors have no memory."""
    form = WeightForm(dtype=torch.bfloat16, round_activations=True, ops=OPS, rank=rank, dummy=True)
    weights = architecture.assembler(config, form, torch.device("meta")).finish_unfilled()
    return architecture.build(
        *(config, OPS, weights, None),
        round_activations=True,
        max_positions=CONTEXT,
        collectives=NoCollectives(rank) if rank.size > 1 else Alone(),
    )


def compare(
    config: DeepseekV41Config, largest: StepLimits, sample: type[LaunchEnumerator]
) -> dict[str, Any]:
    largest = replace(largest, max_len=CONTEXT)
    model, groups = new_model(config), architecture.cache_groups(config)
    cache = LargestSteps.alone(model, groups, OPS).cache
    walked, every = (
        names(collect(run(model, groups, OPS, cache, largest)))
        for run in (LaunchEnumerator, sample)
    )
    missing = [f"{n} {json.loads(s)['constant_vals']}" for n, s in sorted(every - walked)]
    return {"missing": missing[:5], "walked": len(walked), "every": len(every)}


def main() -> None:
    pretend_to_be_hopper()
    drafting = narrow_flash()
    plain = drafting.without_draft_head()
    report = {
        "captured": compare(plain, LARGEST, Steps),
        "eager": compare(plain, EAGER, Steps),
        "drafting": compare(drafting, DRAFTING, DraftingSteps),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
