"""Converts between the training model's parameters and the tensors of an official checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor


def official_tensors(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The official names of a training state dict; stacked experts are yielded one by one."""
    for name, value in state.items():
        name = re.sub(r"hc_(attn|ffn|head)\.(fn|base|scale)$", r"hc_\1_\2", name)
        stacked = re.fullmatch(r"(.*\.experts)\.(w[123])\.weight", name)
        if stacked is None:
            yield name, value
            continue
        for expert, weight in enumerate(value):
            yield f"{stacked[1]}.{expert}.{stacked[2]}.weight", weight


def training_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of official_tensors."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123])\.weight", name)
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = value
        else:
            state[re.sub(r"hc_(attn|ffn|head)_(fn|base|scale)$", r"hc_\1.\2", name)] = value
    for name, by_index in experts.items():
        state[name] = torch.stack([by_index[i] for i in range(len(by_index))])
    return state
