"""Measures perplexity on held-out text and the draft layer's agreement, with finwhale on a CPU.

PYTHONPATH=../.. python evaluate_engine.py --corpus work/corpus.xz [--activations exact]
    [--wo-a-input bf16]

`evaluate.py` measures the training's own model; this measures what users run. It prints one JSON
object: over all sources and by source, the perplexity of a token and the share of positions where
the draft layer's likeliest token is the model's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import Corpus
from tools.stepping import Stepper

from finwhale import LLM
from finwhale.engine.ranks.ranks import first_rank

SOURCE_TOKENS = 5000  # a source is left after the document that reaches this
DOCUMENT_TOKENS = 1500  # longer documents are cut


@torch.inference_mode()
def sums(stepper: Stepper, text: list[int]) -> np.ndarray:
    """[4]: negative log-likelihood, tokens, agreeing drafts, drafts of one document."""
    runner = stepper.runner
    layer = runner.model.draft_head
    assert layer is not None
    sequence = stepper.sequence(text[:-1])
    (streams,) = stepper.step([(sequence, len(text) - 1)])
    assert stepper.inputs is not None
    following = torch.tensor(text[1:])
    drafted = layer(stepper.inputs, streams, following, runner.cache, runner.segments)
    stepper.release(sequence)
    logits = stepper.logits(streams)
    likelihood = logits.double().log_softmax(-1).gather(1, following[:, None]).sum()
    agreeing = layer.compute_logits(drafted)[:-1].argmax(1) == logits[1:].argmax(1)
    return np.array([-likelihood.item(), len(following), agreeing.sum().item(), len(agreeing)])


def summary(total: np.ndarray) -> dict[str, Any]:
    return {
        "perplexity": round(float(np.exp(total[0] / total[1])), 4),
        "agreement": round(float(total[2] / total[3]), 4),
        "tokens": int(total[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--activations", default="as-trained")
    parser.add_argument("--wo-a-input", default="fp8")
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(device="cpu", activations=args.activations, wo_a_input=args.wo_a_input)
    stepper, corpus = Stepper(first_rank(llm._engine.executor)), Corpus.load(args.corpus)
    starts = np.concatenate([[0], np.cumsum(corpus.lengths)])
    by_source = {}
    for index, name in enumerate(corpus.sources):
        total, used = np.zeros(4), 0
        for document in np.flatnonzero(corpus.held_out & (corpus.source == index)):
            text = corpus.tokens[starts[document] : starts[document + 1]][:DOCUMENT_TOKENS].tolist()
            if len(text) >= 8 and used < SOURCE_TOKENS:
                total += sums(stepper, text)
                used += len(text)
        if used:
            by_source[name] = total
    result = {
        "activations": args.activations,
        "wo_a_input": args.wo_a_input,
        "all": summary(np.sum(list(by_source.values()), axis=0)),
        **{name: summary(total) for name, total in by_source.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
