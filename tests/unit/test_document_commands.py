"""A test runs every command of README and docs, or a comment before it says why none does.

The comment is `<!-- not run: REASON -->` or `<!-- run by FILE::TEST -->`. A whole page may have a
line in the table below instead.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.document_blocks import RUNNABLE, blocks

from finwhale.cli.bench import BENCHMARKS
from finwhale.cli.completion import parser_of
from finwhale.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ONE_PAGE = "tests/long/test_first_hour.py::test_the_commands_of_a_page"
DOCKER = "not run: Docker, Kubernetes, systemd, other hosts; tests/long/test_deploy.py checks files"
# Blocks without a comment: the test that runs them, or why none does.
PAGE_MARKS = {
    "README.md": "tests/long/test_first_hour.py::test_the_commands_of_readme",
    "first-hour.md": "tests/long/test_first_hour.py::test_the_tasks_of_the_first_hour",
    **dict.fromkeys([f"{page}.md" for page in RUNNABLE], ONE_PAGE),
    "examples.md": "tests/long/test_examples.py::test_a_program",
    "rollouts.md": "tests/long/test_examples.py::test_a_program",
    "replicas.md": "tests/long/test_prefill_decode.py",
    "hosts.md": "tests/long/test_hosts.py",
    "agents.md": "tests/long/test_agents.py",
    "deployment.md": DOCKER,
    "production.md": "not run: it needs several GPUs",
}
INLINE = re.compile("`(finwhale [^`]+)`")


def exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and (not name or f"def {name}(" in (ROOT / file).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_or_say_why_not(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "bash":
            mark = block.mark or PAGE_MARKS.get(page.name, "")
            assert mark, f"no test runs this block, and no comment says why:\n{block.text}"
            test = mark.removeprefix("run by ")
            assert mark.startswith("not run: ") or test == ".ci/run" or exists(test), test


def commands(text: str) -> Iterator[list[str]]:
    """The words after each `finwhale`, to the end of its command."""
    text = re.sub(r"(^|\s)# .*", "", text.replace("\\\n", " "))
    words = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    command: list[str] = []
    for word in [*words, "\n"]:
        if set(word) <= set(words.punctuation_chars):
            for index, name in enumerate(command[:-1]):
                if name.endswith("finwhale") and command[index + 1] in COMMANDS:
                    yield command[index + 1 :]
                    break
            command = []
        else:
            command.append(word)


def parser_and_arguments(command: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    name, *arguments = command
    module = f"finwhale.cli.{name.replace('-', '_')}"
    if name == "bench" and arguments and arguments[0] in BENCHMARKS:
        module, arguments = f"finwhale.bench.{arguments[0]}", arguments[1:]
    parser = parser_of(module)
    assert parser is not None, f"an extra for {name} is missing"
    return parser, arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_arguments_that_exist(page: Path) -> None:
    """N stands for a number, words in capitals for paths and names."""
    text = page.read_text()
    for block in blocks(text):
        for command in commands(block.text) if block.language == "bash" else ():
            parser, arguments = parser_and_arguments(command)
            parser.parse_args(["2" if word == "N" else word for word in arguments])
    # Sentences may leave out arguments that a command needs.
    for command in commands("\n".join(code.replace("\n", " ") for code in INLINE.findall(text))):
        if command[0] != "bench" or (command[1:2] and command[1] in BENCHMARKS):
            parser, arguments = parser_and_arguments(command)
            for word in arguments:
                name = word.partition("=")[0]
                assert not word.startswith("-") or name in parser._option_string_actions, command


def test_mistakes_are_found() -> None:
    document = """
    finwhale serve PATH --port N | tee log   # a comment

```bash
A=1 .venv/bin/finwhale generate "Once --x" --max-tokens 2 && docker run finwhale serve
```

<!-- not run: it needs a GPU -->

    pip install x
"""
    first, second, third = blocks(document)
    assert list(commands(first.text)) == [["serve", "PATH", "--port", "N"]]
    found = list(commands(second.text))
    assert found == [["generate", "Once --x", "--max-tokens", "2"], ["serve"]] and not second.mark
    assert third.mark == "not run: it needs a GPU" and not list(commands(third.text))
    parser, arguments = parser_and_arguments(["bench", "start", "--no-such-option"])
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
