"""Many clients of a server at once: mixed lengths, some of them leaving, malformed requests and
grammars that no compiler should see.

Every answer is compared with what the same request got alone, every error must be well-formed, the
engine's memory must stay flat and nothing of any request may be left. One client streams all the
time: none of its streams may pause for more than a second between two pieces. By hand, against a
server of its own:

    python -m tests.server.soak --seconds 600
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .hostile import chained_definitions, chained_rules, expensive_schema

MAX_PAUSE_S = 1.0
OPENINGS = ("Once upon a time", "The whale", "One day a little frog", "The sun", "In the morning")
MALFORMED: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", {"model": "other", "prompt": "x"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": [], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "robot"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": [""]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/messages", {"messages": [], "max_tokens": 3}),
    ("/v1/responses", {"input": 3}),
    ("/nowhere", {}),
)
HOSTILE: tuple[Any, ...] = (
    {"type": "json_schema", "json_schema": {"schema": chained_definitions(1000)}},
    {"type": "json_schema", "json_schema": {"schema": chained_definitions(450)}},
    {"type": "json_schema", "json_schema": {"schema": expensive_schema(0)}},
    {"type": "grammar", "grammar": chained_rules(6000)},
    {"type": "grammar", "grammar": chained_rules(950)},
    {"type": "grammar", "grammar": 'start: "a"' + ' | "a"' * 150_000},
    {"type": "regex", "regex": "(a{1,1000}){1,1000}"},
    {"type": "grammar", "grammar": 'start: s "0"\ns: s s | /[a-z]/'},
)


@dataclass
class Report:
    """What was seen.

    Attributes:
        wrong: what should not have been, at most a few of each.
        longest_pause_s: between two pieces of one stream.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0

    def complain(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(text)


class Soak:
    """One run against one server."""

    def __init__(
        self, url: str, model: str, seed: int, kinds: int = 24, new_grammars: float = 0.0
    ) -> None:
        """
        Args:
            kinds: different requests that are asked again and again.
            new_grammars: of the hostile grammars, the part that the server has not tried before.
        """
        self.report = Report()
        self._url = url
        self._model = model
        self._seed = seed
        self._kinds = kinds
        self._new_grammars = new_grammars
        self._alone: dict[str, str] = {}

    async def run(self, clients: int, seconds: float) -> Report:
        timeout = aiohttp.ClientTimeout(total=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            bodies = [self._body(random.Random(f"{self._seed}/{i}")) for i in range(self._kinds)]
            for body in bodies:
                self._alone[json.dumps(body)] = await self._ask(session, body)
            # The watched stream starts first, because the clients may keep the server full.
            started, stop = asyncio.Event(), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(session, started, stop))
                await started.wait()
                end = time.monotonic() + seconds
                await asyncio.gather(
                    *(self._client(session, bodies, end, i, clients) for i in range(clients))
                )
                stop.set()
        return self.report

    def _body(self, draw: random.Random) -> dict[str, Any]:
        prompt = draw.choice(OPENINGS) + " " + "and the sea " * draw.choice((0, 0, 3, 30, 120))
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": draw.choice((1, 4, 16, 48)),
            "temperature": draw.choice((0, 0.8)),
            "seed": draw.randrange(1000),
            "n": draw.choice((1, 1, 1, 3)),
            "stream": draw.random() < 0.6,
        }

    async def _client(
        self,
        session: aiohttp.ClientSession,
        bodies: list[dict[str, Any]],
        end: float,
        index: int,
        clients: int,
    ) -> None:
        draw = random.Random(f"client {self._seed}/{index}")
        kind = index / clients  # The clients begin with requests of every kind.
        while time.monotonic() < end:
            try:
                if kind < 0.08:
                    await self._malformed(session, draw)
                elif kind < 0.1:
                    await self._hostile(session, draw)
                elif kind < 0.3:
                    await self._leave(session, draw)
                else:
                    body = draw.choice(bodies)
                    text = await self._ask(session, body)
                    if text == "429":
                        self.report.counts["429"] += 1
                        await asyncio.sleep(0.2)
                    elif text != self._alone[json.dumps(body)]:
                        self.report.complain(f"{body} got {text!r}")
                    else:
                        self.report.counts["answered"] += 1
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.report.complain(f"{type(error).__name__}: {error}")
            kind = draw.random()

    async def _ask(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        """The texts of all choices, joined; "429" where the server was full."""
        texts = [""] * body["n"]
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status == 429:
                self._check_error(await response.read(), "/v1/completions", 429)
                return "429"
            if response.status != 200:
                raise ValueError(f"status {response.status}: {await response.text()}")
            if not body["stream"]:
                for choice in (await response.json())["choices"]:
                    texts[choice["index"]] = choice["text"]
                return "|".join(texts)
            done = False
            async for line in response.content:
                done = done or line.startswith(b"data: [DONE]")
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
            if not done:
                raise ValueError("a stream ended early")
        return "|".join(texts)

    async def _leave(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        """Goes away while the answer is made: before it, or after a piece of it."""
        body = {
            "model": self._model,
            "prompt": draw.choice(OPENINGS) + " word" * draw.choice((1, 300)),
            "max_tokens": 400,
            "n": draw.choice((1, 2)),
            "stream": draw.random() < 0.7,
            "ignore_eos": True,
        }
        wait = draw.random() * 0.5
        try:
            async with asyncio.timeout(wait):
                async with session.post(f"{self._url}/v1/completions", json=body) as response:
                    async for _ in response.content:
                        pass
        except TimeoutError:
            pass
        self.report.counts["left"] += 1

    async def _malformed(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        path, body = draw.choice(MALFORMED)
        if isinstance(body, dict):
            body = json.dumps({"model": self._model} | body).encode()
        headers = {"content-type": "application/json"}
        async with session.post(self._url + path, data=body, headers=headers) as response:
            self._check_error(await response.read(), path, response.status)
        self.report.counts["malformed"] += 1

    async def _hostile(self, session: aiohttp.ClientSession, draw: random.Random) -> None:
        """Asks for a grammar that is refused or costs much, and maybe leaves before the answer."""
        body = {
            "model": self._model,
            "prompt": draw.choice(OPENINGS),
            "max_tokens": 40,
            "response_format": draw.choice(HOSTILE),
        }
        if draw.random() < self._new_grammars:
            number = draw.choice((999_983, 799_999, 399_989)) + 2 * draw.randrange(1000)
            schema = {"type": "integer", "multipleOf": number}
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        path = "/v1/completions"
        try:
            async with asyncio.timeout(draw.choice((0.3, 100))):
                async with session.post(self._url + path, json=body) as response:
                    answer = await response.read()
                    # A grammar that proves too slow while it is followed is an error of the answer.
                    if response.status not in (200, 500):
                        self._check_error(answer, path, response.status)
        except TimeoutError:
            pass
        self.report.counts["hostile"] += 1

    async def _watch(
        self, session: aiohttp.ClientSession, started: asyncio.Event, stop: asyncio.Event
    ) -> None:
        """Streams until `stop`, and measures the pauses. Sets `started` after the first piece."""
        body = {
            "model": self._model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True,
            "stream": True, "priority": -1,
        }  # fmt: skip
        while not stop.is_set():
            before = None
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status == 429:
                    await asyncio.sleep(0.2)
                    continue
                async for _ in response.content:
                    now = time.monotonic()
                    if before is not None:
                        pause = now - before
                        self.report.longest_pause_s = max(self.report.longest_pause_s, pause)
                    before = now
                    started.set()
                    if stop.is_set():
                        break

    def _check_error(self, body: bytes, path: str, status: int) -> None:
        found = json.loads(body)
        message = found.get("error", {}).get("message")
        form = found.get("type") == "error" if path == "/v1/messages" else "code" in found["error"]
        if not (400 <= status < 500 and form and message and "\n" not in message):
            self.report.complain(f"{path}: status {status}, {body[:200]!r}")


async def _over_http(url: str, model: str, args: argparse.Namespace) -> Report:
    pids = [int(pid) for pid in args.pids.split(",") if pid]
    soak = Soak(url, model, args.seed, new_grammars=0.5)
    sizes: list[list[int]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(args.seconds / 20)
            sizes.append([_resident_mib(pid) for pid in pids])
            print(f"resident MiB {sizes[-1]}, {dict(soak.report.counts)}", file=sys.stderr)

    watching = asyncio.create_task(watch())
    report = await soak.run(args.clients, args.seconds)
    watching.cancel()
    # After a quarter of the run everything has been as large as it gets.
    for before, after in zip(sizes[len(sizes) // 4], sizes[-1], strict=True):
        if after > before * 1.1 + 20:
            report.complain(f"memory grew from {before} to {after} MiB")
    print(f"longest pause of a stream: {report.longest_pause_s:.3f} s", file=sys.stderr)
    if report.longest_pause_s > MAX_PAUSE_S:
        report.complain(f"a stream paused for {report.longest_pause_s:.3f} s")
    return report


def _resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="finwhale-demo")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pids", default="", help="processes whose memory must stay flat")
    args = parser.parse_args()
    report = asyncio.run(_over_http(args.url, args.model, args))
    print(dict(report.counts))
    for line in report.wrong:
        print("WRONG", line)
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
