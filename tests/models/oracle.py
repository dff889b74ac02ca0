"""transformers' DeepSeek-V4 as the tests' oracle: float32, eager attention, nothing rounded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.23")


class Oracle:
    """transformers' model of a plain checkpoint. Raises if a tensor is missing or unknown."""

    def __init__(self, path: Path) -> None:
        self.model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        wrong = {
            kind: sorted(name for name in info[kind] if not name.startswith("mtp."))
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        }
        assert not any(wrong.values()), wrong
        assert {p.dtype for p in self.model.parameters()} == {torch.float32}

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """[T,V] of one prompt, without a cache."""
        logits: Tensor = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, ids: list[int], steps: int) -> tuple[list[int], Tensor]:
        """The greedy continuation, with a cache, and the logits [steps,V] that chose it."""
        out = self.model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        tokens, rows = [], []
        for _ in range(steps):
            rows.append(out.logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) < steps:
                out = self.model(
                    input_ids=torch.tensor([tokens[-1:]]),
                    past_key_values=out.past_key_values,
                    use_cache=True,
                )
        return tokens, torch.stack(rows)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest magnitude wanted."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single_threaded() -> contextlib.AbstractContextManager[None]:
    """One torch thread: small models run fastest so, most of all on a busy machine."""
    return torch_threads(1)
