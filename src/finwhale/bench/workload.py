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
from typing import Any, Literal

from finwhale.errors import FinwhaleError

WORDS = ("the", "a", "sea", "whale", "ship", "sky", "wind", "day", "fish", "sun", "boat", "deep")
TOKEN_IDS = range(256, 4000)  # Low ids are often control tokens.


@dataclass(frozen=True, slots=True)
class Sizes:
    """The default lengths of a data set, in tokens."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix: int


DATASETS = {
    "uniform": Sizes((1024, 1024), (256, 256), 0),
    # The system prompt and 8 turns: 4096 + 4.5 * 858 + 3.5 * 182 is 8,596 tokens.
    "agents": Sizes((429, 1288), (91, 273), 4096),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send to an endpoint.

    Attributes:
        chat: use /v1/chat/completions, with words instead of token ids.
        num_requests: total number of requests.
        request_rate: requests (of agents: sessions) per second; infinite: all at once.
        concurrency: maximum number of requests at once; None: no limit.
        input_tokens, output_tokens: least and largest length; each request draws its own. Of
            agents: the tokens that a turn adds.
        shared_prefix: number of tokens with which all prompts begin, of input_tokens; of agents:
            the system prompt, which comes before input_tokens.
        turns: number of requests of an agent's session.
        ignore_eos: whether outputs have exactly the wanted length.
        seed: of prompts and arrival times.
    """

    dataset: Literal["uniform", "agents"] = "uniform"
    chat: bool = False
    num_requests: int = 256
    request_rate: float = math.inf
    concurrency: int | None = None
    input_tokens: tuple[int, int] = DATASETS["uniform"].input_tokens
    output_tokens: tuple[int, int] = DATASETS["uniform"].output_tokens
    shared_prefix: int = DATASETS["uniform"].shared_prefix
    turns: int = 8
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or not self.request_rate > 0:
            raise FinwhaleError("--request-rate and --num-requests must be above 0")
        if self.turns < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise FinwhaleError("--turns and --concurrency must be at least 1")
        least = self.input_tokens[0]
        if self.dataset == "uniform" and self.shared_prefix >= least:
            raise FinwhaleError(
                f"--shared-prefix must be below --input-tokens ({least}), got {self.shared_prefix}"
            )


def make_sessions(load: Load, model: str) -> list[list[bytes]]:
    """Make the bodies of the requests, by session. The same seed gives the same bodies.

    The requests of a session are sent one after the other. Only agents have more than one.
    """
    draw = random.Random(load.seed)
    make = _uniform if load.dataset == "uniform" else _agents
    sessions, left = [], load.num_requests
    for session in make(load, draw):
        sessions.append([_body(load, model, turns, output) for turns, output in session[:left]])
        left -= len(sessions[-1])
        if not left:
            return sessions
    raise AssertionError("data sets have no end")


# A request: its turns, each of one role, and the number of tokens to generate.
Turns = list[tuple[str, list[Any]]]
Request = tuple[Turns, int]


def _uniform(load: Load, draw: random.Random) -> Iterator[list[Request]]:
    prefix = _tokens(draw, load, load.shared_prefix)
    while True:
        own = draw.randint(*load.input_tokens) - load.shared_prefix
        prompt = prefix + _tokens(draw, load, own)
        yield [([("user", prompt)], draw.randint(*load.output_tokens))]


def _agents(load: Load, draw: random.Random) -> Iterator[list[Request]]:
    system = _tokens(draw, load, load.shared_prefix)
    while True:
        turns: Turns = [("system", system)] if system else []
        session: list[Request] = []
        for _ in range(load.turns):
            new = _tokens(draw, load, draw.randint(*load.input_tokens))
            output = draw.randint(*load.output_tokens)
            turns = [*turns, ("user", new)]
            session.append((turns, output))
            turns = [*turns, ("assistant", _tokens(draw, load, output))]
        yield session


def _body(load: Load, model: str, turns: Turns, output: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.chat:
        body["messages"] = [
            {"role": role, "content": " ".join(map(str, tokens))} for role, tokens in turns
        ]
    else:
        body["prompt"] = [token for _, tokens in turns for token in tokens]
    return json.dumps(body).encode()


def _tokens(draw: random.Random, load: Load, count: int) -> list[Any]:
    """Draw `count` token ids or, for a chat, words."""
    return draw.choices(WORDS if load.chat else TOKEN_IDS, k=count)


def arrivals(load: Load, count: int) -> list[float]:
    """The seconds from the start at which `count` sessions arrive."""
    draw = random.Random(load.seed + 1)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        if math.isfinite(load.request_rate):
            now += draw.expovariate(load.request_rate)
    return times
