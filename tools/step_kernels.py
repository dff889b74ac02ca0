"""Lists the kernels that a decode launches on one of several ranks, in order; needs no GPU.

    python -m tools.step_kernels --ranks 2 --tokens 8 --layers 8

Prints a line for each kernel of Triton and its grid, number of warps and early start (pdl), and for
each operation of torch that may launch one ("aten"). The sizes are those of Flash, with few experts
and words. Compare the output of two commits to see why one is slower. Needs the `test` extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tests.ops import builds_probe as probe
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from finwhale.distributed.collectives import Alone
from finwhale.distributed.push import Push
from finwhale.distributed.rank import Rank
from finwhale.engine.start.launch_signatures import LaunchEnumerator
from finwhale.engine.start.memory import LargestSteps
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.step_inputs import Inline

# Operations that launch nothing.
VIEWS = (
    *("view", "empty", "detach", "slice", "select.", "expand", "squeeze", "transpose", "permute"),
    *("as_strided", "split", "alias", "t.default", "unbind", "flatten", "narrow"),
)


@contextmanager
def noted_launches(lines: list[str]) -> Iterator[None]:
    """Note each launch, and run no kernel."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        sizes = tuple(grid(options) if callable(grid) else grid)
        early, warps = int(bool(options.get("launch_pdl"))), options.get("num_warps")
        lines.append(f"{self.fn.__qualname__} {sizes} warps {warps} pdl {early}")

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not any(view in str(func) for view in VIEWS):
                lines.append(f"aten {func}")
            return func(*args, **(kwargs or {}))

    with patch.object(JITFunction, "run", run), Noted():  # type: ignore[no-untyped-call]
        yield


def launches(ranks: int, tokens: int, layers: int) -> list[str]:
    """The launches of a decode of `tokens` sequences with 2,048 tokens each."""
    probe.pretend_to_be_hopper()

    def allocate(num_bytes: int) -> list[torch.Tensor]:
        return [torch.zeros(num_bytes, dtype=torch.uint8)] * ranks

    def push(rank: Rank) -> Push:
        return Push(rank, torch.device("cpu"), allocate, lambda: None, Alone())

    config = published("flash").without_draft_head().with_layers(layers)
    config = replace(config, n_routed_experts=16, vocab_size=2048)
    with patch.object(probe, "NoCollectives", push):
        model = probe.new_model(config, True, Rank(0, ranks))
    groups = cache_spec(config)
    cache = LargestSteps.alone(model, groups, probe.OPS).cache
    enumerator = LaunchEnumerator(model, groups, probe.OPS, cache, probe.LARGEST)
    inputs = enumerator._inputs(tokens, 2048, 1)
    lines: list[str] = []
    with torch.inference_mode(), noted_launches(lines):
        model.forward_with_logits(inputs, cache, Inline())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    if min(args.tokens, args.layers) < 1:
        parser.error("--tokens and --layers must be at least 1")
    print("\n".join(launches(args.ranks, args.tokens, args.layers)))


if __name__ == "__main__":
    main()
