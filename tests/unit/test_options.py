"""Options are declared once: `LLM`, the commands and docs/options.md agree with that."""

import importlib
import inspect
import re
import runpy
import shutil
import typing
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import finwhale
from finwhale import LLM, AsyncLLM
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.config_files import SAMPLING as OF_CHECKPOINT
from finwhale.cli import serve as serve_command
from finwhale.cli.main import main
from finwhale.cli.options import SAMPLING
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH
from finwhale.errors import FinwhaleError
from finwhale.options import Parser, options_of
from finwhale.request import SamplingParams
from finwhale.server.config import ServerConfig
from finwhale.server.edge.listening import LOCAL_HOSTS
from tools import accuracy

Capture = pytest.CaptureFixture[str]
ROOT = Path(finwhale.__file__).parents[2]
PAGE = ROOT / "docs" / "options.md"

STORE = ["--prefix-store", "/somewhere", "--prefix-salt", "sesame"]
# A command line for each option, and its value. No value is the default of a command.
EXAMPLES: dict[str, tuple[list[str], Any]] = {
    "device": (["--device", "cpu"], "cpu"),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "data_parallel_size": (["--data-parallel-size", "2"], 2),
    "whole_attention": (["--whole-attention"], True),
    "distributed_executor": (["--distributed-executor", "ray"], "ray"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "activations": (["--activations", "exact"], "exact"),
    "wo_a_input": (["--wo-a-input", "bf16"], "bf16"),
    "load_format": (["--load-format", "dummy"], "dummy"),
    "generation_config": (["--generation-config", "none"], "none"),
    "reference": (["--reference"], True),
    "batch_invariant": (["--batch-invariant"], True),
    "enforce_eager": (["--enforce-eager"], True),
    "graph_sizes": (["--max-num-seqs", "8", "--graph-sizes", "1,4"], (1, 4)),
    "max_model_len": (["--max-model-len", "100"], 100),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "300"], 300),
    "target_interval": (["--target-interval", "40"], 40.0),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "cache_memory_bytes": (["--cache-memory-bytes", "1000"], 1000),
    "enable_prefix_caching": (["--no-prefix-caching"], False),
    "exact_prefill": (["--exact-prefill"], True),
    "prefix_salt": (["--prefix-salt", "sesame"], "sesame"),
    "prefix_store": (["--prefix-store", "/somewhere:5GB"], "/somewhere:5GB"),
    "prefix_store_saves": (
        ["--prefix-store", "/somewhere", "--prefix-store-saves", "shared"],
        "shared",
    ),
    "prefix_peers": ([*STORE, "--prefix-peers", "a:5,b:6"], "a:5,b:6"),
    "prefix_peer_port": ([*STORE, "--prefix-peer-port", "7000"], "7000"),
    "role": (["--role", "prefill", "--prefix-store", "/somewhere"], "prefill"),
    "kv_events": (["--kv-events", "5557"], "5557"),
    "enable_sleep_mode": (["--enable-sleep-mode"], True),
    "enable_return_routed_experts": (["--enable-return-routed-experts"], True),
    "compile": (["--compile"], True),
    "cache_dir": (["--cache-dir", "/somewhere"], "/somewhere"),
    "draft_tokens": (["--draft-tokens", "auto"], "auto"),
    "tool_grammar": (["--tool-grammar", "auto"], "auto"),
    "watchdog_seconds": (["--watchdog-seconds", "5"], 5.0),
}
COMMANDS = {
    "serve": ["serve", "--port", "0"],
    "run-batch": ["run-batch", "in.jsonl", "out.jsonl"],
    "warmup": ["warmup"],
    "generate": ["generate", "hi"],
    "chat": ["chat"],
    "validate": ["validate"],
    "offline": ["bench", "offline", "--dummy", "--layers", "2"],
    "throughput": ["bench", "throughput", "--dummy", "--layers", "2"],
    "start": ["bench", "start", "--one"],
}
# Options that a command sets or refuses itself; --dummy and --model choose where a benchmark's
# weights come from.
SET_BY = {
    "validate": {"load_format", "generation_config"},
    "warmup": {"generation_config"},
    "offline": {
        "load_format",
        "generation_config",
        "tool_grammar",
        "max_model_len",
        "max_num_seqs",
        "graph_sizes",
        "draft_tokens",
    },
    "throughput": {"load_format", "generation_config", "tool_grammar", "max_model_len"},
    "start": {"load_format", "generation_config", "tool_grammar"},
}


# Other options without which an option is refused.
NEEDS: dict[str, dict[str, Any]] = {
    "graph_sizes": {"max_num_seqs": 8},
    "prefix_store_saves": {"prefix_store": "/somewhere"},
    "prefix_peers": {"prefix_store": "/somewhere", "prefix_salt": "sesame"},
    "prefix_peer_port": {"prefix_store": "/somewhere", "prefix_salt": "sesame"},
    "role": {"prefix_store": "/somewhere"},
}


class OpenedError(Exception):
    """An engine would have been opened."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[EngineConfig]:
    """The configurations of the engines that would have been opened."""
    found: list[EngineConfig] = []

    def engine(config: EngineConfig, *others: object) -> None:
        found.append(config)
        raise OpenedError

    def serve(
        config: ServerConfig, tokenizer: object, ladder: object, load: Any, *others: object
    ) -> int:
        found.append(load.args[3])
        raise OpenedError

    for module in ("loaded_model", "bench.engine"):
        monkeypatch.setattr(f"finwhale.{module}.start_engine", engine)
    monkeypatch.setattr("finwhale.cli.serve.serve", serve)

    monkeypatch.setattr(Tokenizer, "open", cache(Tokenizer.open))  # each command opens it again

    def spawn(load: Any) -> int:
        return serve(ServerConfig(model_names=("m",)), None, None, load, None)

    monkeypatch.setattr("finwhale.cli.run_batch.EngineClient.spawn", spawn)
    (tmp_path / "in.jsonl").write_text("a line without a result\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "finwhale.server.observe.logs.configure", lambda *form, **kind: lambda: None
    )
    monkeypatch.setattr("finwhale.bench.offline.stamp", lambda *args: {})  # it starts git
    return found


def test_every_engine_option_has_an_example() -> None:
    assert list(EXAMPLES) == [one.name for one in options_of(EngineConfig)]
    assert list(EXAMPLES) == [one.name for one in fields(EngineConfig)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reaches_every_engine_option(
    command: str, opened: list[EngineConfig], capsys: Capture
) -> None:
    for name in EXAMPLES.keys() - SET_BY.get(command, set()):
        arguments, value = EXAMPLES[name]
        with pytest.raises(OpenedError):
            main([*COMMANDS[command], *arguments])
        assert getattr(opened[-1], name) == value, name


def test_the_accuracy_benchmark_measures_batch_invariant_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[EngineConfig] = []

    def engine(config: EngineConfig, *others: object) -> Any:
        found.append(config)
        if len(found) == 3:
            raise OpenedError
        return SimpleNamespace(executor=None)

    monkeypatch.setattr("tools.accuracy.start_engine", engine)
    monkeypatch.setattr("tools.accuracy.call_ranks_collectively", lambda *args: [])
    monkeypatch.setattr("tools.accuracy.stamp", lambda *args: {})
    monkeypatch.setattr("tools.accuracy.torch.cuda.empty_cache", lambda: None)
    with pytest.raises(OpenedError):
        accuracy.main(["--layers", "2", "--device", "cuda", "--batch-invariant"])
    assert [config.batch_invariant for config in found] == [False, False, True]


def test_llm_has_every_engine_option(opened: list[EngineConfig]) -> None:
    for name, (_, value) in EXAMPLES.items():
        more = NEEDS.get(name, {})
        with pytest.raises(OpenedError):
            LLM(**{**more, name: value})
        assert opened[-1] == EngineConfig(**{**more, name: value})


def test_the_signature_of_llm() -> None:
    """It has the path, the names, defaults and types of EngineConfig in order, and three more."""
    first, *given = inspect.signature(LLM).parameters.values()
    assert (first.name, first.kind) == ("path", first.POSITIONAL_OR_KEYWORD)
    assert [(one.name, one.default) for one in given[:-3]] == [
        (one.name, one.default) for one in fields(EngineConfig)
    ]
    assert {one.name: one.annotation for one in given[:-3]} == typing.get_type_hints(EngineConfig)
    assert [one.name for one in given[-3:]] == ["model", "revision", "progress"]
    assert inspect.signature(AsyncLLM) == inspect.signature(LLM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seq": 3}, "LLM has no option 'max_num_seq'; did you mean max_num_seqs?"),
        ({"trust_remote_code": True}, "LLM has no option 'trust_remote_code'"),
        ({"path": "a", "model": "b"}, "LLM takes the checkpoint once: as path or as model"),
    ],
)
def test_wrong_arguments_of_llm(arguments: dict[str, Any], message: str) -> None:
    for cls, name in ((LLM, "LLM"), (AsyncLLM, "AsyncLLM")):
        with pytest.raises(TypeError) as error:
            cls(**arguments)
        assert str(error.value) == message.replace("LLM", name)


def test_the_public_names_of_llm() -> None:
    """Completion in a notebook lists what a user may call."""
    public = {name for name in dir(LLM) if not name.startswith("_")}
    updates = {"update_weights", "init_weights_update_group", "destroy_weights_update_group"}
    calls = {"generate", "chat", "stream", "encode", "chat_template", "get_tokenizer", "metrics"}
    calls.add("get_default_sampling_params")
    states = {"pause", "resume", "sleep", "wake"}
    assert public == updates | calls | states | {"close"}
    others = {name for name in dir(AsyncLLM) if not name.startswith("_")}
    assert others == public - {"close"} | {"aclose"}


def test_no_command_takes_an_abbreviation() -> None:
    """An abbreviation would take one option for another: --model for --model-name."""
    for path in Path(finwhale.__file__).parent.rglob("*.py"):
        assert "ArgumentParser(\n" not in path.read_text(encoding="utf-8"), path
    with pytest.raises(SystemExit):
        Parser(prog="p").parse_args(["--ver"])


def test_vllm_s_names_of_serve_s_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    found: list[tuple[ServerConfig, Any]] = []

    def serve(
        config: ServerConfig,
        tokenizer: object,
        ladder: object,
        load: Any,
        more: Any,
        read_keys: Any,
    ) -> int:
        found.append((config, load.args[0]))
        assert read_keys() == config.api_keys  # after SIGHUP, too
        return 0

    monkeypatch.setattr("finwhale.cli.serve.serve", serve)
    monkeypatch.setattr(
        "finwhale.server.observe.logs.configure", lambda *form, **kind: lambda: None
    )
    monkeypatch.setenv("FINWHALE_API_KEYS", "from-the-environment")
    keys = ["--api-key", "first-key", "--api-key", "second-key"]
    names = ["--served-model-name", "v4", "--served-model-name", "flash"]
    for place in (["--model", str(DEMO_PATH)], [str(DEMO_PATH)]):
        assert main(["serve", *place, *keys, *names]) == 0
        config, path = found[-1]
        assert path == DEMO_PATH
        assert config.model_names == ("v4", "flash")
        assert config.api_keys == ("first-key", "second-key", "from-the-environment")
    for wrong in (["a", "--model", "b"], ["--model-name", "x"], ["--served-model", "x"]):
        with pytest.raises(SystemExit):
            main(["serve", *wrong])
    assert main(["serve", "--model", str(tmp_path / "none")]) == 1
    assert "is not a directory" in capsys.readouterr().err


def test_serve_reads_the_sampling_defaults_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A trainer must know all parameters of its rollouts, so their server has no defaults."""
    found: list[Any] = []

    def serve(*given: Any) -> int:
        found.append(given[4])
        return 0

    monkeypatch.setattr("finwhale.cli.serve.serve", serve)
    monkeypatch.setattr(
        "finwhale.server.observe.logs.configure", lambda *form, **kind: lambda: None
    )
    shutil.copy(DEMO_PATH / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 9}')
    for more in ([], ["--generation-config", "none"], ["--enable-rollout-endpoints"]):
        assert main(["serve", str(tmp_path), *more]) == 0
    assert found == [{"temperature": 0.6, "top_k": 9}, {}, {}]


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, SamplingParams])
def test_every_field_is_an_option_with_help(config: type) -> None:
    options = options_of(config)
    assert [one.name for one in options] == [one.name for one in fields(config)]
    assert len({one.flag for one in options}) == len(options)
    assert all(one.help and not one.help.endswith(".") for one in options)


def test_the_pages_repeat_no_words() -> None:
    assert "(None: none)" not in PAGE.read_text(encoding="utf-8")
    assert "no effect; no effect" not in PAGE.with_name("fields.md").read_text(encoding="utf-8")


def test_the_documentation_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "pages.py"))
    for name, rows in tool["generated_rows"]().items():
        page = PAGE.with_name(name).read_text(encoding="utf-8")
        assert page == tool["with_rows"](page, rows), "run `python tools/pages.py docs`"
    sampling = PAGE.read_text(encoding="utf-8").partition("\n## Sampling\n")[2]
    flags = [f"`--{name.replace('_', '-')}`" for name in SAMPLING]
    named = [*flags, *(f"`{name}`" for name in OF_CHECKPOINT)]
    assert [name for name in named if name not in sampling.partition("\n| ")[0]] == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--graph-sizes", "1,x"], "expected integers separated by commas, got '1,x'"),
        (["--draft-tokens", "-1"], "expected a number or \"auto\", got '-1'"),
        (["--dtype", "float16"], "invalid choice: 'float16'"),
    ],
)
def test_a_value_that_cannot_be_read(arguments: list[str], wanted: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *arguments])
    assert wanted in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"reference": 1}, "reference must be True or False, got 1"),
        ({"dtype": "float16"}, 'dtype must be "float32" or "bfloat16" or None, got \'float16\''),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer or None, got True"),
        ({"draft_tokens": 1.0}, 'draft_tokens must be an integer or "auto", got 1.0'),
    ],
)
def test_a_value_of_a_wrong_type(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(FinwhaleError, match=f"^{wanted}$"):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ([], ("localhost", "addresses")),
        (["--host", "::1"], ("localhost", "addresses")),
        (["--host", "localhost"], ("localhost", "addresses")),
        (["--host", "0.0.0.0"], ()),
        (["--uds", "s"], ()),
        (["--allowed-hosts", "a.example", "--allowed-hosts", "b.example"],
         ("a.example", "b.example")),
    ],
)  # fmt: skip
def test_hosts_that_a_server_answers(arguments: list[str], allowed: tuple[str, ...]) -> None:
    args = serve_command._parser().parse_args(arguments)
    assert serve_command._server_config(args, {}).allowed_hosts == allowed
    if allowed == LOCAL_HOSTS:
        keys = {serve_command.KEYS_VARIABLE: "a-key-of-ours"}
        assert serve_command._server_config(args, keys).allowed_hosts == ()


VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("words", "environment", "url"),
    [
        ([], {}, None),
        ([], {VARIABLE: "http://collector:4318/"}, "http://collector:4318/v1/traces"),
        (
            [],
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://a/b", VARIABLE: "http://c"},
            "https://a/b",
        ),
        (
            ["--otlp-traces-endpoint", "http://d/v1/traces"],
            {VARIABLE: "http://c"},
            "http://d/v1/traces",
        ),
        (["--otlp-traces-endpoint", "http://d/"], {"OTEL_SDK_DISABLED": "true"}, None),
        ([], {VARIABLE: "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_where_traces_go(words: list[str], environment: dict[str, str], url: str | None) -> None:
    args = serve_command._parser().parse_args(words)
    assert serve_command._server_config(args, environment).otlp_traces_endpoint == url


@pytest.mark.parametrize(
    ("url", "environment", "wanted"),
    [
        ("collector:4318", {}, "must be an http or https URL"),
        ("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "is grpc; Finwhale sends traces"),
        ("http://c", {"OTEL_TRACES_EXPORTER": "zipkin"}, "is zipkin; Finwhale sends traces"),
    ],
)
def test_wrong_settings_of_traces(url: str, environment: dict[str, str], wanted: str) -> None:
    args = serve_command._parser().parse_args(["--otlp-traces-endpoint", url])
    with pytest.raises(FinwhaleError, match=wanted):
        serve_command._server_config(args, environment)


# The commands that run an engine.
ENGINE_COMMANDS = ("generate", "chat", "serve", "run_batch", "warmup", "validate")


def test_every_option_has_a_test_that_starts_an_engine() -> None:
    """docs/testing.md has a table of them."""
    text = (ROOT / "docs" / "testing.md").read_text()
    table = text.partition("## Options and their tests")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (`tests/.*`) \|(.*)\|$", table, re.MULTILINE)
    options = [name for row in rows for name in re.findall(r"`(.+?)`", row[0])]
    declared = [one.flag for config in (EngineConfig, ServerConfig) for one in options_of(config)]
    declared += [one.name for one in options_of(SamplingParams)]
    sampling = {one.flag for one in options_of(SamplingParams)}
    for command in ENGINE_COMMANDS:
        parser = importlib.import_module(f"finwhale.cli.{command}")._parser()
        flags = [action.option_strings[0] for action in parser._actions if action.option_strings]
        declared += [flag for flag in flags if flag not in ("-h", *declared, *sampling)]
    assert sorted(options) == sorted(declared)
    for row in rows:
        for test in re.findall(r"`(.+?)`", "".join(row[1:])):
            path, _, name = test.partition("::")
            assert not path.startswith("tests/unit/"), test
            assert f"def {name}(" in (ROOT / path).read_text(), test
