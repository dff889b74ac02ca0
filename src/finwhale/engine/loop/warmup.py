"""Requests of every kind, run before anybody waits: what is only there after a first time is then.

Kernels and graphs are built before (runner.py). What is left is torch's own kernels, which the
driver loads when they are first called, pinned memory, and the host's code: with random tokens, and
forgotten afterwards.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from finwhale.ops.sampling import AllowedTokens, SamplingBatch
from finwhale.request import SamplingParams

if TYPE_CHECKING:
    from finwhale.engine.loop.engine import Engine

TOKENS = 3
# Prompts beside the one of more than a step: a few tokens, one, some hundred.
LENGTHS = (20, 1, 600)


def rehearse(engine: "Engine") -> None:
    """Run requests to their ends. The engine must be idle; it is as new afterwards."""
    longest = max(1, engine.max_model_len - TOKENS)
    few, *lengths = (
        min(longest, length) for length in (*LENGTHS, engine.config.max_num_batched_tokens + 1)
    )
    kinds = list(_kinds(engine.model_config.vocab_size))
    for number, params in enumerate(kinds):
        _run(engine, [([few, *lengths][number % (1 + len(lengths))], params)])
    # All together, and as many as may run at once.
    _run(engine, [(few, params) for params in kinds])
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    _run(engine, [(few, greedy)] * engine.config.max_num_seqs)
    _allow(engine)
    engine.forget()


def _kinds(vocab_size: int) -> Iterator[SamplingParams]:
    top = min(50, vocab_size)

    def params(**options: object) -> SamplingParams:
        chosen = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 1} | options
        return SamplingParams(**chosen)  # type: ignore[arg-type]

    yield params(temperature=0)
    yield params(temperature=0, logprobs=0)
    yield params(temperature=0, logprobs=min(20, vocab_size))
    yield params()
    yield params(top_k=top)
    yield params(top_p=0.9)
    yield params(min_p=0.05)
    yield params(top_k=top, top_p=0.9, min_p=0.05)
    yield params(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    yield params(logit_bias={0: 1.0})
    yield params(n=2)


def _run(engine: "Engine", requests: list[tuple[int, SamplingParams]]) -> None:
    vocab_size = engine.model_config.vocab_size
    # Nothing is found instead of read.
    engine.reset_prefix_cache()
    for number, (length, params) in enumerate(requests):
        # No prompt begins like another.
        prompt = [(7 * i + 13 * number + 1) % vocab_size for i in range(length)]
        engine.add_request(f"rehearsal-{number}", prompt, params)
    while engine.has_work:
        engine.step()


@torch.inference_mode()
def _allow(engine: "Engine") -> None:
    """Grammars' masks, which a request would need a tokenizer for."""
    vocab_size, device = engine.model_config.vocab_size, engine.runner.device
    for rows in (1, 2):
        logits = torch.zeros(rows, vocab_size, device=device)
        words = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        allowed = AllowedTokens(rows_G=torch.arange(rows, device=device), words_GW=words)
        engine.runner.ops.sample(logits, SamplingBatch(allowed=allowed))
