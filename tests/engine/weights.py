"""What tests of new weights compare and send."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.engine.ranks.ranks import first_rank
from finwhale.ops.host_forms import _FORMS
from finwhale.weights.tree import tensors_of


def bits_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[object]:
    """Tokens and log-probabilities, with all their bits."""
    return [
        (o.token_ids, [{i: p.logprob for i, p in table.items()} for table in o.logprobs or []])
        for result in llm.generate(prompts, params)
        for o in result.outputs
    ]


def weights_of(llm: LLM) -> list[Tensor]:
    return tensors_of(first_rank(llm._engine.executor).runner.model.weights)


def forms_of(llm: LLM) -> list[object]:
    """What the CPU table has derived from the weights."""
    kept = [_FORMS[id(t)][1] for t in weights_of(llm) if id(t) in _FORMS]
    return [form for forms in kept for form in forms.values()]


def in_one_buffer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, each in the memory of the one before it, as a sender may reuse its buffer."""
    tensors = list(tensors)
    buffer = torch.empty(max(t.nbytes for _, t in tensors), dtype=torch.uint8)
    for name, tensor in tensors:
        part = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, part.copy_(tensor)
