"""Trains a DSpark draft head for a frozen embedded model, on one GPU or a CPU, for a given time.

    python train_dspark.py --base CHECKPOINT --data FOLDER --out FOLDER --seconds 480

FOLDER of --data holds corpus.xz. The frozen model computes its features once for each row of text,
with the roundings of the shipped model. The head then drafts a block after each of many random
anchors of the row. In the second part the head's own weights and activations are rounded too.

Loss (arXiv 2607.05147): 0.1 cross-entropy to the text + 0.9 L1 distance to the model's
distribution (twice the total variation) + 1.0 confidence, which is the binary cross-entropy to the
probability of acceptance, 1 - L1 / 2. Position k = 1, 2, ... of a block weighs e^(-(k-1)/4).

The checkpoint is written every --save-seconds, on SIGTERM and at the end: the head's tensors as
dspark.safetensors, and config.json. `state.pt` in --state resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Corpus, pack
from dspark import (
    Anchors,
    Drafted,
    DSparkConfig,
    DSparkHead,
    Features,
    HeadParts,
    choose_anchors,
    dspark_json,
    features_of,
)
from export import load_shipped
from export_dspark import export_head
from long_rows import PROSE
from model import Batch, DemoModel, Parts, Switches
from optimizer import Optimizer
from resuming import add_run_options, begin, save_state
from torch import Tensor
from train import BIAS_RATE, Clock, cut, labels_of, log, short_batches

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
GAMMA = 4.0
WARMUP_STEPS = 50
DECAY_FROM = 0.2
ROUNDING_FROM = 0.5
SETTLE_FROM = 0.75  # gate.bias moves a tenth as fast
HELD_OUT_ROWS = 2  # of each source


class Losses(NamedTuple):
    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor


@dataclass
class Judged:
    """The frozen model's distributions for the drafts of J blocks of G."""

    logits: Tensor  # [J, G, V] the head's
    target: Tensor  # [J, G, V] the model's
    confidence: Tensor  # [J, G] logits
    labels: Tensor  # [J, G]; -100 where there is none
    distance: Tensor  # [J, G] L1 distance of the two distributions at temperature 1

    @property
    def valid(self) -> Tensor:
        return self.labels != -100

    @property
    def acceptance(self) -> Tensor:
        """[J, G] the probability that a draft is accepted if all before it are."""
        return 1 - self.distance.detach() / 2

    def accepted_lengths(self) -> tuple[Tensor, Tensor]:
        """[J] expected tokens of a step at temperature 1 and 0, the model's own included.

        The drafts before a position are those of the text.
        """
        sampled = (self.acceptance * self.valid).cumprod(-1).sum(-1)
        agree = self.logits.argmax(-1) == self.target.argmax(-1)
        return 1 + sampled, 1 + (agree & self.valid).long().cumprod(-1).sum(-1)


def judge(
    head: DSparkHead, drafted: Drafted, features: Features, tokens: Tensor, anchors: Anchors,
    lm_head: Tensor,
) -> Judged:  # fmt: skip
    """tokens: [N]; the Markov head reads the text's own tokens."""
    block = head.head_config.block_size
    before = torch.cat((tokens[anchors.at][:, None], anchors.labels[:, :-1].clamp(min=0)), 1)
    logits, confidence = head.markov(drafted, before)
    indices = anchors.at[:, None] + torch.arange(block, device=tokens.device)
    hidden = features.hidden[indices.clamp(max=len(tokens) - 1)]
    target = F.linear(hidden, lm_head.to(hidden.dtype)).float()
    logits = logits.float()
    distance = (logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    return Judged(logits, target, confidence, anchors.labels, distance)


def losses_of(judged: Judged) -> Losses:
    block = judged.labels.shape[1]
    decay = torch.exp(-torch.arange(block, device=judged.labels.device) / GAMMA)
    weight = decay * judged.valid
    cross_entropy = F.cross_entropy(
        judged.logits.flatten(0, 1), judged.labels.flatten(), ignore_index=-100, reduction="none"
    ).view_as(weight)
    confidence = F.binary_cross_entropy_with_logits(
        judged.confidence, judged.acceptance.clamp(0, 1), reduction="none"
    )
    parts = [
        (part * weight).sum() / weight.sum().clamp(min=1e-6)
        for part in (cross_entropy, judged.distance, confidence)
    ]
    total = CE_WEIGHT * parts[0] + L1_WEIGHT * parts[1] + CONFIDENCE_WEIGHT * parts[2]
    return Losses(total, *parts)


@torch.no_grad()
def balance(head: DSparkHead, load: Tensor, rate: float) -> None:
    for stage, share in zip(head.mtp, load, strict=True):
        stage.ffn.gate.bias += rate * torch.sign(share.mean() - share)


class HeldOut:
    """Held-out text with the frozen model's features, which never change."""

    def __init__(self, model: DemoModel, config: DSparkConfig, corpus: Corpus, length: int,
                 anchors: int, on: Switches) -> None:  # fmt: skip
        self.sources: dict[str, tuple[Batch, Features, Anchors]] = {}
        device = next(model.parameters()).device
        window = model.config.sliding_window
        for index, name in enumerate(corpus.sources):
            held = np.flatnonzero(corpus.held_out & (corpus.source == index))
            if not len(held):
                continue
            batch = cut(pack(corpus, held, length), 0, HELD_OUT_ROWS, device)
            chosen = choose_anchors(
                batch,
                labels_of(batch.tokens, batch.doc, 1),
                anchors,
                window,
                config.block_size,
                torch.Generator().manual_seed(0),
            )
            self.sources[name] = batch, features_of(model, config, batch, on), chosen

    @torch.no_grad()
    def measure(self, head: DSparkHead, model: DemoModel, on: Switches) -> dict[str, Any]:
        """By source: accepted length at temperatures 1 and 0, and the confidences' mean error."""
        result: dict[str, Any] = {}
        for name, (batch, features, anchors) in self.sources.items():
            drafted = head(features, batch, anchors, model.embed.weight, model.head.weight, on)
            judged = judge(
                head, drafted, features, batch.tokens.flatten(), anchors, model.head.weight
            )
            real = judged.valid.any(-1)
            lengths = [length[real].float().mean().item() for length in judged.accepted_lengths()]
            error = (judged.confidence.sigmoid() - judged.acceptance)[judged.valid].mean().item()
            result[name] = [round(x, 3) for x in (*lengths, error)]
        return result


def summary(by_source: dict[str, Any]) -> dict[str, float]:
    """Means over the sources of prose and over those of conversations."""
    out = {}
    for kind, chosen in (("prose", True), ("conversations", False)):
        rows = np.array([row for name, row in by_source.items() if (name in PROSE) is chosen])
        if len(rows):
            for column, what in enumerate(("accepted_t1", "accepted_t0", "confidence_error")):
                out[f"{kind}_{what}"] = round(float(rows[:, column].mean()), 3)
    return out


class Trainer:
    def __init__(self, base: Path, model: DemoModel, head: DSparkHead, corpus: Corpus,
                 args: argparse.Namespace, optimizer: Optimizer, clock: Clock) -> None:  # fmt: skip
        """args: of the command line."""
        self.base, self.model, self.head, self.corpus = base, model, head, corpus
        self.args, self.optimizer, self.clock = args, optimizer, clock
        self.device = next(head.parameters()).device
        on = torch.tensor(True, device=self.device)
        self.frozen = Switches(on, on)
        self.switches = Switches(on.clone(), on)
        self.step, self.seen, self.drafts = 0, 0, 0

    def forward(self, batch: Batch) -> tuple[Losses, Tensor]:
        head, model = self.head, self.model
        features = features_of(model, head.head_config, batch, self.frozen)
        anchors = choose_anchors(
            batch,
            labels_of(batch.tokens, batch.doc, 1),
            self.args.row_anchors,
            model.config.sliding_window,
            head.head_config.block_size,
            torch.Generator().manual_seed(self.step),
        )
        drafted = head(
            features, batch, anchors, model.embed.weight, model.head.weight, self.switches
        )
        judged = judge(head, drafted, features, batch.tokens.flatten(), anchors, model.head.weight)
        return losses_of(judged), drafted.expert_load

    def backward(self, losses: Losses) -> None:
        for p in self.head.parameters():
            p.grad = None
        losses.total.backward()

    def warm_up(self, batch: Batch, compiled: bool) -> None:
        """Compiles and forgets the gradients; runs eagerly if compilation fails."""
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            self.head.parts, self.model.parts = HeadParts.compiled(), Parts.compiled()
        try:
            self.backward(self.forward(batch)[0])
        except Exception as error:  # the one run on a GPU must not be lost
            if not compiled:
                raise
            log(f"compilation failed, goes on eagerly: {type(error).__name__}: {str(error)[:2000]}")
            self.head.parts, self.model.parts = HeadParts(), Parts()
            self.backward(self.forward(batch)[0])

    def rate(self, progress: float) -> float:
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return warm * min(1.0, max((1 - progress) / (1 - DECAY_FROM), 0.01))

    def progress(self) -> float:
        steps = self.args.max_steps
        return max(self.clock.progress(), min(1.0, self.step / steps) if steps else 0.0)

    def train_step(self, batch: Batch, progress: float) -> Losses:
        self.switches.rounding.fill_(progress >= ROUNDING_FROM)
        losses, load = self.forward(batch)
        self.backward(losses)
        self.optimizer.step(self.rate(progress))
        balance(self.head, load, BIAS_RATE / 10 if progress >= SETTLE_FROM else BIAS_RATE)
        self.step += 1
        self.seen += batch.tokens.numel()
        self.drafts += len(batch.tokens) * self.args.row_anchors
        return losses

    def run(self, out: Path, state: Path, held_out: HeldOut) -> None:
        args, saved = self.args, self.clock.elapsed()
        size = args.batch_tokens // args.row_tokens
        stream = short_batches(self.corpus, self.step, args.row_tokens, size, self.device)
        lines = (out / "train_dspark.jsonl").open("a")

        def note(record: dict[str, Any]) -> None:
            text = json.dumps({"step": self.step, **record})
            log(text)
            print(text, file=lines, flush=True)

        def measure() -> None:
            parts, self.head.parts = self.head.parts, HeadParts()  # other sizes: compile nothing
            by_source = held_out.measure(self.head, self.model, self.frozen)
            self.head.parts = parts
            note({"held_out": summary(by_source), "by_source": by_source})

        while (progress := self.progress()) < 1:
            if self.step % args.measure_steps == 0:
                measure()
            losses = self.train_step(next(stream), progress)
            if (self.step - 1) % args.log_steps == 0:
                values = zip(losses._fields, losses, strict=True)
                note(
                    {"progress": round(progress, 4)}
                    | {name: round(value.item(), 4) for name, value in values}
                    | {"tokens": self.seen, "blocks": self.drafts}
                    | {"seconds": round(self.clock.elapsed(), 1)}
                )
            if self.clock.elapsed() - saved > args.save_seconds:
                saved = self.clock.elapsed()
                self.save(out, state)
        measure()
        self.save(out, state)

    def save(self, out: Path, state: Path) -> None:
        weights = {name: value.cpu() for name, value in self.head.state_dict().items()}
        export_head(weights, self.base, out)
        values = {
            "head": weights,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "drafts": self.drafts,
            "elapsed": self.clock.elapsed(),
            "progress": self.clock.scheduled(),
        }
        save_state(values, state)

    def resume(self, values: dict[str, Any]) -> None:
        self.head.load_state_dict(values["head"])
        self.optimizer.load_state_dict(values["optimizer"])
        self.step, self.seen, self.drafts = values["step"], values["seen"], values["drafts"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser, Path("/tmp/train_dspark_state"), 32_768)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint of the frozen model")
    parser.add_argument("--row-anchors", type=int, default=256, help="blocks of a row")
    parser.add_argument("--measure-steps", type=int, default=250)
    args = parser.parse_args()
    resumed = begin(args)
    clock = Clock(args.seconds, resumed.get("elapsed", 0.0))
    corpus = Corpus.load(args.data / "corpus.xz")
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    model = load_shipped(args.base, dtype).to(args.device).requires_grad_(False)
    raw = dspark_json(json.loads((args.base / "config.json").read_text()))
    head = DSparkHead(model.config, DSparkConfig.of(raw), dtype).to(args.device)
    head.start_from(model)
    optimizer = Optimizer(head, args.muon_rate, args.adam_rate, weight_decay=0.03)
    trainer = Trainer(args.base, model, head, corpus, args, optimizer, clock)
    if resumed:
        trainer.resume(resumed)
    held_out = HeldOut(
        model, head.head_config, corpus, args.row_tokens, args.row_anchors, trainer.frozen
    )
    log(
        f"ready to warm up after {clock.elapsed():.1f} s: python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, {sum(p.numel() for p in head.parameters()):,} parameters"
    )
    size = args.batch_tokens // args.row_tokens
    warm = next(short_batches(corpus, trainer.step, args.row_tokens, size, trainer.device))
    trainer.warm_up(warm, not args.eager and args.device != "cpu")
    clock.start_schedule(resumed.get("progress", 0.0))
    trainer.run(args.out, args.state, held_out)
    log(
        f"trained: {trainer.step} steps, {trainer.seen:,} tokens, {trainer.drafts:,} blocks, "
        f"{clock.elapsed():.1f} s"
    )


if __name__ == "__main__":
    main()
