"""Keys, separate prefixes of users, allowed hosts, TLS, and a log without secrets."""

import http.client
import json
import logging
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from finwhale.errors import FinwhaleError
from finwhale.server.config import ServerConfig
from finwhale.server.edge.listening import listen, tls_context
from finwhale.server.run import reload

from .running import MODEL, RunningServer
from .test_limits import LONG, request, wait_until

Start = Callable[..., RunningServer]
# More than one block of 256 tokens.
PROMPT = "The whale swims in the sea. " * 40


def cached(server: RunningServer, key: str, **more: Any) -> int:
    """How many tokens of the prompt a completion finds in the prefix cache."""
    answer = server.openai(api_key=key).completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, **more
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    found = answer.usage.prompt_tokens_details.cached_tokens
    assert found is not None
    return found


def salted(salt: str) -> dict[str, Any]:
    return {"extra_body": {"cache_salt": salt}}


def test_keys_and_salts_have_prefixes_of_their_own(start: Start) -> None:
    server = start(
        api_keys=("ann:ann-s-first-key", "ann:ann-s-second-key", "bob:secret-of-bob",
                  "unnamed-key-1", "unnamed-key-2")
    )  # fmt: skip
    server.engine.reset()
    assert cached(server, "ann-s-first-key") == 0
    hit = cached(server, "ann-s-first-key")
    assert hit >= 256
    assert cached(server, "ann-s-second-key") == hit, "two keys of one name"
    for stranger in ("secret-of-bob", "unnamed-key-1", "unnamed-key-2"):
        assert cached(server, stranger) == 0
    assert cached(server, "unnamed-key-2") == hit
    # A salt separates the requests of one key, too, and of no other key.
    assert cached(server, "ann-s-first-key", **salted("a")) == 0
    assert cached(server, "ann-s-first-key", **salted("a")) == hit
    assert cached(server, "secret-of-bob", **salted("a")) == 0
    assert cached(server, "ann-s-first-key") == hit


def test_without_keys_only_salts_separate(server: RunningServer) -> None:
    server.engine.reset()
    assert cached(server, "x") == 0
    hit = cached(server, "y")
    assert hit >= 256
    assert cached(server, "x", **salted("a")) == 0
    assert cached(server, "y", **salted("a")) == hit
    # Every protocol has the field.
    asking: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    found: list[Any] = []
    for salt in ("a", "a"):
        chat = server.openai().chat.completions.create(**asking, max_tokens=1, **salted(salt))
        responses = server.openai().responses.create(
            model=MODEL, input=PROMPT + salt, max_output_tokens=1, **salted(salt + "r")
        )
        messages = server.anthropic().messages.create(**asking, max_tokens=1, **salted(salt + "m"))
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
        assert responses.usage is not None
        found.append(
            (
                chat.usage.prompt_tokens_details.cached_tokens,
                responses.usage.input_tokens_details.cached_tokens,
                messages.usage.cache_read_input_tokens,
            )
        )
    first, second = found
    assert not any(first) and all(n >= 256 for n in second), found
    # The prompts and the continuations of one request share.
    answer = server.openai().completions.create(
        model=MODEL, prompt=[PROMPT, PROMPT], n=2, max_tokens=1, **salted("c")
    )
    assert len(answer.choices) == 4
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached(server, "x", **salted(""))
    status, _, _ = request(
        server, "POST", "/v1/completions",
        json.dumps({"model": MODEL, "prompt": "a", "cache_salt": "\ud800"}).encode(),
    )  # fmt: skip
    assert status in (200, 400) and server.client.failure is None


def test_keys_can_share_prefixes(start: Start) -> None:
    server = start(api_keys=("ann:secret-of-ann", "bob:secret-of-bob"), share_prefixes=True)
    server.engine.reset()
    assert cached(server, "secret-of-ann") == 0
    assert cached(server, "secret-of-bob") >= 256


def test_limits_of_a_key(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = start(
        api_keys=(
            "ann:secret-of-ann concurrent=1 priority=no",
            "bob:secret-of-bob",
            "eve:secret-of-eve tokens_per_minute=5",
        ),
        retry_after_s=3,
    )
    ann, bob = (server.openai(api_key=f"secret-of-{name}") for name in ("ann", "bob"))
    stream = ann.completions.create(**LONG, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        ann.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert caught.value.code == "key_concurrency"
    assert caught.value.response.headers["retry-after"] == "3"
    assert bob.completions.create(model=MODEL, prompt="a", max_tokens=1).choices
    stream.close()
    wait_until(lambda: server.client.num_sequences == 0)
    wait_until(lambda: server.state.keys.find("secret-of-ann").use.in_flight == 0)  # type: ignore[union-attr]

    with pytest.raises(openai.PermissionDeniedError) as denied:
        ann.completions.create(model=MODEL, prompt="a", extra_body={"priority": -1})
    assert denied.value.code == "priority_not_allowed"
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    assert bob.completions.create(**body, extra_body={"priority": -1}).choices  # type: ignore[call-overload]

    eve = server.anthropic(api_key="secret-of-eve")
    asking: dict[str, Any] = {
        "model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}],
    }  # fmt: skip
    assert eve.messages.create(**asking).usage.input_tokens
    with pytest.raises(anthropic.RateLimitError, match="5 tokens a minute") as limited:
        eve.messages.create(**asking)
    assert int(limited.value.response.headers["retry-after"]) >= 1

    lines = [vars(record) for record in caplog.records if record.message == "request"]
    assert {line["key"] for line in lines} == {"ann", "bob", "eve"}
    assert not any("secret" in str(line) for line in lines)


def test_keys_are_read_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(api_keys=("ann:secret-of-ann",))

    def valid(key: str) -> bool:
        status, _, _ = request(
            server, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}
        )
        return status == 200

    reload(server.state, None, lambda: ("bob:secret-of-bob",))
    assert valid("secret-of-bob") and not valid("secret-of-ann")

    def unreadable() -> tuple[str, ...]:
        raise FinwhaleError("cannot read the API keys: gone")

    for wrong in (lambda: ("short",), lambda: (), unreadable):
        caplog.clear()
        reload(server.state, None, wrong)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert valid("secret-of-bob") and not valid("short")


# --- The log --------------------------------------------------------------------------------------


def test_the_log_says_why_a_request_is_refused(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = start(max_body_bytes=5000, max_prompt_tokens=20)

    def logged(method: str, path: str, body: Any = None) -> dict[str, Any]:
        caplog.clear()
        data = None if body is None else json.dumps(body).encode()
        request(server, method, path, data)
        wait_until(lambda: any(r.message == "request" for r in caplog.records))
        return next(vars(r) for r in caplog.records if r.message == "request")

    good = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    found = logged("POST", "/v1/completions", good)
    assert found["status"] == 200 and not {"reason", "code", "param", "path"} & found.keys()
    found = logged("POST", "/v1/completions", {**good, "nonsense\n\x1b": 1})
    assert found["code"] == "unknown_parameter" and found["param"] == "nonsense??"
    assert found["reason"].startswith("unknown parameter: nonsense??")
    found = logged("POST", "/v1/completions", {**good, "temperature": 9})
    assert found["code"] == "invalid_value" and found["param"] == "temperature"
    found = logged("POST", "/v1/completions", {**good, "model": "other"})
    assert found["code"] == "model_not_found" and found["param"] == "model"
    found = logged("POST", "/v1/completions", {**good, "prompt": "whale " * 30})
    assert found["code"] == "context_length_exceeded" and "limit of 20" in found["reason"]
    found = logged("POST", "/v1/completions", {**good, "prompt": "x" * 6000})
    assert (found["status"], found["code"]) == (413, "body_too_large")
    found = logged("GET", "/nowhere/%0A%1B[2J" + "a" * 500)
    assert found["status"] == 404 and found["endpoint"] == "unknown"
    assert found["path"].startswith("/nowhere/??[2Jaaa") and len(found["path"]) < 250
    # The reason does not quote the request.
    message = {"role": "zanzibar", "content": "zanzibar"}
    found = logged("POST", "/v1/chat/completions", {"model": MODEL, "messages": [message]})
    assert found["code"] == "unsupported_value" and found["reason"]
    assert "zanzibar" not in str(found)


# --- Where the server listens, and for whom -------------------------------------------------------


def status_of(server: RunningServer, host: str, path: str = "/v1/models") -> int:
    return request(server, "GET", path, headers={"host": host})[0]


def test_hosts(start: Start) -> None:
    server = start(allowed_hosts=("localhost", "addresses", "llm.example", ".in.example"))
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "10.1.2.3", "[::1]:80", "[::1]",
                 "llm.example", "llm.example.:1", "in.example", "a.b.in.example"):  # fmt: skip
        assert status_of(server, host) == 200, host
    for host in ("evil.example", "llm.example.evil", "xin.example", "127.0.0.1.evil", "a:b",
                 "[localhost]", "[::1].evil", "[::1", "::1", "[127.0.0.1]", "[::1]:x", "[::1]@evil",
                 "localhost:80@evil", "localhost:80:80", "localhost/", "localhost..", ".in.example",
                 "a..in.example", "localhost,evil", "localhost#", "x@localhost", ""):  # fmt: skip
        assert status_of(server, host) == 400, host
        assert status_of(server, host, "/health/live") == 200
    _, _, body = request(server, "GET", "/live", headers={"host": "evil.example"})
    assert json.loads(body)["error"]["code"] == "host_not_allowed"


def test_no_redirect_goes_to_a_host_that_the_client_names(server: RunningServer) -> None:
    """Any host is allowed here."""
    for method, path in (("POST", "/tokenize/"), ("GET", "/metrics/"), ("GET", "/v1/models/"),
                         ("POST", "/v1/completions/"), ("GET", "//evil.example/..")):  # fmt: skip
        status, headers, _ = request(server, method, path, headers={"host": "evil.example"})
        assert status == 404 and "location" not in headers, path


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", f"/CN={name}",
               "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    return str(certificate), str(key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_tls(start: Start, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    server = start(ssl_certfile=certificate, ssl_keyfile=key)
    assert server.url.startswith("https://")
    address = server.url.removeprefix("https://")

    def issuer(trusted: str) -> Any:
        context = ssl.create_default_context(cafile=trusted)
        connection = http.client.HTTPSConnection(address, timeout=20, context=context)
        try:
            connection.request("GET", "/v1/models")
            assert connection.getresponse().status == 200
            return connection.sock.getpeercert()["issuer"]  # type: ignore[union-attr,index]
        finally:
            connection.close()

    assert "first" in str(issuer(certificate))
    plain = http.client.HTTPConnection(address, timeout=20)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/v1/models")
        plain.getresponse()
    plain.close()
    # A renewed certificate is served after SIGHUP; a broken one is not.
    next_certificate, next_key = make_certificate(tmp_path, "second")
    trusted = shutil.copy(certificate, tmp_path / "trusted.pem")
    Path(certificate).write_text("broken")
    reload(server.state, server.tls, tuple)
    assert "first" in str(issuer(trusted))
    shutil.copy(next_certificate, certificate)
    reload(server.state, server.tls, tuple)  # before the certificate's key is there
    assert "first" in str(issuer(trusted))
    shutil.copy(next_key, key)
    reload(server.state, server.tls, tuple)
    assert "second" in str(issuer(next_certificate))


def test_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = start(uds=str(path), uds_mode="660")
    assert server.url == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    connection = http.client.HTTPConnection("localhost", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    connection.close()
    config = server.state.config
    with pytest.raises(FinwhaleError, match="a server listens there"):
        listen(config)
    assert path.exists()


def test_what_cannot_be_listened_on(tmp_path: Path) -> None:
    def config(**options: Any) -> ServerConfig:
        return ServerConfig(model_names=(MODEL,), **options)

    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(FinwhaleError, match="no socket"):
        listen(config(uds=str(file)))
    assert file.read_text() == "kept"
    with pytest.raises(FinwhaleError, match="cannot listen on"):
        listen(config(uds=str(tmp_path / "none" / "s")))
    for certificate in (str(file), str(tmp_path / "none")):
        with pytest.raises(FinwhaleError, match="cannot use the certificate"):
            tls_context(config(ssl_certfile=certificate))
    for wrong in ({"uds_mode": "9"}, {"ssl_keyfile": "x"}):
        with pytest.raises(FinwhaleError):
            config(**wrong)
