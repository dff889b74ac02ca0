"""Requests that arrive at random, and some that are given up."""

import random
from collections.abc import Callable

from tests.support.integrity import check_engine

from finwhale import RequestOutput, SamplingParams
from finwhale.engine.loop.engine import Engine

Text = Callable[[int, object], list[int]]


def random_arrivals(
    engine: Engine,
    draw: random.Random,
    text: Text,
    count: int,
    longest: int,
    *,
    crowded: bool,
    chance: random.Random,
    aborts: bool = True,
) -> list[RequestOutput]:
    """Run them to their ends; the results of those that were not given up.

    Args:
        draw: chooses the requests.
        text: (tokens, salt) to tokens; prompts begin like one of two.
        longest: tokens of a request, its output included.
        crowded: all at once, and growing over the end of a block.
        chance: chooses when they come and go.
    """
    trunks = [text(longest, salt) for salt in range(2)]
    rate = 1.0 if crowded else draw.choice((0.1, 1.0))
    cuts = (236,) if crowded else (0, 128, 256, 256, 512)
    ends = (5, 9) if crowded else (1, 5, 140)
    results: list[RequestOutput] = []
    left = count
    while left or engine.has_work:
        if left and (chance.random() < rate or not engine.has_work):
            left -= 1
            cut = draw.choice(cuts) + draw.choice((0, 1, -1, 4, -4, -40))
            prompt = draw.choice(trunks)[: max(0, cut)]
            prompt = (prompt + text(draw.choice(ends), left))[: longest - 2]
            params = SamplingParams(
                n=draw.choice((1, 1, 2)),
                temperature=draw.choice((0.0, 0.8)),
                seed=left,
                presence_penalty=draw.choice((0.0, 0.4)),
                max_tokens=min(draw.choice((2, 20, 50)), longest - len(prompt)),
                ignore_eos=True,
            )
            priority = draw.choice((0, 0, 1))
            name = f"r{left}"
            results.append(engine.add_request(name, prompt, params, priority=priority))
        engine.step()
        check_engine(engine)
        if aborts and chance.random() < 0.01 and results:
            gone = results.pop(chance.randrange(len(results)))
            engine.abort(gone.request_id)
            check_engine(engine)
    return results
