"""Two engines whose stores share no directory."""

import socket
from pathlib import Path
from typing import Any

import pytest

from finwhale.engine.store import peers
from finwhale.errors import ResourceError

from .test_prefix_store import draft_model, open_llm, tokens


def test_prefixes_of_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine finds both prompts. When the first one has gone, a third one has what the
    second got.
    """
    for name in ("FIND_S", "READ_S", "TURN_S"):
        monkeypatch.setattr(peers, name, 300.0)
    path = draft_model(tmp_path, "mtp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prompts = [
        [2 + (7 * i * i + n) % 290 for i in range(length)] for n, length in ((0, 520), (1, 800))
    ]
    common: dict[str, Any] = {"prefix_salt": "salt", "draft_tokens": 1}
    with open_llm(path, tmp_path / "first", prefix_peer_port=str(port), **common) as first:
        wanted = tokens(first, prompts, 60)
        with open_llm(
            path, tmp_path / "second", prefix_peers=f"localhost:{port}", **common
        ) as second:
            assert tokens(second, prompts, 60) == wanted
            assert second._engine.metrics().cached_tokens == 512 + 768
    with open_llm(path, tmp_path / "second", prefix_peers=f"localhost:{port}", **common) as third:
        assert tokens(third, prompts, 60) == wanted
        assert third._engine.metrics().cached_tokens == 512 + 768


def children() -> set[str]:
    """The process ids of the children of all threads."""
    return {
        pid
        for file in Path("/proc/self/task").glob("*/children")
        for pid in file.read_text().split()
    }


def test_a_port_in_use_leaves_nothing(tmp_path: Path) -> None:
    """The start fails when the weights are loaded: the other rank's process ends, also while
    somebody keeps the exception.
    """
    before = children()
    with socket.create_server(("localhost", 0)) as taken, pytest.raises(ResourceError) as failure:
        open_llm(
            draft_model(tmp_path, "two ranks"),
            tmp_path / "store",
            prefix_peer_port=str(taken.getsockname()[1]),
            prefix_salt="x" * 32,
            tensor_parallel_size=2,
        )
    assert children() == before, failure
