"""Attacks on a server, and an honest client beside them.

An attack is one line of `attacks`: a coroutine function of a `Target` that attacks once and checks
how it was refused. Add one for everything that has ever stopped a server. `run` starts them all;
`Honest` measures meanwhile how long small requests take.
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.processes import importable_tests

MODEL = "finwhale-demo"
MIB = 1 << 20


class Target:
    """`finwhale serve` with the embedded model, as a process of its own on loopback.

    Attributes:
        port, health_port: its ports.
        log: the file of its log.
    """

    def __init__(self, log: Path, *args: str) -> None:
        command = [
            *(sys.executable, "-m", "finwhale", "serve", "--port", "0", "--health-port", "0"),
            *("--device", "cpu", "--max-model-len", "2048", *args),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, env=env)
        self.log = log
        end = time.monotonic() + 120
        while (ready := self.logged("ready")) is None:
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        self.port = int(ready["url"].rpartition(":")[2])
        found = self.logged("health port")
        assert found is not None
        self.health_port = int(found["port"])
        self.engine_pid = next(
            pid
            for pid in _children(self.process.pid)
            if b"spawn_main" in (line := Path(f"/proc/{pid}/cmdline").read_bytes())
            and b"resource_tracker" not in line
        )

    def logged(self, message: str) -> dict[str, Any] | None:
        """The first record of the log with this message."""
        for line in self.log.read_text().splitlines():
            if line.startswith("{") and (record := json.loads(line))["message"] == message:
                return dict(record)
        return None

    def health(self, what: str, port: int | None = None) -> int:
        """The status of a health check, on the first port unless another is given."""
        return ask(port or self.port, "GET", f"/health/{what}")[0]

    def resident_bytes(self) -> dict[int, int]:
        """The memory of each of its processes."""
        pids = [self.process.pid, self.engine_pid]
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return {
            pid: count * os.sysconf("SC_PAGESIZE") for pid, count in zip(pids, pages, strict=True)
        }

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


# --- Attacks --------------------------------------------------------------------------------------

Attack = Callable[[Target], Awaitable[None]]


def posting(path: str, body: bytes, status: int, message: str) -> Attack:
    """Posts a body that must be refused with a status and an error whose message contains a text.

    Args:
        status: 0: the answer does not matter.
    """

    async def attack(target: Target) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        try:
            with contextlib.suppress(ConnectionError):  # it may close before all has been sent
                for begin in range(0, len(body), MIB):
                    writer.write(head.encode() if begin == 0 else b"")
                    writer.write(body[begin : begin + MIB])
                    await writer.drain()
            answer = b""
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                answer = await reader.readuntil(b"\r\n\r\n")
                answer += await reader.read()
        finally:
            writer.close()
        # It may also be too busy with the other attacks.
        if status and answer and answer[9:12] not in (b"429", b"503"):
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (path, answer[:500])
            assert message.encode() in answer, (path, answer[:500])

    return attack


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 1} | fields).encode()


def metadata(items: bytes) -> bytes:
    start = b'{"model":"%s","messages":[{"role":"user","content":"x"}],"max_tokens":1,"metadata":'
    return start % MODEL.encode() + b'{"x":[' + items + b"1]}}"


ASKED = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}


def chat(content: str) -> bytes:
    return completion(messages=[{"role": "user", "content": content}])


def holding(count: int, head: bytes, drip: bytes, seconds: float) -> Attack:
    """Opens connections, sends the beginning of a request on each, and a little more now and then.

    Args:
        seconds: how long the attack goes on, unless the server closes all connections.
    """

    async def hold(target: Target) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        except OSError:
            return
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            end = time.monotonic() + seconds
            while time.monotonic() < end and not reader.at_eof():
                writer.write(drip)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(4096), 0.5)
        writer.close()

    async def attack(target: Target) -> None:
        await asyncio.gather(*(hold(target) for _ in range(count)))

    return attack


def leaving(path: str, body: bytes, *, whole: bool = False) -> Attack:
    """Sends most of a body, or the whole body, and goes away."""

    async def attack(target: Target) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.port)
        with contextlib.suppress(ConnectionError):
            head = (
                f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body) + (0 if whole else 9)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            if whole:
                await asyncio.sleep(0.3)
        writer.close()

    return attack


def deaf(target: Target) -> Awaitable[None]:
    """Asks for a long stream and does not read it."""

    async def attack() -> None:
        body = completion(prompt="Once", stream=True, n=8, ignore_eos=True) + b" " * 8
        body = body.replace(b'"max_tokens": 1', b'"max_tokens": 400')
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            sock.connect(("127.0.0.1", target.port))
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            await asyncio.sleep(0.5)

    return attack()


async def strange_hosts(target: Target) -> None:
    """Sends values of Host that are no host."""
    for host in ("[localhost]", "[::1].evil", "localhost:80@evil", "localhost/", "evil.example"):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        head = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        assert not answer.startswith(b"HTTP/1.1 200"), (host, answer[:500])


def absent_trainer(target: Target) -> Awaitable[None]:
    """Lets the engine wait for a trainer that does not exist, and leaves."""
    place = {"master_address": "127.0.0.1", "master_port": 9, "timeout_seconds": 600}
    return leaving("/init_weights_update_group", json.dumps(place).encode(), whole=True)(target)


COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
FILES = "/v1/files"
# Floods come from an address of their own: whoever sends from the same one shares its fate.
ATTACKER = "127.0.0.2"


@contextlib.asynccontextmanager
async def asking(target: Target, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection of the attacker's address with a request on it."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", target.port, local_addr=(ATTACKER, 0)
    )
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        yield reader
    finally:
        writer.close()


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def refused_to_one(answer: bytes) -> bool:
    """Whether an answer refuses a request, but not because the server is full for all."""
    assert answer[9:12] in (b"", b"200", b"400", b"429", b"503"), answer[:500]
    assert b"the server is full" not in answer, answer[:500]
    return answer[9:12] in (b"429", b"503")


_unique = itertools.count()


def new_grammars() -> list[bytes]:
    """Requests with grammars that no server has seen, in any flood."""
    regexes = [f"(a|b{{{i}}}|{next(_unique)}){{99}}" for i in range(45)]
    formats = [{"type": "regex", "regex": regex} for regex in regexes]
    return [completion(prompt="x", response_format=one) for one in formats]


def flooding(make: Callable[[], Sequence[bytes]]) -> Attack:
    """Sends many requests at once, which would take everything; some of them must be refused."""

    async def one(target: Target, body: bytes) -> bool:
        async with asking(target, post(COMPLETIONS, body)) as reader:
            try:
                return refused_to_one(await reader.read())
            except ConnectionError:
                return True

    async def attack(target: Target) -> None:
        refused = await asyncio.gather(*(one(target, body) for body in make()))
        assert any(refused), "the flood found room for everything"

    return attack


async def downloads(target: Target) -> None:
    """Stores a file, and reads it slowly on many connections."""
    line = b'{"custom_id":"%s"}\n' % (b"x" * 1000)
    form = (
        b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--B\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + line * 8000
        + b"\r\n--B--\r\n"
    )
    async with asking(target, post(FILES, form, "multipart/form-data; boundary=B")) as reader:
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
    if not answer or refused_to_one(answer):
        return
    name = json.loads(answer.partition(b"\r\n\r\n")[2])["id"]
    begin = f" {FILES}/{name}".encode()
    end = b" HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n\r\n"
    refused = 0
    async with contextlib.AsyncExitStack() as open_:
        for _ in range(40):
            request = b"GET" + begin + b"/content" + end
            reader = await open_.enter_async_context(asking(target, request))
            with contextlib.suppress(ConnectionError):
                refused += refused_to_one(await reader.read(300))
    assert refused, "one address may have all downloads"
    async with asking(target, b"DELETE" + begin + end) as reader:
        with contextlib.suppress(ConnectionError):  # of several attackers' connections, it is one
            await reader.read()


_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"


def attacks() -> dict[str, Attack]:
    """All attacks by name. Their bodies take 100 MB, and half a second of CPU time."""
    return {
        "24 MiB to /tokenize": posting(
            TOKENIZE, json.dumps({"prompt": "x" * 24 * MIB}).encode(), 413, "the body has more than"
        ),
        "3 MiB to /tokenize": posting(
            TOKENIZE, json.dumps({"prompt": "x" * 3 * MIB}).encode(), 400, "context length"
        ),
        "16 MiB of prompt": posting(
            COMPLETIONS, completion(prompt="a b " * 4 * MIB), 413, "more than"
        ),
        "3 MiB of prompt": posting(
            COMPLETIONS, completion(prompt="a b " * 800_000), 400, "context length"
        ),
        "3 MiB of chat": posting(CHAT, chat("a b " * 800_000), 400, "context length"),
        "9 million lists": posting(
            CHAT, metadata(b"[]," * 9_000_000), 413, "the body has more than"
        ),
        "a million lists": posting(CHAT, metadata(b"[]," * 1_000_000), 400, "arrays, objects and"),
        "many numbers": posting(CHAT, metadata(b"1," * 130_000), 200, "chat.completion"),
        "as many lists as it may": posting(
            CHAT, metadata(b"[[]]," * 65_000), 200, "chat.completion"
        ),
        "a million numbers": posting(CHAT, metadata(b"1," * 1_500_000), 400, "items"),
        "brackets in a string": posting(
            CHAT, metadata(b'"' + b"[" * 3 * MIB + b'",'), 200, "chat."
        ),
        "300,000 unknown fields": posting(
            CHAT, b"{" + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}", 400, "members"
        ),
        "100,000 unknown fields": posting(
            CHAT, b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}", 400, "fields"
        ),
        "many wrong messages": posting(CHAT, completion(messages=[1] * 130_000), 400, "messages.0"),
        "many wrong modalities": posting(
            CHAT, chat("x")[:-1] + b',"modalities":[' + b"1," * 130_000 + b"1]}", 400, "modalities"
        ),
        "many prompts": posting(COMPLETIONS, completion(prompt=["a"] * 130_000), 400, "allows"),
        "many ids": posting(COMPLETIONS, completion(prompt=[5] * 130_000), 400, "tokens"),
        "many ids to /detokenize": posting(
            "/detokenize", json.dumps({"tokens": [5] * 130_000}).encode(), 200, "prompt"
        ),
        "deep nesting": posting(CHAT, metadata(b"[" * 100_000), 400, "nested deeper"),
        "UTF-16": posting(
            CHAT, chat("x" * 70_000).decode().encode("utf-16"), 400, "not valid JSON"
        ),
        "log-probabilities of a prompt": posting(  # 4.5 MB
            COMPLETIONS, completion(prompt=[5] * 300, n=8, prompt_logprobs=20), 200, "decoded_token"
        ),
        "echoed log-probabilities": posting(
            COMPLETIONS,
            completion(prompt=[5] * 300, n=8, echo=True, logprobs=20),
            200,
            "top_logprobs",
        ),
        "too many log-probabilities": posting(
            COMPLETIONS, completion(prompt=[[5] * 1900] * 30, prompt_logprobs=20), 400, "may have"
        ),
        "log-probabilities of a chat": posting(
            CHAT, completion(**ASKED, max_tokens=200, logprobs=True, top_logprobs=20), 200, "bytes"
        ),
        "token strings": posting(
            TOKENIZE,
            json.dumps({"prompt": "a b" * 19_000, "return_token_strs": True}).encode(),
            200,
            "token_strs",
        ),
        "left in the middle": leaving(COMPLETIONS, b"x" * 3 * MIB),
        "silent connections": holding(100, b"", b"", 2),
        "slow heads": holding(100, b"GET /health HTTP/1.1\r\nx: ", b"y", 2),
        "slow bodies": holding(50, _BODY + b"content-length: 9000\r\n\r\n", b" ", 2),
        "slow chunks": holding(50, _BODY + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", 2),
        "no reader": deaf,
        "requests for all sequences": flooding(
            lambda: [completion(prompt=["x"] * 64, max_tokens=4)] * 16
        ),
        "many continuations": flooding(lambda: [completion(prompt="x", n=128, max_tokens=4)] * 8),
        "busy connections": flooding(lambda: [completion(prompt="x", n=8, max_tokens=8)] * 200),
        "new grammars": flooding(new_grammars),
        "downloads": downloads,
        "strange hosts": strange_hosts,
        "an absent trainer": absent_trainer,
        **{
            f"a trainer's path {path[:12]!a}": posting(
                "/update_weights_from_disk", json.dumps({"model_path": path}).encode(), 400, message
            )
            for path, message in (
                ("\0", "is no path"),
                ("x" * 4096, "cannot be read"),
                ("/dev/zero", "no checkpoint"),
            )
        },
    }


# --- The honest client ----------------------------------------------------------------------------


@dataclass
class Honest:
    """The errors and delays that an honest client has seen.

    Attributes:
        longest_s: the longest time of a request to each path.
        longest_loop_s: the longest CPU time of the event loop during a request to each path, if it
            is not longer than the request itself. Other programs on the machine do not change it.
        failures: answers other than 200.
    """

    count: int = 0
    longest_s: dict[str, float] = field(default_factory=dict)
    longest_loop_s: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


@contextmanager
def honest_client(target: Target) -> Iterator[Honest]:
    """Sends small requests one after the other until the block ends, from a process of its own."""
    seen, context = Honest(), multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(target=_be_honest, args=(target.port, target.process.pid, theirs))
    with importable_tests():
        client.start()
    theirs.close()
    assert ours.poll(120), "the honest client does not start"
    ours.recv()
    try:
        yield seen
    finally:
        ours.send("stop")
        vars(seen).update(vars(ours.recv()))
        client.join()


def _be_honest(port: int, pid: int, pipe: Connection) -> None:
    requests: Sequence[tuple[str, str, bytes | None]] = (
        ("POST", COMPLETIONS, completion(prompt="Once")),
        ("GET", "/health/ready", None),
        ("POST", TOKENIZE, json.dumps({"prompt": "Once upon a time"}).encode()),
        ("POST", CHAT, chat("Hello")),
    )
    seen = Honest()
    pipe.send("started")
    while not seen.count or not pipe.poll():
        for method, path, body in requests:
            begin, loop = time.monotonic(), main_thread_seconds(pid)
            try:
                status, answer = ask(port, method, path, body)
                if status != 200:
                    seen.failures.append(f"{path}: {status} {answer[:200]!r}")
            except OSError as error:
                seen.failures.append(f"{path}: {error!r}")
            spent = time.monotonic() - begin
            loop = min(spent, main_thread_seconds(pid) - loop)
            seen.longest_s[path] = max(seen.longest_s.get(path, 0), spent)
            seen.longest_loop_s[path] = max(seen.longest_loop_s.get(path, 0), loop)
            seen.count += 1
        time.sleep(0.05)
    pipe.send(seen)


async def run(target: Target, attackers: int, seconds: float, seed: int = 0) -> None:
    """Attacks with several clients at once, in random order; each attack at least once."""
    end = time.monotonic() + seconds
    draw = random.Random(seed)
    known = list(attacks().values())
    todo = known.copy()
    draw.shuffle(todo)

    async def attacker() -> None:
        while todo or time.monotonic() < end:
            attack = todo.pop() if todo else draw.choice(known)
            await attack(target)

    await asyncio.gather(*(attacker() for _ in range(attackers)))


def main_thread_seconds(pid: int) -> float:
    """The CPU time of a process's main thread. In the server, that is the event loop."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
