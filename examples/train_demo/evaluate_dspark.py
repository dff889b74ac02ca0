"""Measures the accepted lengths of a DSpark head by source and temperature, and its confidences.

    python evaluate_dspark.py --model CHECKPOINT --mtp CHECKPOINT --corpus corpus.xz --out FILE

--model is a checkpoint with a DSpark head that stands alone (export_dspark.py), --mtp the same
base model with its MTP layer. Finwhale's engine continues held-out texts, drafting with MTP. The
engine chooses argmax(logits / temperature + G), where the noise G is a function of (seed, position,
token). The head drafts over the same text: with the same noise, argmax(its logits / temperature +
G), and for comparison its likeliest token. A draft is accepted if it is the text's token.

A temperature for each position of a block is fitted to the confidences' logits on half of the
texts; the tables of confidences come from the other half.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Corpus
from dspark import DSparkHead, anchors_at, features_of
from export import load_shipped
from export_dspark import load_head
from model import Batch, DemoModel, Switches
from torch import Tensor
from train import labels_of

from finwhale import LLM, SamplingParams
from finwhale.ops.sampling.noise import gumbel

PAD, END_OF_THINKING = 2, 6
PROSE_PROMPT = 128  # tokens of a text without an answer of the assistant
MAX_PROMPT = 1024
SEED = 7
BINS = 10
ROW = 128
FIT = np.exp(np.linspace(np.log(0.2), np.log(10), 200))  # temperatures that are tried


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation by the model."""

    source: str
    tokens: list[int]
    num_prompt: int
    temperature: float


@dataclass
class Trial:
    """The head's drafts at every anchor of one text."""

    text: Text
    shared: np.ndarray  # [J] accepted drafts with the model's own noise
    likeliest: np.ndarray  # [J] accepted drafts if each is the head's likeliest token
    confidence: np.ndarray  # [J, G] logits, of the drafts with the model's noise
    accepted: np.ndarray  # [J, G] 1, 0, or -1 after the first rejection and after the text


def prompts_of(corpus: Corpus, index: int, count: int) -> list[list[int]]:
    """Held-out conversations up to the answer, or the first tokens of prose."""
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    prompts: list[list[int]] = []
    for document in np.flatnonzero(corpus.held_out & (corpus.source == index)):
        text = corpus.tokens[starts[document] : starts[document] + corpus.lengths[document]]
        ends = np.flatnonzero(text == END_OF_THINKING)
        size = int(ends[0]) + 1 if len(ends) else PROSE_PROMPT
        if size <= MAX_PROMPT and len(prompts) < count:
            prompts.append(text[:size].tolist())
    return prompts


def continued(llm: LLM, source: str, prompts: list[list[int]], temperature: float,
              max_tokens: int) -> list[Text]:  # fmt: skip
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=SEED + i)
        for i in range(len(prompts))
    ]
    outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
    return [
        Text(source, [*prompt, *output.token_ids], len(prompt), temperature)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def noise_of(positions: Tensor, seed: int, vocabulary: int) -> Tensor:
    """The engine's noise [..., V] of the draws at positions [...] of the continuation."""
    flat = positions.flatten()
    seeds = torch.full_like(flat, seed)
    noise: Tensor = gumbel(seeds, torch.zeros_like(flat), flat, vocabulary)
    return noise.view(*positions.shape, vocabulary)


@torch.no_grad()
def trial(model: DemoModel, head: DSparkHead, text: Text, seed: int) -> Trial | None:
    """Draft after every token of the continuation but the last."""
    device, block = next(head.parameters()).device, head.head_config.block_size
    on = Switches(torch.tensor(True, device=device), torch.tensor(True, device=device))
    columns = torch.arange(text.num_prompt, len(text.tokens) - 1, device=device)
    if not len(columns):
        return None
    size = -(-len(text.tokens) // ROW) * ROW
    tokens = torch.full((1, size), PAD, device=device)
    tokens[0, : len(text.tokens)] = torch.tensor(text.tokens, device=device)
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.int32))
    anchors = anchors_at(
        batch, labels_of(tokens, batch.doc, 1), columns[None], model.config.sliding_window, block
    )
    features = features_of(model, head.head_config, batch, on)
    drafted = head(features, batch, anchors, model.embed.weight, model.head.weight, on)
    newest = tokens[0, columns]
    noise = None
    if text.temperature:
        positions = columns[:, None] + torch.arange(1, block + 1, device=device)
        noise = noise_of(positions - text.num_prompt, seed, model.config.vocab_size)
    drafts, confidence = head.propose(drafted, newest, text.temperature, noise)
    likeliest, _ = head.propose(drafted, newest, 0.0, None)

    def accepted(tokens: Tensor) -> np.ndarray:
        return (tokens == anchors.labels).long().cumprod(-1).cpu().numpy()

    right = accepted(drafts)
    reached = np.concatenate((np.ones_like(right[:, :1]), right[:, :-1]), 1)
    judged = (reached == 1) & (anchors.labels != -100).cpu().numpy()
    return Trial(
        text,
        right.sum(-1),
        accepted(likeliest).sum(-1),
        confidence.float().cpu().numpy(),
        np.where(judged, right, -1),
    )


def steps(accepted: np.ndarray) -> tuple[int, int]:
    """Tokens and steps of a decode that begins at the first anchor."""
    at = count = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        count += 1
    return min(at, len(accepted)), count


def mean_length(all_accepted: list[np.ndarray]) -> float | None:
    tokens, count = np.sum([steps(one) for one in all_accepted], 0)
    return round(float(tokens / count), 3) if count else None


def sigmoid(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def pairs(trials: list[Trial], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits and outcomes of the drafts at position k whose predecessors were all accepted."""
    logits = np.concatenate([t.confidence[:, k] for t in trials])
    outcome = np.concatenate([t.accepted[:, k] for t in trials])
    return logits[outcome >= 0], outcome[outcome >= 0]


def fitted_temperature(logits: np.ndarray, outcome: np.ndarray) -> float:
    """The temperature with the largest likelihood; 1 without data."""
    if not len(logits):
        return 1.0
    sign = np.where(outcome == 1, -1.0, 1.0)
    loss = [np.logaddexp(0, sign * logits / temperature).mean() for temperature in FIT]
    return round(float(FIT[int(np.argmin(loss))]), 3)


def reliability(confidence: np.ndarray, outcome: np.ndarray) -> dict[str, Any]:
    """Expected calibration error, and for each bin: mean confidence, accepted share, count."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    rows, error = [], 0.0
    for index in range(BINS):
        inside = bins == index
        if inside.any():
            mean, share = float(confidence[inside].mean()), float(outcome[inside].mean())
            rows.append([round(mean, 3), round(share, 3), int(inside.sum())])
            error += abs(mean - share) * float(inside.mean())
    return {"error": round(error, 4), "bins": rows}


def calibration(trials: list[Trial]) -> dict[str, Any]:
    fit, check = trials[::2], trials[1::2]
    block = trials[0].confidence.shape[1]
    temperatures = [fitted_temperature(*pairs(fit, k)) for k in range(block)]
    raw, scaled, outcomes = [], [], []
    for k, temperature in enumerate(temperatures):
        logits, outcome = pairs(check, k)
        raw.append(sigmoid(logits))
        scaled.append(sigmoid(logits / temperature))
        outcomes.append(outcome)
    outcome = np.concatenate(outcomes)
    return {
        "temperatures": temperatures,
        "before": reliability(np.concatenate(raw), outcome),
        "after": reliability(np.concatenate(scaled), outcome),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mtp", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--prompts", type=int, default=16, help="of each source")
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--mtp-drafts", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    corpus = Corpus.load(args.corpus)
    llm = LLM(args.mtp, device=args.device, draft_tokens=args.mtp_drafts)
    model = load_shipped(args.mtp, dtype).to(args.device).requires_grad_(False)
    head = load_head(args.model, dtype).to(args.device)
    results: dict[str, Any] = {"accepted_length": {}, "calibration": {}}
    for temperature in args.temperatures:
        trials: list[Trial] = []
        table: dict[str, Any] = {}
        for index, source in enumerate(corpus.sources):
            prompts = prompts_of(corpus, index, args.prompts)
            before = llm.metrics()
            texts = continued(llm, source, prompts, temperature, args.max_tokens)
            after = llm.metrics()
            verified = after.verifications - before.verifications
            accepted = sum(after.drafts_accepted) - sum(before.drafts_accepted)
            found = [trial(model, head, text, SEED + i) for i, text in enumerate(texts)]
            made = [one for one in found if one is not None]
            trials += made
            table[source] = {
                "dspark": mean_length([one.shared for one in made]),
                "dspark_likeliest": mean_length([one.likeliest for one in made]),
                "mtp": round(1 + accepted / verified, 3) if verified else None,
                "tokens": sum(len(one.shared) for one in made),
            }
            print(temperature, source, table[source], flush=True)
        results["accepted_length"][str(temperature)] = table
        results["calibration"][str(temperature)] = calibration(trials)
        print(temperature, results["calibration"][str(temperature)], flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
