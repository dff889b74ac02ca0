"""Requests made from the server's own OpenAPI description: none is answered with a 5xx."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from finwhale import LLM

from .running import MODEL, RunningServer, check_idle
from .test_openai import QUESTION

EXAMPLES = int(os.environ.get("FINWHALE_FUZZ_EXAMPLES", "12"))


@pytest.fixture(scope="module")
def fuzzed(demo_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("batches")
    server = RunningServer(
        demo_llm._engine, max_choices=4, max_body_bytes=1 << 20, batch_dir=str(directory)
    )
    yield server
    assert server.client.failure is None
    server.close()
    check_idle(demo_llm._engine)


@pytest.fixture(scope="module")
def description(fuzzed: RunningServer) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses/input_tokens"), ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/health"), ("GET", "/health/live"), ("GET", "/health/ready"), ("GET", "/metrics"),
    ("GET", "/live"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/version"),
    ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"), ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/batches"), ("POST", "/v1/batches"), ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_server_error(description: Any, method: str, path: str) -> None:
    operation = description[path][method]
    positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE

    @settings(
        max_examples=EXAMPLES if method == "POST" else 3,
        deadline=None, suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    @given(
        operation.as_strategy(generation_mode=positive)
        | operation.as_strategy(generation_mode=negative)
    )
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            focus(path, case.body)
        case.call_and_validate(checks=[not_a_server_error], timeout=30)

    run()


def focus(path: str, body: dict[str, Any]) -> None:
    """Past the first check: the model is there, every other time the messages are, and no answer
    is long."""
    if "model" in body:
        body["model"] = MODEL
    likely = len(str(body)) % 2
    if likely and "messages" in body:
        body["messages"] = QUESTION
    if "input" in body and likely:
        body["input"] = "Hi"
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    if path in ("/v1/responses", "/v1/messages", "/v1/chat/completions", "/v1/completions"):
        body.pop("max_completion_tokens", None)
        body[name] = 3


def test_every_path_is_fuzzed(description: Any) -> None:
    found = [(method.upper(), path.replace(":path", ""))
             for path, methods in description.raw_schema["paths"].items()
             for method in methods]  # fmt: skip
    assert sorted(found) == sorted(OPERATIONS)
