"""Two engines in two processes: the one that the other loads prefixes from is killed."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.engine.test_prefix_store import draft_model, open_llm, tokens

from finwhale.engine.plan.prefix_store import Record
from finwhale.engine.store import peers
from finwhale.engine.store.peers import PeerStore

PROMPTS = [[2 + (7 * i * i + n) % 290 for i in range(length)] for n, length in ((0, 520), (1, 800))]
RECORDS = 5 + 2  # blocks and states
FIRST = """
import json, sys
from pathlib import Path
from tests.engine.test_prefix_store import open_llm, tokens
path, store, port, prompts = json.loads(sys.argv[1])
with open_llm(Path(path), Path(store), prefix_salt="salt") as llm:
    print(json.dumps(tokens(llm, prompts, 20)), flush=True)
with open_llm(Path(path), Path(store), prefix_salt="salt", prefix_peer_port=str(port)):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def first_engine(path: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], list[list[int]]]]:
    """The process, and what its engine has answered."""
    arguments = json.dumps([str(draft_model(path, "mtp")), str(path / "first"), port, PROMPTS])
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            answer = json.loads(process.stdout.readline())
            assert process.stdout.readline() == "ready\n"
            yield process, answer
        finally:
            process.kill()


@pytest.mark.parametrize("moment", [3, RECORDS])
def test_an_engine_whose_peer_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """While it loads, or later: no request fails, and all tokens are equal."""
    for name in ("FIND_S", "READ_S"):
        monkeypatch.setattr(peers, name, 300.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with first_engine(tmp_path, port) as (process, wanted):
        asked: list[Record] = []
        read = PeerStore.read

        def read_or_kill(store: PeerStore, record: Record, into: memoryview) -> bool:
            asked.append(record)
            if len(asked) > moment:
                process.kill()
                process.wait()
            return read(store, record, into)

        monkeypatch.setattr(PeerStore, "read", read_or_kill)
        options = {"prefix_salt": "salt", "prefix_peers": f"127.0.0.1:{port}"}
        with open_llm(tmp_path / "model", tmp_path / "second", **options) as second:
            assert tokens(second, PROMPTS, 20) == wanted
            cached = second._engine.metrics().cached_tokens
            assert moment <= len(asked) <= RECORDS
            process.kill()
            process.wait()
            assert tokens(second, PROMPTS, 20) == wanted
    assert (cached == 512 + 768) == (moment == RECORDS)
