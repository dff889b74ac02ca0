"""/v1/files and /v1/batches, through OpenAI's client."""

import asyncio
import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from finwhale import LLM
from finwhale.errors import FinwhaleError
from finwhale.server.batch.runner import BatchJob, run
from finwhale.server.batch.store import Owner, Store, StoredBatch
from finwhale.server.edge.room import Room

from .running import MODEL, RunningServer, check_idle
from .test_limits import request

Start = Callable[..., RunningServer]
CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    if url == CHAT:
        asked["messages"] = [{"role": "user", "content": f"Hello {custom_id}"}]
    else:
        asked["prompt"] = f"Once upon a time {custom_id}"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked | body}


def upload(client: openai.OpenAI, lines: Sequence[Any]) -> str:
    text = "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def create(client: openai.OpenAI, file: str, url: str = CHAT, **more: Any) -> Any:
    return client.batches.create(input_file_id=file, endpoint=url, completion_window="24h", **more)


def ended(client: openai.OpenAI, batch: str) -> Any:
    deadline = time.monotonic() + 60
    while True:
        found = client.batches.retrieve(batch)
        if found.status in ("completed", "failed", "expired", "cancelled"):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def results(client: openai.OpenAI, file: str | None) -> dict[str | None, Any]:
    if file is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file).text.splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@pytest.fixture
def running(demo_llm: LLM, tmp_path: Path) -> Iterator[Start]:
    """Starts servers, one after the other, with one batch directory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    servers: list[RunningServer] = []

    def make(**options: Any) -> RunningServer:
        for server in servers:
            server.close()
        servers[:] = [RunningServer(demo_llm._engine, batch_dir=str(tmp_path / "b"), **options)]
        return servers[0]

    yield make
    for server in servers:
        server.close()
    torch.set_num_threads(threads)
    check_idle(demo_llm._engine)


def test_a_batch_from_upload_to_results(running: Start) -> None:
    server = running(max_body_bytes=1500)
    client = server.openai()
    lines = [line("a"), line("b", seed=1, temperature=1), line("wrong", nonsense=1), "no JSON\n",
             "\n", line("c", "/v1/completions"), line("long", user="x" * 1500)]  # fmt: skip
    file = upload(client, lines)
    described = client.files.retrieve(file)
    assert (described.filename, described.purpose) == ("in.jsonl", "batch")
    assert described.bytes == len(client.files.content(file).content)
    batch = create(client, file, metadata={"for": "a test"})
    assert batch.status in ("validating", "in_progress") and batch.input_file_id == file
    done = ended(client, batch.id)
    assert done.status == "completed" and done.errors is None
    assert done.metadata == {"for": "a test"}
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 2, 4)
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert good.keys() == {"a", "b"} and bad.keys() == {"wrong", None, "c", "long"}
    direct = client.chat.completions.create(**line("a")["body"]).model_dump()
    answer = good["a"]["response"]
    assert (
        answer["body"]["choices"][0]["message"]["content"]
        == direct["choices"][0]["message"]["content"]
    )
    assert answer["body"]["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
    assert answer["status_code"] == 200 and answer["request_id"].startswith("req_")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**line("a")["body"], extra_body={"nonsense": 1})
    assert bad["wrong"]["response"]["body"]["error"] == refused.value.body
    assert bad["long"]["response"]["status_code"] == 413
    assert bad[None]["error"]["code"] == "invalid_json"
    assert bad["c"]["error"]["code"] == "invalid_url"
    # Lists and pages, the newest first.
    names = [one.id for one in client.files.list(limit=1)]
    assert set(names) == {file, done.output_file_id, done.error_file_id} and len(names) == 3
    assert [one.id for one in client.files.list(purpose="batch")] == [file]
    assert [one.id for one in client.batches.list()] == [batch.id]
    for name in names:
        assert client.files.delete(name).deleted
    assert not list(client.files.list())
    with pytest.raises(openai.NotFoundError, match="no file has the id"):
        client.files.content(file)
    assert server.state.budget.total == 0


def test_inputs_that_are_refused_as_a_whole(running: Start) -> None:
    client = running().openai()
    twice = ended(client, create(client, upload(client, [line("a"), line("b"), line("a")])).id)
    assert twice.status == "failed" and twice.failed_at
    assert (twice.errors.data[0].code, twice.errors.data[0].line) == ("duplicate_custom_id", 3)
    empty = ended(client, create(client, upload(client, ["\n"])).id)
    assert empty.status == "failed" and empty.errors.data[0].code == "empty_file"
    with pytest.raises(openai.NotFoundError):
        create(client, "file-x")
    for wrong in ({"completion_window": "1h"}, {"endpoint": "/v1/embeddings"},
                  {"metadata": {"a": "x" * 513}}, {"extra_body": {"nonsense": 1}}):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**{"input_file_id": "x", "endpoint": CHAT,
                                     "completion_window": "24h", **wrong})  # fmt: skip


def test_one_key_does_not_see_another_s(running: Start) -> None:
    server = running(api_keys=("ann:ann-s-first-key", "ann:ann-s-other-key", "bob:secret-of-bob",
                               "unnamed-key"), max_files=2)  # fmt: skip
    ann = server.openai(api_key="ann-s-first-key")
    other, bob, unnamed = (
        ann.copy(api_key=key) for key in ("ann-s-other-key", "secret-of-bob", "unnamed-key")
    )
    file = upload(ann, [line("a")])
    batch = create(other, file)
    done = ended(other, batch.id)
    assert results(ann, done.output_file_id).keys() == {"a"}
    for stranger in (bob, unnamed):
        assert not list(stranger.files.list()) and not list(stranger.batches.list())
        for name in (file, done.output_file_id, f"../files/{file}"):
            for ask in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(name)
            with pytest.raises(openai.NotFoundError):
                create(stranger, name)
        with pytest.raises(openai.NotFoundError):
            stranger.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            stranger.batches.cancel(batch.id)
    with pytest.raises(openai.AuthenticationError):
        ann.copy(api_key="no-key-of-ours").files.list()
    # The number of files is each owner's own.
    with pytest.raises(openai.BadRequestError, match="this server allows 2"):
        upload(ann, [line("b")])
    upload(bob, [line("b")])


def test_a_batch_leaves_room_for_other_requests(
    running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running(max_queue=0)  # lines of batches take no places of other requests
    client = server.openai()
    priorities: list[int] = []
    submit = server.client.submit

    def observed(*args: Any) -> Any:
        priorities.append(args[1].priority)
        return submit(*args)

    monkeypatch.setattr(server.client, "submit", observed)
    slots = server.engine.sizes.num_seqs
    lines = [line(str(i), "/v1/completions", max_tokens=60, ignore_eos=True, n=1 + i % 3,
                  priority=-(2**31)) for i in range(30)]  # fmt: skip
    batch = create(client, upload(client, lines), "/v1/completions")
    while len(priorities) < 4:
        time.sleep(0.005)
    most = 0
    for _ in range(5):
        most = max(most, server.client.num_sequences)
        asked = client.completions.create(model=MODEL, prompt="A", max_tokens=2, n=2,
                                          extra_body={"priority": 2**31 - 1})  # fmt: skip
        assert asked.choices[0].finish_reason
    assert client.batches.retrieve(batch.id).status == "in_progress"
    assert slots // 2 < most < slots
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.type == "invalid_request_error"
    # Cancelling keeps the results so far.
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelling_at <= done.cancelled_at
    assert done.request_counts.completed == len(results(client, done.output_file_id)) < 30
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    asked_for = [one for one in priorities if one < 2**31]
    assert asked_for == [2**31 - 1] * 5
    assert min(one for one in priorities if one not in asked_for) >= 2**31


def test_a_restart_continues(running: Start) -> None:
    client = running(api_keys=("ann:ann-s-first-key",)).openai(api_key="ann-s-first-key")
    lines = [line(str(i), max_tokens=12) for i in range(12)]
    batches = [create(client, upload(client, lines[:10])).id,
               create(client, upload(client, lines[10:])).id]  # fmt: skip
    cancelled = create(client, client.batches.retrieve(batches[0]).input_file_id).id
    assert client.batches.cancel(cancelled).status == "cancelled"
    counts = None
    while counts is None or not counts.completed:
        counts = client.batches.retrieve(batches[0]).request_counts
    server = running(api_keys=("ann:ann-s-first-key",))
    client = server.openai(api_key="ann-s-first-key")
    found: list[str | None] = []
    for batch, count in zip(batches, (10, 2), strict=True):
        done = ended(client, batch)
        assert done.status == "completed" and done.request_counts.completed == count
        found += results(client, done.output_file_id)
    assert len(found) == len(lines) and set(found) == {one["custom_id"] for one in lines}
    assert client.batches.retrieve(cancelled).status == "cancelled"
    with pytest.raises(FinwhaleError, match="another server uses"):
        Store(Path(server.state.config.batch_dir))


def test_a_full_disk_stops_no_other_batch(
    running: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running()
    client, store = server.openai(), server.store
    assert store is not None
    save = Owner.save
    failures: list[BatchJob] = []

    async def run_until_full(app: Any, job: BatchJob, held: Room) -> None:
        await run(app, job, held)
        while len(store.owner(None).batches) < 2:
            await asyncio.sleep(0.01)
        if not failures:
            failures.append(job)
            raise FinwhaleError("cannot write results: No space left on device")

    def save_unless_full(owner: Owner, batch: StoredBatch) -> None:
        if batch.status == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(owner, batch)

    monkeypatch.setattr("finwhale.server.batch.batches.run", run_until_full)
    monkeypatch.setattr(Owner, "save", save_unless_full)
    first, second = (create(client, upload(client, [line(name)])) for name in ("a", "b"))
    assert ended(client, second.id).status == "completed"
    failed = ended(client, first.id)
    assert failed.status == "failed" and failed.errors.data[0].code == "server_error"
    assert failed.output_file_id is None and failed.error_file_id is None
    contents = {path.stem for path in (tmp_path / "b/everybody/files").glob("*.jsonl")}
    assert contents == {file.id for file in client.files.list()}
    monkeypatch.undo()
    client = running().openai()
    again = ended(client, first.id)
    assert again.status == "completed" and results(client, again.output_file_id).keys() == {"a"}


def test_a_full_disk_refuses_batches_and_cancels_others(
    running: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = running().openai()
    lines = [line(str(i), max_tokens=200, ignore_eos=True) for i in range(200)]
    first = create(client, upload(client, lines))

    def full(owner: Owner, batch: StoredBatch) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    uploaded = upload(client, [line("a")])
    while client.batches.retrieve(first.id).status != "in_progress":
        time.sleep(0.01)
    monkeypatch.setattr(Owner, "save", full)
    with pytest.raises(openai.APIStatusError) as refused:
        create(client, uploaded)
    assert refused.value.status_code == 507
    assert client.batches.cancel(first.id).status == "cancelling"
    assert ended(client, first.id).status in ("cancelled", "failed")


def test_an_expired_batch(running: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finwhale.server.batch.batches.BATCH_WINDOW_S", 0)
    client = running().openai()
    done = ended(client, create(client, upload(client, [line("a"), line("b")])).id)
    assert done.status == "expired" and done.output_file_id is None
    wrong = results(client, done.error_file_id)
    assert {one["error"]["code"] for one in wrong.values()} == {"batch_expired"}
    assert wrong.keys() == {"a", "b"} and done.request_counts.failed == 2


def test_without_a_directory(server: RunningServer) -> None:
    client = server.openai()
    for ask in (lambda: client.files.list(), lambda: upload(client, [line("a")]),
                lambda: client.batches.list(), lambda: create(client, "file-x"),
                lambda: client.batches.cancel("x"), lambda: client.files.content("x")):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="start it with --batch-dir"):
            ask()


def form(*parts: tuple[bytes, bytes], end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


FILE = b'content-disposition: form-data; name="file"; filename="f"'
PURPOSE = b'content-disposition: form-data; name="purpose"'
BATCH = (PURPOSE, b"batch")
FORMS: dict[str, tuple[int, bytes]] = {
    "no parts": (400, b"--B--\r\n"),
    "no form": (400, b"{}"),
    "no file": (400, form(BATCH)),
    "no purpose": (400, form((FILE, b"{}"))),
    "another purpose": (400, form((PURPOSE, b"fine-tune"), (FILE, b"{}"))),
    "an empty file": (400, form(BATCH, (FILE, b""))),
    "cut off": (400, form(BATCH, (FILE, b"{}"), end=b"")),
    "cut off within a head": (400, form(BATCH, end=b"--B\r\ncontent-dispo")),
    "an unknown field": (400, form(BATCH, (FILE, b"{}"), (PURPOSE + b"x", b"1"))),
    "two files": (400, form(BATCH, (FILE, b"{}"), (FILE, b"{}"))),
    "a long field": (400, form((PURPOSE, b"b" * 5000), (FILE, b"{}"))),
    "a long head": (400, form((PURPOSE + b"; x=" + b"y" * 9000, b"batch"))),
    "many heads": (400, form((PURPOSE + b"\r\na: b" * 3000, b"batch"))),
    "many parts": (400, form(*[BATCH] * 100)),
    "a large file": (413, form(BATCH, (FILE, b"x" * 30_000))),
    "a large body": (413, form(BATCH, (FILE, b"x" * 300_000))),
    "many lines": (413, form(BATCH, (FILE, b"\n" * 101))),
    "carriage returns": (413, form(BATCH, (FILE, b"\r\n--" * 70_000))),
}


def test_hostile_forms(running: Start, tmp_path: Path) -> None:
    server = running(max_file_bytes=20_000, max_file_lines=100, max_files=3)
    kind = {"content-type": "multipart/form-data; boundary=B"}
    for name, (status, body) in FORMS.items():
        found, _, answer = request(server, "POST", "/v1/files", body, kind)
        assert found == status, (name, found, answer)
        assert json.loads(answer)["error"]["message"], name
    for wrong in ("multipart/form-data", "application/json", "multipart/form-data; boundary=",
                  f"multipart/form-data; boundary={'b' * 71}"):  # fmt: skip
        body = form(BATCH, (FILE, b"{}"))
        assert request(server, "POST", "/v1/files", body, {"content-type": wrong})[0] == 415
    left = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["lock"]
    # A page of another server cannot send a form.
    body = form(BATCH, (FILE, b"{}"))
    for origin in ("https://evil.example", "null", f"{server.url}.evil.example"):
        assert request(server, "POST", "/v1/files", body, kind | {"origin": origin})[0] == 403
    # A name cannot leave the directory.
    named = FILE.replace(b'"f"', b'"../../../\x07etc/passwd"')
    _, _, answer = request(server, "POST", "/v1/files", form(BATCH, (named, b"{}")), kind)
    assert json.loads(answer)["filename"] == "passwd"
    # Uploads at once cannot go beyond the number of files.
    found_: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: found_.append(request(server, "POST", "/v1/files", body, kind)[0])
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found_.count(200) == 2 and set(found_) <= {200, 400, 429}
    assert len(list((tmp_path / "b").rglob("*.jsonl"))) == 3
