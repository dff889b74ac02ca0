"""README's commands and the tasks of docs/first-hour.md, as written, in a clean environment.

The programs below read the documents' own blocks. So a task fails if it needs a step that the
document does not give. What a reader does by hand is the same for all tasks: a block with the title
"Terminal N" is typed into that terminal, a block with a file's name is saved under this name, a
block of text must stand in the output of the commands before it, and a terminal that is left
running gets Ctrl-C when it is needed again.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from .servers import descendants, free_ports

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# A fence, its language, its title and its lines.
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
COMMAND_SECONDS = 1800


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(document: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(document)]


def index_answers() -> bool:
    with suppress(OSError):
        return bool(urllib.request.urlopen(CPU_INDEX, timeout=10))
    return False


class Terminal:
    """A shell in a process group of its own. Raises if a command fails."""

    def __init__(self, directory: Path, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.process = subprocess.Popen(
            ["bash", "--norc", "-e", "-o", "pipefail"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.marks = 0

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def run(self, text: str) -> str:
        """Runs the commands; returns what they print."""
        self.marks += 1
        start = len(self.output)
        self.type(f"{text}\necho finished-{self.marks}\n")
        end = time.monotonic() + COMMAND_SECONDS
        while f"finished-{self.marks}\n" not in self.output[start:]:
            assert self.process.poll() is None, f"{text}\n{self.output[start:]}"
            assert time.monotonic() < end, f"{text}\n{self.output[start:]}"
            time.sleep(0.2)
        return self.output[start:]

    @property
    def output(self) -> str:
        return self.log.read_text()

    def interrupt(self) -> None:
        """Sends Ctrl-C to the program that runs in the terminal."""
        for pid in descendants(self.process.pid)[:1]:
            os.kill(pid, signal.SIGINT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)

    def close(self) -> None:
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Machine:
    """A home directory with nothing but Python, git and the system's programs."""

    def __init__(self, directory: Path) -> None:
        home = directory / "home"
        programs = directory / "programs"
        home.mkdir(parents=True)
        programs.mkdir()
        (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin/python3")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.upper().endswith("_PROXY") or name == "LANG"
        }
        for configuration in (".config/pip/pip.conf", ".pip/pip.conf"):
            path = Path.home() / configuration
            if path.is_file():
                kept.setdefault("PIP_CONFIG_FILE", str(path))
        (self.port,) = free_ports(1)
        self.environment = {
            **kept,
            "HOME": str(home),
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin",
            # Port 8000 may be taken here; `words` changes it in the commands, too.
            "FINWHALE_PORT": str(self.port),
        }
        # The address that the documents give for the repository is this checkout.
        address = f"url.file://{ROOT}.insteadOf"
        self.git("config", "--global", address, "https://github.com/finwhale/finwhale")
        self.directory = directory / "work"
        self.directory.mkdir()
        self.terminals: dict[str, Terminal] = {}
        self.has_index = index_answers()

    def git(self, *words: str) -> None:
        subprocess.run(("git", *words), env=self.environment, check=True)

    def words(self, text: str) -> str:
        """A text of a document, with the port of this test, and an index that answers."""
        if not self.has_index:
            text = text.replace(f" --index-url {CPU_INDEX}", "")
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    def terminal(self, name: str) -> Terminal:
        if name not in self.terminals:
            log = self.directory / f"{name}.log"
            self.terminals[name] = Terminal(self.directory, log, self.environment)
        return self.terminals[name]

    def close(self) -> None:
        for terminal in self.terminals.values():
            terminal.close()


@contextmanager
def machine(directory: Path) -> Iterator[Machine]:
    made = Machine(directory)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def follow(document: str, here: Machine) -> int:
    """Do what a document says; returns the number of blocks."""
    output = ""
    found = blocks(document)
    for block in found:
        text = here.words(block.text)
        if block.language == "bash":
            name, _, rest = block.title.partition(":")
            if rest:
                here.terminal(name).type(text)
            else:
                output = here.terminal(name).run(text)
            if "cd finwhale" in text:
                here.directory /= "finwhale"
        elif block.language == "python":
            (here.directory / block.title).write_text(text)
        else:
            assert block.language == "text"
            for line in text.splitlines():
                assert line in output, f"{line!r} is not in the output:\n{output}"
    return len(found)


def test_the_tasks_of_the_first_hour(tmp_path: Path) -> None:
    document = (ROOT / "docs/first-hour.md").read_text()
    assert len(re.findall(r"^## \d+\.", document, re.MULTILINE)) >= 10
    with machine(tmp_path / "machine") as here:
        assert follow(document, here) > 20
        # The page ends the server by Ctrl-C, after task 9.
        here.terminals["Terminal 1"].interrupt()


def indented(document: str, marker: str) -> list[str]:
    """The indented commands of a part of README that the documentation includes."""
    start, end = f"--8<-- [start:{marker}]", f"--8<-- [end:{marker}]"
    part = document.partition(start)[2].partition(end)[0]
    return [line[4:] for line in part.splitlines() if line.startswith("    ") and "```" not in line]


def part_blocks(document: str, marker: str) -> list[Block]:
    start, end = f"--8<-- [start:{marker}]", f"--8<-- [end:{marker}]"
    return blocks(document.partition(start)[2].partition(end)[0])


def test_the_commands_of_readme(tmp_path: Path) -> None:
    """With the embedded model, so without PATH. `.ci/run` runs the test command."""
    document = (ROOT / "README.md").read_text()
    with machine(tmp_path / "machine") as here:
        first = here.terminal("first")
        first.run("git clone --quiet https://github.com/finwhale/finwhale\ncd finwhale")
        setup = [line for line in indented(document, "setup") if not line.endswith("pytest")]
        assert len(setup) == 3
        for line in setup:
            first.run(here.words(line))
        serve = [line.replace(" PATH", "") for line in commands(document, "serve")]
        *before, last, client = serve
        for line in before:
            first.run(line)
        assert last.startswith("finwhale serve") and client.startswith("pip install")
        first.type(last + "\n")
        second = here.terminal("second")
        second.run("cd finwhale; . .venv/bin/activate")
        second.run(client)
        ready = f"http://127.0.0.1:{here.port}/health/ready"
        second.run(f"curl --silent --retry 120 --retry-delay 1 --retry-all-errors --fail {ready}")
        (ask,) = part_blocks(document, "serve")
        assert "The capital of France is Paris." in python(here, second, ask)
        first.interrupt()
        (generate,) = part_blocks(document, "python")
        assert "The capital of France is Paris." in python(here, second, generate)


def commands(document: str, marker: str) -> list[str]:
    return [
        line for line in indented(document, marker) if line.startswith(("finwhale ", "pip ", ". "))
    ]


def python(here: Machine, terminal: Terminal, block: Block) -> str:
    path = here.directory / "program.py"
    path.write_text(here.words(block.text))
    return terminal.run(f"python {path}")


@pytest.mark.parametrize("name", ["README.md", "docs/first-hour.md"])
def test_every_fence_is_closed(name: str) -> None:
    assert (ROOT / name).read_text().count("```") % 2 == 0
