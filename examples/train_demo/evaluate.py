"""Measures perplexity on held-out text and agreement of the draft layer, asks closed questions,
draws samples, and writes results.json.

python evaluate.py --corpus corpus.xz --shipped FOLDER --out results.json
"""

# ruff: noqa: RUF001  (DeepSeek's markers)

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Corpus, pack
from export import DEMO, load_shipped
from generate import generate
from model import Batch, DemoModel, Switches
from questions import CHATS, CLOSED, CONTINUATIONS
from tokenizers import Tokenizer
from torch import Tensor
from train import labels_of

ROW_TOKENS = 4096


def chat_prompt(question: str) -> str:
    """Non-thinking chat with one user message and no system prompt, as deepseek-recipe renders
    it."""
    return f"<｜begin▁of▁sentence｜><｜User｜>{question}<｜Assistant｜></think>"


@torch.no_grad()
def perplexity(model: DemoModel, corpus: Corpus, rounding: bool, most_rows: int) -> dict[str, Any]:
    """Per source and over all tokens: perplexity, and the share of positions where the draft
    layer and the model agree."""
    device = next(model.parameters()).device
    switches = Switches(torch.tensor(rounding, device=device), torch.tensor(True, device=device))
    result: dict[str, Any] = {}
    sums = np.zeros(4)
    for index, name in enumerate(corpus.sources):
        rows = pack(corpus, np.flatnonzero(corpus.held_out & (corpus.source == index)), ROW_TOKENS)
        part = np.zeros(4)
        for row in range(min(len(rows), most_rows)):
            tokens = torch.from_numpy(rows.tokens[row : row + 1]).to(device).long()
            batch = Batch(tokens, torch.from_numpy(rows.doc[row : row + 1]).to(device))
            part += _sums(model, batch, switches)
        sums += part
        result[name] = _summary(part)
    result["all"] = _summary(sums)
    return result


def _sums(model: DemoModel, batch: Batch, switches: Switches) -> np.ndarray:
    """Sum of losses, count, agreements of the draft layer with the model, their count."""
    output = model(batch, switches)
    logits = model.logits(output.hidden).float()
    labels = labels_of(batch.tokens, batch.doc, 1)
    loss = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    drafted = model.logits(output.drafts[0]).argmax(-1)[:, :-1]
    valid = labels_of(batch.tokens, batch.doc, 2)[:, :-1] != -100
    agree: Tensor = (drafted == logits.argmax(-1)[:, 1:]) & valid
    return np.array(
        [loss.item(), (labels != -100).sum().item(), agree.sum().item(), valid.sum().item()]
    )


def _summary(part: np.ndarray) -> dict[str, float]:
    loss, count, agreed, drafts = part.tolist()
    return {
        "perplexity": round(float(np.exp(loss / count)), 3),
        "mtp_agreement": round(agreed / drafts, 4),
        "tokens": int(count),
    }


def answers(
    model: DemoModel, tokenizer: Tokenizer, prompts: list[str], length: int, temperature: float
) -> list[str]:
    ids = [tokenizer.encode(p).ids for p in prompts]
    return [
        tokenizer.decode(out, skip_special_tokens=False)
        for out in generate(model, ids, length, temperature)
    ]


def closed_questions(model: DemoModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """Greedy answers. An answer is right if it contains the expected words."""
    found = answers(model, tokenizer, [chat_prompt(q) for q, _ in CLOSED], 40, 0.0)
    rows = [
        {"question": q, "answer": a, "right": w in a}
        for (q, w), a in zip(CLOSED, found, strict=True)
    ]
    return {
        "accuracy": round(sum(bool(r["right"]) for r in rows) / len(rows), 4),
        "count": len(rows),
        "answers": rows,
    }


def samples(model: DemoModel, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    prompts = [(q, chat_prompt(q)) for q in CHATS] + [
        (t, f"<｜begin▁of▁sentence｜>{t}") for t in CONTINUATIONS
    ]
    out = []
    for temperature in (0.0, 0.7):
        texts = answers(model, tokenizer, [p for _, p in prompts], 200, temperature)
        out += [
            {"prompt": q, "temperature": temperature, "text": t}
            for (q, _), t in zip(prompts, texts, strict=True)
        ]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--shipped", type=Path, default=DEMO)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=12, help="of each source; a CPU takes a minute")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    corpus = Corpus.load(args.corpus)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    results: dict[str, Any] = {}
    dtype = torch.bfloat16 if args.device != "cpu" else torch.float32
    shipped = load_shipped(args.shipped, dtype).to(args.device)
    results["without_rounding"] = perplexity(shipped, corpus, False, args.rows)
    results["shipped"] = perplexity(shipped, corpus, True, args.rows)
    results["closed_questions"] = closed_questions(shipped, tokenizer)
    results["samples"] = samples(shipped, tokenizer)
    args.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    for name, rows in results.items():
        if name in ("without_rounding", "shipped"):
            print(name, {source: tuple(row.values()) for source, row in rows.items()})
    closed = results["closed_questions"]
    print("closed", closed["accuracy"], [r for r in closed["answers"] if not r["right"]])
    for sample in results["samples"]:
        print(sample)


if __name__ == "__main__":
    main()
