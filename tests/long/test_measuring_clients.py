"""Programs that measure speed and accuracy, unmodified, against the embedded model's server."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from finwhale.demo import DEMO_PATH

from . import environments
from .servers import DemoServer, client, complete

# No program asks another host: the tokenizer and the data sets are files.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
STORY = "Every morning Zoe took bread, apples and a book to her grandmother. " * 24


def finished(server: DemoServer, before: int) -> list[dict[str, Any]]:
    """The requests after the first `before`, all answered."""
    found = server.requests()[before:]
    assert found and all(entry["status"] == 200 for entry in found), found
    return found


def test_guidellm(demo_server: DemoServer, tmp_path: Path) -> None:
    programs = environments.make(tmp_path / "environment", "guidellm==0.8.1")
    before = len(demo_server.requests())
    command = [
        f"{programs}/guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={demo_server.url},model=finwhale-demo",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=hf_auto,model={DEMO_PATH}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8",
        "--output", "kind=json,path=report.json",
    ]  # fmt: skip
    environments.run(command, tmp_path, {"HOME": str(tmp_path), **OFFLINE}, 180)
    assert all(entry["output_tokens"] == 8 for entry in finished(demo_server, before))
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 6
    assert not benchmark["requests"]["errored"]


def test_aiperf(demo_server: DemoServer, tmp_path: Path) -> None:
    programs = environments.make(tmp_path / "environment", "aiperf==0.13.0")
    before = len(demo_server.requests())
    for endpoint in ("chat", "completions"):
        command = [
            f"{programs}/aiperf", "profile", "--model", "finwhale-demo", "--url", demo_server.url,
            "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(DEMO_PATH),
            "--request-count", "6", "--concurrency", "2", "--isl", "64", "--osl", "8",
            "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", endpoint,
        ]  # fmt: skip
        # With HF_HUB_OFFLINE, it takes the tokenizer's directory for an id.
        environments.run(command, tmp_path, {"HOME": str(tmp_path)}, 180)
        report = json.loads((tmp_path / endpoint / "profile_export_aiperf.json").read_text())
        assert report["request_count"]["avg"] == 6
        assert not report["error_summary"]
    answers = finished(demo_server, before)
    assert all(entry["output_tokens"] == 8 for entry in answers)
    assert len({entry["endpoint"] for entry in answers}) == 2


def test_evalscope(demo_server: DemoServer, tmp_path: Path) -> None:
    programs = environments.make(tmp_path / "environment", "evalscope[perf]==1.14.1")
    data = tmp_path / "data"
    data.mkdir()
    capital = "The capital of France is Paris."
    question = {"query": "What is the capital of France?", "response": capital}
    (data / "example.jsonl").write_text(json.dumps(question) + "\n")
    before = len(demo_server.requests())
    environment = {"HOME": str(tmp_path), **OFFLINE}
    datasets = {"general_qa": {"local_path": str(data), "subset_list": ["example"]}}
    for kind in ("openai_api", "openai_responses_api"):
        command = [
            f"{programs}/evalscope", "eval", "--model", "finwhale-demo",
            "--api-url", f"{demo_server.url}/v1", "--api-key", "none",
            "--eval-type", kind, "--datasets", "general_qa",
            "--dataset-args", json.dumps(datasets), "--work-dir", kind,
            "--generation-config", json.dumps({"max_tokens": 20, "temperature": 0}),
        ]  # fmt: skip
        environments.run(command, tmp_path, environment, 180)
        (report,) = (tmp_path / kind).glob("*/predictions/*/*.jsonl")
        assert capital in report.read_text()
    command = [
        f"{programs}/evalscope", "perf", "--model", "finwhale-demo", "--api", "openai",
        "--url", f"{demo_server.url}/v1/chat/completions", "--dataset", "openqa",
        "--dataset-path", str(tmp_path / "questions.jsonl"), "--max-tokens", "8",
        "--extra-args", json.dumps({"ignore_eos": True}), "-n", "4", "--parallel", "2",
        "--no-timestamp", "--outputs-dir", "perf",
    ]  # fmt: skip
    (tmp_path / "questions.jsonl").write_text((json.dumps({"question": STORY}) + "\n") * 4)
    environments.run(command, tmp_path, environment, 180)
    answers = finished(demo_server, before)
    assert {entry["endpoint"] for entry in answers} == {"/v1/chat/completions", "/v1/responses"}
    assert sum(entry["output_tokens"] == 8 for entry in answers) >= 4


def test_log_likelihoods(demo_server: DemoServer, tmp_path: Path) -> None:
    """Both kinds of log-likelihood tasks, while the prefix cache holds the tasks' contexts."""
    programs = environments.make(tmp_path / "environment", "lm-eval[api]==0.4.13")
    for _ in range(2):
        complete(demo_server.port, STORY, 1)
    assert demo_server.requests()[-1]["cached_tokens"] > 0
    before = len(demo_server.requests())
    write_tasks(tmp_path)
    command = [
        f"{programs}/python", "-m", "lm_eval", "--model", "local-completions", "--model_args",
        f"model=finwhale-demo,base_url={demo_server.url}/v1/completions,tokenizer={DEMO_PATH},"
        "tokenizer_backend=huggingface,num_concurrent=2,max_length=4096",
        "--tasks", "finwhale_choice,finwhale_text", "--include_path", str(tmp_path),
        "--output_path", "report", "--log_samples",
    ]  # fmt: skip
    environments.run(command, tmp_path, {"HOME": str(tmp_path), **OFFLINE}, 240)
    finished(demo_server, before)
    samples = [
        json.loads(line)
        for path in (tmp_path / "report").glob("**/samples_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert len(samples) == 3
    for sample in samples:
        for arguments, found in zip(sample["arguments"].values(), sample["resps"], strict=True):
            wanted = log_likelihood(demo_server.port, *arguments.values())
            # A choice has its log-likelihood and whether it is the greedy one; a text, the first.
            value = found[0] if isinstance(found[0], str) else found[0][0]
            assert float(value) == pytest.approx(wanted, rel=1e-5, abs=1e-3)


def write_tasks(directory: Path) -> None:
    choices = [
        {"question": STORY + "She took", "choices": ["bread", "nothing", "a ship"], "answer": 0},
        {"question": STORY + "Zoe had a", "choices": ["book", "lake"], "answer": 0},
    ]
    (directory / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
    (directory / "text.jsonl").write_text(json.dumps({"text": STORY}) + "\n")
    common = "test_split: test\ndataset_path: json\n"
    (directory / "choice.yaml").write_text(
        f"task: finwhale_choice\n{common}"
        f"dataset_kwargs: {{data_files: {{test: {directory / 'choice.jsonl'}}}}}\n"
        "output_type: multiple_choice\ndoc_to_target: answer\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "metric_list: [{metric: acc}]\n"
    )
    (directory / "text.yaml").write_text(
        f"task: finwhale_text\n{common}"
        f"dataset_kwargs: {{data_files: {{test: {directory / 'text.jsonl'}}}}}\n"
        "output_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\ndoc_to_text: ''\n"
        "metric_list: [{metric: word_perplexity}]\n"
    )


def log_likelihood(port: int, *texts: str) -> float:
    """The log-probability of the last text after the others, without any cached prefix."""
    answer = client(port).completions.create(
        model="finwhale-demo",
        prompt="".join(texts),
        max_tokens=0,
        echo=True,
        logprobs=0,
        extra_body={"cache_salt": uuid.uuid4().hex, "add_special_tokens": len(texts) < 2},
    )
    assert answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert logprobs.text_offset is not None
    start = len("".join(texts[:-1]))
    pairs = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
    return sum(value for offset, value in pairs if offset >= start and value is not None)
