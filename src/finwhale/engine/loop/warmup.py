"""Warm-up: run one request of each kind before the engine is ready, to initialise it fully.

Startup has already built kernels and captured steps (start/startup.py). Warm-up covers the rest:
torch's own kernels, which the driver loads at their first call, pinned memory, and the host's code.
The prompts are arbitrary tokens, and the engine keeps no state of them.
"""

from collections.abc import Iterator
from dataclasses import replace

from finwhale.engine.loop.engine import Engine
from finwhale.request import SamplingParams

TOKENS = 3
# Lengths of prompts. One more prompt is longer than a step.
LENGTHS = (20, 1, 600)


def warm_up(engine: Engine) -> None:
    """Run the warm-up requests. The engine must be idle, and is reset afterwards."""
    longest = max(1, engine.max_model_len - TOKENS)
    few, *lengths = (min(longest, length) for length in (*LENGTHS, engine.sizes.num_tokens + 1))
    can_route = engine.executor.description.routed_experts is not None
    kinds = list(_kinds(engine.model_config.vocab_size, can_route))
    lanes = len(engine.lanes)  # equal requests go to one lane after the other
    for number, params in enumerate(kinds):
        _run(engine, [([few, *lengths][number % (1 + len(lengths))], params)] * lanes)
    # Run all kinds together, then as many requests as may run at once.
    _run(engine, [(few, params) for params in kinds for _ in range(lanes)])
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    _run(engine, [(few, greedy)] * engine.max_num_seqs)
    for rows in (1, 2):
        masked = replace(greedy, n=rows, allowed_token_ids=[0])
        _run(engine, [(few, masked)] * lanes)
    engine.reset()


def _kinds(vocab_size: int, can_route: bool) -> Iterator[SamplingParams]:
    top = min(50, vocab_size)

    def params(**options: object) -> SamplingParams:
        chosen = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 1} | options
        return SamplingParams(**chosen)  # type: ignore[arg-type]

    yield params(temperature=0)
    yield params(temperature=0, logprobs=0)
    yield params(temperature=0, logprobs=min(20, vocab_size))
    yield params(temperature=0, prompt_logprobs=min(20, vocab_size))
    yield params()
    yield params(top_k=top)
    yield params(top_p=0.9)
    yield params(min_p=0.05)
    yield params(top_k=top, top_p=0.9, min_p=0.05)
    yield params(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    yield params(logit_bias={0: 1.0})
    yield params(n=2)
    if can_route:
        yield params(return_routed_experts=True)


def _run(engine: Engine, requests: list[tuple[int, SamplingParams]]) -> None:
    vocab_size = engine.model_config.vocab_size
    # Without cached prefixes, every prompt is prefilled in full.
    engine.reset_prefix_cache()
    for number, (length, params) in enumerate(requests):
        # No two prompts have a common prefix.
        prompt = [(7 * i + 13 * number + 1) % vocab_size for i in range(length)]
        engine.add_request(f"warm-up-{number}", prompt, params)
    while engine.has_work:
        engine.step()
