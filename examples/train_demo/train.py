"""Trains the embedded model on one GPU, for a given time.

    python train.py --data FOLDER --out FOLDER --seconds 480 [--start CHECKPOINT]

FOLDER of --data holds corpus.xz. The schedule follows the clock. Rows have 2,048 tokens of whole
documents at first, and in the last part 32,768 tokens, of which most belong to one or two long
documents. At first C4 attention sees every entry, then the indexer's top-k only; in the last part
weights and activations are rounded as the shipped model rounds them (straight-through gradients).

The checkpoint is written in the official format, in files of at most 15 MiB: every --save-seconds,
on SIGTERM and at the end. `state.pt` in --state resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import PAD, Corpus, Rows, epoch
from export import export, started
from long_rows import LongRows, position_rows
from model import Batch, DemoConfig, DemoModel, Output, Parts, Switches
from optimizer import Optimizer
from resuming import add_run_options, begin, save_state
from torch import Tensor

MTP_WEIGHTS = (0.3, 0.15)  # of the MTP layer's first step, and of the second on its own streams
SHARD_BYTES = 15 * 1024 * 1024 - 100_000
RESERVED_SECONDS = 20.0  # for the perplexity by position and the last checkpoint
BUCKET = 4096  # positions that one figure of the perplexity by position covers
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
    """The schedule, in shares of the training time."""

    batch_tokens: int
    row_tokens: int
    long_tokens: int  # of a row in the last part; 0 for none
    max_steps: int = 0  # 0: only the clock ends the training
    warmup: int = 100  # steps
    sparse_from: float = 0.12
    second_draft_from: float = 0.5
    decay_from: float = 0.5
    rounding_from: float = 0.6
    settle_from: float = 0.75  # gate.bias moves a tenth as fast
    long_from: float = 0.78

    def rate(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        left = (1 - progress) / (1 - self.decay_from)
        return warm * min(1.0, max(left, 0.01))


class Clock:
    """Progress of the training, 0 to 1, by the time that is left; SIGTERM ends it."""

    def __init__(self, seconds: float, spent: float) -> None:
        self.began = time.monotonic() - spent
        self.seconds = seconds
        self.first = spent  # the schedule begins here, after compilation
        self.stopped = False
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_: object) -> None:
        self.stopped = True

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def start_schedule(self, progress: float) -> None:
        """Let the schedule stand at `progress` now."""
        if progress < 1:
            end = self.seconds - RESERVED_SECONDS
            self.first = (self.elapsed() - progress * end) / (1 - progress)

    def progress(self) -> float:
        return 1.0 if self.stopped else self.scheduled()

    def scheduled(self) -> float:
        """Progress without regard to SIGTERM: where a resumed run continues."""
        end = self.seconds - RESERVED_SECONDS
        return min(1.0, max(0.0, (self.elapsed() - self.first) / max(end - self.first, 1e-6)))


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
    """[B, T]: the token `shift` positions on; -100 where it is padding or of another document."""
    labels = torch.full_like(tokens, -100)
    same = (doc[:, shift:] == doc[:, :-shift]) & (tokens[:, shift:] != PAD)
    labels[:, :-shift] = torch.where(same, tokens[:, shift:], -100)
    return labels


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def cut(rows: Rows, start: int, size: int, device: torch.device) -> Batch:
    tokens = torch.from_numpy(rows.tokens[start : start + size]).to(device).long()
    return Batch(tokens, torch.from_numpy(rows.doc[start : start + size]).to(device))


def short_batches(
    corpus: Corpus, seed: int, length: int, size: int, device: torch.device
) -> Iterator[Batch]:
    """Endless batches; the next epoch is packed in a thread while one is read."""
    rng = np.random.default_rng(seed)
    pool = ThreadPoolExecutor(1)
    future = pool.submit(epoch, corpus, WEIGHTS, length, rng)
    while True:
        rows = future.result()
        future = pool.submit(epoch, corpus, WEIGHTS, length, rng)
        for start in range(0, len(rows) - size + 1, size):
            yield cut(rows, start, size, device)


def long_batches(
    corpus: Corpus, seed: int, length: int, size: int, device: torch.device
) -> Iterator[Batch]:
    """Endless batches of long documents; a thread builds the next ones."""
    source, pool = LongRows(corpus, length, seed), ThreadPoolExecutor(1)
    futures = [pool.submit(source.rows, size) for _ in range(8)]
    while True:
        rows = futures.pop(0).result()
        futures.append(pool.submit(source.rows, size))
        yield cut(rows, 0, size, device)


@torch.no_grad()
def balance(model: DemoModel, load: Tensor, rate: float) -> None:
    """Moves gate.bias towards the experts chosen too rarely. load [score-routed layers, E]."""
    gates = [layer.ffn.gate for layer in [*model.layers, *model.mtp] if not layer.ffn.gate.is_hash]
    for gate, share in zip(gates, load, strict=True):
        gate.bias += rate * torch.sign(share.mean() - share)


def draft_labels(batch: Batch, step: int) -> Tensor:
    """The labels [B, T] of a step of the MTP layer. The first tokens of a document have none, since
    there are no streams of the step before."""
    labels = labels_of(batch.tokens, batch.doc, 2)
    for _ in range(step):
        same = F.pad(batch.doc[:, 1:] == batch.doc[:, :-1], (1, 0), value=False)
        earlier = F.pad(labels[:, :-1], (1, 0), value=-100)
        labels = torch.where(same & (earlier != -100), labels, -100)
    return labels


@dataclass
class Losses:
    total: Tensor
    token: Tensor
    drafts: list[Tensor]
    index: Tensor

    def record(self) -> dict[str, float]:
        values = {"loss": self.token, "index_loss": self.index}
        values |= {f"mtp_loss_{i + 1}": loss for i, loss in enumerate(self.drafts)}
        return {name: round(value.item(), 4) for name, value in values.items()}


class Trainer:
    def __init__(
        self,
        config: Path,
        model: DemoModel,
        corpus: Corpus,
        plan: Plan,
        optimizer: Optimizer,
        clock: Clock,
    ) -> None:
        self.config, self.model, self.plan = config, model, plan
        self.optimizer, self.clock = optimizer, clock
        self.corpus, self.device = corpus, next(model.parameters()).device
        off = torch.tensor(False, device=self.device)
        self.switches = Switches(off, off.clone())
        self.loss_of = cross_entropy
        self.step, self.seen = 0, 0

    def compile(self) -> None:
        torch._dynamo.config.recompile_limit = 64
        self.model.parts = Parts.compiled()
        self.loss_of = torch.compile(cross_entropy, dynamic=False)

    def batches(self, long: bool) -> Iterator[Batch]:
        length = self.plan.long_tokens if long else self.plan.row_tokens
        make = long_batches if long else short_batches
        return make(self.corpus, self.step, length, self.plan.batch_tokens // length, self.device)

    def losses(self, batch: Batch, draft_steps: int) -> tuple[Losses, Output]:
        output = self.model(batch, self.switches, draft_steps)
        head = self.model.head.weight
        token = self.loss_of(output.hidden, head, labels_of(batch.tokens, batch.doc, 1))
        drafts = [
            self.loss_of(hidden, head, draft_labels(batch, i))
            for i, hidden in enumerate(output.drafts)
        ]
        total = token + INDEX_WEIGHT * output.index_loss
        for weight, loss in zip(MTP_WEIGHTS, drafts, strict=False):
            total = total + weight * loss
        return Losses(total, token, drafts, output.index_loss), output

    def warm_up(self, long: bool) -> None:
        """Compiles everything that a kind of rows needs, and forgets the gradients."""
        began = time.monotonic()
        losses, _ = self.losses(next(self.batches(long)), 2)
        losses.total.backward()
        for p in self.model.parameters():
            p.grad = None
        value = losses.total.item()
        log(
            f"warm-up, {'long' if long else 'short'} rows: {time.monotonic() - began:.1f} s, "
            f"loss {value:.3f}"
        )

    def train_step(self, batch: Batch, progress: float) -> tuple[Losses, Tensor]:
        plan = self.plan
        self.switches.rounding.fill_(progress >= plan.rounding_from)
        self.switches.sparse.fill_(progress >= plan.sparse_from)
        losses, output = self.losses(batch, 1 + (progress >= plan.second_draft_from))
        losses.total.backward()
        self.optimizer.step(plan.rate(self.step, progress))
        for p in self.model.parameters():
            p.grad = None
        settled = progress >= plan.settle_from
        balance(self.model, output.expert_load, BIAS_RATE / 10 if settled else BIAS_RATE)
        self.step += 1
        self.seen += batch.tokens.numel()
        return losses, output.expert_load

    def progress(self) -> float:
        steps = self.plan.max_steps
        return max(self.clock.progress(), min(1.0, self.step / steps) if steps else 0.0)

    def run(self, out: Path, state: Path, save_seconds: float, log_steps: int) -> None:
        saved, stream, is_long = self.clock.elapsed(), self.batches(False), False
        lines = (out / "train.jsonl").open("a")
        while (progress := self.progress()) < 1:
            if self.plan.long_tokens and progress >= self.plan.long_from and not is_long:
                stream, is_long = self.batches(True), True
            losses, load = self.train_step(next(stream), progress)
            if (self.step - 1) % log_steps == 0:
                record = {"step": self.step - 1, "progress": round(progress, 4)}
                record |= losses.record()
                record |= {
                    "max_load": round((load.max() / load.mean()).item(), 2),
                    "tokens": self.seen,
                    "long": is_long,
                    "seconds": round(self.clock.elapsed(), 1),
                }
                log(json.dumps(record))
                print(json.dumps(record), file=lines, flush=True)
            if self.clock.elapsed() - saved > save_seconds:
                saved = self.clock.elapsed()
                self.save(out, state)
        self.save(out, state)
        log(f"trained: {self.step} steps, {self.seen:,} tokens, {self.clock.elapsed():.1f} s")

    def save(self, out: Path, state: Path) -> None:
        """The official checkpoint into `out`, and everything that a resumed run needs."""
        weights = {name: value.cpu() for name, value in self.model.state_dict().items()}
        new = state / "checkpoint"
        shutil.rmtree(new, ignore_errors=True)
        export(weights, self.config, new, SHARD_BYTES)
        for file in new.iterdir():
            shutil.copyfile(file, out / f"{file.name}.new")
        for file in out.glob("*.new"):
            file.replace(file.with_suffix(""))
        values = {
            "model": weights,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "elapsed": self.clock.elapsed(),
            "progress": self.clock.scheduled(),
        }
        save_state(values, state)

    def resume(self, values: dict[str, Any]) -> None:
        self.model.load_state_dict(values["model"])
        self.optimizer.load_state_dict(values["optimizer"])
        self.step, self.seen = values["step"], values["seen"]

    def perplexity_by_position(self, num_rows: int) -> list[float]:
        """One figure for each BUCKET positions; every one covers the same held-out tokens."""
        self.switches.rounding.fill_(True)
        self.switches.sparse.fill_(True)
        length, size = self.plan.long_tokens, self.plan.batch_tokens // self.plan.long_tokens
        rows = position_rows(self.corpus, length, num_rows, BUCKET)
        sums = torch.zeros(length, dtype=torch.float64)
        for start in range(0, len(rows) - size + 1, size):
            batch = cut(rows, start, size, self.device)
            # With gradients, as it was compiled; the graph goes before the next one is built.
            hidden = self.model(batch, self.switches, 1).hidden.detach()
            logits = self.model.logits(hidden)
            for row, labels in zip(logits, labels_of(batch.tokens, batch.doc, 1), strict=True):
                loss = F.cross_entropy(row.float(), labels, ignore_index=-100, reduction="none")
                sums += loss.detach().double().cpu()
        sums = sums[: length - 1] / (len(rows) // size * size)
        return [round(float(part.mean().exp()), 3) for part in sums.split(BUCKET)]


def log(text: str) -> None:
    print(text, flush=True)


def warm_up(trainer: Trainer) -> None:
    """Compiles. Long rows that do not run are given up, one length after another."""
    trainer.warm_up(False)
    plan = trainer.plan
    for length in (plan.long_tokens, plan.long_tokens // 2, plan.long_tokens // 4):
        trainer.plan = replace(plan, long_tokens=length)
        if not length:
            return
        try:
            trainer.warm_up(True)
        except Exception as error:  # the one run on a GPU must not be lost
            log(f"rows of {length} tokens do not run: {type(error).__name__}: {str(error)[:2000]}")
            for p in trainer.model.parameters():
                p.grad = None
            torch.cuda.empty_cache()
        else:
            return
    trainer.plan = replace(plan, long_tokens=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser, Path("/tmp/train_demo_state"), 65_536)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config.json")
    parser.add_argument("--start", type=Path, help="a checkpoint whose fitting weights begin")
    parser.add_argument("--long-tokens", type=int, default=32_768)
    parser.add_argument("--position-rows", type=int, default=16)
    args = parser.parse_args()
    resumed = begin(args)
    clock = Clock(args.seconds, resumed.get("elapsed", 0.0))
    corpus = Corpus.load(args.data / "corpus.xz")
    config = DemoConfig.load(args.config)
    model = DemoModel(config, torch.bfloat16 if args.device != "cpu" else torch.float32)
    table = hash_table(corpus, config)
    for layer in model.layers:
        if layer.ffn.gate.is_hash:
            layer.ffn.gate.tid2eid.copy_(table)
    if args.start:
        fitting = started(args.start, model.state_dict())
        model.load_state_dict(fitting, strict=False)
        for name, p in model.named_parameters():
            if name not in fitting and name.endswith("w2.weight"):
                p.data.mul_(0.1)  # new experts must not drown what the other weights know
        log(f"{len(fitting)} of {len(model.state_dict())} tensors from {args.start}")
    model.to(args.device)
    plan = Plan(
        batch_tokens=args.batch_tokens,
        row_tokens=args.row_tokens,
        long_tokens=args.long_tokens,
        max_steps=args.max_steps,
    )
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate, weight_decay=0.03)
    trainer = Trainer(args.config, model, corpus, plan, optimizer, clock)
    if resumed:
        trainer.resume(resumed)
    if not args.eager:
        trainer.compile()
    log(
        f"ready to warm up after {clock.elapsed():.1f} s: python {sys.version.split()[0]}, "
        f"torch {torch.__version__}"
    )
    warm_up(trainer)
    clock.start_schedule(resumed.get("progress", 0.0))
    trainer.run(args.out, args.state, args.save_seconds, args.log_steps)
    if trainer.plan.long_tokens and args.position_rows:
        by_position = trainer.perplexity_by_position(args.position_rows)
        record = {"bucket": BUCKET, "rows": args.position_rows, "perplexity": by_position}
        log(f"perplexity by position: {json.dumps(record)}")
        (args.out / "positions.json").write_text(json.dumps(record) + "\n")
    log(f"done after {clock.elapsed():.1f} s")


if __name__ == "__main__":
    main()
