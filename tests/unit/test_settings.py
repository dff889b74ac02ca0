"""Options from a file and from the environment."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from finwhale.cli import completion, serve, settings
from finwhale.cli.options import add_engine_options, add_path, engine_config
from finwhale.cli.settings import parse_settings
from finwhale.errors import FinwhaleError
from finwhale.options import add_options
from finwhale.server.config import ServerConfig


def parse(
    *argv: str, environment: Mapping[str, str] | None = None, text: str | None = None, tmp: Path
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_path(parser)
    add_options(parser, ServerConfig)
    add_engine_options(parser)
    if text is not None:
        (tmp / "options.yaml").write_text(text)
        argv = (*argv, "--config", str(tmp / "options.yaml"))
    return parse_settings(parser, argv, environment or {})


def test_the_command_line_comes_first_then_the_environment_then_the_file(tmp_path: Path) -> None:
    text = "max-num-seqs: 1\nmax_num_batched_tokens: 2\nmax-model-len: 3\nmodel: /from/file\n"
    environment = {"FINWHALE_MAX_NUM_SEQS": "4", "FINWHALE_MAX_NUM_BATCHED_TOKENS": "5"}
    args = parse("--max-num-seqs=6", environment=environment, text=text, tmp=tmp_path)
    config = engine_config(args)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (6, 5, 3)
    assert args.path == "/from/file"
    assert parse("/given", text=text, tmp=tmp_path).path == "/given"
    assert parse(environment={"FINWHALE_MODEL": "/env"}, text=text, tmp=tmp_path).path == "/env"


def test_the_model_on_the_command_line_of_serve_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: /from/file\n")
    options = ["--config", str(file)]
    assert serve._parse(options).path == "/from/file"
    for argv in (["--model", "/given"], ["--model=/given"], ["/given"]):
        assert serve._parse([*argv, *options]).path == "/given"
    monkeypatch.setenv("FINWHALE_MODEL", "/env")
    assert serve._parse([]).path == "/env"
    for argv in (["--model", "/given"], ["--model=/given"], ["/given"]):
        assert serve._parse([*argv, *options]).path == "/given"
    with pytest.raises(SystemExit):
        serve._parse(["/given", "--model", "/other"])


def test_switches_and_lists(tmp_path: Path) -> None:
    text = """
        no-prefix-caching: true
        compile: false
        thinking: no
        cors-origin: [http://a.example, http://b.example]
        graph-sizes: [1, 2]
        draft-tokens: auto
    """
    args = parse(text=text, tmp=tmp_path)
    config = engine_config(args)
    assert (config.enable_prefix_caching, config.compile, args.default_thinking) == (False,) * 3
    assert (config.graph_sizes, config.draft_tokens) == ((1, 2), "auto")
    assert args.cors_origins == ["http://a.example", "http://b.example"]
    environment = {"FINWHALE_COMPILE": "1", "FINWHALE_CORS_ORIGIN": "http://c.example"}
    args = parse(environment=environment, text=text, tmp=tmp_path)
    assert args.compile
    assert args.cors_origins == ["http://c.example"]
    given = parse("--cors-origin", "http://d.example", environment=environment, tmp=tmp_path)
    assert given.cors_origins == ["http://d.example"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("max-modle-len: 8", "unknown option 'max-modle-len'; did you mean max-model-len?"),
        ("config: other.yaml", "unknown option 'config'"),
        ("- a", "must hold one option a line"),
        ("a: [", "is not YAML"),
        ("compile: maybe", "compile must be true or false, got 'maybe'"),
        ("max-model-len: {a: 1}", "is not a value of this option"),
        ("max-model-len: true", "is not a value of this option"),
    ],
)
def test_wrong_files_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FinwhaleError) as error:
        parse(text=text, tmp=tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_wrong_number_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(environment={"FINWHALE_MAX_MODEL_LEN": "many"}, tmp=tmp_path)
    assert "argument --max-model-len: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MAX_MODLE_LEN", "; did you mean FINWHALE_MAX_MODEL_LEN?"),
        ("API_KYES", "; did you mean FINWHALE_API_KEYS?"),
        ("ZZZ", ""),
    ],
)
def test_an_unknown_variable_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FinwhaleError) as error:
        parse(environment={f"FINWHALE_{name}": "5", "OTHER": "1"}, tmp=tmp_path)
    assert str(error.value) == f"unknown variable FINWHALE_{name}{message}"


def test_variables_of_other_commands_and_of_kubernetes_are_no_mistake(tmp_path: Path) -> None:
    environment = {
        "FINWHALE_STOP": "x",  # of `generate`
        "FINWHALE_NOTHING": "",
        "FINWHALE_LONG": "1",
        "FINWHALE_PORT": "tcp://10.0.0.1:8000",
        "FINWHALE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "FINWHALE_ROUTER_PORT": "tcp://10.0.0.1:80",
        "FINWHALE_ROUTER_SERVICE_HOST": "10.0.0.1",
        "FINWHALE_SERVICE_PORT_HTTP": "8000",
    }
    assert parse(environment=environment, tmp=tmp_path).port == 8000
    environment["FINWHALE_PORT"] = "9"
    assert parse(environment=environment, tmp=tmp_path).port == 9


def test_the_list_of_variables_that_are_no_options_is_complete() -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("tests/**/*.py"), *root.glob("tools/*"), *root.glob(".ci/*")]
    files += [*root.glob("src/**/*.py"), *root.glob("deploy/**/*"), root / "justfile"]
    files += root.glob(".github/workflows/*")
    text = "".join(path.read_text() for path in files if path.is_file() and path != Path(__file__))
    parsers = [completion.parser_of(f"finwhale.cli.{name}") for name in settings.COMMANDS]
    options = {
        settings._variable(name)
        for parser in parsers
        if parser is not None
        for name in settings._actions(parser)
    }
    found = set(re.findall(r"FINWHALE_[A-Z_]+[A-Z]", text)) - options
    assert found == {settings.PREFIX + name for name in settings.OTHER_VARIABLES}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FinwhaleError, match="cannot read the options"):
        parse("--config", str(tmp_path / "none.yaml"), tmp=tmp_path)
