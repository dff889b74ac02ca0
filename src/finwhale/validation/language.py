"""Checks of the model as a language model: perplexity, word order, prefill against decode.

A text's log-probabilities come from ordinary requests of the engine. A request generates the text
under a matcher that allows only the text's next token. The engine reports each token's
log-probability before the mask, so these are the model's own. All texts run in one batch. This
works with any number of ranks, and it exercises decode rather than prefill.
"""

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from finwhale.errors import RequestError
from finwhale.llm import LLM
from finwhale.request import SamplingParams
from finwhale.validation.expectations import Expectations
from finwhale.validation.report import Check, Expectation, skipped
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


class ForcedTokens:
    """A matcher (engine.plan.sampling.TokenMatcher) that allows one text and nothing else."""

    def __init__(self, token_ids: Sequence[int], index: int = 0) -> None:
        self.error: str | None = None
        self._token_ids = token_ids
        self._index = index

    def copy(self) -> "ForcedTokens":
        return ForcedTokens(self._token_ids, self._index)

    def allow(self, words: NDArray[np.int32]) -> None:
        # A draft past the end of the text may ask for one more mask.
        token_id = self._token_ids[min(self._index, len(self._token_ids) - 1)]
        words[:] = 0
        words.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)

    def accept(self, token_id: int) -> None:
        self._index += 1


def score(
    llm: LLM, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[NDArray[np.float64]]:
    """Score continuations: returns an array for each, with its tokens' natural log-probabilities.

    Args:
        texts: pairs of a prompt, at least one token, and the continuation to score.

    Raises:
        RequestError: a request failed, for example because logits are not finite.
    """
    # A cached prefix would hide how a prompt is prefilled.
    llm._engine.reset_prefix_cache()
    outputs = [
        llm._engine.add_request(
            f"score-{number}",
            prompt,
            SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, logprobs=0),
            matcher=ForcedTokens(ids),
        )
        for number, (prompt, ids) in enumerate(texts)
    ]
    while llm._engine.has_work:
        llm._engine.step()
    found = []
    for output, (_, ids) in zip(outputs, texts, strict=True):
        if output.error is not None:
            raise RequestError(output.error)
        entries = output.outputs[0].logprobs
        assert entries is not None and output.outputs[0].token_ids == list(ids)
        found.append(np.array([entry[i].logprob for entry, i in zip(entries, ids, strict=True)]))
    return found
