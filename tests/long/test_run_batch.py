"""`finwhale run-batch`, and a server with batches, killed again and again."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import openai

from .servers import Program, free_ports, is_ready, python, wait_for

QUESTIONS = 60


def requests() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(QUESTIONS):
        url = ("/v1/chat/completions", "/v1/completions", "/v1/responses")[i % 3]
        body: dict[str, Any] = {"model": "finwhale-demo", "temperature": 0}
        if url == "/v1/completions":
            body |= {"prompt": f"Once upon a time, {i}", "max_tokens": 100}
        elif url == "/v1/responses":
            body |= {"input": f"Tell me about {i} whales.", "max_output_tokens": 100}
        else:
            message = {"role": "user", "content": f"What is the capital of {i}?"}
            body |= {"messages": [message], "max_tokens": 100}
        found.append({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body})
    found[7]["body"]["nonsense"] = 1
    return found


def text_of(result: dict[str, Any]) -> Any:
    body = result["response"]["body"]
    if "choices" in body:
        choice = body["choices"][0]
        return choice.get("text") or choice["message"]["content"]
    return body["output"][-1]["content"] if "output" in body else body["error"]["param"]


def command(directory: Path, output: str) -> list[str]:
    arguments = ["run-batch", "in.jsonl", output, "--device", "cpu", "--max-model-len", "1024"]
    return python("-m", "finwhale", *arguments, "--max-num-seqs", "4")


def read(path: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(text) for text in path.read_text().splitlines()]
    found = {one["custom_id"]: one for one in results}
    assert len(found) == len(results)
    return found


def test_a_run_that_is_killed_again_and_again(tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in requests()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    whole = subprocess.run(
        command(tmp_path, "whole.jsonl"), cwd=tmp_path, timeout=300, capture_output=True, text=True
    )
    assert whole.returncode == 0, whole.stderr
    assert f"{QUESTIONS} lines, {QUESTIONS - 1} answered, 1 with errors" in whole.stderr
    wanted = read(tmp_path / "whole.jsonl")
    assert wanted.keys() == {f"r{i}" for i in range(QUESTIONS)}
    assert wanted["r7"]["response"]["status_code"] == 400

    out = tmp_path / "out.jsonl"
    for stop in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        before = out.stat().st_size if out.exists() else 0
        run = subprocess.Popen(command(tmp_path, "out.jsonl"), cwd=tmp_path, text=True,
                               stderr=subprocess.PIPE)  # fmt: skip
        deadline = time.monotonic() + 120
        while (not out.exists() or out.stat().st_size <= before + 400) and run.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.send_signal(stop)
        run.communicate(timeout=60)
        assert run.returncode in (-stop, 130)
        with out.open("ab") as file:  # as if it had been killed within a line
            file.write(lines[0].encode()[:100])
    last = subprocess.run(
        command(tmp_path, "out.jsonl"), cwd=tmp_path, timeout=300, capture_output=True, text=True
    )
    assert last.returncode == 0 and "in earlier runs" in last.stderr, last.stderr
    found = read(out)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name]["response"]["status_code"] == wanted[name]["response"]["status_code"]
        assert text_of(found[name]) == text_of(wanted[name]), name


def test_duplicates_are_refused_before_the_model_loads(tmp_path: Path) -> None:
    line = json.dumps(requests()[0])
    (tmp_path / "in.jsonl").write_text(f"{line}\n{line}\n")
    ran = subprocess.run(
        command(tmp_path, "out.jsonl"), cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert ran.returncode == 1 and "lines 1 and 2 have the same custom_id" in ran.stderr


def test_a_server_that_is_killed_again_and_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    arguments = ["serve", "--device", "cpu", "--max-model-len", "1024", "--max-num-seqs", "4",
                 "--port", str(port), "--batch-dir", str(tmp_path / "batches")]  # fmt: skip
    lines = [one for one in requests() if one["url"] == "/v1/completions"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    batch, before = "", 0
    for last in (False, False, True):
        program = Program(python("-m", "finwhale", *arguments), tmp_path / "log")
        try:
            wait_for(lambda: is_ready(port), 120, [program])
            if not batch:
                file = client.files.create(file=tmp_path / "in.jsonl", purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                ).id
            deadline = time.monotonic() + 120
            while True:
                found = client.batches.retrieve(batch)
                assert found.request_counts is not None and time.monotonic() < deadline
                if found.status == "completed" or (
                    not last and found.request_counts.completed > before
                ):
                    break
            before = found.request_counts.completed
            if found.status == "completed":
                break
        finally:
            program.close()  # SIGKILL
    else:
        raise AssertionError
    assert last, "it was killed twice"
    (output,) = (tmp_path / "batches").rglob(f"{found.output_file_id}.jsonl")
    assert read(output).keys() | {"r7"} == {one["custom_id"] for one in lines}
