"""Trains the demo model on one GPU.

    python train.py --corpus corpus.xz --out FOLDER

Rows are 4,096 tokens of whole documents. At first C4 attention sees every entry, then the
indexer's top-k only; in the
last part weights and activations are rounded as the shipped model rounds them (straight-through
gradients). The shipped weights took 20 minutes on one H200.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import PAD, Corpus, Rows, epoch
from model import Batch, DemoConfig, DemoModel, Switches
from optimizer import Optimizer
from torch import Tensor

CONFIG = Path(__file__).parents[2] / "src/finwhale/demo/config.json"
MTP_WEIGHT = 0.3
INDEX_WEIGHT = 0.1
BIAS_RATE = 1e-3
# How often an epoch repeats a source. Prose is small beside the template conversations.
WEIGHTS = {
    "sotu": 2.0,
    "moby": 3.0,
    "shakespeare": 2.0,
    "bible": 2.0,
    "definition": 1.5,
    "story": 1.0,
    "tool": 0.7,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    steps: int
    batch_tokens: int
    warmup: int = 100
    sparse_from: float = 0.15  # shares of the steps
    decay_from: float = 0.55
    rounding_from: float = 0.6
    settle_from: float = 0.8  # gate.bias moves a tenth as fast
    row_tokens: int = 4096

    def rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        left = (self.steps - step) / (self.steps * (1 - self.decay_from))
        return warm * min(1.0, max(left, 0.01))


def hash_table(corpus: Corpus, config: DemoConfig) -> Tensor:
    """tid2eid [V, k]: each token's experts, chosen so that every expert gets the same share of
    the corpus."""
    counts = np.bincount(corpus.tokens, minlength=config.vocab_size) + 1
    rng, load = np.random.default_rng(0), np.zeros(config.n_routed_experts)
    table = np.zeros((config.vocab_size, config.num_experts_per_tok), np.int64)
    for token in np.argsort(-counts):
        chosen = np.argsort(load + rng.random(len(load)) * counts[token], kind="stable")[
            : table.shape[1]
        ]
        load[chosen] += counts[token]
        table[token] = chosen
    return torch.from_numpy(table)


def labels_of(tokens: Tensor, doc: Tensor, shift: int) -> Tensor:
    """[B, T]: the token `shift` places on, or -100 where it is padding or of another document."""
    labels = torch.full_like(tokens, -100)
    same = (doc[:, shift:] == doc[:, :-shift]) & (tokens[:, shift:] != PAD)
    labels[:, :-shift] = torch.where(same, tokens[:, shift:], -100)
    return labels


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Batches:
    """Endless batches; the next epoch is packed in a thread while one is read."""

    def __init__(self, corpus: Corpus, seed: int, device: torch.device) -> None:
        self.corpus, self.device = corpus, device
        self.rng = np.random.default_rng(seed)
        self.pool = ThreadPoolExecutor(1)

    def rows(self, length: int) -> Rows:
        return epoch(self.corpus, WEIGHTS, length, self.rng)

    def read(self, length: int, batch_tokens: int) -> Iterator[Batch]:
        size = batch_tokens // length
        future = self.pool.submit(self.rows, length)
        while True:
            rows = future.result()
            future = self.pool.submit(self.rows, length)
            for start in range(0, len(rows) - size + 1, size):
                tokens = torch.from_numpy(rows.tokens[start : start + size]).to(self.device).long()
                yield Batch(
                    tokens, torch.from_numpy(rows.doc[start : start + size]).to(self.device)
                )


@torch.no_grad()
def balance(model: DemoModel, load: Tensor, rate: float) -> None:
    """Moves gate.bias towards the experts chosen too rarely. load [score-routed layers, E]."""
    gates = [layer.ffn.gate for layer in [*model.layers, *model.mtp] if not layer.ffn.gate.is_hash]
    for gate, share in zip(gates, load, strict=True):
        gate.bias += rate * torch.sign(share.mean() - share)


def train(
    model: DemoModel, corpus: Corpus, plan: Plan, optimizer: Optimizer, out: Path, compiled: bool
) -> None:
    device = next(model.parameters()).device
    switches = Switches(torch.tensor(False, device=device), torch.tensor(False, device=device))
    loss_of = cross_entropy
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        for layer in [*model.layers, *model.mtp]:
            layer.compile(dynamic=False)
        loss_of = torch.compile(cross_entropy, dynamic=False)
    stream = Batches(corpus, 0, device).read(plan.row_tokens, plan.batch_tokens)
    log = (out / "train.jsonl").open("a")
    began, seen = time.time(), 0
    for step in range(plan.steps):
        progress = step / plan.steps
        switches.rounding.fill_(progress >= plan.rounding_from)
        switches.sparse.fill_(progress >= plan.sparse_from)
        batch = next(stream)
        output = model(batch, switches)
        loss = loss_of(output.hidden, model.head.weight, labels_of(batch.tokens, batch.doc, 1))
        mtp_loss = loss_of(
            output.mtp_hidden, model.head.weight, labels_of(batch.tokens, batch.doc, 2)
        )
        (loss + MTP_WEIGHT * mtp_loss + INDEX_WEIGHT * output.index_loss).backward()
        optimizer.step(plan.rate(step))
        for p in model.parameters():
            p.grad = None
        balance(
            model, output.expert_load, BIAS_RATE if progress < plan.settle_from else BIAS_RATE / 10
        )
        seen += batch.tokens.numel()
        if step % 50 == 0 or step == plan.steps - 1:
            max_load = output.expert_load.max() / output.expert_load.mean()
            record = {
                "step": step,
                "loss": round(loss.item(), 4),
                "mtp_loss": round(mtp_loss.item(), 4),
                "index_loss": round(output.index_loss.item(), 4),
                "max_load": round(max_load.item(), 2),
                "tokens": seen,
                "seconds": round(time.time() - began, 1),
            }
            print(json.dumps(record), flush=True)
            print(json.dumps(record), file=log, flush=True)
        if step % 1000 == 999 or step == plan.steps - 1:
            torch.save(model.state_dict(), out / "model.pt.new")
            (out / "model.pt.new").replace(out / "model.pt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6200)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--adam-rate", type=float, default=2e-3)
    parser.add_argument("--start", type=Path, help="a state dict to go on from")
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.load(args.corpus)
    config = DemoConfig.load(CONFIG)
    model = DemoModel(config, torch.bfloat16)
    table = hash_table(corpus, config)
    for layer in model.layers:
        if layer.ffn.gate.is_hash:
            layer.ffn.gate.tid2eid.copy_(table)
    if args.start:
        model.load_state_dict(torch.load(args.start))
    model.to(args.device)
    plan = Plan(steps=args.steps, batch_tokens=args.batch_tokens, row_tokens=args.row_tokens)
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate, weight_decay=0.03)
    train(model, corpus, plan, optimizer, args.out, compiled=not args.eager)


if __name__ == "__main__":
    main()
