"""Between the training model's parameters and the tensors of an official checkpoint, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "fp4", "bf16", "f32", "i64"]

_FP8 = re.compile(
    r"(attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|shared_experts\.w[123]|[eh]_proj|main_proj)\.weight$"
)
_F32 = re.compile(r"(attn_sink|ape|gate\.bias|hc_(attn|ffn|head)_(fn|base|scale))$")


def kind_of(name: str) -> Kind:
    """How a tensor of the checkpoint is stored."""
    if ".experts." in name:
        return "fp4"
    if _FP8.search(name):
        return "fp8"
    if name.endswith("tid2eid"):
        return "i64"
    return "f32" if _F32.search(name) else "bf16"


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
