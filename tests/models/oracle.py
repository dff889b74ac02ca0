"""transformers' DeepSeek-V4 as the tests' oracle: float32, eager attention, nothing rounded."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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


def in_float64(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights for the formulas, whose roundings then depend on no library and no CPU."""
    return {name: w.double() if w.is_floating_point() else w for name, w in weights.items()}


def assert_texts_agree(errors: Sequence[float], length: int) -> None:
    """Every token of at least half of 16 texts agrees with the formulas as trained.

    A value may lie so near the middle of two E4M3 values that the last bit of a float32 sum decides
    how it is rounded. 52 of 448 texts of ten tokens met one, with kernels of torch and OpenBLAS for
    AVX-512, for AVX2 and for neither. At 14% a text, more than 8 of 16 have a probability of 1e-4.

    Args:
        errors: the relative error of each token.
        length: number of tokens of a text.
    """
    texts = [max(errors[i : i + length]) for i in range(0, len(errors), length)]
    assert len(texts) == 16 and sum(error > 1e-5 for error in texts) <= 8, texts


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
