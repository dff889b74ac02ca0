"""README's commands and the tasks of docs/first-hour.md, as written, in a clean environment; and
the commands of other pages that run with the embedded model, in the environment of the tests.

The programs below read the documents' own blocks. So a task fails if it needs a step that the
document does not give. What a reader does by hand is the same for all tasks: a block with the title
"Terminal N" is typed into that terminal, a block with a file's name is saved under this name, and a
block of text must stand in the output of the commands before it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.document_blocks import RUNNABLE, Block, blocks, part

from .servers import descendants, free_ports

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMMAND_SECONDS = 1800


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
    """A clone of the repository, and a home directory with nothing but Python and the system's
    programs. With `installed`, the programs of the tests' environment come first."""

    def __init__(self, directory: Path, installed: bool) -> None:
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
        if installed:
            self.environment["PATH"] = f"{Path(sys.executable).parent}:{self.environment['PATH']}"
        self.directory = directory / "finwhale"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.directory)], check=True)
        self.terminals: dict[str, Terminal] = {}
        self.has_index = index_answers()

    def words(self, text: str) -> str:
        """A text of a document, with the port of this test, and an index that answers."""
        if not self.has_index:
            text = text.replace(f" --index-url {CPU_INDEX}", "")
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")

    def terminal(self, name: str) -> Terminal:
        if name not in self.terminals:
            log = self.directory.parent / f"{name}.log"
            self.terminals[name] = Terminal(self.directory, log, self.environment)
        return self.terminals[name]

    def close(self) -> None:
        for terminal in self.terminals.values():
            terminal.close()


@contextmanager
def machine(directory: Path, installed: bool = False) -> Iterator[Machine]:
    made = Machine(directory, installed)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


def follow(found: list[Block], here: Machine) -> None:
    """Do what a document says."""
    output = ""
    for block in found:
        text = here.words(block.text)
        if block.language == "bash" and not block.mark:
            name, _, rest = (block.title or "Terminal 1").partition(":")
            if rest:
                here.terminal(name).type(text)
            else:
                output = here.terminal(name).run(text)
        elif block.language == "text":
            for line in text.splitlines():
                assert line in output, f"{line!r} is not in the output:\n{output}"
        elif block.title:
            (here.directory / block.title).write_text(text)


def test_the_tasks_of_the_first_hour(tmp_path: Path) -> None:
    found = blocks((ROOT / "docs/first-hour.md").read_text())
    assert len(found) > 20
    with machine(tmp_path / "machine") as here:
        follow(found, here)
        # The page ends the server by Ctrl-C, after task 9.
        here.terminals["Terminal 1"].interrupt()


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_commands_of_a_page(page: str, tmp_path: Path) -> None:
    found = blocks((ROOT / f"docs/{page}.md").read_text())
    assert any(block.language == "bash" and not block.mark for block in found)
    with machine(tmp_path / "machine", installed=True) as here:
        follow(found, here)


def test_the_commands_of_readme(tmp_path: Path) -> None:
    """PATH is the embedded model. `.ci/run` runs the test command."""
    document = (ROOT / "README.md").read_text()
    (setup,) = [block.text for block in blocks(part(document, "setup")) if not block.mark]
    serve, ask, checkpoint = blocks(part(document, "serve"))
    (generate,) = blocks(part(document, "python"))
    with machine(tmp_path / "machine") as here:
        first, second = here.terminal("first"), here.terminal("second")
        first.run(here.words(setup))
        first.type(serve.text)
        second.run(". .venv/bin/activate; pip install openai")
        ready = f"http://127.0.0.1:{here.port}/health/ready"
        second.run(f"curl --silent --retry 120 --retry-delay 1 --retry-all-errors --fail {ready}")
        assert "The capital of France is Paris." in python(here, second, ask)
        first.interrupt()
        assert "The capital of France is Paris." in python(here, second, generate)
        *before, last = checkpoint.text.replace("PATH", "src/finwhale/demo").splitlines()
        second.run("\n".join(before))
        second.type(last + "\n")
        here.terminal("third").run(
            f"curl --silent --retry 120 --retry-delay 1 --retry-all-errors --fail {ready}"
        )
        second.interrupt()


def python(here: Machine, terminal: Terminal, block: Block) -> str:
    path = here.directory / "program.py"
    path.write_text(here.words(block.text))
    return terminal.run(f"python {path}")


@pytest.mark.parametrize("name", ["README.md", "docs/first-hour.md"])
def test_every_fence_is_closed(name: str) -> None:
    assert (ROOT / name).read_text().count("```") % 2 == 0
