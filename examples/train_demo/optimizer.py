"""Muon for the matrices inside layers, AdamW for everything else."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

# Learning rates of what AdamW trains, as multiples of its base rate; the first pattern that
# matches a name counts.
ADAM_RATES = [
    (r"^embed\.|markov_w1", 2.5),
    (r"^head\.", 1.0),
    (r"hc_\w+\.fn$", 0.15),
    (r"hc_\w+\.", 0.5),
    (r"gate\.weight$|weights_proj", 0.5),
    (r"", 1.0),
]
_NOT_MUON = re.compile(
    r"^embed\.|^head\.|hc_|gate\.weight$|weights_proj|\.ape$|markov_head|confidence_head"
)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(gradient: Tensor) -> Tensor:
    """Approximate the semi-orthogonal matrices nearest to gradient [N, out, in], with five
    Newton-Schulz steps in bf16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = gradient.bfloat16()
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


class Optimizer:
    """One step over all parameters. Muon's updates have a root mean square of 0.2 * rate,
    whatever the shape."""

    def __init__(
        self, model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float
    ) -> None:
        self.muon_rate, self.weight_decay = muon_rate, weight_decay
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if p.dim() >= 2 and not _NOT_MUON.search(name):
                self.by_shape.setdefault(p.shape, []).append(p)
            else:
                factor = next(f for pattern, f in ADAM_RATES if re.search(pattern, name))
                groups.setdefault(factor * adam_rate, []).append(p)
        self.momenta = {
            shape: torch.zeros(len(ps), *shape, device=ps[0].device)
            for shape, ps in self.by_shape.items()
        }
        self.adam = torch.optim.AdamW(
            [{"params": ps, "lr": rate, "base": rate} for rate, ps in groups.items()],
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=next(model.parameters()).is_cuda,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.momenta = values["momenta"]
        self.adam.load_state_dict(values["adam"])

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """factor: of the schedule, 0 to 1."""
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * factor
        self.adam.step()
        for shape, parameters in self.by_shape.items():
            gradient = torch.stack(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            )
            momentum = self.momenta[shape]
            momentum.lerp_(gradient, 0.05)
            update = gradient.lerp(momentum, 0.95).flatten(0, -3)
            update = orthogonalise(update).float().view_as(gradient) * (
                0.2 * max(shape[-2:]) ** 0.5
            )
            rate = self.muon_rate * factor
            tensors: list[Tensor] = list(parameters)
            torch._foreach_mul_(tensors, 1 - rate * self.weight_decay)
            torch._foreach_add_(tensors, list(update.unbind(0)), alpha=-rate)
