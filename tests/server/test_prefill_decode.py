"""A prefill and a decode server on one directory, asked as vllm-router 0.1.17 asks them."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from finwhale import LLM
from finwhale.engine.plan import stored_prefixes
from finwhale.engine.plan.stored_prefixes import StoredPrefixes
from finwhale.errors import FinwhaleError

from .conftest import SharedServer
from .running import MODEL, RunningServer, check_idle
from .test_limits import wait_until

TEXT = "Tom went to the old house by the lake, and nobody was there. " * 40
# By path: the prompt, and the fields that bound the answer of a decode server and of a prefill
# server.
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": ("messages", {"max_tokens": 6}, {"max_tokens": 1, "min_tokens": 1}),
    "/v1/completions": ("prompt", {"max_tokens": 6}, {"max_tokens": 1, "min_tokens": 1}),
    "/v1/responses": ("input", {"max_output_tokens": 6}, {"max_output_tokens": 1}),
    "/v1/messages": ("messages", {"max_tokens": 6}, {"max_tokens": 1, "min_tokens": 1}),
}
COMPLETIONS = "/v1/completions"
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def open_server(
    model: Path, path: Path, keys: tuple[str, ...] = (), **options: Any
) -> RunningServer:
    common = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 2048}
    llm = LLM(model, **common, prefix_store=str(path / "store"), **options)
    return RunningServer(llm._engine, api_keys=keys)


def close_server(server: RunningServer) -> None:
    server.close()
    check_idle(server.engine)
    server.engine.close()


class Pair:
    """A prefill server and a decode server."""

    def __init__(self, model: Path, path: Path) -> None:
        self.model, self.path = model, path
        self.prefill = open_server(model, path, role="prefill")
        self.decode = open_server(model, path)

    @property
    def stored(self) -> StoredPrefixes:
        stored = self.prefill.engine.scheduler.admission.stored
        assert stored is not None
        return stored

    def files(self) -> set[str]:
        """The whole files of records: others have temporary names."""
        return {f.name for f in self.path.glob("store/*/*/*/*") if f.suffix in (".block", ".state")}


@pytest.fixture(scope="module")
def pair(short_demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(short_demo_path, tmp_path_factory.mktemp("pair"))
    yield pair
    close_server(pair.prefill)
    close_server(pair.decode)


def post(server: RunningServer, path: str, key: str = "", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url, asked = f"{server.url}{path}", {"model": MODEL, **body}
    return httpx.post(url, json=asked, headers=headers, timeout=100)


def prompt(path: str, name: str) -> dict[str, Any]:
    text, field = f"{name}: {TEXT}", BODIES[path][0]
    return {field: [{"role": "user", "content": text}] if field == "messages" else text}


def prefill(server: RunningServer, path: str, name: str, key: str = "") -> Any:
    asked = {**prompt(path, name), **BODIES[path][2], "kv_transfer_params": ASKED}
    answer = post(server, path, key, stream=False, **asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def decode(
    server: RunningServer, path: str, name: str, params: Any, key: str = ""
) -> tuple[Any, int]:
    """What the answer says, and the number of its cached tokens."""
    asked = {**prompt(path, name), **BODIES[path][1], "kv_transfer_params": params}
    answer = post(server, path, key, temperature=0, **asked)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found["usage"]
    if path == "/v1/messages":
        return found["content"], usage["cache_read_input_tokens"]
    if path == "/v1/responses":
        return found["output"][0]["content"], usage["input_tokens_details"]["cached_tokens"]
    said = [choice.get("text") or choice["message"]["content"] for choice in found["choices"]]
    return said, usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_a_decode_server_continues_what_a_prefill_server_has_read(
    pair: Pair, shared_server: SharedServer, path: str
) -> None:
    """The files are whole before the prefill server answers; the text is that of one server."""
    before = pair.files()
    params = prefill(pair.prefill, path, path)
    new = pair.files() - before
    blocks = [name for name in new if name.endswith(".block")]
    assert len(blocks) >= 2 and len(new) > len(blocks)
    (about,) = pair.path.glob("store/*/about.json")
    named = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "prefix_store": about.parent.name,
    }
    assert params == named
    said, cached = decode(pair.decode, path, path, params)
    assert cached == 256 * len(blocks)
    assert decode(shared_server.get(), path, path, None) == (said, 0)
    assert pair.prefill.engine.metrics().ordinary_requests == 0


def test_peers_with_keys(short_demo_path: Path, tmp_path: Path) -> None:
    """Two directories: the decode server asks the prefill server, for one key's prompts alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = {"ann": "secret-of-ann", "ben": "secret-of-ben"}
    common: dict[str, Any] = {"keys": tuple(keys.values()), "prefix_salt": "x" * 32}
    first = open_server(
        short_demo_path, tmp_path / "1", role="prefill", prefix_peer_port=str(port), **common
    )
    second = open_server(
        short_demo_path, tmp_path / "2", prefix_peers=f"127.0.0.1:{port}", **common
    )
    params = prefill(first, COMPLETIONS, "peers", keys["ann"])
    assert decode(second, COMPLETIONS, "peers", params, keys["ben"])[1] == 0
    said, cached = decode(second, COMPLETIONS, "peers", params, keys["ann"])
    assert cached >= 512
    close_server(first)  # the second has what it asked for
    second.engine.reset_prefix_cache()
    assert decode(second, COMPLETIONS, "peers", params, keys["ann"]) == (said, cached)
    close_server(second)


def test_every_block_is_saved_although_few_may_be_on_their_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers: Any = pair.stored._transfers
    monkeypatch.setitem(transfers._for_saves, "block", 1)
    params = prefill(pair.prefill, COMPLETIONS, "few")
    assert pair.stored.counts.skipped
    assert decode(pair.decode, COMPLETIONS, "few", params)[1] >= 512


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "hangs"])
def test_a_bad_store_delays_no_answer_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """A store that hangs delays an answer by the limit, and one that fails not at all."""
    end = threading.Event()
    store: Any = pair.stored
    with monkeypatch.context() as patch:
        patch.setattr(stored_prefixes, "LONGEST_FLUSH_S", 10**6 if fails else 0.3)
        patch.setattr(store, "_told_of_late", False)  # a busy machine may have been late before
        patch.setattr(store._transfers._store, "write", lambda *_: not (fails or end.wait(60)))
        for name in ("bad store 1", "bad store 2"):
            params = prefill(pair.prefill, COMPLETIONS, f"{name} {fails}")
            assert decode(pair.decode, COMPLETIONS, f"{name} {fails}", params)[1] == 0
    end.set()
    late = [r for r in caplog.records if "did not save a prompt within" in r.getMessage()]
    assert len(late) == (0 if fails else 1)
    assert stored_prefixes.LONGEST_FLUSH_S == 1.0


def test_another_store_is_told_once_with_the_field_that_differs(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    other = open_server(pair.model, pair.path, activations="exact")
    for name in ("other 1", "other 2"):
        params = prefill(other, COMPLETIONS, name)
        assert decode(pair.decode, COMPLETIONS, name, params)[1] == 0

    def told() -> list[str]:
        found = [r for r in caplog.records if "has another prefix store" in r.getMessage()]
        return [record.getMessage().rpartition(": ")[2] for record in found]

    wait_until(lambda: bool(told()))
    assert told() == ["activations"]
    close_server(other)


def test_ordinary_requests_of_a_prefill_server_are_answered_and_counted(pair: Pair) -> None:
    before = len(pair.files())
    assert decode(pair.prefill, COMPLETIONS, "ordinary", None)[1] == 0
    # Its prompt is saved before the answer, too.
    assert len(pair.files()) >= before + 3
    assert pair.prefill.engine.metrics().ordinary_requests == 1
    wait_until(
        lambda: (
            "finwhale_ordinary_requests_total 1.0" in httpx.get(f"{pair.prefill.url}/metrics").text
        )
    )


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({"prefix_store": "../../etc"}, "prefix_store"),
        ({"remote_host": "127.0.0.1"}, "remote_host"),
        ({"transfer_id": "1"}, "kv_transfer_params.transfer_id"),
        ("yes", "kv_transfer_params"),
    ],
)
def test_wrong_parameters(pair: Pair, params: Any, why: str) -> None:
    answer = post(pair.decode, COMPLETIONS, prompt="x", kv_transfer_params=params)
    assert answer.status_code == 400 and why in answer.text, answer.text


def test_what_a_server_cannot_do_is_refused(pair: Pair, shared_server: SharedServer) -> None:
    asked = {"prompt": TEXT, "kv_transfer_params": ASKED}
    answer = post(pair.decode, COMPLETIONS, stream=True, **asked)
    assert answer.status_code == 400 and "not available in streams" in answer.text
    answer = post(shared_server.get(), COMPLETIONS, **asked)
    assert answer.status_code == 400 and "needs a server with --prefix-store" in answer.text
    with pytest.raises(FinwhaleError, match='role "prefill" needs prefix_store'):
        LLM(device="cpu", role="prefill")
