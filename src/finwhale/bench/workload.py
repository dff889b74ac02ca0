"""The requests of a load test: their lengths, prompts and arrival times.

Two data sets are synthetic, so that nothing is downloaded:

- `uniform`: each prompt and output draws its length from a range. Equal bounds give one length.
- `agents`: sessions of several turns that share a system prompt. A turn's prompt is the prompt of
  the turn before, an answer and new input, and is sent when the answer of the turn before is
  complete. With the default sizes, prompts have a mean of 8,596 tokens and outputs of 182, as the
  "Tool and Agent" trace of Mooncake (FAST 2025, https://github.com/kvcache-ai/Mooncake). The
  answers in later prompts are random tokens, not those of the server, so that the same seed always
  gives the same prompts.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from finwhale.errors import FinwhaleError
from finwhale.options import check_options, option

TOKEN_IDS = range(256, 4000)  # Low ids are often control tokens.
# Lengths in tokens that a data set has unless options give others.
DATASETS: dict[str, dict[str, Any]] = {
    "uniform": {"input_tokens": (1024, 1024), "output_tokens": (256, 256), "shared_prefix": 0},
    # The system prompt and 8 turns: 4096 + 4.5 * 858 + 3.5 * 182 is 8,596 tokens.
    "agents": {"input_tokens": (429, 1288), "output_tokens": (91, 273), "shared_prefix": 4096},
}

# A request: the token ids of its prompt, and the number of tokens to generate.
LoadRequest = tuple[list[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The requests to send to an endpoint.

    Attributes:
        input_tokens, output_tokens: least and largest length; each request draws its own. Of
            agents: the tokens that a turn adds.
        shared_prefix: number of tokens with which all prompts begin, of input_tokens; of agents:
            the system prompt, which comes before input_tokens.
    """

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix: int = 0
    dataset: Literal["uniform", "agents"] = option(
        "uniform",
        "lengths of the requests: uniform in a range; or agents, which are sessions of growing "
        "prompts with a shared system prompt",
    )
    num_requests: int = option(256, "number of requests", least=1)
    request_rate: float = option(
        math.inf,
        "requests (of agents: sessions) per second, which arrive as a Poisson process; inf: all "
        "at once",
        metavar="R",
        above=0,
    )
    concurrency: int | None = option(
        None, "maximum number of requests at once", unset="no limit", least=1
    )
    turns: int = option(8, "number of requests of an agent's session", least=1)
    ignore_eos: bool = option(True, "let the model end its output", flag="--no-ignore-eos")
    seed: int = option(0, "seed of prompts and arrival times")

    def __post_init__(self) -> None:
        check_options(self)
        least = self.input_tokens[0]
        if self.dataset == "uniform" and self.shared_prefix >= least:
            raise FinwhaleError(
                f"--shared-prefix must be below --input-tokens ({least}), got {self.shared_prefix}"
            )


def make_sessions(load: ServerLoad, model: str) -> list[list[bytes]]:
    """Make the bodies of the requests, by session. The same seed gives the same bodies.

    The requests of a session are sent one after the other. Only agents have more than one.
    """
    draw = random.Random(load.seed)
    make = _uniform if load.dataset == "uniform" else _agents
    sessions, left = [], load.num_requests
    for session in make(load, draw):
        sessions.append([_body(load, model, *request) for request in session[:left]])
        left -= len(sessions[-1])
        if not left:
            return sessions
    raise AssertionError("data sets have no end")


def _uniform(load: ServerLoad, draw: random.Random) -> Iterator[list[LoadRequest]]:
    prefix = _tokens(draw, load.shared_prefix)
    while True:
        own = draw.randint(*load.input_tokens) - load.shared_prefix
        yield [(prefix + _tokens(draw, own), draw.randint(*load.output_tokens))]


def _agents(load: ServerLoad, draw: random.Random) -> Iterator[list[LoadRequest]]:
    system = _tokens(draw, load.shared_prefix)
    while True:
        prompt, session = system, []
        for _ in range(load.turns):
            prompt = prompt + _tokens(draw, draw.randint(*load.input_tokens))
            output = draw.randint(*load.output_tokens)
            session.append((prompt, output))
            prompt = prompt + _tokens(draw, output)
        yield session


def _body(load: ServerLoad, model: str, prompt: list[int], output: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(TOKEN_IDS, k=count)


def arrivals(load: ServerLoad, count: int) -> list[float]:
    """The seconds from the start at which `count` sessions arrive."""
    draw = random.Random(load.seed + 1)
    gaps = (draw.expovariate(load.request_rate) for _ in range(1, count))
    return list(accumulate(gaps, initial=0.0))
