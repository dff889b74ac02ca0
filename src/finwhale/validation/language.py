"""Checks of the model as a language model: perplexity, word order, prefill against decode."""

from random import Random

import numpy as np
from numpy.typing import NDArray

from finwhale.llm import LLM
from finwhale.validation.expectations import Expectations
from finwhale.validation.report import Check, Expectation, skipped
from finwhale.validation.scoring import score
from finwhale.validation.texts import PROSE, TEXTS

# Longer than the sliding window of 128 tokens, and than the window of a C128 entry.
MAX_TOKENS = 160
# The end of a text that is scored again, after a prefill of its beginning.
TAIL = 24
WORD_ORDER = Expectation.above(
    5, 2, "stated: shuffled words surprise a model that reads its context"
)
AGREEMENT = Expectation.below(
    0.1, 0.5, "stated: 0 on a CPU; a GPU rounds differently in batches of other sizes"
)


def check_language(llm: LLM, expectations: Expectations) -> list[Check]:
    """Score the built-in texts. Raises RequestError if a request fails."""
    bos = [llm._engine.model_config.bos_token_id]
    wanted = expectations.perplexity
    texts = {name: _encode(llm, TEXTS[name]) for name in wanted}
    prose = [name for name in PROSE if name in texts]
    shuffled = [_encode(llm, _shuffled(TEXTS[name])) for name in prose]
    scores = score(llm, [(bos, ids) for ids in (*texts.values(), *shuffled)])
    ordered = dict(zip(texts, scores, strict=False))
    checks = [
        wanted[name].check(f"perplexity: {name}", _perplexity(logprobs))
        for name, logprobs in ordered.items()
    ]
    checks += [
        skipped(f"perplexity: {name}", "the model was not trained on such text")
        for name in TEXTS
        if name not in wanted
    ]
    ratio = _perplexity(np.concatenate(scores[len(texts) :])) / _perplexity(
        np.concatenate([ordered[name] for name in prose])
    )
    checks.append(WORD_ORDER.check("perplexity of shuffled words / of prose", ratio, 1))
    again = score(llm, [(bos + ids[:-TAIL], ids[-TAIL:]) for ids in texts.values()])
    difference = np.concatenate(again) - np.concatenate(
        [logprobs[-TAIL:] for logprobs in ordered.values()]
    )
    checks.append(
        AGREEMENT.check("log-probabilities, prefill - decode", float(np.abs(difference).mean()), 4)
    )
    return checks


def _encode(llm: LLM, text: str) -> list[int]:
    return llm.encode(text)[1 : 1 + MAX_TOKENS]


def _shuffled(text: str) -> str:
    words = text.split()
    Random(0).shuffle(words)
    return " ".join(words)


def _perplexity(logprobs: NDArray[np.float64]) -> float:
    return float(np.exp(-logprobs.mean()))
