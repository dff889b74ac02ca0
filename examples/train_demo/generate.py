"""A minimal generation loop that computes the whole sequence again for every token."""

from __future__ import annotations

import torch
from model import Batch, DemoModel, Switches
from torch import Tensor

PAD, EOS = 2, 1


@torch.no_grad()
def generate(
    model: DemoModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    rounding: bool = True,
    seed: int = 0,
) -> list[list[int]]:
    """Continues prompts (token ids) until eos or max_new_tokens; returns the new ids, without
    eos."""
    device = next(model.parameters()).device
    switches = Switches(torch.tensor(rounding, device=device), torch.tensor(True, device=device))
    generator = torch.Generator(device).manual_seed(seed)
    ends = [len(p) for p in prompts]
    length = -(-(max(ends) + max_new_tokens) // 128) * 128
    tokens = torch.full((len(prompts), length), PAD, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    position = torch.tensor(ends, device=device)
    rows, done = (
        torch.arange(len(prompts), device=device),
        torch.zeros(len(prompts), dtype=torch.bool, device=device),
    )
    for _ in range(max_new_tokens):
        used = -(-(int(position.max()) + 1) // 128) * 128
        hidden = hidden_of(model, tokens[:, :used], switches)
        logits = model.logits(hidden[rows, position - 1]).float()
        if temperature:
            chosen = torch.multinomial(
                (logits / temperature).softmax(-1), 1, generator=generator
            ).squeeze(1)
        else:
            chosen = logits.argmax(-1)
        done |= chosen == EOS
        tokens[rows, position] = torch.where(done, PAD, chosen)
        position += (~done).long()
        if bool(done.all()):
            break
    return [
        row[start:end].tolist()
        for row, start, end in zip(tokens, ends, position.tolist(), strict=True)
    ]


def hidden_of(model: DemoModel, tokens: Tensor, switches: Switches) -> Tensor:
    """[B, T, D] after the last norm, of one document a row."""
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.int32))
    streams, _, _ = model.streams(batch, switches)
    hidden: Tensor = model.norm(model.hc_head(streams)).unflatten(0, tokens.shape)
    return hidden
