"""Log-probabilities of given texts, through the engine's ordinary requests.

A request generates the text under a matcher that allows only the text's next token. The engine
reports each token's log-probability before the mask, so these are the model's own. All texts run in
one batch. This works with any number of ranks, and it exercises decode rather than prefill.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from finwhale.errors import RequestError
from finwhale.llm import LLM
from finwhale.request import SamplingParams


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
    """The natural log-probability of each token of each continuation.

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
