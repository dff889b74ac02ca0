"""The requests of a load test: their lengths, prompts and arrival times.

Three data sets are synthetic, so that nothing is downloaded:

- `uniform`: each prompt and output draws its length from a range. Equal bounds give one length.
- `chat`: lengths are log-normal, as those of the conversation trace of Azure's LLM inference traces
  of 2023 (19,366 requests; https://github.com/Azure/AzurePublicDataset, described in "Splitwise",
  ISCA 2024). CHAT_PROMPT and CHAT_OUTPUT are the means and standard deviations of the logarithms of
  its lengths. They give prompts of 760 tokens in the median and outputs of 151.
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
from finwhale.options import option

Dataset = Literal["uniform", "chat", "agents"]
WORDS = ("the", "a", "sea", "whale", "ship", "sky", "wind", "day", "fish", "sun", "boat", "deep")

# The mean and the standard deviation of the logarithm of a length in tokens.
CHAT_PROMPT, CHAT_OUTPUT = (math.log(760), 0.985), (math.log(151), 0.859)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The default lengths of a data set, in tokens."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix: int


UNIFORM = Sizes((1024, 1024), (256, 256), 0)
# The system prompt and 8 turns: 4096 + 4.5 * 858 + 3.5 * 182 is 8,596 tokens.
AGENTS = Sizes((429, 1288), (91, 273), 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send to an endpoint. The fields with a help text are options.

    Attributes:
        num_requests: total number of requests.
        input_tokens, output_tokens: least and largest length; each request draws its own. Of
            agents: the tokens that a turn adds. `chat` does not use them.
        shared_prefix: number of tokens with which all prompts begin, of input_tokens; of agents:
            the system prompt, which comes before input_tokens.
    """

    dataset: Dataset = option(
        "uniform",
        "lengths of the requests: uniform in a range; log-normal as those of chats; or agents, "
        "which are sessions of growing prompts with a shared system prompt",
    )
    chat: bool = option(False, "use /v1/chat/completions, with words instead of token ids")
    num_requests: int = 256
    request_rate: float = option(
        math.inf,
        "requests (of agents: sessions) per second, which arrive as a Poisson process; inf: all at "
        "once",
        metavar="R",
    )
    concurrency: int | None = option(
        None, "maximum number of requests at once", unset="no limit", metavar="N"
    )
    input_tokens: tuple[int, int] = UNIFORM.input_tokens
    output_tokens: tuple[int, int] = UNIFORM.output_tokens
    shared_prefix: int = UNIFORM.shared_prefix
    turns: int = option(8, "number of requests of an agent's session", metavar="N")
    max_length: int | None = option(
        None,
        "cut prompts and outputs so that both together have at most this many tokens; of agents: "
        "end a session before a prompt exceeds it",
        unset="no limit",
        metavar="N",
    )
    max_token_id: int = option(4000, "token ids of prompts are below this", metavar="N")
    ignore_eos: bool = option(True, "let the model end its output", flag="--no-ignore-eos")
    temperature: float = option(0.0, "sampling temperature")
    seed: int = option(0, "seed of prompts and arrival times")

    def check(self) -> None:
        """Raises FinwhaleError if a value is out of range or contradicts another."""
        if self.num_requests < 1 or not self.request_rate > 0:
            raise FinwhaleError("--request-rate and --num-requests must be above 0")
        if self.turns < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise FinwhaleError("--turns and --concurrency must be at least 1")
        if self.max_length is not None and self.max_length < 2:
            raise FinwhaleError(f"--max-length must be at least 2, got {self.max_length}")
        least, first = self.input_tokens[0], self.shared_prefix
        if self.dataset == "uniform" and self.shared_prefix >= least:
            raise FinwhaleError(
                f"--shared-prefix must be below --input-tokens ({least}), got {self.shared_prefix}"
            )
        if self.dataset == "agents" and self.max_length is not None:
            first += self.input_tokens[1] + self.output_tokens[1]
            if first > self.max_length:
                raise FinwhaleError(
                    f"an agent's first turn has up to {first} tokens, and --max-length is "
                    f"{self.max_length}: lower --shared-prefix, --input-tokens or --output-tokens"
                )


def described(load: Load) -> dict[str, Any]:
    """The load as a JSON object."""
    found = {name: getattr(load, name) for name in load.__dataclass_fields__}
    found |= {"request_rate": str(load.request_rate)}
    for name in ("input_tokens", "output_tokens"):
        found[name] = list(found[name])
    return found


def make_sessions(load: Load, model: str) -> list[list[bytes]]:
    """Make the bodies of the requests, by session. The same seed gives the same bodies.

    The requests of a session are sent one after the other. Only agents have more than one.
    """
    draw = random.Random(load.seed)
    make = {"uniform": _uniform, "chat": _chat, "agents": _agents}[load.dataset]
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
        output = draw.randint(*load.output_tokens)
        size, output = _cut(load, len(prompt), output)
        yield [([("user", prompt[:size])], output)]


def _chat(load: Load, draw: random.Random) -> Iterator[list[Request]]:
    while True:
        lengths = (draw.lognormvariate(*CHAT_PROMPT), draw.lognormvariate(*CHAT_OUTPUT))
        size, output = _cut(load, *(max(1, round(length)) for length in lengths))
        yield [([("user", _tokens(draw, load, size))], output)]


def _agents(load: Load, draw: random.Random) -> Iterator[list[Request]]:
    system = _tokens(draw, load, load.shared_prefix)
    while True:
        turns: Turns = [("system", system)] if system else []
        session: list[Request] = []
        for _ in range(load.turns):
            new = _tokens(draw, load, draw.randint(*load.input_tokens))
            output = draw.randint(*load.output_tokens)
            turns = [*turns, ("user", new)]
            length = sum(len(tokens) for _, tokens in turns) + output
            if load.max_length is not None and length > load.max_length:
                break
            session.append((turns, output))
            turns = [*turns, ("assistant", _tokens(draw, load, output))]
        yield session


def _cut(load: Load, prompt: int, output: int) -> tuple[int, int]:
    """The lengths of a prompt and its output, which fit max_length together."""
    if load.max_length is None or prompt + output <= load.max_length:
        return prompt, output
    output = min(output, load.max_length // 2)
    return min(prompt, load.max_length - output), output


def _body(load: Load, model: str, turns: Turns, output: int) -> bytes:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output,
        "temperature": load.temperature,
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
    if load.chat:
        return draw.choices(WORDS, k=count)
    # Low ids are often control tokens.
    return [
        draw.randrange(min(256, load.max_token_id // 2), load.max_token_id) for _ in range(count)
    ]


def arrivals(load: Load, count: int) -> list[float]:
    """The seconds from the start at which `count` sessions arrive."""
    draw = random.Random(load.seed + 1)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        if math.isfinite(load.request_rate):
            now += draw.expovariate(load.request_rate)
    return times
